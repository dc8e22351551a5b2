"""Ten times as much as it may: requests, questions, commitments without files, uploads that drip, files without end.

All comes from other addresses than the honest witness, as it would: a caller has a rate of its own, an owner has few
commitments at once, and nobody waits for a slow sender.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from shoal.redteam.camp import OVERTAKEN, Camp, Recruit
from shoal.redteam.evidence import TAKEN
from shoal.swarm.asking import RefusedError
from shoal.swarm.messages import Lease, Manifest, RolloutEntry

BEAT, TARGET = b'{"version":0}', "/v1/heartbeat"
CALM_S, FLOOD_S = 1.0, 5.0
WAVE, PIPES = 50, 4
MAX_OFFERED = 4000
NUM_QUESTIONS = 200
MAX_COMMITS = 24
DRIPPERS, DRIP_BYTES, DRIP_S = 4, 64, 0.05
FILE_BYTES = 1 << 17
HUGE = 10**9


async def attack(camp: Camp) -> None:
    """All of it at once, with an honest node that calls before and meanwhile."""
    flooder, committer = await camp.join(), await camp.join()
    async with camp.watch("calm"):
        await camp.sleep(CALM_S)
    async with camp.watch("flood"):
        submission = await commit_files(camp, committer)
        await asyncio.gather(
            flood_requests(camp, flooder), flood_questions(camp), drip_uploads(camp, committer, submission)
        )
        await send_huge(camp, flooder)


async def flood_requests(camp: Camp, node: Recruit) -> None:
    """Signed requests as fast as they can be made, through several pipes."""
    begun, most, source = time.monotonic(), min(MAX_OFFERED, camp.purse.left_requests // 2), camp.find_source(0)
    found, offered = Counter[int](), 0
    while offered < most and time.monotonic() - begun < FLOOD_S:
        waves = [[(camp.sign(node, "POST", TARGET, BEAT), BEAT) for _ in range(WAVE)] for _ in range(PIPES)]
        for answers in await asyncio.gather(*(camp.pour(wave, source=source) for wave in waves)):
            found.update(answers)
        offered += PIPES * WAVE
    camp.evidence.figures["requests_s"] = round(time.monotonic() - begun, 2)
    note_statuses(camp, "requests", found)


async def flood_questions(camp: Camp) -> None:
    """Open questions, and statements of strangers, of which each costs the coordinator a look."""
    source = camp.find_source(1)
    for name, line in (("questions", "GET /v1/status HTTP/1.1"), ("statements", "POST /v1/appeals HTTP/1.1")):
        note_statuses(camp, name, await camp.pour([([line], b"")] * NUM_QUESTIONS, source=source))


def note_statuses(camp: Camp, name: str, found: Mapping[int, int]) -> None:
    """Write down how many were answered how; that some were too many is what must be."""
    for status, number in found.items():
        camp.evidence.count(f"{name}_{status or 'unanswered'}", number)
    camp.evidence.record_code(f"more {name} than it may send", ("too_many",), "too_many" if found.get(429) else TAKEN)


async def commit_files(camp: Camp, node: Recruit) -> str:
    """Promise files that never come, until no more leases are given for it; the last of the promises."""
    submission = ""
    for _ in range(MAX_COMMITS):
        answer = await camp.ask_lease(node)
        if answer.lease is None:
            break
        if not submission:
            with camp.refused("too_large", what="a file larger than the run takes", moot=OVERTAKEN):
                await node.client.commit(promise_file(camp, answer.lease, camp.params.blob_max_bytes + 1))
        with suppress(RefusedError):  # the step was over
            submission = (await node.client.commit(promise_file(camp, answer.lease, FILE_BYTES))).submission
            camp.evidence.count("promised")
    limits = ("too_many", "busy", "no_need", "resting", "queue_full")
    camp.evidence.record_code("one promise more without its file", limits, answer.code)
    return submission


def promise_file(camp: Camp, lease: Lease, size: int) -> Manifest:
    """A manifest for which there is no file."""
    entries = [RolloutEntry(hash=os.urandom(32).hex(), tokens=1) for _ in range(lease.count * camp.params.group_size)]
    version, blob = min(lease.newest_version, lease.step - 1), os.urandom(32).hex()
    return Manifest(
        lease=lease.lease, fence=lease.fence, blob=blob, size=size, version=version, rollouts=tuple(entries)
    )


async def drip_uploads(camp: Camp, node: Recruit, submission: str) -> None:
    """Files that come so slowly that they would never be whole."""
    if not submission:
        return
    target, body = f"/v1/submissions/{submission}/blob", bytes(FILE_BYTES)

    async def drip() -> None:
        lines, way = camp.sign(node, "PUT", target, body), {"pause_s": DRIP_S, "piece": DRIP_BYTES}
        await camp.try_raw("an upload that drips", ("http",), lines, body, source=camp.find_source(2), **way)

    await asyncio.gather(*(drip() for _ in range(DRIPPERS)))


async def send_huge(camp: Camp, node: Recruit) -> None:
    """Bodies larger than anything here may be: they are refused by their head."""
    source = camp.find_source(3)
    for method, target in (("POST", "/v1/leases"), ("PUT", "/v1/submissions/s1/blob")):
        lines = camp.sign(node, method, target, length=HUGE)
        await camp.try_raw(f"a gigabyte for {target}", ("too_large",), lines, source=source)
