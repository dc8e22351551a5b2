"""The watch list: owners whose work differs from everyone else's. Being watched is no penalty: pay and standing stay.

While an owner is watched, its submissions are checked in full and by two validators, for its next accepted
`watch_submissions`. If nothing is found, its evidence restarts at zero.

Invariant: the start of a watch follows from the events alone, at the cut of a batch; its end, from the last clean
submission.
"""

from shoal.coordinator.decide.context import Decision
from shoal.coordinator.rules.drift import DriftStream, line_evidence
from shoal.coordinator.state.drift import HistoryRow, find_history, list_odd
from shoal.net.api_error import ApiError
from shoal.protocol.events import WatchEnd, WatchStart
from shoal.protocol.messages import VerdictStatement

MAX_AT_ONCE = 64
"""owners that one cut may add; those with most evidence come first, the others with the next cut"""
_WORDS = {
    DriftStream.LENGTH: "the lengths of its rollouts are unlike those of others",
    DriftStream.REWARD: "the rewards of its rollouts are unlike those of others",
    DriftStream.ENTROPY: "the log-probs of its tokens are unlike those of others",
    DriftStream.DRIFT: "its stated log-probs are further from replayed ones than honest ones are",
}


def watch_owners(decision: Decision) -> None:
    """Start watching owners whose evidence has reached the threshold."""
    rate = decision.params.watch_rate
    if not rate:
        return
    line = line_evidence(rate)
    for row in list_odd(decision.connection, line, MAX_AT_ONCE):
        body = WatchStart(
            because=_WORDS[DriftStream(row.leader)],
            evidence=row.peak,
            groups=row.num_groups,
            line=line,
            stream=row.leader,
            submissions=decision.params.watch_submissions,
        )
        decision.append(row.owner, body)


def end_watch(decision: Decision, owner: str) -> None:
    """End the watch of an owner that has enough clean submissions."""
    row = find_history(decision.connection, owner)
    if row is not None and row.watch_seq and not row.remaining:
        because = "as many of its submissions as it takes were checked in full and accepted"
        decision.append(owner, WatchEnd(because=because))


def describe_watch(row: HistoryRow) -> str:
    """Why and for how long an owner is watched, as a sentence."""
    more = "1 more submission is" if row.remaining == 1 else f"{row.remaining} more submissions are"
    return f"{row.because}; no blame, but its work is checked in full until {more} accepted"


def check_numbers(said: VerdictStatement) -> None:
    """Reject group numbers that do not match the verdict."""
    stated = [group.numbers for group in said.groups if group.numbers is not None]
    if not stated:
        return
    if len(stated) != len(said.groups) or sum(numbers.tokens for numbers in stated) != said.tokens:
        raise ApiError(400, "numbers", "numbers must cover all groups, and their tokens must sum to `tokens`")


def list_work(said: VerdictStatement) -> dict[str, tuple[tuple[int, ...], ...]]:
    """What an accepting verdict reports about the work, in the form stored in an outcome."""
    stated = [group.numbers for group in said.groups if group.numbers is not None]
    return {
        "drift": tuple((count.level, count.chance, count.chunks, count.above) for count in said.drift),
        "numbers": tuple((numbers.tokens, numbers.reward, numbers.entropy) for numbers in stated),
    }
