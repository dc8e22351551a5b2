"""Standing under any order of events: what the ledger of a run must never contain."""

import contextlib
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from shoal.coordinator.rules.standing import MOVES
from shoal.coordinator.state.submissions import find_submission
from shoal.identity.delegation import sign_revocation
from shoal.ledger.event import EventKind
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.messages import Action, Standing, Verdict

OWNERS = ("ann", "bob")
NODES = {"a1": "ann", "a2": "ann", "b1": "bob"}
JUDGES = ("judge-a", "judge-b", "judge-c")
CANARIES = tuple(f"canary-{number}" for number in range(8))
SETTINGS = {
    "steps": 1,
    "async_level": 0,
    "groups_per_batch": 500,
    "group_size": 1,
    "probation_leases": 64,
    "max_width": 64,
    "good_after": 2,
    "trusted_after": 4,
    "limit_after": 2,
    "stake_submissions": 1,
    "slash_share": 500_000,
    "limited_s": 50,
}


class OwnerStandingMachine(RuleBasedStateMachine):
    """Owners that work, cheat, are banned, leave, rejoin, appeal and redeem."""

    world_type = None

    @initialize()
    def begin(self):
        memory = Path("/dev/shm")
        self.folder = TemporaryDirectory(prefix="shoal-", dir=memory if memory.is_dir() else None)
        self.world = type(self).world_type(f"sqlite:///{self.folder.name}/run.db", **SETTINGS)
        for node, owner in NODES.items():
            self.world.join(node, owner)
        self.world.publish(0)
        self.rejected = []
        self.world.seal(*CANARIES)
        self.canaries, self.planted = list(CANARIES), []

    @rule(node=st.sampled_from(sorted(NODES)), verdict=st.sampled_from([Verdict.ACCEPTED, *Verdict]))
    def work(self, node, verdict):
        with contextlib.suppress(ApiError):
            answer = self.world.ask(node)
            if answer.lease is not None:
                submission = self.world.submit(node, answer.lease, salt=str(self.world.coordinator.ledger.size))
                self.judge_all(submission, verdict)

    @rule(node=st.sampled_from(sorted(NODES)))
    def only_deliver(self, node):
        with contextlib.suppress(ApiError):
            answer = self.world.ask(node)
            if answer.lease is not None:
                self.world.submit(node, answer.lease, salt=str(self.world.coordinator.ledger.size))

    @rule(lazy=st.sampled_from(JUDGES), others=st.booleans())
    def plant_canary(self, lazy, others):
        """Bad work that one validator accepts; either first, or after others doubted it."""
        if not self.canaries:
            return
        name = self.canaries.pop()
        self.world.join(name, name)
        with contextlib.suppress(ApiError):
            submission = self.world.submit(name, self.world.lease(name), salt=name)
            self.planted.append((name, submission, lazy))
            order = [judge for judge in JUDGES if judge != lazy] if others else []
            for judge in (*order[:1], lazy, *order[1:]):
                self.judge_next(judge, Verdict.ACCEPTED if judge == lazy else Verdict.HARD)

    @rule(ban=st.booleans())
    def reveal_canary(self, ban):
        """The validator may already be banned for another reason."""
        if self.planted:
            name, submission, lazy = self.planted.pop(0)
            if ban:
                self.world.order(Action.BAN, target=self.world.owner_id(lazy))
            with contextlib.suppress(ApiError):
                self.world.reveal(name, submission)

    @rule(owner=st.sampled_from([*OWNERS, *JUDGES]), lift=st.booleans())
    def order_ban(self, owner, lift):
        self.order(lift, self.world.owner_id(owner))

    @rule(node=st.sampled_from(sorted(NODES)), lift=st.booleans())
    def order_ban_of_node(self, node, lift):
        self.order(lift, self.world.id(node))

    def order(self, lift, target):
        with contextlib.suppress(ApiError):  # only a ban that exists can be lifted
            self.world.order(Action.UNBAN if lift else Action.BAN, target=target)

    @rule(node=st.sampled_from(sorted(NODES)), new=st.booleans())
    def come_back(self, node, new):
        with contextlib.suppress(ApiError):
            self.world.run(self.world.coordinator.leave(self.world.id(node)))
        with contextlib.suppress(ApiError):
            self.world.join(f"{node} again" if new else node, NODES[node])

    @rule(node=st.sampled_from(["a2"]))
    def revoke(self, node):
        with contextlib.suppress(ApiError):
            document = sign_revocation(self.world.owners[NODES[node]], self.world.id(node), "demo")
            self.world.run(self.world.coordinator.revoke(document))

    @rule(right=st.booleans())
    def appeal(self, right):
        if self.rejected:
            submission = self.rejected.pop(0)
            public = self.world.query(find_submission, submission).owner
            owner = next(name for name, key in self.world.owners.items() if key.public == public)
            with contextlib.suppress(ApiError):
                self.world.appeal(owner, submission)
                self.judge_all(submission, Verdict.ACCEPTED if right else Verdict.HARD)

    @rule(owner=st.sampled_from(OWNERS), fails=st.booleans())
    def redeem(self, owner, fails):
        with contextlib.suppress(ApiError):
            request = self.world.redeem(owner, 100).request
            if fails:
                self.world.order(Action.REDEEM_FAILED, request=request)

    @rule(node=st.sampled_from(sorted(NODES)))
    def unbond(self, node):
        with contextlib.suppress(ApiError):
            self.world.unbond(NODES[node])

    @rule(seconds=st.sampled_from([10, 60, 600, 4000]))
    def pass_time(self, seconds):
        self.world.wait(seconds)

    def judge_all(self, submission, verdict):
        for judge in JUDGES:
            self.judge_next(judge, verdict)

    def judge_next(self, judge, verdict):
        with contextlib.suppress(ApiError):
            job = self.world.claim(judge).job
            if job is not None:
                answer = self.world.post(judge, self.world.describe_verdict(job, verdict))
                if answer.record.state.startswith("rejected"):
                    self.rejected.append(job.submission)

    def teardown(self):
        if hasattr(self, "world"):
            try:
                audit_events(self.world.query(lambda connection: list(read_events(connection, 0, 10**6))))
                assert self.world.verify().holds
            finally:
                self.world.close()
                self.folder.cleanup()


def audit_events(events):
    """Walk over a ledger: only an unban ends a ban, and meanwhile its owner gains nothing by any event."""
    standing, banned = {}, set()
    for event in events:
        content = event.content
        match event.kind:
            case EventKind.NODE_JOIN:
                owner = content["owner"]
                assert owner not in banned and event.subject not in banned
                standing.setdefault(owner, Standing.PROBATION)
            case EventKind.NODE_STANDING:
                old, new = standing[event.subject], Standing(content["standing"])
                assert old is not Standing.BANNED and new in MOVES[old]
                standing[event.subject] = new
            case EventKind.BAN:
                banned.add(content["target"])
                standing[content["target"]] = Standing.BANNED
            case EventKind.UNBAN:
                if content["target"] in banned:
                    banned.discard(content["target"])
                    standing[content["target"]] = Standing.PROBATION
            case EventKind.LEASE_GRANT | EventKind.SUB_RECEIPT:
                assert content["owner"] not in banned
        assert sum(posting.amount for posting in event.postings) == 0
        for owner in banned:
            gains = [posting.amount for posting in event.postings if posting.account.endswith(owner)]
            assert sum(gains) <= 0, f"event {event.seq}: paid while banned"


def test_only_an_unban_leads_from_banned_to_paid(world):
    OwnerStandingMachine.world_type = type(world)
    run_state_machine_as_test(OwnerStandingMachine, settings=settings(max_examples=12, stateful_step_count=30))
