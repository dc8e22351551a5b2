"""What a coordinator answers, in words: status, standing, leaders."""

from shoal.swarm.api.answers import Leaders
from shoal.swarm.messages import LeaderLine, MemberInfo, Status, StepInfo
from shoal.swarm.postings import MICRO


def describe_member(info: MemberInfo, coordinator: str) -> str:
    """What a node is in its run."""
    lines = [
        f"joined run {info.run}",
        f"  node         {info.node}",
        f"  owner        {info.owner}",
        f"  standing     {info.standing.value}",
        f"  may          {', '.join(info.scopes)}; hold {count_things(info.width, 'lease')} at once",
        f"  heartbeat    every {info.heartbeat_s} s",
        f"  coordinator  {coordinator}",
    ]
    return "\n".join(lines)


def describe_status(status: Status) -> str:
    """The run at a glance, and who waits for whom."""
    state = "finished" if status.finished else "stopped by the operator" if status.stopped else "going on"
    version = f"v{status.newest_version} is newest" if status.newest_version >= 0 else "no version yet"
    lines = [
        f"run {status.run}: {state}, {status.trained} of {count_things(status.steps, 'step')} trained, {version}",
        f"  nodes        {status.nodes_live} live, {status.nodes_stale} stale, {status.nodes_gone} gone",
        f"  to judge     {count_things(status.queue, 'submission')}",
        *(_describe_step(step) for step in status.open_steps),
        *(f"  checks       {line}" for line in status.checks),
        *(f"  watched      {line}" for line in status.watched),
    ]
    overdue = {wait.text for wait in status.waits if wait.overdue}
    lines += [f"  {'OVERDUE' if wait.text in overdue else 'waiting'}      {wait.text}" for wait in status.waits]
    # What is overdue is said above.
    lines += [f"  ALARM        {text}" for text in status.alarms if not text.startswith("overdue: ")]
    return "\n".join(lines)


def describe_leaders(leaders: Leaders) -> str:
    """Owners by accepted tokens, a line for each."""
    if not leaders.leaders:
        return "nobody has joined yet"
    head = f"{'':>4}  {'tokens':>12}  {'accepted':>8}  {'rejected':>8}  {'credits':>14}  {'standing':<9}  owner"
    return "\n".join([head, *(_describe_leader(rank, line) for rank, line in enumerate(leaders.leaders, 1))])


def count_things(number: int, noun: str) -> str:
    """`1 step`, `3 steps`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe_step(step: StepInfo) -> str:
    parts = [
        (step.leased, "leased"),
        (step.judged, "being judged"),
        (step.offered, "offered again"),
        (step.dull, "without signal"),
    ]
    rest = "".join(f", {number} {what}" for number, what in parts if number)
    return f"  step {step.step:<7} {step.state}: {step.accepted} of {count_things(step.needed, 'group')} accepted{rest}"


def _describe_leader(rank: int, line: LeaderLine) -> str:
    counts = f"{rank:>4}  {line.tokens:>12}  {line.accepted:>8}  {line.rejected:>8}  {line.earned / MICRO:>14.6f}"
    return f"{counts}  {line.standing.value:<9}  {line.owner}"
