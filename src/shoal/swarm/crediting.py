"""Credit that becomes free by time: pay after its challenge window, bonds after theirs."""

from collections import defaultdict

from shoal.swarm.balances import read_balances
from shoal.swarm.callers import require_member
from shoal.swarm.event import Kind
from shoal.swarm.postings import move_credit, name_account
from shoal.swarm.refusal import AuthError
from shoal.swarm.state.credit import HoldRow, list_free, list_ripe
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 256


def release_holds(turn: Turn) -> bool:
    """Free pay whose time has come; whether there may be more."""
    params, now_ms = turn.params, turn.now_ms
    ripe = list_ripe(
        turn.connection,
        challenged_ms=now_ms - 1000 * params.challenge_s,
        longest_ms=now_ms - 1000 * params.hold_max_s,
        more=params.hold_submissions,
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


def unbond_stake(turn: Turn, *, node: str) -> int:
    """Begin to give an owner's bond back; until it is free a conviction still takes it. Returns when that is, in ms."""
    owner = require_member(turn, node).owner.owner
    purse = name_account("stake", owner)
    amount = read_balances(turn.connection, [purse])[purse]
    if amount == 0:
        raise AuthError(409, "no_bond", "this owner has no bond to take back")
    free_ms = turn.now_ms + 1000 * turn.params.unbond_s
    body = {"amount": amount, "free_ms": free_ms, "state": "waiting"}
    turn.append(Kind.STAKE_UNBOND, owner, body, move_credit(purse, name_account("unbond", owner), amount))
    return free_ms
