"""What follows when the operator reveals a canary: who was wrong about its work, and the end of the canary.

Who accepted what had to be rejected did not look, or lies; who rejected what no check finds fault with lies too. What
is neither bad nor good beyond doubt is not named, and nobody is graded by it.

Invariants:
- the canary's seal was in the ledger before its first node joined, and its owner's key opens it;
- all of it is one decision: nobody sees a canary named whose validators are not graded;
- work that was known to be bad and accepted all the same is taken back and offered again, unless its batch was cut
  before. Then the grade says which step has it;
- a canary keeps nothing: what it holds is burned, what it has begun is void, and it is banned.
"""

from collections.abc import Sequence

from shoal.swarm.balances import read_balances
from shoal.swarm.ending import empty_outcome, void_work
from shoal.swarm.event import Kind
from shoal.swarm.grading import BOND, grade_by_canary, is_clear, is_right
from shoal.swarm.messages import Command, Standing, SubmissionState
from shoal.swarm.postings import Posting, name_account
from shoal.swarm.refusal import AuthError
from shoal.swarm.rules.pay import burn_purses
from shoal.swarm.rules.trust import Side
from shoal.swarm.seals import find_seal
from shoal.swarm.settling import burn_credit
from shoal.swarm.state.canaries import find_sealed
from shoal.swarm.state.credit import has_appeal
from shoal.swarm.state.nodes import find_ban, find_node, find_owner, first_join
from shoal.swarm.state.spans import count_batched, count_signals
from shoal.swarm.state.steps import find_step
from shoal.swarm.state.submissions import SubmissionRow, find_submission
from shoal.swarm.state.verdicts import list_verdicts
from shoal.swarm.turn import Turn

_PURSES = ("pending", "stake", "unbond", "avail")
_REJECTIONS = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)


def check_seals(turn: Turn, command: Command) -> None:
    """Refuse seals that are none, or were noted before."""
    if not command.seals or len(set(command.seals)) != len(command.seals):
        raise AuthError(400, "seals", "a command to seal names one seal or more, each once")
    if any(find_sealed(turn.connection, seal) is not None for seal in command.seals):
        raise AuthError(409, "sealed", "one of these seals was noted before; seal owners that are new")


def check_reveal(turn: Turn, command: Command) -> None:
    """Refuse to reveal what was not sealed in time, and work of others."""
    owner, canary = command.target, command.canary
    if not owner or canary is None:
        raise AuthError(400, "canary", "who reveals a canary names its owner, and what opens its seal")
    seal = find_seal(turn.run, owner, canary.signature)
    row = None if seal is None else find_sealed(turn.connection, seal)
    if row is None:
        raise AuthError(409, "not_sealed", "this owner was not sealed for this run")
    if row.owner:
        raise AuthError(409, "revealed", "this canary was revealed before")
    if not row.seq < first_join(turn.connection, owner):
        raise AuthError(409, "not_sealed", "this owner did not join, or joined before it was sealed")
    if has_appeal(turn.connection, owner):
        raise AuthError(409, "appealed", "an appeal of this owner is open; reveal it when that is decided")
    names = (*canary.submissions, *canary.good)
    rows = [find_submission(turn.connection, name) for name in names]
    if any(row is None or row.owner != owner for row in rows) or len(set(names)) != len(rows):
        raise AuthError(400, "canary", "the submissions of a canary are those of its owner, each named once")


def post_reveal(turn: Turn, command: Command) -> tuple[Posting, ...]:
    """The postings that burn all that a canary holds."""
    accounts = {purse: name_account(purse, command.target) for purse in _PURSES}
    balances = read_balances(turn.connection, list(accounts.values()))
    return tuple(burn_purses(command.target, {purse: balances[account] for purse, account in accounts.items()}))


def end_canary(turn: Turn, command: Command) -> None:
    """End a canary that was revealed, and grade those who judged its work."""
    owner = command.target
    if find_ban(turn.connection, owner, owner) is None:
        turn.append(Kind.BAN, owner, {"reason": "a canary, revealed", "target": owner})
        void_work(turn, owner)
    assert command.canary is not None, "it was checked"
    for name in command.canary.submissions:
        submission = _grade_submission(turn, name, Side.BAD)
        if submission.state == SubmissionState.ACCEPTED:
            _withdraw_work(turn, submission)
    for name in command.canary.good:
        _grade_submission(turn, name, Side.GOOD)


def _grade_submission(turn: Turn, name: str, side: Side) -> SubmissionRow:
    """Grade who judged a piece of a canary's work; returns it as it was."""
    submission = find_submission(turn.connection, name)
    assert submission is not None, "it was checked"
    votes = list_verdicts(turn.connection, name)
    wrong = [vote.validator for vote in votes if is_clear(vote) and not is_right(vote, side)]
    body = {
        "good": int(side is Side.GOOD),
        "missed_by": wrong,
        "owner": submission.owner,
        "state": _name_grade(submission, side, wrong),
        "trained": _find_trained(turn, submission),
    }
    turn.append(Kind.CANARY_GRADE, name, body)
    for validator in wrong:
        _punish_validator(turn, submission, validator)
    grade_by_canary(turn, submission, votes, side)
    return submission


def _name_grade(submission: SubmissionRow, side: Side, wrong: Sequence[str]) -> str:
    if side is Side.BAD:
        caught = "caught" if submission.state in _REJECTIONS else "unseen"
        return "missed" if wrong else caught
    passed = "passed" if submission.state == SubmissionState.ACCEPTED else "unseen"
    return "wronged" if wrong else passed


def _find_trained(turn: Turn, submission: SubmissionRow) -> int:
    """The step that has groups of a submission in its batch; 0 for none."""
    return submission.step if count_batched(turn.connection, submission.step, submission.submission) else 0


def _withdraw_work(turn: Turn, submission: SubmissionRow) -> None:
    """Take accepted groups back while their batch is not cut; those without a signal are trained on by nobody."""
    step = find_step(turn.connection, submission.step)
    if step is None or step.state != "open":
        return
    body = empty_outcome(turn, submission, SubmissionState.VOID, "a canary, revealed")
    body["fills"] = int(count_signals(turn.connection, submission.step, submission.submission) > 0)
    turn.append(Kind.SUB_OUTCOME, submission.submission, body)


def _punish_validator(turn: Turn, submission: SubmissionRow, validator: str) -> None:
    """Who was wrong about a canary loses its bond, and may not judge for a while."""
    node = find_node(turn.connection, validator)
    assert node is not None, "a verdict has a validator"
    burn_credit(turn, submission, node.owner, BOND)
    owner = find_owner(turn.connection, node.owner)
    assert owner is not None, "a node has an owner"
    if owner.standing != Standing.BANNED:
        reason = f"was wrong about {submission.submission} of a canary"
        turn.append(Kind.NODE_STANDING, owner.owner, {"reason": reason, "standing": Standing.LIMITED.value})
