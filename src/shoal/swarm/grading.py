"""What becomes of validators: their verdicts are held against what the work turned out to be.

    graded by verdicts   two owners say the same, and their numbers leave no doubt
    graded by an appeal  more than half of all that judged it, then and now, say what it came to, without doubt
    graded by a canary   the operator knew what the work was
    Each grades anew what was graded otherwise before.

    wrong once: unpaid    again: limited, it may not judge for a while    a third time: its bond is burned, it is banned
    silent too often where others could judge: limited

Invariants:
- honest doubt is never graded: neither an inconclusive verdict nor one on work of which others could not be sure. Who
  says nothing else is limited, see rules/trust.py;
- a verdict counts once, whatever shows that it was wrong;
- a lone liar harms nobody but itself: it is one against two, and has no part in what it contradicts.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shoal.swarm.ending import void_work
from shoal.swarm.event import Kind
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.rules.outcome import REJECTIONS, Vote, agrees, list_majority
from shoal.swarm.rules.trust import BANNED_AT, LIMITED_AT, SILENT_AT, Side, next_score, undo_score
from shoal.swarm.settling import burn_credit
from shoal.swarm.state.judges import find_grade, find_judge
from shoal.swarm.state.nodes import find_node, find_owner
from shoal.swarm.state.submissions import SubmissionRow
from shoal.swarm.state.verdicts import VerdictRow
from shoal.swarm.turn import Turn

BOND = ("stake", "unbond")


def read_votes(rows: Sequence[VerdictRow]) -> list[Vote]:
    """Verdicts as the rules see them."""
    return [Vote(Verdict(row.verdict), bool(row.crashed), (row.tokens, row.signals)) for row in rows]


def grade_verdicts(turn: Turn, submission: SubmissionRow, rows: Sequence[VerdictRow]) -> None:
    """Grade the verdicts on a submission by their majority, if there is one that is sure."""
    votes = read_votes(rows)
    agreed = list_majority(votes)
    majority = [row for row, is_one in zip(rows, agreed, strict=True) if is_one]
    if not majority or not all(row.sure for row in majority):
        return
    side = Side.GOOD if majority[0].verdict == Verdict.ACCEPTED else Side.BAD
    clear = [(row, is_one) for row, is_one in zip(rows, agreed, strict=True) if is_clear(row)]
    _record_grades(turn, submission, side, {row.validator: right for row, right in clear}, by="verdicts")


def grade_appeal(turn: Turn, submission: SubmissionRow, rows: Sequence[VerdictRow], state: SubmissionState) -> None:
    """Grade all verdicts on a submission by what its appeal came to, if more than half of them say that for sure.

    Two against two is no majority: somebody lied, and nobody can say who.
    """
    clear = [row for row in rows if is_clear(row)]
    prevailing = [row for row in clear if agrees(Verdict(row.verdict), state)]
    if 2 * len(prevailing) <= len(clear) or not all(row.sure for row in prevailing):
        return
    side = Side.GOOD if state is SubmissionState.ACCEPTED else Side.BAD
    _record_grades(turn, submission, side, {row.validator: is_right(row, side) for row in clear}, by="appeal")


def limit_silent(turn: Turn, submission: SubmissionRow, rows: Sequence[VerdictRow]) -> None:
    """Who said nothing of this, and of too much before that others could judge, may not judge for a while."""
    for row in rows:
        node = find_node(turn.connection, row.validator)
        assert node is not None, "a verdict has a validator"
        owner = find_owner(turn.connection, node.owner)
        assert owner is not None, "a node has an owner"
        if is_clear(row) or owner.standing in (Standing.LIMITED, Standing.BANNED):
            continue
        if find_judge(turn.connection, owner.owner).silence >= SILENT_AT:
            reason = f"says nothing of too much that others could judge, the last one {submission.submission}"
            turn.append(Kind.NODE_STANDING, owner.owner, {"reason": reason, "standing": Standing.LIMITED.value})


def grade_by_canary(turn: Turn, submission: SubmissionRow, rows: Sequence[VerdictRow], side: Side) -> None:
    """Grade the verdicts on work of a canary, which was good or bad for certain."""
    right = {row.validator: is_right(row, side) for row in rows if is_clear(row)}
    _record_grades(turn, submission, side, right, by="canary")


def is_clear(row: VerdictRow) -> bool:
    """Whether a verdict says something."""
    return row.verdict == Verdict.ACCEPTED or row.verdict in REJECTIONS


def is_right(row: VerdictRow, side: Side) -> bool:
    """Whether a clear verdict says what the work was."""
    return (row.verdict == Verdict.ACCEPTED) is (side is Side.GOOD)


def _record_grades(turn: Turn, submission: SubmissionRow, side: Side, right: Mapping[str, bool], *, by: str) -> None:
    grades = [grade for validator, is_right in right.items() for grade in _grade(turn, submission, validator, is_right)]
    if not grades:
        return
    scored = [{**grade, **_count_scores(turn, submission, side, grade)} for grade in grades]
    turn.append(Kind.VAL_GRADE, submission.submission, {"by": by, "grades": scored, "side": side.value})
    for grade in scored:
        if not grade["right"]:
            _punish_owner(turn, submission, grade["owner"], grade[side.value])


def _grade(turn: Turn, submission: SubmissionRow, validator: str, right: bool) -> Iterable[dict[str, Any]]:
    """The grade of a verdict, unless it has that one already."""
    node = find_node(turn.connection, validator)
    assert node is not None, "a verdict has a validator"
    before = find_grade(turn.connection, submission.submission, node.owner)
    if before is None or bool(before.correct) is not right:
        yield {"owner": node.owner, "right": int(right), "validator": validator}


def _count_scores(turn: Turn, submission: SubmissionRow, side: Side, grade: Mapping[str, Any]) -> dict[str, int]:
    """The owner's scores after a grade; one that turned out to be mistaken is taken back."""
    judge = find_judge(turn.connection, grade["owner"])
    scores = {Side.GOOD.value: judge.good, Side.BAD.value: judge.bad}
    before = find_grade(turn.connection, submission.submission, grade["owner"])
    if before is not None:
        scores[before.side] = undo_score(scores[before.side], right=bool(before.correct))
    scores[side.value] = next_score(scores[side.value], right=bool(grade["right"]))
    return scores


def _punish_owner(turn: Turn, submission: SubmissionRow, name: str, score: int) -> None:
    owner = find_owner(turn.connection, name)
    assert owner is not None, "a validator has an owner"
    if owner.standing == Standing.BANNED:
        return
    reason = f"its verdicts are wrong too often, the last one on {submission.submission}"
    if score >= BANNED_AT:
        burn_credit(turn, submission, name, BOND)
        turn.append(Kind.BAN, name, {"reason": reason, "target": name})
        void_work(turn, name)
    elif score >= LIMITED_AT and owner.standing != Standing.LIMITED:
        turn.append(Kind.NODE_STANDING, name, {"reason": reason, "standing": Standing.LIMITED.value})
