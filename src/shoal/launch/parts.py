"""The parts of a swarm: which commands are started, and in which order they are stopped."""

from shoal.errors import EXIT_UNWANTED
from shoal.identity.keys import Key
from shoal.launch.layout import name_cheats, name_relays, name_validators, name_workers
from shoal.launch.prepare import HOST, PreparedSwarm
from shoal.launch.process import Part
from shoal.protocol.params import RunParams
from shoal.shardcast.origin import SHARD_BYTES

LAST = (0, EXIT_UNWANTED)
_WORK, _VALIDATE, _TRAIN, _RELAY, _ORIGIN, _COORDINATE = range(6)
"""the order in which parts are stopped: those that take work first, those that the others need last"""


def list_parts(prepared: PreparedSwarm) -> list[Part]:
    """All parts of a swarm."""
    trainer, evaluator = list_trainer_arguments(prepared), list_evaluator_arguments(prepared)
    return [
        *list_servers(prepared),
        Part(name="trainer", arguments=trainer, rank=_TRAIN, ends=True, last=(EXIT_UNWANTED,), has_model=True),
        Part(name="evaluator", arguments=evaluator, rank=_TRAIN, ends=True, has_model=True),
        *_list_nodes(prepared),
    ]


def list_servers(prepared: PreparedSwarm) -> list[Part]:
    """Coordinator, origin and relays."""
    layout = prepared.layout
    coordinator = ("coordinator", str(layout.service), "--data", str(layout.coordinator))
    parts = [
        Part(name="coordinator", arguments=coordinator, rank=_COORDINATE),
        Part(name="origin", arguments=list_origin_arguments(prepared, _listen(prepared, "origin")), rank=_ORIGIN),
    ]
    for name in name_relays(prepared.config.swarm):
        source, listen = prepared.locate("origin"), _listen(prepared, name)
        relay = list_relay_arguments(prepared, source, str(layout.folder(name)), listen)
        parts.append(Part(name=name, arguments=relay, rank=_RELAY))
    return parts


def list_origin_arguments(prepared: PreparedSwarm, listen: str) -> tuple[str, ...]:
    """The command of the origin, which runs on the machine of the trainer."""
    layout, config = prepared.layout, prepared.config
    rate = ("--rate", config.swarm.rate) if config.swarm.rate else ()
    origin = ("origin", "--data", str(layout.folder("origin")), "--run", config.run, *_list_keeping(prepared))
    origin += (*rate, "--key", str(layout.publisher_key), "--listen", listen)
    return (*origin, "--shard-size", str(SHARD_BYTES))  # the root in the recipe was computed with it


def list_relay_arguments(prepared: PreparedSwarm, source: str, data: str, listen: str) -> tuple[str, ...]:
    """The command of a relay."""
    publisher, run = Key.load(prepared.layout.publisher_key).public, prepared.config.run
    relay = ("relay", source, "--publisher", publisher, "--run", run, *_list_keeping(prepared))
    return (*relay, "--data", data, "--listen", listen)


def list_trainer_arguments(prepared: PreparedSwarm) -> tuple[str, ...]:
    """The command of the trainer."""
    layout = prepared.layout
    place = ("--origin", str(layout.folder("origin")), "--folder", str(layout.folder("trainer")))
    ranks = prepared.config.swarm.trainer_ranks
    nproc = ("--nproc", str(ranks)) if ranks else ()
    return ("trainer", str(layout.run_settings), "--coordinator", prepared.url, *place, *nproc)


def list_evaluator_arguments(prepared: PreparedSwarm) -> tuple[str, ...]:
    """The command of the evaluator, which reads the versions that the trainer writes."""
    return ("evaluator", str(prepared.layout.run_settings))


def _list_nodes(prepared: PreparedSwarm) -> list[Part]:
    layout, swarm, url = prepared.layout, prepared.config.swarm, prepared.url
    threads = ("--threads", str(swarm.threads))
    slots = (*threads, "--slots", str(swarm.slots or prepared.config.engine.slots))

    def make_part(name: str, rank: int, *arguments: str) -> Part:
        own = (*arguments, "--folder", str(layout.folder(name)), *(threads if rank == _VALIDATE else slots))
        return Part(name=name, arguments=own, rank=rank, last=LAST, has_model=True)

    return [
        *(make_part(name, _VALIDATE, "validator", url) for name in name_validators(swarm)),
        *(make_part(name, _WORK, "worker", url) for name in name_workers(swarm)),
        *(
            make_part(name, _WORK, "redteam", "work", url, "--attack", attack)
            for name, attack in zip(name_cheats(swarm), swarm.cheats, strict=True)
        ),
    ]


def _list_keeping(prepared: PreparedSwarm) -> tuple[str, ...]:
    """Flags for the versions that are kept: those that workers may ask for, and those that appeals may need."""
    config = prepared.config
    hours = RunParams.model_fields["appeal_s"].default / 3600
    recent = ("--keep-hours", f"{hours:g}", "--keep-bytes", config.swarm.archive)
    return ("--keep", str(config.async_level + 4), *recent)


def _listen(prepared: PreparedSwarm, name: str) -> str:
    return f"{HOST}:{prepared.ports[name]}"
