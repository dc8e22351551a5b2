"""Two manifests for one lease, each signed: to hand in whichever turns out better.

The first is in the ledger before its file may come; all others are refused and leave nothing, however many come at
once. Nothing is gained by it, so nobody is convicted for it either: two manifests are also what an honest worker signs
whose disk was put back to an earlier state, or whose folder was copied to a second machine. It writes its lease again,
by then with a newer version, and would lose all it has for that.
"""

import asyncio
import os
from typing import TYPE_CHECKING

from shoal.redteam.camp import OVERTAKEN, Camp, Recruit
from shoal.swarm.messages import CommitAnswer, Manifest

if TYPE_CHECKING:
    from shoal.worker.outbox import Parcel

AT_ONCE = 4
LOOK_S = 0.5


async def attack(camp: Camp) -> None:
    """Other manifests beside the first: at once, after the commitment, after the upload; and another file."""
    liar = await camp.join()
    parcel, committed = await commit_first(camp, liar)
    first, forged = parcel.manifest, parcel.path.with_name("other")
    await asyncio.gather(*(commit_other(camp, liar, first, "at once") for _ in range(AT_ONCE)))
    forged.write_bytes(os.urandom(first.size))
    with camp.refused("body", "blob", what="another file than the committed one", moot=OVERTAKEN):
        await liar.client.upload(committed, first, forged)
    camp.evidence.count("same_again_same_answer", await liar.client.commit(first) == committed)
    await camp.upload(liar, committed, parcel)
    await commit_other(camp, liar, first, "after the upload")


async def commit_first(camp: Camp, liar: Recruit) -> tuple["Parcel", CommitAnswer]:
    """Honest work that is committed; others may be faster with the same groups, and then it takes another lease."""
    while True:
        lease = (await camp.ask_lease(liar)).lease
        if lease is not None:
            parcel = await camp.write_work(liar, lease)
            committed = await camp.commit(liar, parcel)
            if committed is not None:
                return parcel, committed
        await camp.sleep(LOOK_S)


async def commit_other(camp: Camp, liar: Recruit, first: Manifest, when: str) -> None:
    """Sign and send another manifest for the lease of the first."""
    other = first.model_copy(update={"blob": os.urandom(32).hex()})
    with camp.refused("committed", what=f"another manifest, {when}"):
        await liar.client.commit(other)
