"""Abuse of leases: keep only easy ones, hold without answering, submit late or twice, use many identities.

Why each gains nothing:
- tasks follow from the step's beacon, and a worker knows those of its own leases only. Groups that an owner returns or
  drops are reserved for it, whatever request key or node it uses next. Repeated returns lower its limit, then pause it;
- the version is fixed with the lease, before the tasks are known: the better of two versions cannot be chosen;
- an owner on probation holds few leases, a slow one gets a backup, and expired groups are offered to others;
- of several holders, the first with a complete file is paid, once. Later ones are refused;
- the first manifest is in the ledger before its file is accepted. A second manifest is refused but not punished: an
  honest worker restored from a backup, or started from a copied folder, signs two as well;
- pay is for accepted tokens: a new owner has to do the proof of work for joining and earn its own bond.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from statistics import median_low
from typing import TYPE_CHECKING

from shoal.net.retry import RefusedError
from shoal.protocol.beacon import read_seeds
from shoal.protocol.messages import CommitAnswer, Heartbeat, Lease, LeaseProgress, Manifest
from shoal.redteam.raw_requests import BudgetError
from shoal.redteam.registry import Expected, attack
from shoal.redteam.scripted import OVERTAKEN, AttackerIdentity, AttackSession
from shoal.tasks.base import Task, at_step
from shoal.tasks.split import train_task
from shoal.util.clock import read_clock

if TYPE_CHECKING:
    from shoal.redteam.behaviours.rubbish import RubbishWriter
    from shoal.worker.behaviour import PendingSubmission


MARGIN_S = 1.5
"""after a deadline, until the coordinator has processed what expired"""
NUM_GRINDERS, NUM_PARALLEL, NUM_HOARDERS, NUM_SYBILS, MAX_CHERRY_LEASES = 3, 4, 8, 100, 12
NUM_RUBBISH = 16
_REQUEST_KEY = "0" * 32
POLL_S, HOARD_POLL_S = 0.5, 1.0
NUM_SAMPLED = 16
"""number of tasks that a lease is compared with"""
JOIN_SHARE = 0.5
"""maximum share of its time to spend on joining"""
LetGo = Callable[[AttackSession, AttackerIdentity, Lease], Awaitable[None]]


@attack("late", expect=Expected.REFUSED, text="work is submitted after its lease ended")
async def submit_late(session: AttackSession) -> None:
    """First the trials that need no waiting, then the deadline, if there is time."""
    await session.prepare_work()
    early = await session.join()
    late = await session.join(early.owner)
    await submit_returned(session, early, late)
    await submit_expired(session, await session.join())


async def submit_returned(session: AttackSession, early: AttackerIdentity, late: AttackerIdentity) -> None:
    """Two nodes hold the same groups in turn. The first returns them and submits anyway."""
    first = await session.take_lease(early)
    if first is None:
        session.note("got no lease to submit late")
        return
    pending = await session.write_work(early, first)
    for fence in (first.fence - 1, first.fence + 1):
        with session.refused("fence", what=f"fence {fence} instead of {first.fence}"):
            await early.client.commit(pending.manifest.model_copy(update={"fence": fence}))
    if (await early.client.return_lease(first.lease)).state != "returned":
        session.note("the lease expired before it was returned")
        return
    with session.refused("lease_ended", what="work for a returned lease", moot=("superseded",)):
        await early.client.commit(pending.manifest)
    second = await session.take_lease(late)
    if second is None or (second.step, second.first) != (first.step, first.first):
        session.note("its groups went to another node")
        return
    with session.refused("unknown_lease", what="work for another node's lease"):
        await early.client.commit(pending.manifest.model_copy(update={"lease": second.lease, "fence": second.fence}))
    if await session.submit(late, await session.write_work(late, second)) is not None:
        with session.refused("superseded", what="work under the old fence, after the new holder submitted"):
            await early.client.commit(pending.manifest)
    with session.refused("fence", what="work for the old lease under the new fence"):
        await early.client.commit(pending.manifest.model_copy(update={"fence": second.fence}))


async def submit_expired(session: AttackSession, slow: AttackerIdentity) -> None:
    """Wait until the deadline has passed and another node holds the groups, or has submitted them."""
    lease = await session.take_lease(slow)
    if lease is None or count_seconds_left(lease) + session.params.late_s + 2 * MARGIN_S > session.left_s:
        session.note("the deadline is after the end of the attack")
        return
    pending = await session.write_work(slow, lease)
    successor = await session.join(slow.owner)
    await session.sleep(count_seconds_left(lease) + MARGIN_S)
    taken = await session.take_lease(successor)
    if taken is None or (taken.step, taken.first) != (lease.step, lease.first):
        session.note("its groups went to another node")
        taken = None
    await session.sleep(session.params.late_s)
    with session.refused(
        "lease_ended", "superseded", what="work after its deadline, while another node has its groups"
    ):
        await slow.client.commit(pending.manifest)
    if taken is not None and await session.submit(successor, await session.write_work(successor, taken)) is not None:
        with session.refused("superseded", what="work after its deadline, after another node submitted"):
            await slow.client.commit(pending.manifest)


def count_seconds_left(lease: Lease) -> float:
    """Seconds to the deadline of a lease."""
    return max(0.0, (lease.deadline_ms - read_clock()) / 1000)


@attack("grinding", expect=Expected.FRUITLESS, text="leases are requested and dropped until an easy task comes")
async def grind_leases(session: AttackSession) -> None:
    """Owner after owner drops leases by returning them, by leaving, and by using another node."""
    for _ in range(NUM_GRINDERS):
        await grind_owner(session)


async def grind_owner(session: AttackSession) -> None:
    """One owner drops leases in every way; counts the different tasks it saw."""
    first, ranges = await session.join(), list[tuple[int, int]]()
    other = await session.join(first.owner)
    ways: tuple[tuple[AttackerIdentity, LetGo], ...] = ((first, ask_again), (other, leave_run), (first, return_lease))
    for node, let_go in ways:
        # Wait for the first lease, otherwise there is nothing to drop; the later ones are up to the coordinator.
        is_first = let_go is ask_again
        lease = await session.take_lease(node, _REQUEST_KEY) if is_first else (await session.ask_lease(node)).lease
        if lease is not None:
            ranges.append((lease.step, lease.first))
            await let_go(session, node, lease)
    answer = await session.ask_lease(first)
    if answer.lease is not None:
        await return_lease(session, first, answer.lease)
    session.evidence.count("tries", len(ranges))
    session.evidence.count("distinct", len(set(ranges)))
    session.note(f"{len(ranges)} leases dropped, {len(set(ranges))} different ones; then {answer.code or 'one more'}")


async def return_lease(session: AttackSession, node: AttackerIdentity, lease: Lease) -> None:
    """Return the lease."""
    await node.client.return_lease(lease.lease)


async def ask_again(session: AttackSession, node: AttackerIdentity, lease: Lease) -> None:
    """Return the lease and check whether the same request key gets a different one."""
    await return_lease(session, node, lease)
    again = (await session.ask_lease(node, _REQUEST_KEY)).lease
    session.evidence.count("other_by_same_key", again is not None and again.lease != lease.lease)


async def leave_run(session: AttackSession, node: AttackerIdentity, lease: Lease) -> None:
    """Leave with the lease, and rejoin."""
    await node.client.leave()
    await node.client.join(node.delegation)


@attack("two_manifests", expect=Expected.REFUSED, text="two manifests are signed for one lease")
async def commit_twice(session: AttackSession) -> None:
    """Further manifests after the first: immediately, after the commitment, after the upload; and a different file."""
    await session.prepare_work()
    attacker = await session.join()
    pending, committed = await commit_first(session, attacker)
    first = pending.manifest
    await asyncio.gather(*(commit_other(session, attacker, first, "at once") for _ in range(NUM_PARALLEL)))
    target = f"/v1/submissions/{committed.submission}/blob"
    lines, wanted = session.sign(attacker, "PUT", target, pending.path.read_bytes()), ("body", "blob", *OVERTAKEN)
    await session.try_raw("a different file than the committed one", wanted, lines, os.urandom(first.size))
    session.evidence.count("same_again_same_answer", await attacker.client.commit(first) == committed)
    await session.upload(attacker, committed, pending)
    await commit_other(session, attacker, first, "after the upload")


async def commit_first(session: AttackSession, attacker: AttackerIdentity) -> tuple["PendingSubmission", CommitAnswer]:
    """Commit honest work. If others were faster with the same groups, take another lease."""
    while True:
        lease = (await session.ask_lease(attacker)).lease
        if lease is not None:
            pending = await session.write_work(attacker, lease)
            committed = await session.commit(attacker, pending)
            if committed is not None:
                return pending, committed
        await session.sleep(POLL_S)


async def commit_other(session: AttackSession, attacker: AttackerIdentity, first: Manifest, when: str) -> None:
    """Sign and send another manifest for the lease of the first one."""
    other = first.model_copy(update={"blob": os.urandom(32).hex()})
    with session.refused("committed", what=f"another manifest, {when}"):
        await attacker.client.commit(other)


def rank_task(task: Task) -> tuple[int, str]:
    """Sort key for the difficulty of a task: its length, then the text to break ties."""
    return len(task.prompt), task.prompt


def is_hard(session: AttackSession, lease: Lease) -> bool:
    """Whether a lease has a task that is harder than most in its step."""
    family = at_step(session.recipe.open_family(), lease.step)
    # Other groups of the step are unknown, so it compares with tasks of its own choice.
    ranks = [rank_task(train_task(family, index)) for index in range(NUM_SAMPLED)]
    usual = median_low(ranks)
    own = (rank_task(train_task(family, read_seeds(text).task)) for text in lease.seeds)
    return any(rank > usual for rank in own)


@attack("cherry_leases", expect=Expected.FRUITLESS, text="leases with hard tasks are returned")
async def pick_leases(session: AttackSession) -> None:
    """Keep the easy ones and return the others, as long as there are leases."""
    await session.prepare_work()
    picker, returned = await session.join(), set[tuple[int, int]]()
    for _ in range(MAX_CHERRY_LEASES):
        lease = await session.take_lease(picker)
        if lease is None:
            return
        place = lease.step, lease.first
        session.evidence.count("met_again", place in returned)
        if is_hard(session, lease):
            await picker.client.return_lease(lease.lease)
            returned.add(place)
            session.evidence.count("returned")
        else:
            receipt = await session.submit(picker, await session.write_work(picker, lease))
            session.evidence.count("handed_in", receipt is not None)


@attack("hoarding", expect=Expected.FRUITLESS, text="leases are taken and never answered")
async def hoard_leases(session: AttackSession) -> None:
    """Take every lease available, report progress, and take again what becomes free, until time is up."""
    first = await session.join()
    nodes = [first, *[await session.join(first.owner) for _ in range(NUM_HOARDERS - 1)]]
    held: dict[str, list[Lease]] = {}
    most = 0
    while session.left_s > HOARD_POLL_S:
        for node in nodes:
            mine = held.setdefault(node.key.public, [])
            leases = tuple(LeaseProgress(lease=one.lease, done=0) for one in mine)
            beat = Heartbeat(role="worker", leases=leases)
            gone = set((await node.client.send_heartbeat(beat)).cancelled)
            mine[:] = [lease for lease in mine if lease.lease not in gone]
            lease = (await session.ask_lease(node)).lease
            if lease is not None:
                mine.append(lease)
        most = max(most, sum(map(len, held.values())))
        session.evidence.figures["held_most"] = most
        await session.sleep(HOARD_POLL_S)
    session.note(f"held up to {most} leases, submitted nothing")


@attack("sybil", expect=Expected.FRUITLESS, text="a hundred identities instead of one")
async def use_sybils(session: AttackSession) -> None:
    """Create identities for half of the time, then work under each in turn."""
    await session.prepare_work()
    names, joining_s = list[AttackerIdentity](), JOIN_SHARE * session.left_s
    begun = time.monotonic()
    while len(names) < NUM_SYBILS and time.monotonic() - begun < joining_s:
        names.append(await session.join())
    session.evidence.figures["join_s"] = round(time.monotonic() - begun, 2)
    session.note(f"{len(names)} owners joined")
    while names and session.left_s:
        handed_in = [await work_once(session, name) for name in names]
        if not any(handed_in):
            await session.sleep(1.0)


@attack("rubbish", expect=Expected.FRUITLESS, text="many owners without compute take leases and submit rubbish")
async def submit_rubbish(session: AttackSession) -> None:
    """Owners with a form of rubbish each; those that are shut out are replaced."""
    await flood_rubbish(session, NUM_RUBBISH)


async def flood_rubbish(session: AttackSession, num_owners: int, *, replaced: bool = True) -> None:
    """Let so many owners submit rubbish until time is up; `replaced`: new ones join for those that are shut out."""
    from shoal.redteam.behaviours.rubbish import FORMS, RubbishWriter

    writer = RubbishWriter(session.recipe)
    forms = [FORMS[number % len(FORMS)] for number in range(num_owners)]
    await asyncio.gather(*(_waste_leases(session, writer, form, replaced=replaced) for form in forms))


async def _waste_leases(session: AttackSession, writer: "RubbishWriter", form: str, *, replaced: bool) -> None:
    """One owner after another takes leases until it is shut out."""
    while session.left_s:
        try:
            owner = await session.join()
            while session.left_s:
                answer = await session.ask_lease(owner)
                if answer.code == "finished":
                    return
                if answer.lease is None:
                    if replaced and answer.code in ("resting", "work"):
                        break  # a new identity is cheaper
                    await session.sleep(min(answer.retry_after_s, POLL_S))
                else:
                    await _waste_lease(session, writer, form, owner, answer.lease)
        except (RefusedError, BudgetError) as error:
            session.note(f"{form}: {error}")
            session.evidence.count("shut_out")
            if not replaced or isinstance(error, BudgetError):
                return


async def _waste_lease(
    session: AttackSession, writer: "RubbishWriter", form: str, owner: AttackerIdentity, lease: Lease
) -> None:
    if form == "returned":
        await owner.client.return_lease(lease.lease)
        return
    if form == "silent":
        return
    path = owner.folder / f"{lease.lease}.parquet"
    manifest = await asyncio.to_thread(writer.write, form, lease, path)
    try:
        committed = await owner.client.commit(manifest)
        if form != "unsent":
            await owner.client.upload(committed, manifest, path)
            session.evidence.count("handed_in")
    except RefusedError as error:
        if error.refusal.code not in (*OVERTAKEN, "blob_known"):
            raise
    finally:
        path.unlink(missing_ok=True)


async def work_once(session: AttackSession, name: AttackerIdentity) -> bool:
    """Take a lease under one identity and submit work for it. Returns whether there was a lease."""
    lease = (await session.ask_lease(name)).lease
    if lease is None:
        return False
    receipt = await session.submit(name, await session.write_work(name, lease))
    session.evidence.count("handed_in", receipt is not None)
    return True
