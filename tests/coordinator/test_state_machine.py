"""Everything in any order: a run of 4 steps with 3 owners and 5 workers, under a clock that jumps.

Whatever happened before, at the end an honest new owner can finish the run, although an attacker continues to the last;
the ledger verifies, and a restart changes no answer. Validators reject copies, as the real ones do.
"""

import contextlib
import itertools
import shutil
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text
from tests.fixtures.world import check_room

from shoal.coordinator.rules.storage import limit_lease_file
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.run import list_steps
from shoal.coordinator.state.submissions import find_submission
from shoal.identity.delegation import Scope
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Heartbeat, LeaseProgress, Verdict
from shoal.protocol.params import is_allowed

WORKERS = {"a1": "ann", "a2": "ann", "b1": "bob", "b2": "bob", "c1": "cleo"}
JUDGES = ("judge-a", "judge-b", "judge-c")
OWNERS = ("ann", "bob", "cleo")
ATTACKS = ("hold", "return", "leave", "only commit", "copy", "rubbish")
"""what an attacker does with each lease that it gets"""
CANARIES = tuple(f"canary-{number}" for number in range(12))
ACCOUNT_KINDS = ("stake", "pending", "avail", "unbond")
SETTINGS = {
    "steps": 4,
    "async_level": 1,
    "groups_per_batch": 3,
    "groups_per_lease": 2,
    "group_size": 1,
    "raise_after": 1,
    "limit_after": 2,
    "good_after": 2,
    "verdict_price": 3,
    "slash_share": 600_000,
    "stake_submissions": 2,
    "reserve_s": 10,
}
_SPANS = text("SELECT step, first, count, state, holders, submission FROM span ORDER BY step, first")
_GROUPS = text("SELECT step, position, signal, batched FROM trained_group ORDER BY step, position")
_STEPS = text("SELECT step, state, leased, offered, delivered, signal, dull FROM step")
_TRANSIENT = text(
    "SELECT count(*) FROM job WHERE validator <> '' UNION ALL SELECT count(*) FROM owner WHERE standing = 'limited'"
)
_WRONG_JOBS = text(
    "SELECT j.submission FROM job j LEFT JOIN served_owner o ON o.owner = j.owner WHERE j.state = 'queued' AND ("
    "j.turn <> coalesce(o.seq, 0) OR (j.blocked = 1) <> EXISTS (SELECT 1 FROM duplicate d JOIN submission r "
    "ON r.submission = d.rival WHERE d.submission = j.submission AND r.state IN ('committed', 'received')) OR "
    "j.judge <> coalesce((SELECT n.owner FROM verdict v JOIN node n ON n.node = v.validator "
    "WHERE v.submission = j.submission ORDER BY v.round DESC LIMIT 1), ''))"
)
_WRONG_HOLDS = text(
    "SELECT h.seq FROM hold h JOIN owner o ON o.owner = h.owner WHERE h.state IN ('held', 'ready', 'frozen') AND "
    "h.state <> CASE WHEN o.standing = 'banned' THEN 'frozen' WHEN o.accepted - h.number >= :more THEN 'ready' "
    "ELSE 'held' END"
)
_ACTIVE = text("SELECT step, first, state FROM lease WHERE state = 'active'")
_WAITING = text("SELECT step, first FROM submission WHERE state = 'committed'")
_BALANCES = text("SELECT account, amount FROM balance")
_BANNED = text("SELECT target FROM ban")
_OPEN = text("SELECT count(*) FROM submission WHERE state IN ('committed', 'received')")


class Swarm(RuleBasedStateMachine):
    """What anyone may do at any time. A refusal is an answer; any other exception is a bug."""

    world_type = make_url = None

    @initialize(plan=st.permutations(ATTACKS))
    def begin(self, plan):
        self.plan = itertools.cycle(plan)
        memory = Path("/dev/shm")
        self.folder = TemporaryDirectory(prefix="shoal-", dir=memory if memory.is_dir() else None)
        self.world = type(self).world_type(self.make_url(), **SETTINGS)
        for node, owner in WORKERS.items():
            self.world.join(node, owner)
        self.world.publish(0)
        self.leases = {node: [] for node in WORKERS}
        self.uploads = []
        self.rejected = []
        self.world.seal(*CANARIES)
        self.canaries = list(CANARIES)
        self.planted = {}
        self.revealed = set()
        self.frozen = {}
        self.rubbish = set()
        self.copies = set()

    @rule(seconds=st.sampled_from([0, 3, 31, 130, 400, 3700, 100_000]))
    def pass_time(self, seconds):
        self.world.wait(seconds)

    @rule(node=st.sampled_from(sorted(WORKERS)), age=st.sampled_from([0, 1, 2]))
    def ask_lease(self, node, age):
        newest = self.world.coordinator.cache.newest_version
        with contextlib.suppress(ApiError):
            answer = self.world.ask(node, version=max(0, newest - age))
            if answer.lease is not None:
                self.leases[node].append(answer.lease)

    @rule(node=st.sampled_from(sorted(WORKERS)))
    def give_back(self, node):
        if self.leases[node]:
            with contextlib.suppress(ApiError):
                self.world.run(self.world.coordinator.return_lease(self.world.id(node), self.leases[node].pop().lease))

    @rule(node=st.sampled_from(sorted(WORKERS)), done=st.sampled_from([0, 1, 2, 9]))
    def report_progress(self, node, done):
        leases = tuple(LeaseProgress(lease=lease.lease, done=done) for lease in self.leases[node])
        with contextlib.suppress(ApiError):  # it left
            self.world.coordinator.heartbeat(self.world.id(node), Heartbeat(leases=leases))

    @rule(node=st.sampled_from(sorted(WORKERS)), salt=st.sampled_from(["", "x"]))
    def commit_work(self, node, salt):
        if self.leases[node]:
            lease = self.leases[node].pop(0)
            with contextlib.suppress(ApiError):
                answer = self.world.commit(node, self.world.make_manifest(lease, salt=salt))
                self.uploads.append((node, answer.submission, (lease.lease + salt).encode()))

    @rule()
    def upload_file(self):
        if self.uploads:
            with contextlib.suppress(ApiError):
                self.world.upload(*self.uploads.pop())

    @rule(node=st.sampled_from(sorted(WORKERS)), salt=st.sampled_from(["", "y"]))
    def deliver_quickly(self, node, salt):
        with contextlib.suppress(ApiError):
            answer = self.world.ask(node)
            if answer.lease is not None:
                self.world.submit(node, answer.lease, salt=salt)

    @rule(node=st.sampled_from(sorted(WORKERS)), signal=st.booleans())
    def work_honestly(self, node, signal):
        self.deliver_quickly(node, "")
        self.judge_next("judge-a", Verdict.ACCEPTED, signal, "toploc")

    @rule(node=st.sampled_from(sorted(WORKERS)))
    def be_convicted(self, node):
        self.deliver_quickly(node, "")
        self.judge_next("judge-b", Verdict.HARD, False, "toploc")
        self.judge_next("judge-c", Verdict.HARD, False, "toploc")

    @rule(node=st.sampled_from(sorted(WORKERS)), victim=st.sampled_from(sorted(WORKERS)))
    def copy_rollouts(self, node, victim):
        if self.leases[node] and self.leases[victim] and node != victim:
            stolen = self.world.make_manifest(self.leases[victim][0]).rollouts
            if len(stolen) == self.leases[node][0].count:
                with contextlib.suppress(ApiError):
                    self.copies.add(self.world.submit(node, self.leases[node].pop(0), rollouts=stolen))

    @rule(
        judge=st.sampled_from(JUDGES),
        verdict=st.sampled_from([Verdict.ACCEPTED, Verdict.ACCEPTED, *Verdict]),
        signal=st.booleans(),
        check=st.sampled_from(["toploc", "crash"]),
    )
    def judge_next(self, judge, verdict, signal, check):
        with contextlib.suppress(ApiError):
            job = self.world.claim(judge).job
            if job is not None:
                if self.is_copy(job) and verdict is Verdict.ACCEPTED:
                    verdict = Verdict.SOFT
                answer = self.world.post(judge, self.world.describe_verdict(job, verdict, signal=signal, check=check))
                if answer.record.state.startswith("rejected") and job.submission not in self.planted:
                    self.rejected.append(job.submission)

    @rule(judge=st.sampled_from(JUDGES))
    def claim_only(self, judge):
        with contextlib.suppress(ApiError):
            self.world.claim(judge)

    @rule()
    def train_next(self):
        step = self.world.coordinator.cache.newest_version + 1
        with contextlib.suppress(ApiError):
            batch = self.world.cut(step).batch
            if batch is not None:
                assert len(batch.groups) == SETTINGS["groups_per_batch"]
                assert all(is_allowed(step, entry.version, SETTINGS["async_level"]) for entry in batch.groups)
                assert not {entry.submission for entry in batch.groups} & self.revealed, "known to be bad"
                self.world.publish(step, batch.hash)

    @rule(owner=st.sampled_from(OWNERS), ban=st.integers(0, 3))
    def order_ban(self, owner, ban):
        self.order(not ban, self.world.owner_id(owner))

    @rule(judge=st.sampled_from(JUDGES), ban=st.integers(0, 2))
    def order_ban_of_judge(self, judge, ban):
        self.order(not ban, self.world.owner_id(judge))

    def order(self, ban, target):
        with contextlib.suppress(ApiError):  # only a ban that exists can be lifted
            self.world.order(Action.BAN if ban else Action.UNBAN, target=target)

    @rule(judge=st.sampled_from(JUDGES))
    def restart_judge(self, judge):
        with contextlib.suppress(ApiError):
            self.world.run(self.world.coordinator.leave(self.world.id(judge)))
            self.world.join(judge, judge, scopes={Scope.VALIDATE})

    @rule(right=st.booleans())
    def appeal_rejection(self, right):
        if self.rejected:
            submission = self.rejected.pop()
            public = self.world.query(find_submission, submission).owner
            owner = next(name for name in OWNERS if self.world.owner_id(name) == public)
            with contextlib.suppress(ApiError):
                self.world.appeal(owner, submission)
                for judge in JUDGES:
                    self.judge_next(judge, Verdict.ACCEPTED if right else Verdict.SOFT, True, "toploc")

    @rule(owner=st.sampled_from(OWNERS))
    def take_bond(self, owner):
        with contextlib.suppress(ApiError):
            self.world.unbond(owner)

    @rule(owner=st.sampled_from(OWNERS), amount=st.integers(1, 3000), ends=st.booleans())
    def redeem_credit(self, owner, amount, ends):
        with contextlib.suppress(ApiError):
            request = self.world.redeem(owner, amount).request
            if ends:
                action = Action.REDEEM_DONE if amount % 2 else Action.REDEEM_FAILED
                self.world.order(action, request=request)

    @rule(judge=st.sampled_from(JUDGES), lazy=st.booleans(), signal=st.booleans())
    def plant_canary(self, judge, lazy, signal):
        if not self.canaries:
            return
        name = self.canaries.pop()
        self.world.join(name, name)
        answer = self.world.ask(name)
        if answer.lease is not None:
            self.planted[self.world.submit(name, answer.lease, salt=name)] = name
            self.judge_next(judge, Verdict.ACCEPTED if lazy else Verdict.SOFT, signal, "toploc")

    @rule()
    def reveal_canary(self):
        hidden = [name for name in self.planted if name not in self.revealed]
        if hidden:
            open_steps = {step.step for step in self.world.query(list_steps, "open")}
            self.world.reveal(self.planted[hidden[0]], hidden[0])
            if self.world.query(find_submission, hidden[0]).step in open_steps:
                self.revealed.add(hidden[0])
            else:
                del self.planted[hidden[0]]  # its batch is already cut, with it or without it

    @rule(node=st.sampled_from(sorted(WORKERS)))
    def leave_and_return(self, node):
        with contextlib.suppress(ApiError):
            self.world.run(self.world.coordinator.leave(self.world.id(node)))
            self.world.join(node, WORKERS[node])

    @precondition(lambda self: self.world.coordinator.ledger.size > 40)
    @rule()
    def start_again(self):
        before = self.list_answers()
        self.world.restart()
        assert self.list_answers() == before

    @invariant()
    def room_adds_up(self):
        self.world.query(check_room)

    @invariant()
    def postings_sum_to_zero(self):
        assert sum(amount for _, amount in self.read(_BALANCES)) == 0

    @invariant()
    def every_index_is_in_one_span_and_held_as_often_as_it_says(self):
        holders = Counter(tuple(row[:2]) for row in (*self.read(_ACTIVE), *self.read(_WAITING)))
        groups = Counter(tuple(row[:2]) for row in self.read(_GROUPS))
        next_index = Counter()
        for step, first, count, state, held, submission in self.read(_SPANS):
            assert next_index[step] == first, "a gap, or an overlap"
            next_index[step] += count
            assert held == holders[step, first]
            assert (state == "leased") == (held > 0), "a range without holders is offered"
            assert (state in ("delivered", "accepted")) == bool(submission)
            assert all(groups[step, first + place] == (state == "accepted") for place in range(count))

    @invariant()
    def no_step_has_more_on_its_way_than_it_needs(self):
        for step in self.world.query(list_steps, "open"):
            assert step.signal + step.on_their_way <= SETTINGS["groups_per_batch"]

    @invariant()
    def steps_count_their_groups_right_and_train_on_a_whole_batch_or_none(self):
        counts, batched = Counter(), Counter()
        for step, _, count, state, _, _ in self.read(_SPANS):
            counts[step, state] += count
        for step, _, signal, in_batch in self.read(_GROUPS):
            counts[step, "signal" if signal else "dull"] += 1
            batched[step] += in_batch
        for step, state, *numbers in self.read(_STEPS):
            assert numbers == [counts[step, name] for name in ("leased", "offered", "delivered", "signal", "dull")]
            assert batched[step] == (0 if state == "open" else SETTINGS["groups_per_batch"])

    @invariant()
    def what_the_indexes_of_the_queue_and_of_credit_go_by_is_right(self):
        assert self.read(_WRONG_JOBS) == []
        more = self.world.coordinator.params.hold_submissions
        with self.world.coordinator.ledger.read() as connection:
            assert connection.execute(_WRONG_HOLDS, {"more": more}).all() == []

    @rule(more=st.integers(0, 3))
    def change_what_is_enough(self, more):
        self.world.change(hold_submissions=more)

    @invariant()
    def nobody_is_paid_while_banned(self):
        balances = dict(tuple(row) for row in self.read(_BALANCES))
        banned = {target for (target,) in self.read(_BANNED)}
        for owner in (*OWNERS, *JUDGES):
            public = self.world.owner_id(owner)
            held = sum(balances.get(f"{kind}:{public}", 0) for kind in (*ACCOUNT_KINDS, "redeeming"))
            if public not in banned:
                self.frozen.pop(owner, None)
                continue
            free = balances.get(f"avail:{public}", 0) + balances.get(f"redeeming:{public}", 0)
            most = self.frozen.setdefault(owner, (held, free))
            assert held <= most[0] and free <= most[1]

    def teardown(self):
        if not hasattr(self, "world"):
            return
        try:
            self.finish_run()
            report = self.world.verify()
            assert report.holds, report.findings
        finally:
            self.world.close()
            self.folder.cleanup()

    def finish_run(self):
        """Time ends all open work; then a new owner and honest judges finish the run, although a cheat interferes."""
        world = self.world
        for judge in JUDGES:
            self.order(False, world.owner_id(judge))
        for _ in range(3):
            world.wait(4000)  # limits of validators end too
        assert self.read(_ACTIVE) == [] and self.read(_WAITING) == []
        assert [number for (number,) in self.read(_TRANSIENT)] == [0, 0], "time ends claims and limits too"
        for judge in JUDGES:
            world.join(judge, judge, scopes={Scope.VALIDATE})
        for node, owner in (("honest", "dora"), ("m1", "mallory")):
            world.join(node, owner)
        for _ in range(600):
            self.attack_once(next(self.plan))
            self.judge_honestly()
            step = world.coordinator.cache.newest_version + 1
            if step > SETTINGS["steps"]:
                break
            if world.cut(step).batch is not None:
                world.train(step)
            elif (answer := world.ask("honest")).lease is not None:
                world.submit("honest", answer.lease)
            else:
                world.wait(100)
        assert world.coordinator.cache.finished, world.coordinator.read_status()
        world.wait(4000)
        self.judge_honestly()
        assert self.read(_OPEN)[0][0] == 0
        honest = world.query(find_owner, world.owner_id("dora"))
        assert honest.rejected == 0, "nobody can make an honest worker look like a cheat"

    def judge_honestly(self):
        world = self.world
        for judge in JUDGES:
            while (job := world.claim(judge).job) is not None:
                is_bad = self.is_copy(job) or job.submission in self.planted or job.submission in self.rubbish
                world.post(judge, world.describe_verdict(job, Verdict.SOFT if is_bad else Verdict.ACCEPTED))

    def is_copy(self, job):
        """Whether real validators would see a copy of earlier or later work. In the second case the coordinator
        knows of no duplicate yet, but the rollouts do not belong to the tasks of their place."""
        return bool(job.duplicates) or job.submission in self.copies

    def attack_once(self, attack):
        """Cost others time, and itself as little as possible."""
        world = self.world
        with contextlib.suppress(ApiError):
            lease = world.ask("m1").lease
            if lease is None:
                return
            match attack:
                case "return":
                    world.run(world.coordinator.return_lease(world.id("m1"), lease.lease))
                case "leave":
                    world.run(world.coordinator.leave(world.id("m1")))
                    world.join("m1", "mallory")
                case "only commit":
                    world.commit("m1", world.make_manifest(lease, size=limit_lease_file(world.params, lease.count)))
                case "copy":
                    world.commit("m1", world.make_manifest(lease, rollouts=self.guess_rollouts(lease)))
                case "rubbish":
                    self.rubbish.add(world.submit("m1", lease, salt="rubbish"))

    def guess_rollouts(self, lease):
        """What an honest worker will submit for other groups of the step: a group is a function of its place."""
        other = lease.model_copy(update={"first": 0 if lease.first else lease.count})
        return self.world.make_manifest(other).rollouts

    def list_answers(self):
        world = self.world
        members = {node: world.coordinator.find_member(world.id(node)) for node in WORKERS}
        standings = dict(world.coordinator.cache.standings)
        records = {owner: world.coordinator.cache.has_record(owner) for owner in standings}
        beats = {}
        for node in WORKERS:
            with contextlib.suppress(ApiError):  # it left
                beats[node] = world.coordinator.heartbeat(world.id(node), Heartbeat()).newest_version
        leases = set(world.coordinator.cache.leases)
        return members, standings, records, beats, leases, world.coordinator.read_leaders()

    def read(self, statement):
        with self.world.coordinator.ledger.read() as connection:
            return connection.execute(statement).all()


@pytest.mark.parametrize("max_examples", [8])
def test_anything_in_any_order_keeps_the_rules_and_can_be_finished(world, migrated, max_examples):
    class OnFile(Swarm):
        world_type = type(world)

        def make_url(self):
            return f"sqlite:///{shutil.copy(migrated, self.folder.name)}"

    run_state_machine_as_test(OnFile, settings=settings(max_examples=max_examples, stateful_step_count=40))


def test_the_same_on_postgresql(world, make_database):
    class OnServer(Swarm):
        world_type, make_url = type(world), staticmethod(make_database)

    run_state_machine_as_test(OnServer, settings=settings(max_examples=2, stateful_step_count=25))
