"""`shoal ledger verify`, `show`, `prove`, `check` and `tasks`: read a ledger, from its database or over HTTP.

All of them only read, so they can run next to the coordinator. Checking a proof again needs only the coordinator's
public key.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, CommandResult, flag
from shoal.errors import ConfigError
from shoal.util.clock import show_time
from shoal.util.files import check_output, write_output
from shoal.util.units import check_run, count_things

if TYPE_CHECKING:
    from shoal.audit.verify import AuditReport
    from shoal.ledger.db import Projection
    from shoal.ledger.event import Event
    from shoal.ledger.head import InclusionProof, SignedHead
    from shoal.protocol.descriptor import Descriptor

EXIT_BROKEN = 1
"""the ledger is invalid"""
MAX_SHOWN = 10_000
_BODY_CHARS, _TEXT_CHARS = 100, 1000
_LIST_ENTRIES = 4
"""longer lists in an event are shown by their size"""
_EXAMPLES = 10
"""number of tasks to print"""


_PLACE = (
    "a run's or coordinator's folder, its database (a file or postgresql://...), or its address (http://..., "
    "https://...)"
)
_LEDGER = (flag("where", type=common.parse_ledger, metavar="LEDGER", help=_PLACE), common.AUTHORITY)


def _add_verify(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--head", type=Path, metavar="FILE", help="a head that the ledger must extend, e.g. a node's DIR/head.json")
    whose = "public key of the coordinator that must have signed it (default: the one in its genesis)"
    add("--coordinator", metavar="HEX", help=whose)
    known = "the run's descriptor, which its genesis must match (default: that of the folder or address)"
    add("--descriptor", type=Path, metavar="FILE", help=known)
    add("--copy", type=Path, metavar="FILE", help="with an address: keep the copy, continue from it next time")


def _add_show(parser: CommandParser) -> None:
    add = parser.add_argument
    add("event", nargs="?", metavar="EVENT", help="number of an event, or its hash in a database")
    add("--from", dest="first", type=int, metavar="N", help="first event to list (default: the last ones)")
    add("--count", type=int, default=20, metavar="N", help="number of events to list (%(default)s)")


def _add_check(parser: CommandParser) -> None:
    add = parser.add_argument
    add("proof", type=Path, metavar="FILE", help="the proof")
    add("--descriptor", type=Path, metavar="FILE", help="the run's descriptor")
    add("--coordinator", metavar="HEX", help="the coordinator's public key, if there is no descriptor")
    add("--run", metavar="NAME", help="name of the run (default: the one that the proof names)")


def _add_tasks(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--recipe", type=Path, required=True, metavar="FILE", help="the run's recipe")
    add("--tasks", type=Path, metavar="FILE", help="its task set, if it has one; any format with the same content")
    add("--out", type=Path, metavar="FILE", help="JSONL file to write, one line per group")


def run_verify(args: argparse.Namespace) -> int:
    """Recompute chain, signatures, sums, heads, tables and decisions."""
    from shoal.audit.database import find_database

    expected = common.check_key("--coordinator", args.coordinator)
    held = None if args.head is None else load_head(args.head)
    path = args.descriptor or find_descriptor(args.where)
    descriptor = None if path is None else common.read_descriptor(path)[0]
    if common.is_address(args.where):
        return common.run_query(_verify_remote(args, held, expected, descriptor), as_json=args.json)
    if args.copy is not None:
        raise ConfigError("--copy: only for a ledger at an address; this one is local")
    url = find_database(args.where)
    result = verify_database(url, held=held, expected=expected, descriptor=descriptor)
    return common.print_result(result, as_json=args.json)


def find_descriptor(where: str) -> Path | None:
    """The descriptor in a coordinator's folder, if it is one and has one."""
    path = Path(where) / "descriptor.json"
    return path if "://" not in where and path.is_file() else None


def verify_database(
    url: str,
    *,
    held: "SignedHead | None" = None,
    expected: str | None = None,
    descriptor: "Descriptor | None" = None,
    projections: "Sequence[Projection] | None" = None,
) -> CommandResult:
    """Check everything that can be checked. `held` is a head stored by a node, which the ledger must extend;
    `expected` the coordinator's public key."""
    from shoal.audit.database import open_reader
    from shoal.audit.verify import verify_ledger
    from shoal.coordinator.state import PROJECTIONS

    with open_reader(url) as engine:
        tables = PROJECTIONS if projections is None else projections
        report = verify_ledger(engine, projections=tables, held=held, coordinator=expected, descriptor=descriptor)
    return describe_report(report)


async def _verify_remote(
    args: argparse.Namespace, held: "SignedHead | None", expected: str | None, descriptor: "Descriptor | None"
) -> CommandResult:
    from shoal.audit.remote import RemoteLedgerError, verify_remote

    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        path = args.copy or Path(folder) / "ledger.db"
        async with common.open_client(args.where, args.ca) as client:
            if descriptor is None:
                descriptor, _ = await common.fetch_descriptor(client)
            else:
                client.trust(descriptor.run, descriptor.coordinator)
            if expected is not None and expected != descriptor.coordinator:
                text = (
                    f"wrong coordinator key: the run's descriptor names {descriptor.coordinator}, expected {expected}"
                )
                return CommandResult(EXIT_BROKEN, f"ledger at {args.where}: {text}", {"holds": False, "text": text})
            try:
                report = await verify_remote(client, descriptor, path, held, expected)
            except RemoteLedgerError as error:
                text = f"ledger at {args.where}: BROKEN\n  {error}"
                return CommandResult(EXIT_BROKEN, text, {"holds": False, "text": str(error)})
    return describe_report(report)


def run_show(args: argparse.Namespace) -> int:
    """Show one event in full, or list the last ones."""
    if not 1 <= args.count <= MAX_SHOWN:
        raise ConfigError(f"--count: must be from 1 to {MAX_SHOWN}")
    if args.first is not None and args.first < 0:
        raise ConfigError("--from: must be 0 or more")
    if common.is_address(args.where):
        return common.run_query(_show_remote(args), as_json=args.json)
    from shoal.audit.database import find_database

    result = show_events(find_database(args.where), event=args.event, first=args.first, count=args.count)
    return common.print_result(result, as_json=args.json)


def show_events(url: str, *, event: str | None = None, first: int | None = None, count: int = 20) -> CommandResult:
    """Show one event in full, or list `count` events, one per line: starting at `first`, or the last ones."""
    from shoal.audit.database import read_one, read_range

    return _show_list(*read_range(url, first, count)) if event is None else _show_one(read_one(url, event))


async def _show_remote(args: argparse.Namespace) -> CommandResult:
    """Like `show_events`, but only for events that a signed head covers."""
    from shoal.audit.remote import fetch_events, fetch_proof

    async with common.open_client(args.where, args.ca) as client:
        if args.event is None:
            return _show_list(*await fetch_events(client, args.first, args.count))
        descriptor, _ = await common.fetch_descriptor(client)
        return _show_one((await fetch_proof(client, descriptor, args.event)).event)


def run_prove(args: argparse.Namespace) -> int:
    """Print a checked proof that an event is in the ledger."""
    if common.is_address(args.where):
        return common.run_query(_prove_remote(args))
    from shoal.audit.database import find_database, prove_event

    return common.print_result(_write_proof(prove_event(find_database(args.where), args.event), args.out))


async def _prove_remote(args: argparse.Namespace) -> CommandResult:
    from shoal.audit.remote import fetch_proof

    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        return _write_proof(await fetch_proof(client, descriptor, args.event), args.out)


def run_check(args: argparse.Namespace) -> int:
    """Check a proof of `shoal ledger prove` with only a public key."""
    from shoal.identity.keys import check_public

    run = None if args.run is None else check_run(args.run)
    if args.descriptor is not None:
        descriptor, _ = common.read_descriptor(args.descriptor)
        run, coordinator = descriptor.run, descriptor.coordinator
    elif args.coordinator is None:
        raise ConfigError("give --coordinator KEY or --descriptor FILE: the coordinator that signed the proof")
    else:
        coordinator = check_public(args.coordinator)
    return common.print_result(check_proof(args.proof, run=run, coordinator=coordinator), as_json=args.json)


def check_proof(path: Path, *, run: str | None, coordinator: str) -> CommandResult:
    """Check a file written by `shoal ledger prove` with only the coordinator's public key.

    Without `run`, the proof may be of any run of this coordinator; the result names it.
    """
    from shoal.ledger.event import EventError
    from shoal.ledger.head import InclusionProof

    try:
        proof = InclusionProof.from_bytes(common.read_file(path).rstrip(b"\n"))
        proof.check_proof(run or proof.head.head.run, coordinator)
    except EventError as error:
        return CommandResult(EXIT_BROKEN, f"{path}: invalid proof: {error}", {"valid": False, "text": str(error)})
    head = proof.head.head
    first = f"valid: event {proof.event.seq} is in the ledger of run {head.run}, signed by {coordinator} over"
    text = f"{first} {count_things(head.size, 'event')}\n\n{_describe_event(proof.event)}"
    data = {"valid": True, "run": head.run, "coordinator": coordinator, "size": head.size}
    return CommandResult(0, text, {**data, "event": _dump_event(proof.event)})


def load_head(path: Path) -> "SignedHead":
    """Load a signed head from a node's file."""
    from shoal.ledger.head import HeadError, SignedHead

    try:
        return SignedHead.from_bytes(common.read_file(path))
    except HeadError as error:
        raise ConfigError(f"{path}: {error}") from None


def run_tasks(args: argparse.Namespace) -> int:
    """List each task's accepted groups with mean reward and signal."""
    if common.is_address(args.where):
        raise ConfigError("a folder or a database is needed; `shoal ledger verify ADDRESS --copy FILE` creates one")
    if args.out is not None:
        check_output(args.out)
    from shoal.audit.database import find_database, name_tasks, read_groups

    groups, recipe_hash = read_groups(find_database(args.where))
    recipe = common.read_file(args.recipe)
    if recipe_hash and hashlib.sha256(recipe).hexdigest() != recipe_hash:
        raise ConfigError(f"{args.recipe}: not the recipe of this ledger (SHA-256 differs)")
    lines = list(name_tasks(groups, recipe, args.tasks))
    if args.out is not None:
        write_output(args.out, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return common.print_result(_describe_tasks(lines), as_json=args.json)


def describe_report(report: "AuditReport") -> CommandResult:
    """Describe a verification; code 0 only if the ledger holds."""
    lines = [f"{finding.check}: {finding.text}" for finding in report.findings]
    counts = (
        f"{count_things(report.num_events, 'event')}, {count_things(report.num_postings, 'posting')}, "
        f"{count_things(report.num_heads, 'signed head')}, {count_things(report.num_tables, 'table')} rebuilt"
    )
    if report.holds:
        verdict = "holds"
    elif report.findings:
        verdict = f"BROKEN, {count_things(len(lines), 'finding')}"
    else:
        verdict = "NOT SIGNED TO ITS END"
        lines.append(f"head: {report.problem}")
    lines += [f"ledger of run {report.run or '?'}: {verdict}", f"  {counts}"]
    lines += [f"  coordinator {report.coordinator or '?'}", f"  root        {report.root or '?'}"]
    sizes = {name: getattr(report, f"num_{name}") for name in ("events", "postings", "heads", "tables")}
    data = {"holds": report.holds, "run": report.run, "coordinator": report.coordinator, **sizes, "root": report.root}
    data |= {"signed": report.num_signed, "problem": report.problem}
    data["findings"] = [{"check": finding.check, "text": finding.text} for finding in report.findings]
    return CommandResult(0 if report.holds else EXIT_BROKEN, "\n".join(lines), data)


def _write_proof(proof: "InclusionProof", out: Path | None) -> CommandResult:
    """Print a proof, or write it to a file."""
    if out is None:
        return CommandResult(0, proof.to_bytes().decode())
    write_output(out, proof.to_bytes() + b"\n")
    text = f"event {proof.event.seq} is in the ledger of {proof.head.head.size} events; proof written to {out}"
    return CommandResult(0, text)


def _show_one(event: "Event") -> CommandResult:
    """Describe an event in full."""
    return CommandResult(0, _describe_event(event), _dump_event(event))


def _show_list(events: "Sequence[Event]", size: int) -> CommandResult:
    """List events of a ledger of `size` events, one per line."""
    lines = [_summarise_event(event) for event in events]
    data = {"events": [_dump_event(event) for event in events], "size": size}
    return CommandResult(0, "\n".join([*lines, f"{size} events"]), data)


def _describe_tasks(lines: list[dict[str, Any]]) -> CommandResult:
    """Describe the number of groups and tasks, and the most frequent tasks."""
    rewards: dict[str, list[float]] = {}
    for line in lines:
        rewards.setdefault(line["task"], []).append(line["reward"])
    signal = sum(line["signal"] for line in lines)
    text = [f"{len(lines)} accepted groups of {len(rewards)} tasks; {signal} of them have a signal"]
    often = sorted(rewards, key=lambda task: (-len(rewards[task]), task))[:_EXAMPLES]
    text += [f"  {len(rewards[task]):5d} x  {_mean(rewards[task]):.3f}  {task}" for task in often]
    data = {task: {"groups": len(found), "reward": _mean(found)} for task, found in sorted(rewards.items())}
    return CommandResult(0, "\n".join(text), {"groups": len(lines), "signal": signal, "tasks": data})


def _summarise_event(event: "Event") -> str:
    from shoal.ledger.event import MICRO

    body = _show_body(event)
    body = body if len(body) <= _BODY_CHARS else f"{body[: _BODY_CHARS - 3]}..."
    moved = sum(posting.amount for posting in event.postings if posting.amount > 0)
    credit = f"  {moved / MICRO:g} credits" if moved else ""
    return f"{event.seq:>8}  {_show_time(event)}  {event.kind:<16} {event.actor[:8]}  {event.subject}{credit}  {body}"


def _describe_event(event: "Event") -> str:
    from shoal.ledger.event import MICRO

    signed = "signed by its actor" if event.signature else "the coordinator's own"
    lines = [
        f"event      {event.seq}",
        f"time       {_show_time(event)}",
        f"kind       {event.kind}",
        f"actor      {event.actor} ({signed})",
        f"subject    {event.subject or '-'}",
        f"body       {json.dumps(_shorten(event.content))}",
        f"prev hash  {event.prev_hash.hex()}",
        f"hash       {event.hash.hex()}",
    ]
    lines += [f"posting    {amount / MICRO:+.6f}  {account}" for account, amount in event.postings]
    return "\n".join(lines)


def _shorten(value: Any) -> Any:
    """The value with each long list replaced by its size, and the sum of its tokens: `256 entries, 2410 tokens`."""
    if isinstance(value, dict):
        return {key: _shorten(own) for key, own in value.items()}
    if not isinstance(value, list):
        return value if not isinstance(value, str) or len(value) <= _TEXT_CHARS else f"{len(value)} characters"
    if len(value) <= _LIST_ENTRIES:
        return [_shorten(own) for own in value]
    tokens = [own["tokens"] for own in value if isinstance(own, dict) and isinstance(own.get("tokens"), int)]
    return f"{len(value)} entries{f', {sum(tokens)} tokens' if tokens else ''}; --json shows them"


def _dump_event(event: "Event") -> dict[str, Any]:
    plain = {name: getattr(event, name) for name in ("seq", "time_ms", "kind", "actor", "subject")}
    hashes = {name: getattr(event, name).hex() for name in ("signature", "prev_hash", "hash")}
    postings = [{"account": account, "amount": amount} for account, amount in event.postings]
    return {**plain, "body": event.content, **hashes, "postings": postings}


def _show_body(event: "Event") -> str:
    """As ASCII JSON: a body contains text from strangers, and JSON does not escape every terminal control code."""
    return json.dumps(event.content)


def _show_time(event: "Event") -> str:
    return show_time(event.time_ms, "%Y-%m-%d %H:%M:%S")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


_EVENT = flag("event", metavar="EVENT", help="number of an event, or its hash in a database")
_OUT = flag("--out", type=Path, metavar="FILE", help="file to write (default: stdout)")
_ACTIONS = (
    CliCommand("verify", run_verify, (*_LEDGER, common.JSON, _add_verify)),
    CliCommand("show", run_show, (*_LEDGER, common.JSON, _add_show)),
    CliCommand("prove", run_prove, (*_LEDGER, _EVENT, _OUT)),
    CliCommand("check", run_check, (_add_check, common.JSON)),
    CliCommand("tasks", run_tasks, (*_LEDGER, common.JSON, _add_tasks)),
)
COMMANDS = (CliCommand("ledger", text="verify, read and prove a run's ledger", actions=_ACTIONS),)
