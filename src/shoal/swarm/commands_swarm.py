"""What `shoal coordinator`, `shoal join`, `shoal status` and `shoal explain` do.

Each but the first returns an exit code and a text. Nothing of what a server sends reaches a terminal uncleaned.
"""

import asyncio
import json
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shoal.console import clean_text, format_time
from shoal.errors import ConfigError, DiskError
from shoal.keys import Key, check_public
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.client import NodeClient, OpenClient
from shoal.swarm.client_auth import read_clock_ms
from shoal.swarm.commands_ledger import Outcome
from shoal.swarm.delegation import Grant, Scope, sign_delegation
from shoal.swarm.descriptor import Descriptor, open_descriptor
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import parse_place
from shoal.swarm.messages import MemberInfo, Status, StepInfo
from shoal.swarm.service import ServiceConfig, open_service
from shoal.swarm.tags import DocumentError
from shoal.swarm.writer import WriterStoppedError

EXIT_REFUSED = 1
LEASES = 16
DAY_MS = 86_400_000
_QUICK = Patience(tries=4, first_s=0.5, longest_s=5.0)

Say = Callable[[str], None]


async def run_coordinator(config: ServiceConfig, data: Path, *, log: Say | None = None) -> int:
    """Serve a run until the task is cancelled. `log` gets one line of JSON for each thing worth knowing."""
    tell = log or _write_log
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: tell(_describe_bug(context)))
    async with open_service(config, data) as service:
        tell(_write_line("started", url=service.url, run=config.run, coordinator=service.coordinator.public))
        try:
            await service.run()
        except WriterStoppedError as error:
            raise DiskError(f"the ledger stopped: {error}; start the coordinator again") from error
        finally:
            tell(_write_line("stopping"))
    return 0


async def run_join(
    source: str,
    *,
    folder: Path,
    owner: Path | None = None,
    delegation: Path | None = None,
    coordinator: str | None = None,
    scopes: frozenset[Scope] = frozenset({Scope.WORK}),
    days: int = 30,
) -> Outcome:
    """Join a run. `source` is an address or the file of a descriptor; `owner` the file of a key, or a delegation's."""
    descriptor, data = await _find_descriptor(source)
    if coordinator is not None and check_public(coordinator) != descriptor.coordinator:
        return Outcome(EXIT_REFUSED, f"{source}: the coordinator there has the key {descriptor.coordinator}")
    folder.mkdir(parents=True, exist_ok=True)
    key = _load_node_key(folder / "node.key")
    document = _make_delegation(key, descriptor.run, owner, delegation, scopes, days)
    place = parse_place(descriptor.urls[0])
    client = NodeClient(place, key, run=descriptor.run, coordinator=descriptor.coordinator, folder=folder)
    try:
        info = await client.join(document)
    except (RefusedError, UnreachableError, KeepError, ForkError) as error:
        return Outcome(EXIT_REFUSED, clean_text(f"not joined: {error}"))
    finally:
        client.close()
    (folder / "delegation.json").write_bytes(document)
    (folder / "descriptor.json").write_bytes(data)
    return Outcome(0, _describe_member(info, descriptor))


async def run_status(url: str) -> Outcome:
    """The run at a glance, in words."""
    return await _ask(url, lambda client: client.read_status(), _describe_status)


async def run_explain(url: str, submission: str) -> Outcome:
    """All that is known of a submission, in words."""
    return await _ask(url, lambda client: client.explain(submission), str)


async def _ask(url: str, question: Callable[[OpenClient], Any], describe: Callable[[Any], str]) -> Outcome:
    client = OpenClient(parse_place(url), asker=Asker(_QUICK))
    try:
        return Outcome(0, clean_text(describe(await question(client))))
    except (RefusedError, UnreachableError) as error:
        return Outcome(EXIT_REFUSED, clean_text(str(error)))
    finally:
        client.close()


async def _find_descriptor(source: str) -> tuple[Descriptor, bytes]:
    try:
        if source.startswith(("http://", "https://")):
            client = OpenClient(parse_place(source), asker=Asker(_QUICK))
            try:
                data = await client.read_descriptor()
            finally:
                client.close()
        else:
            data = Path(source).read_bytes()
        descriptor = open_descriptor(data.rstrip(b"\n"))
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror})") from None
    except (DocumentError, RefusedError, UnreachableError) as error:
        raise ConfigError(clean_text(f"{source}: gives no descriptor of a run ({error})")) from None
    if not descriptor.urls:
        raise ConfigError(f"{source}: the descriptor names no address of a coordinator")
    return descriptor, data


def _load_node_key(path: Path) -> Key:
    if not path.exists():
        Key.generate().save(path)
    return Key.load(path)


def _make_delegation(
    key: Key, run: str, owner: Path | None, delegation: Path | None, scopes: frozenset[Scope], days: int
) -> bytes:
    """The owner's word for this node: as a file from where the owner's key is kept, or made here with that key."""
    if (owner is None) == (delegation is None):
        raise ConfigError("give the file of the owner's key, or of a delegation that the owner signed, one of both")
    if delegation is not None:
        try:
            return delegation.read_bytes().rstrip(b"\n")
        except OSError as error:
            raise ConfigError(f"{delegation}: cannot be read ({error.strerror})") from None
    assert owner is not None
    now_ms = read_clock_ms()
    try:
        # From a day ago on: the coordinator's clock may be behind ours.
        grant = Grant(key.public, run, now_ms - DAY_MS, now_ms + days * DAY_MS, scopes, LEASES)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return sign_delegation(Key.load(owner), grant)


def _describe_member(info: MemberInfo, descriptor: Descriptor) -> str:
    lines = [
        f"joined run {info.run}",
        f"  node         {info.node}",
        f"  owner        {info.owner}",
        f"  standing     {info.standing.value}, {info.width} leases at once, may {', '.join(info.scopes)}",
        f"  coordinator  {descriptor.coordinator}",
    ]
    return clean_text("\n".join(lines))


def _describe_status(status: Status) -> str:
    state = "finished" if status.finished else "stopped by the operator" if status.stopped else "going on"
    lines = [
        f"run {status.run}: {state}, step {status.trained} of {status.steps} trained",
        f"  newest version {status.newest_version if status.newest_version >= 0 else 'none yet'}",
        f"  nodes: {status.nodes_live} live, {status.nodes_stale} stale, {status.nodes_gone} gone",
        f"  submissions to judge: {status.queue}",
        *(_describe_step(step) for step in status.open_steps),
    ]
    for wait in status.waits:
        since = format_time(max(0, status.server_time_ms - wait.since_ms) / 1000)
        lines.append(f"  {'OVERDUE ' if wait.overdue else ''}{wait.text} (for {since})")
    lines += [f"  ALARM {text}" for text in status.alarms]
    return "\n".join(lines)


def _describe_step(step: StepInfo) -> str:
    return (
        f"  step {step.step} {step.state}: {step.accepted} of {step.needed} groups accepted, {step.leased} leased, "
        f"{step.judged} being judged, {step.offered} offered again, {step.dull} without signal"
    )


def _write_log(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _write_line(event: str, **fields: object) -> str:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **fields})


def _describe_bug(context: dict[str, Any]) -> str:
    error = context.get("exception")
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    return _write_line("bug", text=str(context.get("message", "")), trace=trace[-4000:])
