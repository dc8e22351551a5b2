"""The operator's commands, each signed, recorded and executed once; and what follows when a canary is revealed.

A revealed canary shows which validators were wrong about its work. One that accepted bad work did not check it, or
lies; one that rejected work in which no check finds a fault lies too. Work that is not certainly bad or good is not
named, and nobody is graded on it.

Invariants:
- the canary's seal was in the ledger before its first node joined, and its owner's key opens it;
- all of this is one decision: nobody sees a revealed canary whose validators are not graded;
- work that was known to be bad but was accepted is withdrawn and offered again, unless its batch is already cut. Then
  the grade names the step that trained on it;
- a canary keeps nothing: its credit is burned, its open work is void, and it is banned.
"""

from collections.abc import Sequence

from shoal.coordinator.decide.context import Decision, require_row
from shoal.coordinator.decide.credit import post_redeem
from shoal.coordinator.decide.settlement import burn_credit, empty_outcome, void_work
from shoal.coordinator.decide.validators import BOND, grade_by_canary, is_clear, is_right
from shoal.coordinator.rules.pay import burn_accounts
from shoal.coordinator.rules.validator_trust import ActualOutcome
from shoal.coordinator.state.canaries import find_sealed, list_grades
from shoal.coordinator.state.credit import has_appeal
from shoal.coordinator.state.leases import count_batched, count_signals
from shoal.coordinator.state.members import find_ban, find_node, find_owner, first_join, list_named
from shoal.coordinator.state.run import find_command, find_step
from shoal.coordinator.state.submissions import SubmissionRow, find_submission
from shoal.coordinator.state.validators import list_verdicts
from shoal.errors import ConfigError
from shoal.ledger.db import read_accounts
from shoal.ledger.event import Posting
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import find_seal
from shoal.protocol.events import Ban, CanaryGraded, NodeStanding
from shoal.protocol.messages import REJECTED, Action, Command, CommandAnswer, SignedCommand, Standing, SubmissionState
from shoal.protocol.params import check_change, parse_params

_ACCOUNTS = ("pending", "stake", "unbond", "avail")


def check_seals(decision: Decision, command: Command) -> None:
    """Reject invalid seals, and seals that were recorded before."""
    if not command.seals or len(set(command.seals)) != len(command.seals):
        raise ApiError(400, "seals", "a seal command needs at least one seal, without duplicates")
    if any(find_sealed(decision.connection, seal) is not None for seal in command.seals):
        raise ApiError(409, "sealed", "one of these seals is already recorded; seal new owners")


def check_reveal(decision: Decision, command: Command) -> None:
    """Reject a reveal that was not sealed in time, or that names other owners' work."""
    owner, canary = command.target, command.canary
    if not owner or canary is None:
        raise ApiError(400, "canary", "a reveal command needs the canary's owner, and what opens its seal")
    seal = find_seal(decision.run, owner, canary.signature)
    row = None if seal is None else find_sealed(decision.connection, seal)
    if row is None:
        raise ApiError(409, "not_sealed", "this owner was not sealed for this run")
    if row.owner:
        raise ApiError(409, "revealed", "this canary is already revealed")
    if not row.seq < first_join(decision.connection, owner):
        raise ApiError(409, "not_sealed", "this owner did not join, or joined before it was sealed")
    if has_appeal(decision.connection, owner):
        raise ApiError(409, "appealed", "an appeal of this owner is open; reveal the canary after it is decided")
    names = (*canary.submissions, *canary.good)
    rows = [find_submission(decision.connection, name) for name in names]
    if any(row is None or row.owner != owner for row in rows) or len(set(names)) != len(rows):
        raise ApiError(400, "canary", "the submissions of a canary must belong to its owner, without duplicates")


def post_reveal(decision: Decision, command: Command) -> tuple[Posting, ...]:
    """The postings that burn all credit of a canary."""
    return tuple(burn_accounts(command.target, read_accounts(decision.connection, command.target, *_ACCOUNTS)))


def end_canary(decision: Decision, command: Command) -> None:
    """End a revealed canary, and grade the validators of its work."""
    owner = command.target
    if find_ban(decision.connection, owner, owner) is None:
        decision.append(owner, Ban(reason="a canary, revealed", target=owner))
        void_work(decision, owner)
    assert command.canary is not None, "check_reveal requires it"
    for name in command.canary.submissions:
        submission = _grade_submission(decision, name, ActualOutcome.BAD)
        if submission.state == SubmissionState.ACCEPTED:
            _withdraw_work(decision, submission)
    for name in command.canary.good:
        _grade_submission(decision, name, ActualOutcome.GOOD)


def _grade_submission(decision: Decision, name: str, side: ActualOutcome) -> SubmissionRow:
    """Grade the validators of one canary submission; return its row as it was before."""
    submission = require_row(find_submission(decision.connection, name), "check_reveal requires it")
    votes = list_verdicts(decision.connection, name)
    wrong = [vote.validator for vote in votes if is_clear(vote) and not is_right(vote, side)]
    body = CanaryGraded(
        good=1 if side is ActualOutcome.GOOD else 0,
        missed_by=tuple(wrong),
        owner=submission.owner,
        state=_name_grade(submission, side, wrong),
        trained=submission.step if count_batched(decision.connection, submission.step, name) else 0,
    )
    decision.append(name, body)
    for validator in wrong:
        _punish_validator(decision, submission, validator)
    grade_by_canary(decision, submission, votes, side)
    return submission


def _name_grade(submission: SubmissionRow, side: ActualOutcome, wrong: Sequence[str]) -> str:
    if side is ActualOutcome.BAD:
        caught = "caught" if submission.state in REJECTED else "unseen"
        return "missed" if wrong else caught
    passed = "passed" if submission.state == SubmissionState.ACCEPTED else "unseen"
    return "wronged" if wrong else passed


def _withdraw_work(decision: Decision, submission: SubmissionRow) -> None:
    """Withdraw accepted groups while their batch is not cut; groups without a signal are never trained on."""
    step = find_step(decision.connection, submission.step)
    if step is None or step.state != "open":
        return
    body = empty_outcome(decision, submission, SubmissionState.VOID, "a canary, revealed")
    has_signal = count_signals(decision.connection, submission.step, submission.submission) > 0
    decision.append(submission.submission, body.replace(fills=int(has_signal)))


def _punish_validator(decision: Decision, submission: SubmissionRow, validator: str) -> None:
    """A validator that was wrong about a canary loses its bond, and may not judge for a while."""
    node = require_row(find_node(decision.connection, validator), "every verdict has a validator")
    burn_credit(decision, submission, node.owner, BOND)
    owner = require_row(find_owner(decision.connection, node.owner), "every node has an owner")
    if owner.standing != Standing.BANNED:
        reason = f"was wrong about {submission.submission} of a canary"
        decision.append(owner.owner, NodeStanding(reason=reason, standing=Standing.LIMITED))


def run_command(decision: Decision, signed: SignedCommand) -> CommandAnswer:
    """Execute an operator's command; repeating it returns the answer without executing it again."""
    command = signed.command
    statement = decision.open_message(decision.state.operator, command, signed.signature)
    earlier = find_command(decision.connection, command.nonce)
    if earlier is not None:
        if not decision.is_recorded(earlier, command):
            raise ApiError(409, "nonce_known", "this nonce was used for a different command; sign with a new one")
        return _answer_command(decision, command, earlier)
    _check_command(decision, command)
    event = decision.record(statement, _post_command(decision, command))
    if command.action is Action.BAN:
        _end_work(decision, command.target)
    if command.action is Action.CANARY_REVEAL:
        end_canary(decision, command)
    return _answer_command(decision, command, event.seq)


def _check_command(decision: Decision, command: Command) -> None:
    match command.action:
        case Action.BAN:
            if not list_named(decision.connection, command.target):
                raise ApiError(404, "target", "no node or owner of this run has this key, so there is nobody to ban")
        case Action.UNBAN:
            if find_ban(decision.connection, command.target, command.target) is None:
                raise ApiError(409, "not_banned", "this key is not banned; the ban of an owner names the owner's key")
        case Action.PARAMS:
            try:
                check_change(decision.params, parse_params(command.params))
            except ConfigError as error:
                raise ApiError(400, "params", str(error)[:300]) from None
        case Action.CANARY_SEAL:
            check_seals(decision, command)
        case Action.CANARY_REVEAL:
            check_reveal(decision, command)


def _post_command(decision: Decision, command: Command) -> tuple[Posting, ...]:
    """The credit that a command moves."""
    match command.action:
        case Action.REDEEM_DONE | Action.REDEEM_FAILED:
            return post_redeem(decision, command)
        case Action.CANARY_REVEAL:
            return post_reveal(decision, command)
    return ()


def _answer_command(decision: Decision, command: Command, seq: int) -> CommandAnswer:
    reveals = command.action is Action.CANARY_REVEAL
    rows = list_grades(decision.connection, command.target) if reveals else []
    return CommandAnswer(nonce=command.nonce, seq=seq, grades=tuple(row.grade for row in rows))


def _end_work(decision: Decision, target: str) -> None:
    """End all work of a banned owner or node."""
    node = find_node(decision.connection, target)
    if node is not None:
        void_work(decision, node.owner, target)
    void_work(decision, target)
