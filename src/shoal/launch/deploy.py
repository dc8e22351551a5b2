"""A swarm whose parts are on several machines: what is typed on which, once it is made ready on the trainer's.

Invariants:
- nothing secret leaves the machine it was made on: the publisher's key is the trainer's alone, the coordinator makes
  its own at its first start, and so does every node;
- who serves listens on all addresses of its machine, at the port of the address that the settings name.
"""

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.launch.prepare import Prepared
from shoal.launch.roster import write_evaluator, write_origin, write_relay, write_trainer

EVERYWHERE = "0.0.0.0"
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Station:
    """One machine."""

    name: str
    about: str
    """what has to be there before"""
    commands: tuple[tuple[str, ...], ...]
    """arguments of `shoal`, each a process of its own"""


def list_stations(prepared: Prepared) -> list[Station]:
    """All machines, in the order in which they are best started."""
    hosts, layout = prepared.config.swarm.hosts, prepared.layout
    origin = write_origin(prepared, _find_listen(hosts.origin))
    here = (origin, write_trainer(prepared), write_evaluator(prepared))
    relays = [
        Station(
            _find_name(url), "nothing", (write_relay(prepared, hosts.origin, f"relay-{number}", _find_listen(url)),)
        )
        for number, url in enumerate(hosts.relays, start=1)
    ]
    judge = ("validator", prepared.url, "--owner", "owner.key")
    return [
        Station(
            _find_name(hosts.coordinator), f"a copy of {layout.bundle}, and in it", (_write_coordinator(prepared),)
        ),
        Station(_find_name(hosts.origin), "this folder", here),
        *relays,
        Station("each validator", "the owner's key that is named in the settings", (judge,)),
        Station("each worker", "nothing", (("worker", prepared.url),)),
    ]


def describe_stations(prepared: Prepared) -> str:
    """The same as lines for a shell, with a comment for each machine."""
    lines = []
    for station in list_stations(prepared):
        lines.append(f"# {station.name}: {station.about}")
        lines += [shlex.join(("shoal", *arguments)) for arguments in station.commands]
    return "\n".join(lines)


def _write_coordinator(prepared: Prepared) -> tuple[str, ...]:
    url = prepared.config.swarm.hosts.coordinator
    tls = ("--tls-cert", "fullchain.pem", "--tls-key", "key.pem") if url.startswith("https") else ()
    return (
        "coordinator",
        prepared.layout.service.name,
        "--data",
        "data",
        "--listen",
        _find_listen(url),
        "--public",
        *tls,
    )


def _find_listen(url: str) -> str:
    """Where a server listens that is reached at an address."""
    parts = urlsplit(url)
    return f"{EVERYWHERE}:{parts.port or _PORTS[parts.scheme]}"


def _find_name(url: str) -> str:
    return urlsplit(url).hostname or url
