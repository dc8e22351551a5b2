"""Work that is handed in when its time is over: after the lease was given back, under an old fence, after somebody else
delivered, after the deadline.

Of several holders the first whose file is whole is paid, once. Who is late is told so.
"""

from shoal.redteam.camp import Camp, Recruit
from shoal.swarm.clock import read_clock
from shoal.swarm.messages import Lease

MARGIN_S = 1.5
"""after a deadline until the coordinator has ended what was due"""


async def attack(camp: Camp) -> None:
    """First what needs no waiting, then the deadline, if there is time for it."""
    early = await camp.join()
    late = await camp.join(early.owner)
    await hand_in_returned(camp, early, late)
    await hand_in_expired(camp, await camp.join())


async def hand_in_returned(camp: Camp, early: Recruit, late: Recruit) -> None:
    """Both hold the same groups, one after the other; the first gave them back and hands them in all the same."""
    first = await camp.take_lease(early)
    if first is None:
        camp.note("no lease to be late with")
        return
    parcel = await camp.write_work(early, first)
    for fence in (first.fence - 1, first.fence + 1):
        with camp.refused("fence", what=f"a fence of {fence}, where the lease has {first.fence}"):
            await early.client.commit(parcel.manifest.model_copy(update={"fence": fence}))
    if (await early.client.return_lease(first.lease)).state != "returned":
        camp.note("its time was over before it was given back")
        return
    with camp.refused("lease_ended", what="work of a lease that was given back", moot=("superseded",)):
        await early.client.commit(parcel.manifest)
    second = (await camp.ask_lease(late)).lease
    if second is None or (second.step, second.first) != (first.step, first.first):
        camp.note("its groups went to somebody else")
        return
    with camp.refused("unknown_lease", what="work for the lease of another node"):
        await early.client.commit(parcel.manifest.model_copy(update={"lease": second.lease, "fence": second.fence}))
    if await camp.hand_in(late, await camp.write_work(late, second)) is not None:
        with camp.refused("superseded", what="work under the old fence, after the new holder delivered"):
            await early.client.commit(parcel.manifest)
    with camp.refused("fence", what="work of the old lease under the new fence"):
        await early.client.commit(parcel.manifest.model_copy(update={"fence": second.fence}))


async def hand_in_expired(camp: Camp, slow: Recruit) -> None:
    """Wait until the deadline is over and another node holds the groups, or has delivered them."""
    lease = await camp.take_lease(slow)
    if lease is None or count_left(lease) + camp.params.late_s + 2 * MARGIN_S > camp.left_s:
        camp.note("the deadline is later than it may wait for")
        return
    parcel = await camp.write_work(slow, lease)
    heir = await camp.join(slow.owner)
    await camp.sleep(count_left(lease) + MARGIN_S)
    taken = (await camp.ask_lease(heir)).lease
    if taken is None or (taken.step, taken.first) != (lease.step, lease.first):
        camp.note("its groups went to somebody else")
        taken = None
    await camp.sleep(camp.params.late_s)
    with camp.refused("lease_ended", "superseded", what="work after its deadline, while another node has its groups"):
        await slow.client.commit(parcel.manifest)
    if taken is not None and await camp.hand_in(heir, await camp.write_work(heir, taken)) is not None:
        with camp.refused("superseded", what="work after its deadline, after another node delivered"):
            await slow.client.commit(parcel.manifest)


def count_left(lease: Lease) -> float:
    """Seconds to the deadline of a lease."""
    return max(0.0, (lease.deadline_ms - read_clock()) / 1000)
