"""The parts of a swarm: which commands are started, and in which order they are stopped."""

from shoal.errors import EXIT_UNWANTED
from shoal.keys import Key
from shoal.launch.layout import name_cheats, name_relays, name_validators, name_workers
from shoal.launch.part import Part
from shoal.launch.ports import HOST
from shoal.launch.prepare import Prepared
from shoal.shardcast.publish import SHARD_BYTES

EXIT_DONE = 0
LAST = (EXIT_DONE, EXIT_UNWANTED)
_WORK, _JUDGE, _TRAIN, _RELAY, _ORIGIN, _RULE = range(6)
"""in this order they are stopped: those who take work first, those whom the others need last"""


def list_parts(prepared: Prepared) -> list[Part]:
    """All parts of a swarm."""
    return [*_list_servers(prepared), *_list_trainers(prepared), *_list_nodes(prepared)]


def _list_servers(prepared: Prepared) -> list[Part]:
    layout = prepared.layout
    coordinator = ("coordinator", str(layout.service), "--data", str(layout.coordinator))
    parts = [
        Part(name="coordinator", arguments=coordinator, rank=_RULE),
        Part(name="origin", arguments=write_origin(prepared, _listen(prepared, "origin")), rank=_ORIGIN),
    ]
    for name in name_relays(prepared.config.swarm):
        relay = write_relay(prepared, prepared.locate("origin"), str(layout.folder(name)), _listen(prepared, name))
        parts.append(Part(name=name, arguments=relay, rank=_RELAY))
    return parts


def write_origin(prepared: Prepared, listen: str) -> tuple[str, ...]:
    """The command of the origin, which is beside the trainer."""
    layout, config = prepared.layout, prepared.config
    rate = ("--rate", config.swarm.rate) if config.swarm.rate else ()
    origin = ("origin", "--data", str(layout.folder("origin")), "--run", config.run, "--keep", _count_kept(prepared))
    origin += (*rate, "--key", str(layout.publisher_key), "--listen", listen)
    return (*origin, "--shard-size", str(SHARD_BYTES))  # the root in the recipe was computed with it


def write_relay(prepared: Prepared, source: str, data: str, listen: str) -> tuple[str, ...]:
    """The command of a relay."""
    publisher, run = Key.load(prepared.layout.publisher_key).public, prepared.config.run
    relay = ("relay", source, "--publisher", publisher, "--run", run, "--keep", _count_kept(prepared))
    return (*relay, "--data", data, "--listen", listen)


def write_trainer(prepared: Prepared) -> tuple[str, ...]:
    """The command of the trainer."""
    layout = prepared.layout
    place = ("--origin", str(layout.folder("origin")), "--folder", str(layout.folder("trainer")))
    return ("trainer", str(layout.run_settings), "--coordinator", prepared.url, *place)


def write_evaluator(prepared: Prepared) -> tuple[str, ...]:
    """The command of the evaluator, which reads the versions that the trainer writes."""
    return ("evaluator", str(prepared.layout.run_settings))


def _list_trainers(prepared: Prepared) -> list[Part]:
    trainer, evaluator = write_trainer(prepared), write_evaluator(prepared)
    return [
        Part(name="trainer", arguments=trainer, rank=_TRAIN, ends=True, last=(EXIT_UNWANTED,), has_model=True),
        Part(name="evaluator", arguments=evaluator, rank=_TRAIN, ends=True, has_model=True),
    ]


def _list_nodes(prepared: Prepared) -> list[Part]:
    layout, swarm, url = prepared.layout, prepared.config.swarm, prepared.url
    threads = ("--threads", str(swarm.threads))
    slots = (*threads, "--slots", str(swarm.slots or prepared.config.engine.slots))

    def place(name: str) -> tuple[str, str]:
        return ("--folder", str(layout.folder(name)))

    parts = [
        Part(name=name, arguments=("validator", url, *place(name), *threads), rank=_JUDGE, last=LAST, has_model=True)
        for name in name_validators(swarm)
    ]
    parts += [
        Part(name=name, arguments=("worker", url, *place(name), *slots), rank=_WORK, last=LAST, has_model=True)
        for name in name_workers(swarm)
    ]
    parts += [
        Part(
            name=name,
            arguments=("redteam", "work", url, "--attack", attack, *place(name), *slots),
            rank=_WORK,
            last=LAST,
            has_model=True,
        )
        for name, attack in zip(name_cheats(swarm), swarm.cheats, strict=True)
    ]
    return parts


def _count_kept(prepared: Prepared) -> str:
    """Versions that are kept on the way: those that may still be asked for."""
    return str(prepared.config.async_level + 4)


def _listen(prepared: Prepared, name: str) -> str:
    return f"{HOST}:{prepared.ports[name]}"
