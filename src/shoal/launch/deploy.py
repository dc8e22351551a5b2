"""A swarm whose parts are on several machines: which commands run where, once it is prepared on the trainer's.

Invariants:
- nothing secret leaves the machine it was made on: the publisher's key is the trainer's alone, the coordinator makes
  its own at its first start, and so does every node;
- a server listens on all addresses of its machine, at the port of the address that the settings name.
"""

import shlex
from dataclasses import dataclass
from urllib.parse import urlsplit

from shoal.launch import parts
from shoal.launch.prepare import PreparedSwarm

ALL_ADDRESSES = "0.0.0.0"
_PORTS = {"http": 80, "https": 443}
_ONE_LINE = 8
"""words of a command that is printed on one line"""


@dataclass(frozen=True, slots=True)
class DeployHost:
    """One machine."""

    name: str
    about: str
    """what has to be there before"""
    commands: tuple[tuple[str, ...], ...]
    """arguments of `shoal`, each a process of its own"""


def list_hosts(prepared: PreparedSwarm) -> list[DeployHost]:
    """All machines, in the order in which they are best started."""
    hosts, layout = prepared.config.swarm.hosts, prepared.layout
    origin = (*parts.list_origin_arguments(prepared, _find_listen(hosts.origin)), *_list_tls_arguments(hosts.origin))
    trust = ("--ca", hosts.ca) if hosts.ca else ()
    trainer = (*parts.list_trainer_arguments(prepared), *trust)
    here = (origin, trainer, parts.list_evaluator_arguments(prepared))
    relays = []
    for number, url in enumerate(hosts.relays, start=1):
        relay = parts.list_relay_arguments(prepared, hosts.origin, f"relay-{number}", _find_listen(url))
        secured = (*(trust if hosts.origin.startswith("https") else ()), *_list_tls_arguments(url))
        relays.append(DeployHost(_name_host("relay", url), _name_files(secured), ((*relay, *secured),)))
    coordinator = _list_coordinator_arguments(prepared)
    validator = ("validator", prepared.url, "--owner", "owner.key", *trust)
    return [
        DeployHost(
            _name_host("coordinator", hosts.coordinator), f"a copy of {layout.bundle}, and in it", (coordinator,)
        ),
        DeployHost(_name_host("trainer", hosts.origin), "this folder", here),
        *relays,
        DeployHost("each validator", "the owner's key that is named in the settings", (validator,)),
        DeployHost("each worker", _name_files(trust), (("worker", prepared.url, *trust),)),
    ]


def describe_hosts(prepared: PreparedSwarm) -> str:
    """The same as lines for a shell, with a comment for each machine."""
    lines = []
    for host in list_hosts(prepared):
        lines.append(f"# {host.name}: {host.about}")
        lines += [_wrap_command(("shoal", *arguments)) for arguments in host.commands]
    return "\n".join(lines)


def _wrap_command(arguments: tuple[str, ...]) -> str:
    """A command for a shell; a long one has one flag per line."""
    if len(arguments) <= _ONE_LINE:
        return shlex.join(arguments)
    words = [f"\\\n    {shlex.quote(word)}" if word.startswith("--") else shlex.quote(word) for word in arguments]
    return " ".join(words)


def _list_coordinator_arguments(prepared: PreparedSwarm) -> tuple[str, ...]:
    hosts = prepared.config.swarm.hosts
    start = ("coordinator", prepared.layout.service.name, "--data", "data")
    if hosts.behind_proxy:  # as its settings say; it listens on loopback
        return start
    place = ("--listen", _find_listen(hosts.coordinator), "--public")
    return (*start, *place, *_list_tls_arguments(hosts.coordinator))


def _list_tls_arguments(url: str) -> tuple[str, ...]:
    """The certificate of a server that is reached at an address, if that is https."""
    return ("--tls-cert", "fullchain.pem", "--tls-key", "key.pem") if url.startswith("https") else ()


def _name_files(flags: tuple[str, ...]) -> str:
    """The files that flags name."""
    return ", ".join(flags[1::2]) or "no files needed"


def _find_listen(url: str) -> str:
    """Where a server listens that is reached at an address."""
    address = urlsplit(url)
    return f"{ALL_ADDRESSES}:{address.port or _PORTS[address.scheme]}"


def _name_host(role: str, url: str) -> str:
    """A role and its machine: several roles may be on one."""
    return f"{role} ({urlsplit(url).hostname})"
