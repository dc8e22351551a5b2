"""Canaries: like other new owners until they are revealed; then validators that accepted their bad work are found."""

import hashlib
import json
import re

import pytest

from shoal.coordinator.state.canaries import find_sealed, list_grades
from shoal.coordinator.state.leases import find_range
from shoal.coordinator.state.members import find_owner
from shoal.coordinator.state.run import find_step
from shoal.coordinator.state.submissions import find_submission
from shoal.identity.keys import Key
from shoal.ledger.reader import read_events
from shoal.net.api_error import ApiError
from shoal.protocol.beacon import make_seal, sign_seal
from shoal.protocol.messages import Action, CanaryReveal, Heartbeat, Standing, SubmissionState, Verdict

SIGNATURE = re.compile(r"[0-9a-f]{128}")


@pytest.fixture
def planted(world):
    """A run with a canary: node c1 of the owner canary."""
    world.seal("canary", "spare")
    world.join("c1", "canary")
    return world


def state_of(world, submission):
    return world.query(find_submission, submission).state


def grades_of(world, owner="canary"):
    return [(row.submission, row.state) for row in world.query(list_grades, world.owner_id(owner))]


def read_accounts(world, owner):
    return {kind: world.balance(kind, owner) for kind in ("stake", "pending", "avail", "unbond")}


def live_through(world, sealed):
    """A new owner's first days, as everyone sees them; `sealed` is the owner that the operator has sealed."""
    seen = [world.seal(sealed)]
    seen += [world.join("new", "newcomer"), world.coordinator.heartbeat(world.id("new"), Heartbeat(role="worker"))]
    for verdicts in ([Verdict.ACCEPTED], [Verdict.SOFT], [Verdict.HARD, Verdict.ACCEPTED, Verdict.SOFT]):
        lease = world.ask("new")
        manifest = world.make_manifest(lease.lease)
        committed = world.commit("new", manifest)
        seen += [lease, committed, world.upload("new", committed.submission, lease.lease.lease.encode())]
        for judge, verdict in zip(("judge-a", "judge-b", "judge-c"), verdicts, strict=False):
            seen.append(world.claim(judge))
            seen.append(world.post(judge, world.describe_verdict(seen[-1].job, verdict)))
        seen.append(world.coordinator.explain(committed.submission))
    seen += [world.coordinator.read_status(), *world.query(lambda connection: list(read_events(connection, 0, 10_000)))]
    leaders = sorted(show_item(world, line) for line in world.coordinator.read_leaders())  # ties are ordered by key
    return [*(show_item(world, item) for item in seen), *leaders]


def show_item(world, item):
    """The content of a message or event, with names for keys and without signatures and what depends on them."""
    if isinstance(item, str):
        text = item
    elif hasattr(item, "postings"):
        body = json.loads(item.body)
        body.pop("digest", None)
        body.pop("seals", None)
        fields = {name: getattr(item, name) for name in ("seq", "time_ms", "kind", "actor", "subject")}
        text = json.dumps({**fields, "body": body, "postings": item.postings, "signed": bool(item.signature)})
    else:
        text = item.model_dump_json()
    names = {key.public: name for keys in (world.owners, world.nodes) for name, key in keys.items()}
    names |= {world.key.public: "coordinator", world.operator.public: "operator"}
    for public, name in names.items():
        text = text.replace(public, name).replace(public[:8], name)
    return SIGNATURE.sub("signature", text)


def test_nothing_anywhere_differs_between_a_canary_and_an_honest_newcomer(make_world):
    """Two runs, in one of which the new owner is sealed: every answer, every job and every event is the same."""
    stories = []
    for sealed in ("newcomer", "nobody"):
        world = make_world(groups_per_batch=4)
        world.publish(0)
        stories.append(live_through(world, sealed))
    canary, honest = stories
    assert len(canary) > 60
    for one, other in zip(canary, honest, strict=True):
        assert one == other


def test_a_canary_that_is_rejected_is_caught_and_nobody_is_blamed(planted):
    submission = planted.work("c1", Verdict.SOFT)
    answer = planted.reveal("canary", submission)
    assert [(grade.submission, grade.state, grade.missed_by) for grade in answer.grades] == [(submission, "caught", ())]
    assert planted.coordinator.read_status().alarms == ()
    assert planted.balance("mint", "") == 0
    assert planted.claim("judge-a").job is None, "an honest validator may continue to judge"
    assert "a canary, known to be bad; it was rejected." in planted.coordinator.explain(submission)
    counts = planted.coordinator.cache.canaries
    assert counts == {"caught": 1, "missed": 0, "unseen": 0, "passed": 0, "wronged": 0}
    with pytest.raises(ApiError, match="banned"):
        planted.ask("c1")


def test_who_accepts_a_canary_is_found_and_its_work_is_not_trained_on(both_world):
    world = both_world
    world.seal("canary")
    world.join("c1", "canary")
    submission = world.work("c1")
    first = world.query(find_submission, submission).first
    world.work("w1")
    assert world.cut(2).batch is None and world.balance("stake", "canary") == 2000
    world.reveal("canary", submission)
    assert state_of(world, submission) == SubmissionState.VOID
    assert read_accounts(world, "canary") == {"stake": 0, "pending": 0, "avail": 0, "unbond": 0}
    assert world.balance("burn", "") == 2000
    (alarm,) = world.coordinator.read_status().alarms
    judge = world.id("judge-a")
    assert alarm.startswith(f"{submission} of a canary was accepted by validator {judge[:8]}: it lies, or")
    assert f"accepted by validator {judge}." in world.coordinator.explain(submission)
    with pytest.raises(ApiError, match="may not judge"):
        world.claim("judge-a")
    step = world.query(find_step, 1)
    assert (step.signal, step.offered, step.dull) == (1, 1, 0), "the canary's group is missing again"
    assert world.cut(1).batch is None
    lease = world.lease("w2")
    assert (lease.step, lease.first) == (1, first), "and is offered again"
    again = world.submit("w2", lease)
    world.judge("judge-b")
    batch = world.cut(1).batch
    assert submission not in [entry.submission for entry in batch.groups]
    assert again in [entry.submission for entry in batch.groups]


def test_a_canary_that_is_revealed_after_the_cut_is_named_with_the_step_that_has_it(planted):
    submission = planted.work("c1")
    planted.work("w1")
    planted.train(1)
    (grade,) = planted.reveal("canary", submission).grades
    assert (grade.state, grade.trained) == ("missed", 1)
    assert state_of(planted, submission) == SubmissionState.ACCEPTED, "the batch cannot change"
    assert planted.coordinator.read_status().alarms[0].endswith("; step 1 was trained on it")
    assert "and step 1 was trained on it" in planted.coordinator.explain(submission)
    assert planted.balance("stake", "canary") == 0


def test_groups_without_a_signal_are_not_trained_on_and_stay_done(planted):
    submission = planted.work("c1", signal=False)
    (grade,) = planted.reveal("canary", submission).grades
    assert (grade.state, grade.trained) == ("missed", 0)
    row = planted.query(find_submission, submission)
    assert row.state == SubmissionState.VOID
    assert planted.query(find_range, row.step, row.first).state == "accepted"


def test_what_a_canary_did_well_stands_and_what_it_has_begun_is_void(make_world):
    world = make_world(groups_per_batch=9, stake_submissions=1, raise_after=1)
    world.seal("canary")
    world.join("c1", "canary")
    world.publish(0)
    honest, bad = world.work("c1"), world.work("c1", Verdict.SOFT)
    queued = world.submit("c1", world.lease("c1"))
    held = world.lease("c1")
    world.wait(world.params.challenge_s)
    answer = world.reveal("canary", bad, queued)
    assert [(grade.submission, grade.state) for grade in answer.grades] == [(bad, "caught"), (queued, "unseen")]
    states = [state_of(world, name) for name in (honest, bad, queued)]
    assert states == [SubmissionState.ACCEPTED, SubmissionState.SOFT, SubmissionState.VOID]
    assert world.coordinator.read_status().alarms == (), "its honest work was accepted rightly"
    assert held.lease not in world.coordinator.cache.leases
    assert set(read_accounts(world, "canary").values()) == {0} and world.balance("burn", "") == 2000


def test_credit_of_a_canary_is_burned_wherever_it_is(make_world):
    world = make_world(groups_per_batch=9, stake_submissions=1, hold_submissions=0)
    world.seal("canary")
    world.join("c1", "canary")
    world.publish(0)
    for _ in range(2):
        world.work("c1")
    world.wait(world.params.challenge_s)
    world.unbond("canary")
    world.work("c1")
    world.work("c1")
    assert read_accounts(world, "canary") == {"stake": 2000, "pending": 2000, "avail": 2000, "unbond": 2000}
    world.reveal("canary")
    assert set(read_accounts(world, "canary").values()) == {0} and world.balance("burn", "") == 8000
    world.order(Action.UNBAN, target=world.owner_id("canary"))
    world.wait(world.params.unbond_s + world.params.hold_max_s)
    assert set(read_accounts(world, "canary").values()) == {0}, "and nothing is returned"


def test_who_accepts_a_canary_loses_its_bond_to_nobody(make_world):
    world = make_world(verdict_price=7, stake_submissions=2, groups_per_batch=9)
    world.seal("canary")
    world.join("w1", "ann")
    world.join("c1", "canary")
    world.publish(0)
    for _ in range(3):
        world.work("w1")
    assert read_accounts(world, "judge-a") == {"stake": 14, "pending": 7, "avail": 0, "unbond": 0}
    before = world.balance("treasury", "")
    world.reveal("canary", world.work("c1"))
    assert read_accounts(world, "judge-a") == {"stake": 0, "pending": 14, "avail": 0, "unbond": 0}
    assert (world.balance("burn", ""), world.balance("treasury", "")) == (14 + 2000, before)
    owner = world.query(find_owner, world.owner_id("judge-a"))
    assert (owner.standing, owner.staked) == (Standing.LIMITED, 0)
    world.wait(world.params.challenge_s)
    assert read_accounts(world, "judge-a")["avail"] == 14, "other earnings are not taken"


def test_every_opinion_on_a_canary_is_graded_whatever_came_of_it(make_world):
    world = make_world(verdict_price=7, stake_submissions=9, groups_per_batch=9)
    world.seal("canary")
    world.join("w1", "ann")
    world.join("c1", "canary")
    world.publish(0)
    for judge in ("judge-a", "judge-b", "judge-c"):
        world.submit("w1", world.lease("w1"))
        world.judge(judge)
    submission = world.work("c1", Verdict.HARD)
    world.judge("judge-b")
    world.judge("judge-c", Verdict.HARD)
    assert state_of(world, submission) == SubmissionState.HARD
    (grade,) = world.reveal("canary", submission).grades
    assert (grade.state, grade.missed_by) == ("missed", (world.id("judge-b"),))
    assert [world.balance("stake", judge) for judge in ("judge-a", "judge-b", "judge-c")] == [14, 0, 14]


def test_a_ban_of_a_validator_is_not_lifted_by_its_mistake(planted):
    submission = planted.work("c1")
    planted.order(Action.BAN, target=planted.owner_id("judge-a"))
    planted.reveal("canary", submission)
    assert planted.query(find_owner, planted.owner_id("judge-a")).standing == Standing.BANNED


def test_a_canary_is_revealed_once_and_the_same_command_gets_the_first_answer(planted):
    submission = planted.work("c1")
    first = planted.reveal("canary", submission, nonce="a" * 32)
    planted.restart()
    assert planted.reveal("canary", submission, nonce="a" * 32) == first and first.grades[0].state == "missed"
    assert planted.coordinator.cache.canaries["missed"] == 1
    with pytest.raises(ApiError, match="already revealed"):
        planted.reveal("canary", submission)
    assert grades_of(planted) == [(submission, "missed")]


def test_an_owner_not_sealed_before_it_joined_cannot_be_a_canary(planted):
    with pytest.raises(ApiError, match="was not sealed"):
        planted.reveal("ann")
    planted.seal("ann")
    with pytest.raises(ApiError, match="joined before it was sealed"):
        planted.reveal("ann")
    with pytest.raises(ApiError, match="did not join"):
        planted.reveal("spare")
    assert planted.query(find_owner, planted.owner_id("ann")).standing == Standing.PROBATION


def test_a_seal_is_opened_by_its_owners_key_alone(planted):
    owner = planted.owner_id("canary")
    forged = [sign_seal(planted.operator, "demo"), sign_seal(planted.owners["canary"], "other"), "0" * 128]
    for signature in forged:
        canary = CanaryReveal(signature=signature, submissions=())
        with pytest.raises(ApiError, match="was not sealed"):
            planted.order(Action.CANARY_REVEAL, target=owner, canary=canary)
    with pytest.raises(ApiError, match="invalid signature"):
        planted.reveal("canary", key=planted.owners["ann"])


def test_an_operator_cannot_seal_a_stranger_whose_key_is_known(world):
    """A seal made with another owner's key cannot be opened without that owner's signature."""
    stranger = Key.generate()
    world.owners["stranger"] = stranger
    seal = hashlib.sha256(b"shoal-canary-1\n" + bytes.fromhex(stranger.public) + bytes(64)).hexdigest()
    world.order(Action.CANARY_SEAL, seals=(seal,))
    world.join("s1", "stranger")
    canary = CanaryReveal(signature="00" * 64, submissions=())
    with pytest.raises(ApiError, match="was not sealed"):
        world.order(Action.CANARY_REVEAL, target=stranger.public, canary=canary)


def test_a_canary_is_revealed_with_its_own_submissions(planted):
    others = planted.work("w1")
    for names in ([others], ["s999"]):
        with pytest.raises(ApiError, match="must belong to its owner"):
            planted.reveal("canary", *names)
    own = planted.work("c1", Verdict.SOFT)
    with pytest.raises(ApiError, match="without duplicates"):
        planted.reveal("canary", own, own)
    with pytest.raises(ApiError, match="what opens its seal"):
        planted.order(Action.CANARY_REVEAL, target=planted.owner_id("canary"))
    assert grades_of(planted) == []


def test_seals_are_new_and_reveal_nothing(world):
    key = Key.generate()
    seal = make_seal(key, "demo")
    assert world.query(find_sealed, seal) is None
    number = world.order(Action.CANARY_SEAL, seals=(seal,)).seq
    assert world.query(find_sealed, seal) == (seal, number, "")
    assert make_seal(key, "other") != seal and key.public not in seal
    for seals in ((seal,), (make_seal(Key.generate(), "demo"), seal)):
        with pytest.raises(ApiError, match="already recorded"):
            world.order(Action.CANARY_SEAL, seals=seals)
    for seals in ((), ("f" * 64, "f" * 64)):
        with pytest.raises(ApiError, match="at least one seal"):
            world.order(Action.CANARY_SEAL, seals=seals)


def test_a_canary_does_not_appeal(planted):
    early = planted.work("c1", Verdict.SOFT)
    planted.appeal("canary", early)
    with pytest.raises(ApiError, match="an appeal of this owner is open"):
        planted.reveal("canary", early)
    planted.judge("judge-b", Verdict.SOFT)
    planted.wait(1)
    late = planted.work("c1", Verdict.SOFT)
    planted.reveal("canary", early, late)
    with pytest.raises(ApiError, match="was a canary"):
        planted.appeal("canary", late)
    assert grades_of(planted) == [(early, "caught"), (late, "caught")]


def test_silence_of_the_canaries_is_an_alarm(planted):
    planted.change(canary_every_s=60)
    planted.wait(61)
    (alarm,) = planted.coordinator.read_status().alarms
    assert alarm == "no canary was caught for 61 s; plant one: shoal canary plant"
    planted.reveal("canary", planted.convict("c1"))
    assert planted.coordinator.read_status().alarms == ()
