"""What follows when a submission is decided: pay, record, standing, the span; and what a conviction costs.

Invariants:
- all of it is in the decision of the last verdict: nobody sees a verdict without its pay, or pay without its verdict;
- a submission is paid once at most, and never one of an owner that is banned;
- what a conviction takes is burned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.swarm.balances import read_balances
from shoal.swarm.ending import empty_outcome, void_work
from shoal.swarm.event import Kind
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.postings import MINT, TREASURY, Posting, name_account
from shoal.swarm.rules.outcome import agrees
from shoal.swarm.rules.pay import Payment, count_loss, pay_tokens, pay_verdicts, post_loss, post_payments
from shoal.swarm.rules.standing import count_soft, next_standing
from shoal.swarm.rules.width import Width, halve_width, raise_width
from shoal.swarm.state.credit import find_appeal, find_loss, list_bonds
from shoal.swarm.state.leases import LeaseRow, find_lease
from shoal.swarm.state.nodes import OwnerRow, find_ban, find_node, find_owner
from shoal.swarm.state.submissions import SubmissionRow
from shoal.swarm.state.verdicts import VerdictRow
from shoal.swarm.turn import Turn
from shoal.swarm.watching import end_watch

_BLAMED = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the verdicts made of a submission."""

    state: SubmissionState
    because: str
    votes: Sequence[VerdictRow]
    """those that count: one that contradicts what two others saw is paid nothing"""
    round: int = 0
    """of the verdict that decided; 0 if time did"""
    tokens: int = 0
    signals: tuple[int, ...] = ()
    work: Mapping[str, list[list[int]]] = field(default_factory=dict)
    """what an accepted submission is like, see `watching.list_work`"""
    spared: int = 0
    """share, in millionths, with which a second opinion was drawn and not found to be needed; 0 if none was"""


def settle_submission(turn: Turn, submission: SubmissionRow, finding: Finding) -> None:
    """Record the outcome with all its consequences."""
    owner = find_owner(turn.connection, submission.owner)
    assert owner is not None, "a submission has an owner"
    assert owner.standing != Standing.BANNED, "the work of a banned owner is void"
    body, payments = _describe_outcome(turn, submission, owner, finding)
    turn.append(Kind.SUB_OUTCOME, submission.submission, body, post_payments(payments))
    _change_standing(turn, owner, finding.state)
    if finding.state is SubmissionState.ACCEPTED:
        end_watch(turn, submission.owner)
    if finding.state is SubmissionState.HARD:
        convict_owner(turn, submission)


def settle_appeal(turn: Turn, submission: SubmissionRow, finding: Finding) -> SubmissionState:
    """Record what an appeal came to: the rejection stands, or its owner is paid and given back what was taken."""
    reverses = finding.state is SubmissionState.ACCEPTED
    state = finding.state if reverses else SubmissionState(submission.state)
    if reverses:
        _lift_conviction(turn, submission)
    body = empty_outcome(turn, submission, state, finding.because)
    owner = find_owner(turn.connection, submission.owner)
    assert owner is not None, "a submission has an owner"
    body |= {"appeal": 1, "fills": 0, "round": finding.round}
    payments: list[Payment] = []
    if reverses and find_ban(turn.connection, submission.node, submission.owner) is not None:
        body["because"] = f"{finding.because}; its owner is banned for another reason, so only the fee is given back"
    elif reverses:
        payments = _repay_owner(turn, submission, finding.tokens)
        paid, earned = sum(payment.amount for payment in payments), _find_lease(turn, submission).price * finding.tokens
        body |= {"earned": earned, "paid": paid, "purse": "pending", "tokens": finding.tokens}
        body["holds"] = _list_holds(payments, owner)
    postings = _post_appeal(turn, submission, payments) if reverses else []
    turn.append(Kind.SUB_OUTCOME, submission.submission, body, postings)
    return state


def convict_owner(turn: Turn, submission: SubmissionRow) -> None:
    """Two validators found that a submission was faked: burn what its owner holds, and ban it."""
    owner = submission.owner
    burn_credit(turn, submission, owner, ("pending", "stake", "unbond"))
    turn.append(Kind.BAN, owner, {"reason": name_conviction(submission.submission), "target": owner})
    void_work(turn, owner)


def burn_credit(turn: Turn, submission: SubmissionRow, owner: str, purses: Sequence[str]) -> None:
    """Burn what an owner has in some purses, for what it did to a submission; once."""
    accounts = {purse: name_account(purse, owner) for purse in purses}
    balances = read_balances(turn.connection, list(accounts.values()))
    held = {purse: balances[account] for purse, account in accounts.items()}
    loss = count_loss(turn.params, **held)
    if loss.total == 0 or find_loss(turn.connection, submission.submission, owner):
        return
    free_ms = max((bond.free_ms for bond in list_bonds(turn.connection, owner)), default=0)
    body = {"amount": loss.total, "free_ms": free_ms, "owner": owner, "pending": int("pending" in purses)}
    body["rest"] = held["unbond"] - loss.unbond
    turn.append(Kind.SLASH, submission.submission, body, post_loss(owner, loss))


def name_conviction(submission: str) -> str:
    """The reason of a ban by verdict, by which an appeal finds it."""
    return f"hard verdict on {submission}"


def _describe_outcome(
    turn: Turn, submission: SubmissionRow, owner: OwnerRow, finding: Finding
) -> tuple[dict[str, Any], list[Payment]]:
    width = _change_width(turn, submission.node, finding.state)
    body: dict[str, Any] = empty_outcome(turn, submission, finding.state, finding.because)
    body |= {"progress": width.progress, "soft_row": count_soft(owner.soft_row, finding.state), "width": width.width}
    judges = _list_judges(turn, finding)
    payments = pay_verdicts(turn.params, {judge.owner: judge.staked for judge in judges})
    if finding.state is SubmissionState.ACCEPTED:
        lease = _find_lease(turn, submission)
        pay = pay_tokens(turn.params, lease.price, submission.owner, finding.tokens, owner.staked)
        group_ms = (lease.ended_ms - lease.granted_ms) // lease.count
        body |= {"group_ms": group_ms, "signals": list(finding.signals), "tokens": finding.tokens, **finding.work}
        if pay is not None:
            body |= {"earned": pay.amount, "paid": pay.amount, "purse": pay.purse}
            payments.append(pay)
    body |= {"holds": _list_holds(payments, owner), "round": finding.round, "spared": finding.spared}
    body["staked"] = [payment.owner for payment in payments if payment.purse == "stake"]
    return body, payments


def _list_holds(payments: Sequence[Payment], owner: OwnerRow) -> list[dict[str, Any]]:
    """What is pending, each with how many submissions of its owner were accepted, this one included."""
    return [
        {
            "amount": payment.amount,
            "number": owner.accepted + 1 if payment.owner == owner.owner else 0,
            "owner": payment.owner,
        }
        for payment in payments
        if payment.purse == "pending"
    ]


def _list_judges(turn: Turn, finding: Finding) -> list[OwnerRow]:
    """Owners of the validators that said what the outcome says; an owner judges a submission once."""
    said = [vote for vote in finding.votes if agrees(Verdict(vote.verdict), finding.state)]
    nodes = [find_node(turn.connection, vote.validator) for vote in said]
    owners = [find_owner(turn.connection, node.owner) for node in nodes if node is not None]
    return [owner for owner in owners if owner is not None and owner.standing != Standing.BANNED]


def _change_width(turn: Turn, node: str, state: SubmissionState) -> Width:
    row = find_node(turn.connection, node)
    assert row is not None, "a submission has a node"
    if state is SubmissionState.ACCEPTED:
        return raise_width(row.aimd, turn.params.raise_after, turn.params.max_width)
    return halve_width(row.aimd) if state in _BLAMED else row.aimd


def _change_standing(turn: Turn, old: OwnerRow, state: SubmissionState) -> None:
    owner = find_owner(turn.connection, old.owner)
    assert owner is not None, "it was there before"
    standing = next_standing(
        turn.params,
        Standing(owner.standing),
        state,
        accepted=owner.accepted,
        soft_row=owner.soft_row,
        judges=owner.standing == Standing.LIMITED and _is_judge(turn, owner.owner),
    )
    if standing != owner.standing:
        turn.append(Kind.NODE_STANDING, owner.owner, {"reason": state.value, "standing": standing.value})


def _is_judge(turn: Turn, owner: str) -> bool:
    """Whether any node of an owner may judge."""
    nodes = [find_node(turn.connection, key) for key in turn.params.validators]
    return owner in turn.params.validators or any(node is not None and node.owner == owner for node in nodes)


def _find_lease(turn: Turn, submission: SubmissionRow) -> LeaseRow:
    lease = find_lease(turn.connection, submission.lease)
    assert lease is not None, "a submission has a lease"
    return lease


def _lift_conviction(turn: Turn, submission: SubmissionRow) -> None:
    """Undo the ban that this submission caused; one for another reason stays."""
    ban = find_ban(turn.connection, submission.owner, submission.owner)
    if ban is not None and ban.reason == name_conviction(submission.submission):
        turn.append(Kind.UNBAN, submission.owner, {"reason": "its appeal was right", "target": submission.owner})


def _repay_owner(turn: Turn, submission: SubmissionRow, tokens: int) -> list[Payment]:
    """The pay that was due, and what the conviction took."""
    price = _find_lease(turn, submission).price
    amounts = (price * tokens, find_loss(turn.connection, submission.submission, submission.owner))
    return [Payment(submission.owner, "pending", amount) for amount in amounts if amount]


def _post_appeal(turn: Turn, submission: SubmissionRow, payments: Sequence[Payment]) -> list[Posting]:
    """Pay, and the fee back."""
    appeal = find_appeal(turn.connection, submission.submission)
    postings = post_payments(payments)
    if appeal is not None and appeal.fee:
        postings += [Posting(TREASURY, -appeal.fee), Posting(name_account("avail", submission.owner), appeal.fee)]
    assert all(posting.account != MINT or posting.amount < 0 for posting in postings), "credit is minted, not taken"
    return postings
