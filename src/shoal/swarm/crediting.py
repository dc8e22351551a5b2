"""Credit that becomes free by time: pay after its challenge window, bonds after theirs; and credit that is paid out.

    redeem: avail -> redeeming -> redeemed, or back to avail

Invariant: what is asked for leaves the free purse in the decision that records the request, so however many ask at
once, credit is paid out once.
"""

from collections import defaultdict

from shoal.swarm.balances import read_balances
from shoal.swarm.event import Kind
from shoal.swarm.messages import Action, Command, RedeemAnswer, SignedRedeem, SignedUnbond, UnbondAnswer
from shoal.swarm.postings import REDEEMED, Posting, move_credit, name_account
from shoal.swarm.refusal import AuthError, refuse_banned
from shoal.swarm.state.credit import BondRow, HoldRow, find_bond, list_free, list_ripe
from shoal.swarm.state.nodes import find_ban
from shoal.swarm.state.redeems import RedeemRow, find_redeem
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 256


def release_holds(turn: Turn) -> bool:
    """Free pay whose time has come; whether there may be more."""
    params, now_ms = turn.params, turn.now_ms
    ripe = list_ripe(
        turn.connection,
        challenged_ms=now_ms - 1000 * params.challenge_s,
        longest_ms=now_ms - 1000 * params.hold_max_s,
        most=MAX_AT_ONCE,
    )
    by_owner: defaultdict[str, list[HoldRow]] = defaultdict(list)
    for hold in ripe:
        by_owner[hold.owner].append(hold)
    for owner, holds in by_owner.items():
        amount = sum(hold.amount for hold in holds)
        body = {"amount": amount, "holds": [[hold.seq, hold.line] for hold in holds]}
        moved = move_credit(name_account("pending", owner), name_account("avail", owner), amount)
        turn.append(Kind.CREDIT_POST, owner, body, moved)
    return len(ripe) == MAX_AT_ONCE


def release_bonds(turn: Turn) -> bool:
    """Give back bonds whose time has come; whether there may be more."""
    free = list_free(turn.connection, turn.now_ms, MAX_AT_ONCE)
    for bond in free:
        moved = move_credit(name_account("unbond", bond.owner), name_account("avail", bond.owner), bond.amount)
        turn.append(Kind.STAKE_UNBOND, bond.owner, {"bond": bond.seq, "state": "released"}, moved)
    return len(free) == MAX_AT_ONCE


def unbond_stake(turn: Turn, *, signed: SignedUnbond) -> UnbondAnswer:
    """Begin to give an owner's bond back; until it is free a conviction still takes it. The same request again gets the
    first answer: what an owner signed once must not take a bond out that it earned later."""
    asked, owner = signed.unbond, signed.owner
    statement = turn.open_message(owner, asked, signed.signature)
    earlier = find_bond(turn.connection, asked.request)
    if earlier is not None:
        if earlier.owner != owner:
            raise AuthError(409, "request_known", "another request has this name; choose a new one")
        return _answer_unbond(earlier)
    if find_ban(turn.connection, owner, owner) is not None:
        raise refuse_banned()
    purse = name_account("stake", owner)
    amount = read_balances(turn.connection, [purse])[purse]
    if amount == 0:
        raise AuthError(409, "no_bond", "this owner has no bond to take back")
    free_ms = turn.now_ms + 1000 * turn.params.unbond_s
    turn.record(statement)
    body = {"amount": amount, "free_ms": free_ms, "request": asked.request, "state": "waiting"}
    turn.append(Kind.STAKE_UNBOND, owner, body, move_credit(purse, name_account("unbond", owner), amount))
    made = find_bond(turn.connection, asked.request)
    assert made is not None, "it was recorded"
    return _answer_unbond(made)


def request_redeem(turn: Turn, *, signed: SignedRedeem) -> RedeemAnswer:
    """An owner wants credit paid out; the same request again is answered and not done twice."""
    asked, owner = signed.redeem, signed.owner
    statement = turn.open_message(owner, asked, signed.signature)
    earlier = find_redeem(turn.connection, asked.request)
    if earlier is not None:
        if (earlier.owner, earlier.amount, earlier.goal) != (owner, asked.amount, asked.goal):
            raise AuthError(409, "request_known", "another request has this name; choose a new one")
        return _answer_redeem(earlier)
    if find_ban(turn.connection, owner, owner) is not None:
        raise refuse_banned()
    if asked.amount < turn.params.redeem_least:
        raise AuthError(400, "amount", f"at least {turn.params.redeem_least} micro-credits can be redeemed at once")
    purse = name_account("avail", owner)
    free = read_balances(turn.connection, [purse])[purse]
    if free < asked.amount:
        raise AuthError(402, "credit", f"this owner has {free} micro-credits free, and not {asked.amount}")
    turn.record(statement, move_credit(purse, name_account("redeeming", owner), asked.amount))
    made = find_redeem(turn.connection, asked.request)
    assert made is not None, "it was recorded"
    return _answer_redeem(made)


def post_redeem(turn: Turn, command: Command) -> tuple[Posting, ...]:
    """The postings by which the operator ends a request; `AuthError` if there is none to end."""
    row = find_redeem(turn.connection, command.request)
    if row is None or row.state != "open":
        state = "unknown" if row is None else row.state
        raise AuthError(409, "request", f"there is no open request of this name; it is {state}")
    source = name_account("redeeming", row.owner)
    target = REDEEMED if command.action is Action.REDEEM_DONE else name_account("avail", row.owner)
    return move_credit(source, target, row.amount)


def _answer_unbond(row: BondRow) -> UnbondAnswer:
    return UnbondAnswer(request=row.request, amount=row.amount, free_ms=row.free_ms)


def _answer_redeem(row: RedeemRow) -> RedeemAnswer:
    return RedeemAnswer(request=row.request, state=row.state, amount=row.amount, seq=row.seq)
