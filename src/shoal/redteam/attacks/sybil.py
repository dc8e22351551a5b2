"""A hundred owners instead of one, with one machine behind them all.

Pay is for accepted tokens, so names earn nothing; each costs the work of joining, which grows with the rate of joins,
and each has to earn a bond of its own before anything is free.
"""

import time

from shoal.redteam.camp import Camp, Recruit

NUM_OWNERS = 100
JOIN_SHARE = 0.5
"""of its time that it spends on joining, at most"""


async def attack(camp: Camp) -> None:
    """Make names for half of the time, then work in turns under all of them."""
    names, joining_s = list[Recruit](), JOIN_SHARE * camp.left_s
    begun = time.monotonic()
    while len(names) < NUM_OWNERS and time.monotonic() - begun < joining_s:
        names.append(await camp.join())
    camp.evidence.figures["join_s"] = round(time.monotonic() - begun, 2)
    camp.note(f"{len(names)} owners joined")
    while names and camp.left_s:
        handed_in = [await work_once(camp, name) for name in names]
        if not any(handed_in):
            await camp.sleep(1.0)


async def work_once(camp: Camp, name: Recruit) -> bool:
    """Take a lease under one name and hand its work in; whether there was one."""
    lease = (await camp.ask_lease(name)).lease
    if lease is None:
        return False
    receipt = await camp.hand_in(name, await camp.write_work(name, lease))
    camp.evidence.count("handed_in", receipt is not None)
    return True
