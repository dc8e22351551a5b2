"""Only what is easy: leases of hard tasks are given back, in the hope of easier ones that take less for the same pay.

Tasks follow from the beacon, so a worker knows them the moment it has a lease. What it gives back is kept for its
owner, costs it width, and after three times in a row a rest.
"""

from statistics import median_low

from shoal.redteam.camp import Camp
from shoal.swarm.beacon import derive_group
from shoal.swarm.messages import Lease
from shoal.tasks.base import Task, at_step
from shoal.tasks.split import train_task

MAX_LEASES = 12
SAMPLE = 16
"""groups of the same step by which it sees what is usual"""
Hardness = tuple[int, str]


def rank_task(task: Task) -> Hardness:
    """How hard a task looks: by its length, then by anything that tells two apart."""
    return len(task.prompt), task.prompt


def is_hard(camp: Camp, lease: Lease) -> bool:
    """Whether a lease has a task that is harder than most of its step."""
    family = at_step(camp.recipe.open_family(), lease.step)
    ranks = [rank_task(train_task(family, derive_group(lease.beacon, index, 1).task)) for index in range(SAMPLE)]
    usual = median_low(ranks)
    wanted = range(lease.first, lease.first + lease.count)
    own = (rank_task(train_task(family, derive_group(lease.beacon, index, 1).task)) for index in wanted)
    return any(rank > usual for rank in own)


async def attack(camp: Camp) -> None:
    """Keep the easy ones, return the others, as long as there are leases."""
    picker, returned = await camp.join(), set[tuple[int, int]]()
    for _ in range(MAX_LEASES):
        lease = await camp.take_lease(picker)
        if lease is None:
            return
        place = lease.step, lease.first
        camp.evidence.count("met_again", place in returned)
        if is_hard(camp, lease):
            await picker.client.return_lease(lease.lease)
            returned.add(place)
            camp.evidence.count("returned")
        else:
            receipt = await camp.hand_in(picker, await camp.write_work(picker, lease))
            camp.evidence.count("handed_in", receipt is not None)
