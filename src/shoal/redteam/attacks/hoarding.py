"""Taking and never answering: whoever holds the work of a step holds up its training.

As many nodes of one owner as it takes ask for as much as they get, and do nothing. An owner on probation holds few,
what is slow gets a backup, and what expires is offered to others.
"""

from shoal.redteam.camp import Camp
from shoal.swarm.messages import Heartbeat, Lease, Progress

NUM_NODES = 8
LOOK_S = 1.0


async def attack(camp: Camp) -> None:
    """Take all there is, say that work goes on, and take again what comes free, until the time is over."""
    first = await camp.join()
    hands = [first, *[await camp.join(first.owner) for _ in range(NUM_NODES - 1)]]
    held: dict[str, list[Lease]] = {}
    most = 0
    while camp.left_s > LOOK_S:
        for hand in hands:
            mine = held.setdefault(hand.key.public, [])
            beat = Heartbeat(role="worker", leases=tuple(Progress(lease=one.lease, done=0) for one in mine), metrics={})
            gone = set((await hand.client.send_heartbeat(beat)).cancelled)
            mine[:] = [lease for lease in mine if lease.lease not in gone]
            lease = (await camp.ask_lease(hand)).lease
            if lease is not None:
                mine.append(lease)
        most = max(most, sum(map(len, held.values())))
        camp.evidence.figures["held_most"] = most
        await camp.sleep(LOOK_S)
    camp.note(f"held {most} leases at most, answered none")
