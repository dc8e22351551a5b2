"""`shoal status`, `explain` and `leaderboard`: public queries to a coordinator."""

import argparse
import asyncio
import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandResult, flag
from shoal.errors import ConfigError, UnreachableError
from shoal.util.console import is_live
from shoal.util.logs import clean_text
from shoal.util.units import count_things

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.protocol.messages import LeaderLine, Leaders, NodeInfo, OwnerLine, Status, StepInfo

WATCH_S = 2.0
MAX_NODES = 12
"""nodes that the text lists; JSON has all that the coordinator lists"""
MAX_LEADERS = 100
_PREFIX = re.compile("[0-9a-f]{8,64}")
_CLEAR = "\x1b[H\x1b[J"


def run_status(args: argparse.Namespace) -> int:
    """Show a run's progress, and what it is waiting for."""
    if args.watch:
        return common.run_until_stopped(_watch_status(args))
    return common.run_query(_ask_status(args), as_json=args.json)


async def _explain(args: argparse.Namespace) -> CommandResult:
    """Explain a submission (checks and pay; -v lists every value), an owner or a node."""
    args.what = _read_names(args.where).get(args.what, args.what)
    if _PREFIX.fullmatch(args.what):
        return await ask_key(args.where, args.what, args.ca)
    if not args.what.startswith("s"):
        raise ConfigError(
            f"{args.what[:80]!r}: not an id; give a submission (s123), or 8 or more digits of an owner's or node's key"
        )
    return await ask_explanation(args.where, common.check_submission(args.what), args.ca, in_full=bool(args.verbose))


def _read_names(where: str) -> dict[str, str]:
    """In the folder of `shoal run`: the public key of each node, by the name of its process."""
    path = Path(where) / "launch" / "keys.json"
    return {name: keys["node"] for name, keys in json.loads(path.read_bytes()).items()} if path.is_file() else {}


async def _ask_status(args: argparse.Namespace) -> CommandResult:
    return await ask_status(args.where, args.ca, in_full=bool(args.verbose))


async def ask_status(where: str, authority: Path | None = None, *, in_full: bool = False) -> CommandResult:
    """Fetch and describe the run's status; `in_full` with the check rate."""
    from shoal.net.client import GLANCE

    async with common.open_client(where, authority, deadlines=GLANCE) as client:
        try:
            status = await client.read_status()
        except UnreachableError as error:
            if not Path(where).is_dir():
                raise
            return _describe_folder(where, error)
    return CommandResult(0, describe_status(status, in_full=in_full), status.model_dump(mode="json"))


def _describe_folder(where: str, error: UnreachableError) -> CommandResult:
    """What the ledger in a folder says about a run whose coordinator does not answer."""
    from shoal.coordinator.state.run import newest_version, read_run
    from shoal.ledger.reader import count_events

    with common.open_folder(where) as connection:
        steps, newest, size = read_run(connection).params.steps, newest_version(connection), count_events(connection)
    data = {"finished": newest >= steps, "steps": steps, "trained": max(0, newest), "newest_version": newest}
    done = f"{data['trained']} of {count_things(steps, 'step')} trained, {count_things(size, 'event')} in the ledger"
    text = f"{common.explain_error(error)}\nby the ledger in {where}: {done}"
    return CommandResult(common.EXIT_REFUSED, text, data | {"events": size, "error": common.explain_error(error)})


async def ask_explanation(
    where: str, submission: str, authority: Path | None = None, *, in_full: bool = False
) -> CommandResult:
    """Fetch and describe what is known about a submission; `in_full` with every value of every check."""
    if Path(where).is_dir():
        from shoal.coordinator.explain import explain_submission, list_findings

        with common.open_folder(where) as connection:
            text = explain_submission(connection, submission, now_ms=int(1000 * time.time()))
            findings = tuple(list_findings(connection, submission))
    else:
        async with common.open_client(where, authority) as client:
            found = await client.explain(submission)
        text, findings = found.text, found.findings
    data = {"submission": submission, "text": text, "findings": findings}
    if in_full:
        text = "\n".join([text, "Every value:", *(f"  {line}" for line in findings)])
    return CommandResult(0, text, data)


async def ask_key(where: str, prefix: str, authority: Path | None = None) -> CommandResult:
    """Fetch and describe the owners whose key, or whose node's key, begins with a prefix."""
    if Path(where).is_dir():
        from shoal.coordinator.status import find_key

        with common.open_folder(where) as connection:
            answer = find_key(connection, prefix)
    else:
        async with common.open_client(where, authority) as client:
            answer = await client.find_key(prefix)
    if not answer.owners:
        text = f"no owner and no node of this run has a key that begins with {prefix}"
        return CommandResult(common.EXIT_REFUSED, text, answer.model_dump(mode="json"))
    text = "\n".join(describe_owner(owner, where) for owner in answer.owners)
    return CommandResult(0, text, answer.model_dump(mode="json"))


async def _leaderboard(args: argparse.Namespace) -> CommandResult:
    """List the owners of a run by accepted tokens."""
    own = None if args.owner is None else common.load_key(args.owner).public
    if Path(args.where).is_dir():
        from shoal.coordinator.status import read_leaders
        from shoal.protocol.messages import Leaders

        with common.open_folder(args.where) as connection:
            leaders = Leaders(leaders=tuple(read_leaders(connection, MAX_LEADERS)))
    else:
        async with common.open_client(args.where, args.ca) as client:
            leaders = await client.read_leaders()
    return CommandResult(0, describe_leaders(leaders, own), leaders.model_dump(mode="json"))


async def _watch_status(args: argparse.Namespace) -> int:
    """Print the status repeatedly until interrupted; retries while the coordinator is unreachable."""
    is_drawn = is_live(sys.stdout) and not args.json
    while True:
        try:
            outcome = await _ask_status(args)
        except common.query_errors() as error:
            outcome = CommandResult(1, common.explain_error(error), {"error": common.explain_error(error)})
        text = json.dumps(outcome.data) if args.json else f"{clean_text(outcome.text)}\n"
        print(f"{_CLEAR if is_drawn else ''}{text}", flush=True)
        if outcome.data.get("finished"):
            return 0
        await asyncio.sleep(WATCH_S)


def describe_status(status: "Status", *, in_full: bool = False) -> str:
    """Describe the run's progress, and what it is waiting for; `in_full` with the check rate."""
    state = "finished" if status.finished else "stopped by the operator" if status.stopped else "running"
    version = f"v{status.newest_version} is newest" if status.newest_version >= 0 else "no version yet"
    overdue = [wait.text for wait in status.waits if wait.overdue]
    waiting = [wait.text for wait in status.waits if not wait.overdue]
    lines = [
        f"run {status.run}: {state}, {status.trained} of {count_things(status.steps, 'step')} trained, {version}",
        *(f"  OVERDUE      {text}" for text in overdue),
        f"  nodes        {status.nodes_live} live, {status.nodes_stale} stale, {status.nodes_gone} gone",
        *_describe_nodes(status.nodes),
        f"  queue        {count_things(status.queue, 'submission')} awaiting validation",
        *(_describe_step(step) for step in status.open_steps),
        *(f"  checks       {line}" for line in status.checks if in_full),
        *(f"  watched      {line}" for line in status.watched),
        *(f"  waiting      {text}" for text in waiting),
        # Overdue ones are listed at the top.
        *(f"  ALARM        {text}" for text in status.alarms if not text.startswith("overdue: ")),
    ]
    return "\n".join(lines)


def describe_leaders(leaders: "Leaders", own: str | None = None) -> str:
    """Owners by accepted tokens, one line each; `own` is the public key of the owner to mark."""
    if not leaders.leaders:
        return "no owner has joined yet"
    counts = f"{'':>4}  {'tokens':>12}  {'accepted':>8}  {'rejected':>8}  {'credits':>14}"
    head = f"{counts}  {'standing':<9}  {'scopes':<9}  owner"
    lines = [_describe_leader(rank, line, own) for rank, line in enumerate(leaders.leaders, 1)]
    if own is not None and own not in {line.owner for line in leaders.leaders}:
        lines.append(f"you ({own}) are not among them")
    return "\n".join([head, *lines])


def _describe_nodes(nodes: "Sequence[NodeInfo]") -> list[str]:
    """The first few nodes with the rates that they report, one line each."""
    lines = [_describe_node(node) for node in nodes[:MAX_NODES]]
    return [*lines, f"  ...          {len(nodes) - MAX_NODES} more"] if len(nodes) > MAX_NODES else lines


def _describe_node(node: "NodeInfo") -> str:
    version = f"v{node.version}" if node.version >= 0 else "no version"
    rate = "" if node.role == "trainer" else f", {node.tokens_per_s:,} tokens/s"
    return f"    {node.role:<10} {node.node[:8]}, {version}{rate}"


def _describe_step(step: "StepInfo") -> str:
    parts = [
        (step.leased, "leased"),
        (step.judged, "being judged"),
        (step.offered, "offered again"),
        (step.dull, "without signal (all rewards equal, so replaced)"),
    ]
    rest = "".join(f", {number} {what}" for number, what in parts if number)
    return f"  step {step.step:<7} {step.state}: {step.accepted} of {count_things(step.needed, 'group')} accepted{rest}"


def _describe_leader(rank: int, line: "LeaderLine", own: str | None) -> str:
    from shoal.ledger.event import MICRO

    counts = f"{rank:>4}  {line.tokens:>12}  {line.accepted:>8}  {line.rejected:>8}  {line.earned / MICRO:>14.6f}"
    you = "  (you)" if line.owner == own else ""
    return f"{counts}  {line.shown_standing or '-':<9}  {','.join(line.scopes):<9}  {line.owner}{you}"


def describe_owner(owner: "OwnerLine", where: str) -> str:
    """An owner with its nodes, and which of its submissions to look at."""
    counts = f"{count_things(owner.accepted, 'submission')} accepted, {owner.rejected} rejected"
    lines = [f"owner {owner.owner}: {owner.standing.value}, {counts}"]
    lines += [f"  banned: {owner.ban}"] if owner.ban else []
    for node in owner.nodes:
        state = "".join(f", {word}" for word in (node.gone, node.ban and f"banned: {node.ban}") if word)
        lines.append(f"  node {node.node}: {', '.join(node.scopes)}{state}")
    if owner.rejections:
        lines.append(f"  rejected, the latest first: {', '.join(owner.rejections)}")
        lines.append(f"  why: shoal explain {where} {owner.rejections[0]}")
    return "\n".join(lines)


_WHAT = flag("what", metavar="ID", help="a submission, e.g. s123, or 8 or more digits of an owner's or node's key")
_OWNER = flag("--owner", type=Path, metavar="FILE", help="your owner key, to mark your line")
_WATCH = flag("--watch", action="store_true", help="repeat until the run is finished")
COMMANDS = (
    CliCommand("status", run_status, (*common.QUERY, _WATCH)),
    CliCommand("explain", _explain, (*common.QUERY, _WHAT)),
    CliCommand("leaderboard", _leaderboard, (*common.QUERY, _OWNER)),
)
