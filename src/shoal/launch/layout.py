"""Where everything of a swarm is on this machine: one folder, which is also the run directory of its trainer.

<out>/<name>-seed<seed>/
  config.toml metrics.jsonl eval.jsonl checkpoints/ versions/ ...   the trainer's and the evaluator's
  launch/         settings.toml, ports.json, recipe.json, calibration.json, coordinator.toml, run.toml, v0/, keys
                  tasks.jsonl, of a run on a task set; cpu.json, what the parts took
                  coordinator/, for a coordinator on another machine
  coordinator/    ledger, blobs, keys         origin/, relay-1/ ...     weights on their way
  trainer/, validator-1/ ..., worker-1/ ..., cheat-1/ ...               a node each: keys, receipts, spans
  logs/           what each part printed      report.html, report.png, report.txt
"""

from dataclasses import dataclass
from pathlib import Path

from shoal.launch.settings import LaunchConfig, SwarmConfig
from shoal.rundir import run_path


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one swarm."""

    root: Path

    @classmethod
    def of(cls, config: LaunchConfig) -> "Layout":
        return cls(run_path(config).resolve())

    @property
    def launch(self) -> Path:
        """What is made ready before anything starts, and the lock of who started it."""
        return self.root / "launch"

    @property
    def settings(self) -> Path:
        """The settings of last time; written last, so what is there is complete."""
        return self.launch / "settings.toml"

    @property
    def run_settings(self) -> Path:
        """What the trainer and the evaluator read."""
        return self.launch / "run.toml"

    @property
    def service(self) -> Path:
        """What the coordinator reads."""
        return self.launch / "coordinator.toml"

    @property
    def ports(self) -> Path:
        return self.launch / "ports.json"

    @property
    def recipe(self) -> Path:
        return self.launch / "recipe.json"

    @property
    def calibration(self) -> Path:
        return self.launch / "calibration.json"

    @property
    def costs(self) -> Path:
        """CPU seconds of the parts so far."""
        return self.launch / "cpu.json"

    @property
    def tasks(self) -> Path:
        """The task set in its canonical form, of a run that has one."""
        return self.launch / "tasks.jsonl"

    @property
    def start(self) -> Path:
        """Version 0 as a folder."""
        return self.launch / "v0"

    @property
    def publisher_key(self) -> Path:
        return self.launch / "publisher.key"

    @property
    def operator_key(self) -> Path:
        return self.launch / "operator.key"

    @property
    def coordinator(self) -> Path:
        return self.root / "coordinator"

    @property
    def ledger(self) -> Path:
        return self.coordinator / "ledger.db"

    @property
    def bundle(self) -> Path:
        """What a coordinator on another machine needs; none of it is secret."""
        return self.launch / "coordinator"

    @property
    def is_begun(self) -> bool:
        """Whether the run's first event was written, here or on the coordinator's machine."""
        return self.ledger.exists() or (self.root / "versions").exists()

    @property
    def logs(self) -> Path:
        return self.root / "logs"

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
