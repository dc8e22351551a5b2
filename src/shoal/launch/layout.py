"""Where everything of a swarm is on this machine: one folder, which is also the run directory of its trainer.

<out>/<name>-seed<seed>/
  config.toml metrics.jsonl eval.jsonl checkpoints/ versions/ ...   the trainer's and the evaluator's
  launch/         settings.toml, ports.json, keys.json, recipe.json, calibration.json, coordinator.toml, run.toml, v0/,
                  private keys; tasks.jsonl, of a run on a task set; cpu.json, what the parts took
                  coordinator/, for a coordinator on another machine
  coordinator/    ledger, blobs, keys         origin/, relay-1/ ...     weights on their way
  trainer/, validator-1/ ..., worker-1/ ..., cheat-1/ ...               a node each: keys, receipts, spans
  logs/           what each part printed      report.html, report.png, report.txt
"""

from pathlib import Path

from shoal.launch.settings import LaunchConfig, SwarmConfig
from shoal.train.rundir import run_path


class SwarmPaths:
    """The paths of one swarm."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.launch = launch = root / "launch"
        """what is made ready before anything starts, and the lock of who started it"""
        self.settings = launch / "settings.toml"
        """the settings of last time; written last, so what is there is complete"""
        self.run_settings = launch / "run.toml"
        """what the trainer and the evaluator read"""
        self.service = launch / "coordinator.toml"
        """what the coordinator reads"""
        self.ports, self.recipe = launch / "ports.json", launch / "recipe.json"
        self.calibration = launch / "calibration.json"
        self.keys = launch / "keys.json"
        """public keys of the node and the owner of each part"""
        self.costs = launch / "cpu.json"
        """CPU seconds of the parts so far"""
        self.tasks = launch / "tasks.jsonl"
        """the task set in its canonical form, of a run that has one"""
        self.start = launch / "v0"
        """version 0 as a folder"""
        self.publisher_key, self.operator_key = launch / "publisher.key", launch / "operator.key"
        self.bundle = launch / "coordinator"
        """what a coordinator on another machine needs; none of it is secret"""
        self.coordinator, self.logs = root / "coordinator", root / "logs"
        self.ledger = self.coordinator / "ledger.db"

    @classmethod
    def of(cls, config: LaunchConfig) -> "SwarmPaths":
        return cls(run_path(config).resolve())

    @property
    def is_begun(self) -> bool:
        """Whether the run's first event was written, here or on the coordinator's machine."""
        return self.ledger.exists() or (self.root / "versions").exists()

    def folder(self, name: str) -> Path:
        """The folder of a part."""
        return self.root / name


def name_workers(swarm: SwarmConfig) -> list[str]:
    """The names of the honest workers."""
    return _number("worker", swarm.workers)


def name_cheats(swarm: SwarmConfig) -> list[str]:
    """The names of those that cheat, in the order of their attacks."""
    return _number("cheat", len(swarm.cheats))


def name_validators(swarm: SwarmConfig) -> list[str]:
    """The names of the validators."""
    return _number("validator", swarm.validators)


def name_relays(swarm: SwarmConfig) -> list[str]:
    """The names of the relays."""
    return _number("relay", swarm.relays)


def _number(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(1, count + 1)]
