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
    layout, config = prepared.layout, prepared.config
    publisher = Key.load(layout.publisher_key).public
    keep = str(config.async_level + 4)
    rate = ("--rate", config.swarm.rate) if config.swarm.rate else ()
    coordinator = ("coordinator", str(layout.service), "--data", str(layout.coordinator))
    origin = ("origin", "--data", str(layout.folder("origin")), "--run", config.run, "--keep", keep, *rate)
    origin += ("--key", str(layout.publisher_key), "--listen", _listen(prepared, "origin"))
    origin += ("--shard-size", str(SHARD_BYTES))  # the root in the recipe was computed with it
    parts = [
        Part(name="coordinator", arguments=coordinator, rank=_RULE),
        Part(name="origin", arguments=origin, rank=_ORIGIN),
    ]
    for name in name_relays(config.swarm):
        source = ("relay", prepared.locate("origin"), "--publisher", publisher, "--run", config.run, "--keep", keep)
        place = ("--data", str(layout.folder(name)), "--listen", _listen(prepared, name))
        parts.append(Part(name=name, arguments=(*source, *place), rank=_RELAY))
    return parts


def _list_trainers(prepared: Prepared) -> list[Part]:
    layout = prepared.layout
    trainer = ("trainer", str(layout.run_settings), "--coordinator", prepared.url)
    place = ("--origin", str(layout.folder("origin")), "--folder", str(layout.folder("trainer")))
    return [
        Part(name="trainer", arguments=(*trainer, *place), rank=_TRAIN, ends=True, last=(EXIT_UNWANTED,)),
        Part(name="evaluator", arguments=("evaluator", str(layout.run_settings)), rank=_TRAIN, ends=True),
    ]


def _list_nodes(prepared: Prepared) -> list[Part]:
    layout, swarm, url = prepared.layout, prepared.config.swarm, prepared.url
    threads = ("--threads", str(swarm.threads))
    slots = (*threads, "--slots", str(swarm.slots or prepared.config.engine.slots))

    def place(name: str) -> tuple[str, str]:
        return ("--folder", str(layout.folder(name)))

    parts = [
        Part(name=name, arguments=("validator", url, *place(name), *threads), rank=_JUDGE, last=LAST)
        for name in name_validators(swarm)
    ]
    parts += [
        Part(name=name, arguments=("worker", url, *place(name), *slots), rank=_WORK, last=LAST)
        for name in name_workers(swarm)
    ]
    parts += [
        Part(
            name=name,
            arguments=("redteam", "work", url, "--attack", attack, *place(name), *slots),
            rank=_WORK,
            last=LAST,
        )
        for name, attack in zip(name_cheats(swarm), swarm.cheats, strict=True)
    ]
    return parts


def _listen(prepared: Prepared, name: str) -> str:
    return f"{HOST}:{prepared.ports[name]}"
