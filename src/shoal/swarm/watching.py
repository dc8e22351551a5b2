"""Who is watched: an owner whose work is unlike everybody's. Doubt is not guilt: nobody is paid less or banned for it.

What a watch changes: the owner's submissions are checked in full and by two validators, for its next accepted
`watch_submissions`. If nothing is found in them, its evidence begins again at nothing.

Invariant: who is watched follows from the events alone, at the cut of a batch; who is no more, from its last clean
submission.
"""

from shoal.swarm.event import Kind
from shoal.swarm.messages import VerdictStatement
from shoal.swarm.refusal import AuthError
from shoal.swarm.rules.history import Stream, line_evidence
from shoal.swarm.state.history import HistoryRow, find_history, list_odd
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
"""owners that one cut may begin to watch; those with most evidence come first, the others with the next cut"""
_WORDS = {
    Stream.LENGTH: "the lengths of its rollouts are unlike those of others",
    Stream.REWARD: "the rewards of its rollouts are unlike those of others",
    Stream.ENTROPY: "the log-probs of its tokens are unlike those of others",
    Stream.DRIFT: "its stated log-probs are further from replayed ones than honest ones are",
}


def watch_owners(turn: Turn) -> None:
    """Begin to watch those whose evidence has reached the line."""
    rate = turn.params.watch_rate
    if not rate:
        return
    line = line_evidence(rate)
    for row in list_odd(turn.connection, line, MAX_AT_ONCE):
        body = {
            "because": _WORDS[Stream(row.leader)],
            "evidence": row.peak,
            "groups": row.num_groups,
            "line": line,
            "state": "watched",
            "stream": row.leader,
            "submissions": turn.params.watch_submissions,
        }
        turn.append(Kind.NODE_WATCH, row.owner, body)


def end_watch(turn: Turn, owner: str) -> None:
    """Watch an owner no more, if it had as many clean submissions as it takes."""
    row = find_history(turn.connection, owner)
    if row is not None and row.watch_seq and not row.remaining:
        because = "as many of its submissions as it takes were checked in full and accepted"
        turn.append(Kind.NODE_WATCH, owner, {"because": because, "state": "over"})


def describe_watch(row: HistoryRow) -> str:
    """Why and for how long an owner is watched, in words."""
    more = "1 more submission is" if row.remaining == 1 else f"{row.remaining} more submissions are"
    return f"{row.because}; no blame, but its work is checked in full until {more} accepted"


def check_numbers(said: VerdictStatement) -> None:
    """Refuse numbers of groups that do not belong together."""
    told = [group.numbers for group in said.groups if group.numbers is not None]
    if not told:
        return
    if len(told) != len(said.groups) or sum(numbers.tokens for numbers in told) != said.tokens:
        raise AuthError(400, "numbers", "numbers are those of all groups, and their tokens are the validated ones")


def list_work(said: VerdictStatement) -> dict[str, list[list[int]]]:
    """What an accepting verdict says of the work, as it stands in an outcome."""
    told = [group.numbers for group in said.groups if group.numbers is not None]
    return {
        "drift": [[count.level, count.chance, count.chunks, count.above] for count in said.drift],
        "numbers": [[numbers.tokens, numbers.reward, numbers.entropy] for numbers in told],
    }
