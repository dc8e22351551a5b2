"""Credit released by time (pay and bonds, each after its waiting period), and credit that is paid out.

    redeem: avail -> redeeming -> redeemed, or back to avail

Invariant: the requested amount leaves the available account in the decision that records the request, so concurrent
requests cannot pay out credit twice.
"""

from collections import defaultdict

from shoal.coordinator.decide.context import Decision, build_from, check_ban
from shoal.coordinator.state.credit import HoldRow, count_open, find_bond, find_redeem, list_free, list_ripe
from shoal.ledger.db import read_accounts
from shoal.ledger.event import REDEEMED, Posting, move_credit, name_account, show_credit
from shoal.net.api_error import ApiError
from shoal.protocol.events import BondReleased, BondWaiting, CreditPost
from shoal.protocol.messages import Action, Command, RedeemAnswer, SignedRedeem, SignedUnbond, UnbondAnswer

MAX_AT_ONCE = 256
MAX_OPEN = 16
"""open payout requests of one owner: credit can be split into many requests, and each is an event"""


def release_holds(decision: Decision) -> bool:
    """Release held pay whose time has come; return whether more may remain."""
    params, now_ms = decision.params, decision.now_ms
    ripe = list_ripe(
        decision.connection,
        challenged_ms=now_ms - 1000 * params.challenge_s,
        longest_ms=now_ms - 1000 * params.hold_max_s,
        most=MAX_AT_ONCE,
    )
    by_owner: defaultdict[str, list[HoldRow]] = defaultdict(list)
    for hold in ripe:
        by_owner[hold.owner].append(hold)
    for owner, holds in by_owner.items():
        amount = sum(hold.amount for hold in holds)
        body = CreditPost(amount=amount, holds=tuple((hold.seq, hold.line) for hold in holds))
        decision.append(owner, body, _move_between(owner, "pending", "avail", amount))
    return len(ripe) == MAX_AT_ONCE


def release_bonds(decision: Decision) -> bool:
    """Return bonds whose time has come; return whether more may remain."""
    free = list_free(decision.connection, decision.now_ms, MAX_AT_ONCE)
    for bond in free:
        moved = _move_between(bond.owner, "unbond", "avail", bond.amount)
        decision.append(bond.owner, BondReleased(bond=bond.seq), moved)
    return len(free) == MAX_AT_ONCE


def unbond_stake(decision: Decision, signed: SignedUnbond) -> UnbondAnswer:
    """Start returning an owner's bond; until it is released, a conviction still takes it.

    The same request again gets the first answer: a request must not take out a bond that the owner earned later."""
    asked, owner = signed.unbond, signed.owner
    statement = decision.open_message(owner, asked, signed.signature)
    earlier = find_bond(decision.connection, asked.request)
    if earlier is not None:
        _check_same(earlier.owner == owner)
        return build_from(UnbondAnswer, earlier)
    check_ban(decision, owner, owner)
    amount = read_accounts(decision.connection, owner, "stake")["stake"]
    if amount == 0:
        raise ApiError(409, "no_bond", "this owner has no bond to return")
    free_ms = decision.now_ms + 1000 * decision.params.unbond_s
    decision.record(statement)
    body = BondWaiting(amount=amount, free_ms=free_ms, request=asked.request)
    decision.append(owner, body, _move_between(owner, "stake", "unbond", amount))
    return build_from(UnbondAnswer, find_bond(decision.connection, asked.request))


def request_redeem(decision: Decision, signed: SignedRedeem) -> RedeemAnswer:
    """Record an owner's payout request; the same request again gets the first answer."""
    asked, owner = signed.redeem, signed.owner
    statement = decision.open_message(owner, asked, signed.signature)
    earlier = find_redeem(decision.connection, asked.request)
    if earlier is not None:
        _check_same((earlier.owner, earlier.amount, earlier.goal) == (owner, asked.amount, asked.goal))
        return build_from(RedeemAnswer, earlier)
    check_ban(decision, owner, owner)
    if asked.amount < decision.params.redeem_least:
        raise ApiError(400, "amount", f"the minimum redemption is {show_credit(decision.params.redeem_least)}")
    free = read_accounts(decision.connection, owner, "avail")["avail"]
    if free < asked.amount:
        wanted = show_credit(asked.amount)
        raise ApiError(402, "credit", f"insufficient credit: {wanted} requested, {show_credit(free)} free")
    if count_open(decision.connection, owner) >= MAX_OPEN:
        raise ApiError(409, "open_requests", f"this owner has {MAX_OPEN} open requests; the operator pays those first")
    decision.record(statement, _move_between(owner, "avail", "redeeming", asked.amount))
    return build_from(RedeemAnswer, find_redeem(decision.connection, asked.request))


def post_redeem(decision: Decision, command: Command) -> tuple[Posting, ...]:
    """The postings with which the operator ends a request; `ApiError` if there is no open one."""
    row = find_redeem(decision.connection, command.request)
    if row is None or row.state != "open":
        state = "unknown" if row is None else row.state
        raise ApiError(409, "request", f"no open request with this name; it is {state}")
    if command.action is Action.REDEEM_DONE:
        return move_credit(name_account("redeeming", row.owner), REDEEMED, row.amount)
    return _move_between(row.owner, "redeeming", "avail", row.amount)


def _move_between(owner: str, source: str, target: str, amount: int) -> tuple[Posting, ...]:
    """The postings that move credit from one account of an owner to another."""
    return move_credit(name_account(source, owner), name_account(target, owner), amount)


def _check_same(is_same: bool) -> None:
    if not is_same:
        raise ApiError(409, "request_known", "this name was used for a different request; choose a new one")
