"""The consequences of an outcome: pay, record, standing, the groups; and the penalty of a conviction.

Invariants:
- all of this is in the decision of the last verdict: nobody sees a verdict without its pay, or pay without its verdict;
- a submission is paid at most once, and never if its owner is banned;
- what a conviction takes is burned.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.coordinator.decide.context import Decision, build_from, require_row
from shoal.coordinator.decide.drift_watch import end_watch
from shoal.coordinator.decide.leases import drop_upload, end_lease, next_spacing
from shoal.coordinator.rules.leases import LeaseLimit, charge_time, halve_limit, raise_limit
from shoal.coordinator.rules.pay import Payment, burn_accounts, count_loss, pay_tokens, pay_verdicts, post_payments
from shoal.coordinator.rules.standing import STRIKE, count_strikes, is_shut_out, next_standing
from shoal.coordinator.rules.suspicion import CONVICTIONS
from shoal.coordinator.state.credit import find_appeal, find_loss, list_bonds
from shoal.coordinator.state.leases import LeaseRow, find_lease, list_of_owner, read_trials
from shoal.coordinator.state.members import OwnerRow, find_ban, find_node, find_owner
from shoal.coordinator.state.submissions import SubmissionRow, list_open
from shoal.coordinator.state.suspicion import list_proven
from shoal.coordinator.state.validators import VerdictRow
from shoal.ledger.db import read_accounts
from shoal.ledger.event import MINT, TREASURY, Posting, name_account
from shoal.protocol.events import Ban, NodeStanding, PayHold, Slash, SubmissionOutcome, Unban
from shoal.protocol.messages import REJECTED, Standing, SubmissionState, Verdict
from shoal.protocol.outcome import agrees


@dataclass(frozen=True, slots=True)
class Settlement:
    """The outcome that the verdicts give a submission."""

    state: SubmissionState
    because: str
    votes: Sequence[VerdictRow]
    """the verdicts that count: one that contradicts what two others saw is not paid"""
    round: int = 0
    """round of the verdict that decided; 0 if a deadline did"""
    tokens: int = 0
    signals: tuple[int, ...] = ()
    work: Mapping[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """statistics of an accepted submission, see `drift_watch.list_work`"""
    by_odds: bool = False
    """whether the odds of several submissions convict, and not the verdicts on this one"""
    spared: int = 0
    """probability, in millionths, of a second opinion that was drawn as not needed; 0 if nothing was drawn"""


def settle_submission(decision: Decision, submission: SubmissionRow, finding: Settlement) -> None:
    """Record the outcome with all its consequences."""
    owner = require_row(find_owner(decision.connection, submission.owner), "every submission has an owner")
    assert owner.standing != Standing.BANNED, "the work of a banned owner is void"
    body, payments = _describe_outcome(decision, submission, owner, finding)
    decision.append(submission.submission, body, post_payments(payments))
    if is_shut_out(decision.params, finding.state, body.strikes):
        decision.append(owner.owner, Ban(reason=name_shut_out(submission.submission), target=owner.owner))
        void_work(decision, owner.owner)
        return
    _change_standing(decision, owner, finding.state)
    if finding.state is SubmissionState.ACCEPTED:
        end_watch(decision, submission.owner)
    if finding.state is SubmissionState.HARD:
        reason = name_conviction(submission.submission)
        convict_owner(decision, submission, f"{reason}: {finding.because}" if finding.by_odds else reason)


def settle_appeal(decision: Decision, submission: SubmissionRow, finding: Settlement) -> SubmissionState:
    """Record the result of an appeal: the rejection stands, or its owner is paid and gets back what was taken."""
    reverses = finding.state is SubmissionState.ACCEPTED
    state = finding.state if reverses else SubmissionState(submission.state)
    ban = find_ban(decision.connection, submission.owner, submission.owner)
    if reverses and ban is not None and is_cause(submission.submission, ban.reason):
        # A ban for another reason stays.
        decision.append(submission.owner, Unban(reason="its appeal was right", target=submission.owner))
    body = empty_outcome(decision, submission, state, finding.because)
    owner = require_row(find_owner(decision.connection, submission.owner), "every submission has an owner")
    body = body.replace(appeal=1, fills=0, round=finding.round)
    if not reverses:
        body = body.replace(charge_ms=_add_charge(owner, finding))
    payments: list[Payment] = []
    if reverses and find_ban(decision.connection, submission.node, submission.owner) is not None:
        because = f"{finding.because}; its owner is banned for another reason, so only the fee is given back"
        body = body.replace(because=because)
    elif reverses:
        due = _find_lease(decision, submission).price * finding.tokens
        lost = find_loss(decision.connection, submission.submission, submission.owner)
        payments = [Payment(submission.owner, "pending", amount) for amount in (due, lost) if amount]
        body = body.replace(
            earned=due,
            holds=_list_holds(payments, owner),
            paid=sum(payment.amount for payment in payments),
            purse="pending",
            strikes=max(0, owner.strikes - STRIKE),
            tokens=finding.tokens,
        )
    postings = _post_appeal(decision, submission, payments) if reverses else []
    decision.append(submission.submission, body, postings)
    return state


def convict_owner(decision: Decision, submission: SubmissionRow, because: str) -> None:
    """Two validators found a submission faked: burn its owner's credit, and ban the owner."""
    owner = submission.owner
    burn_credit(decision, submission, owner, ("pending", "stake", "unbond"))
    decision.append(owner, Ban(reason=because, target=owner))
    void_work(decision, owner)


def describe_odds(decision: Decision, owner: str) -> str:
    """What the odds of an owner's submissions prove, if they prove it to two owners of validators; else empty."""
    proven = list_proven(decision.connection, owner)
    if len(proven) < CONVICTIONS:
        return ""
    number, rival = sum(row.submissions for row in proven), proven[0].leader
    return f"{number} submissions up to this one are closer to {rival} weights than to the stated ones"


def burn_credit(decision: Decision, submission: SubmissionRow, owner: str, accounts: Sequence[str]) -> None:
    """Burn an owner's credit in some accounts because of a submission; once."""
    held = read_accounts(decision.connection, owner, *accounts)
    loss = count_loss(decision.params, held)
    if not any(loss.values()) or find_loss(decision.connection, submission.submission, owner):
        return
    free_ms = max((bond.free_ms for bond in list_bonds(decision.connection, owner)), default=0)
    body = Slash(
        amount=sum(loss.values()),
        free_ms=free_ms,
        owner=owner,
        pending=1 if "pending" in accounts else 0,
        rest=held["unbond"] - loss["unbond"],
    )
    decision.append(submission.submission, body, burn_accounts(owner, loss))


def name_conviction(submission: str) -> str:
    """The reason of a ban by verdict, or how it begins; an appeal uses it to find the ban."""
    return f"hard verdict on {submission}"


def is_cause(submission: str, reason: str) -> bool:
    """Whether a ban with this reason follows from a submission."""
    conviction = name_conviction(submission)
    return reason in (conviction, name_shut_out(submission)) or reason.startswith(f"{conviction}: ")


def name_shut_out(submission: str) -> str:
    """The reason of a ban for rejected work that accepted work does not outweigh."""
    return f"too much rejected work, the last of it {submission}"


def _describe_outcome(
    decision: Decision, submission: SubmissionRow, owner: OwnerRow, finding: Settlement
) -> tuple[SubmissionOutcome, list[Payment]]:
    width = _change_lease_limit(decision, submission.node, finding.state)
    body: dict[str, Any] = dict(empty_outcome(decision, submission, finding.state, finding.because))
    body |= {"progress": width.progress, "width": width.width, **_count_record(decision, submission, owner, finding)}
    judges = _list_validator_owners(decision, finding)
    payments = pay_verdicts(decision.params, {judge.owner: judge.staked for judge in judges})
    if finding.state is SubmissionState.ACCEPTED:
        lease = _find_lease(decision, submission)
        pay = pay_tokens(decision.params, lease.price, submission.owner, finding.tokens, owner.staked)
        # Of groups that its owner did not know before, and of owners whose durations are worth something.
        is_measured = lease.fence == 1 and not lease.trial
        group_ms = (lease.ended_ms - lease.granted_ms) // lease.count
        body |= {
            "group_ms": max(1, group_ms) if is_measured else 0,
            "signals": finding.signals,
            "tokens": finding.tokens,
            **finding.work,
        }
        if pay is not None:
            body |= {"earned": pay.amount, "paid": pay.amount, "purse": pay.account}
            payments.append(pay)
    body |= {"holds": _list_holds(payments, owner), "round": finding.round, "spared": finding.spared}
    body["staked"] = tuple(payment.owner for payment in payments if payment.account == "stake")
    return SubmissionOutcome(**body), payments


def _count_record(
    decision: Decision, submission: SubmissionRow, owner: OwnerRow, finding: Settlement
) -> dict[str, int]:
    """The owner's strikes, failures and rest after an outcome, and the time between trials.

    Work that could not be judged is no fault. But it cost as much: of an owner without a record the CPU time is charged
    too, and a trial that led to nothing has failed.
    """
    lease, state = _find_lease(decision, submission), finding.state
    strikes = count_strikes(owner.strikes, state)
    if state is SubmissionState.ACCEPTED:
        spacing_ms = next_spacing(decision, lease, failed=False)
        return {"charge_ms": 0, "failures": 0, "spacing_ms": spacing_ms, "strikes": strikes}
    is_charged = state in REJECTED or not owner.has_record
    charge_ms = _add_charge(owner, finding) if is_charged else owner.charge_ms
    # Work of leases that were held concurrently and failed together counts as one failure.
    failures = owner.failures + int(state in REJECTED and lease.granted_ms > owner.failed_ms)
    spacing_ms = next_spacing(decision, lease, failed=True)
    return {"charge_ms": charge_ms, "failures": failures, "spacing_ms": spacing_ms, "strikes": strikes}


def _add_charge(owner: OwnerRow, finding: Settlement) -> int:
    """What an owner is charged in all since its work was last accepted, with what this outcome cost validators."""
    return charge_time(sum(vote.cpu_ms for vote in finding.votes), owner.charge_ms)


def _list_holds(payments: Sequence[Payment], owner: OwnerRow) -> tuple[PayHold, ...]:
    """The pending pay, each with the number of its owner's accepted submissions, including this one."""
    return tuple(
        PayHold(
            amount=payment.amount, number=owner.accepted + 1 if payment.owner == owner.owner else 0, owner=payment.owner
        )
        for payment in payments
        if payment.account == "pending"
    )


def _list_validator_owners(decision: Decision, finding: Settlement) -> list[OwnerRow]:
    """Owners of the validators that agree with the outcome; an owner judges a submission once."""
    said = [vote for vote in finding.votes if agrees(Verdict(vote.verdict), finding.state)]
    nodes = [find_node(decision.connection, vote.validator) for vote in said]
    owners = [find_owner(decision.connection, node.owner) for node in nodes if node is not None]
    return [owner for owner in owners if owner is not None and owner.standing != Standing.BANNED]


def _change_lease_limit(decision: Decision, node: str, state: SubmissionState) -> LeaseLimit:
    row = require_row(find_node(decision.connection, node), "every submission has a node")
    if state is SubmissionState.ACCEPTED:
        return raise_limit(row.lease_limit, decision.params.raise_after, decision.params.max_width)
    return halve_limit(row.lease_limit) if state in REJECTED else row.lease_limit


def _change_standing(decision: Decision, old: OwnerRow, state: SubmissionState) -> None:
    owner = require_row(find_owner(decision.connection, old.owner), "the owner existed before")
    standing = next_standing(
        decision.params,
        Standing(owner.standing),
        state,
        accepted=owner.accepted,
        strikes=owner.strikes,
        judges=owner.standing == Standing.LIMITED and _is_judge(decision, owner.owner),
    )
    if standing != owner.standing:
        decision.append(owner.owner, NodeStanding(reason=state.value, standing=standing))


def _is_judge(decision: Decision, owner: str) -> bool:
    """Whether any node of an owner may judge."""
    nodes = [find_node(decision.connection, key) for key in decision.params.validators]
    return owner in decision.params.validators or any(node is not None and node.owner == owner for node in nodes)


def _find_lease(decision: Decision, submission: SubmissionRow) -> LeaseRow:
    return require_row(find_lease(decision.connection, submission.lease), "every submission has a lease")


def _post_appeal(decision: Decision, submission: SubmissionRow, payments: Sequence[Payment]) -> list[Posting]:
    """The pay, and the returned fee."""
    appeal = find_appeal(decision.connection, submission.submission)
    postings = post_payments(payments)
    if appeal is not None and appeal.fee:
        postings += [Posting(TREASURY, -appeal.fee), Posting(name_account("avail", submission.owner), appeal.fee)]
    assert all(posting.account != MINT or posting.amount < 0 for posting in postings), "mint only pays"
    return postings


def void_work(decision: Decision, owner: str, node: str | None = None) -> None:
    """End all open work of an owner, or of one of its nodes: it is not paid, and others may do it."""
    for lease in list_of_owner(decision.connection, owner):
        if node in (None, lease.node):
            end_lease(decision, lease, "cancelled", "its holder was banned")
    for submission in list_open(decision.connection, owner):
        if node in (None, submission.node):
            _void_submission(decision, submission)


def _void_submission(decision: Decision, submission: SubmissionRow) -> None:
    if submission.state == SubmissionState.COMMITTED:
        drop_upload(decision, submission, SubmissionState.VOID)
        return
    body = empty_outcome(decision, submission, SubmissionState.VOID, "banned")
    decision.append(submission.submission, body)


def empty_outcome(
    decision: Decision, submission: SubmissionRow, state: SubmissionState, because: str
) -> SubmissionOutcome:
    """An outcome that pays nothing and changes no record."""
    node, owner = find_node(decision.connection, submission.node), find_owner(decision.connection, submission.owner)
    assert node is not None and owner is not None, "every submission has a node, and every node an owner"
    record = {"charge_ms": owner.charge_ms, "failures": owner.failures, "strikes": owner.strikes}
    record |= {"progress": node.progress, "width": node.width}
    spacing_ms = read_trials(decision.connection).spacing_ms
    return build_from(SubmissionOutcome, submission, because=because, spacing_ms=spacing_ms, state=state, **record)
