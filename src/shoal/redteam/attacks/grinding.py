"""Asking until it fits: a lease is let go in every way there is, to be given another task the next time.

What an owner let go is kept for it, under whatever request key and with whichever of its nodes it comes back. A new
owner costs the work of joining and gets what is next, which nobody can choose either.
"""

from collections.abc import Awaitable, Callable

from shoal.redteam.camp import Camp, Recruit
from shoal.swarm.messages import Lease

NUM_OWNERS = 3
_KEY = "0" * 32
LetGo = Callable[[Camp, Recruit, Lease], Awaitable[None]]


async def attack(camp: Camp) -> None:
    """One owner after the other lets go by returning, by leaving, and with another node."""
    for _ in range(NUM_OWNERS):
        await grind_owner(camp)


async def grind_owner(camp: Camp) -> None:
    """All ways of one owner; the tasks that it saw are counted."""
    first, spans = await camp.join(), list[tuple[int, int]]()
    other = await camp.join(first.owner)
    ways: tuple[tuple[Recruit, LetGo], ...] = ((first, ask_again), (other, leave_run), (first, return_lease))
    for node, let_go in ways:
        # The first is waited for, or there would be nothing to let go; what comes then is for the coordinator to say.
        is_first = let_go is ask_again
        lease = await camp.take_lease(node, _KEY) if is_first else (await camp.ask_lease(node)).lease
        if lease is not None:
            spans.append((lease.step, lease.first))
            await let_go(camp, node, lease)
    answer = await camp.ask_lease(first)
    if answer.lease is not None:
        await return_lease(camp, first, answer.lease)
    camp.evidence.count("tries", len(spans))
    camp.evidence.count("distinct", len(set(spans)))
    camp.note(f"{len(spans)} leases let go, {len(set(spans))} different ones; then {answer.code or 'one more'}")


async def return_lease(camp: Camp, node: Recruit, lease: Lease) -> None:
    """Give it back."""
    await node.client.return_lease(lease.lease)


async def ask_again(camp: Camp, node: Recruit, lease: Lease) -> None:
    """Give it back, and see whether the same request key brings another one."""
    await return_lease(camp, node, lease)
    again = (await camp.ask_lease(node, _KEY)).lease
    camp.evidence.count("other_by_same_key", again is not None and again.lease != lease.lease)


async def leave_run(camp: Camp, node: Recruit, lease: Lease) -> None:
    """Leave with the lease in hand, and come back."""
    await node.client.leave()
    await node.client.join(node.delegation)
