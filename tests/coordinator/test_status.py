"""What everyone can see: status, waits, explanations, leaders."""

import pytest

from shoal.coordinator.blobs.base import FullError
from shoal.coordinator.cache import MAX_LISTED, MAX_REPORTED
from shoal.coordinator.coordinator import Coordinator
from shoal.coordinator.decide import leases
from shoal.coordinator.state.leases import find_lease
from shoal.errors import ConfigError
from shoal.ledger.ledger import WriterStoppedError
from shoal.net.api_error import ApiError
from shoal.protocol.messages import (
    MAX_NODES,
    MAX_TOKENS_PER_S,
    Action,
    Finding,
    Heartbeat,
    NodeWait,
    Standing,
    Verdict,
)


def texts(world):
    return [wait.text for wait in world.coordinator.read_status().waits]


def test_a_run_waits_for_v0_first(make_world):
    (text,) = texts(make_world())
    assert text.startswith("the run waits for the trainer to publish v0")


def test_status_shows_who_holds_what_and_who_is_silent(world):
    lease = world.lease("w1")
    world.wait(62)
    status = world.coordinator.read_status()
    assert (status.trained, status.newest_version, status.queue) == (0, 0, 0)
    assert [(step.step, step.accepted, step.leased) for step in status.open_steps] == [(1, 0, 1), (2, 0, 0)]
    assert "step 1 waits for 2 of 2 groups, for 62 s, deadline in 1258 s: " in texts(world)[0]
    assert f": node {world.id('w1')[:8]} has {lease.lease}" in texts(world)[0]
    assert "silent 62 s" in texts(world)[0]
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert "silent" not in texts(world)[0]


def test_a_step_for_which_nothing_arrives_is_overdue_and_any_delivery_gives_it_more_time(world):
    patience_s = 2 * world.params.lease_first_s + world.params.upload_s
    world.wait(patience_s - 10)
    world.submit("w1", world.lease("w1"))
    world.wait(20)
    assert not world.coordinator.read_status().alarms
    world.wait(patience_s)
    alarms = world.coordinator.read_status().alarms
    assert any(alarm.startswith("overdue: step 1 waits for 2 of 2 groups") for alarm in alarms)
    assert not any("step 2" in alarm for alarm in alarms), "it is served after step 1"


def test_liveness_follows_the_last_sign(world):
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (7, 0, 0)
    world.wait(46)
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (1, 6, 0)
    world.wait(75)
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (0, 1, 6)


def test_nodes_that_left_or_were_banned_are_not_missed(world):
    world.run(world.coordinator.leave(world.id("w1")))
    world.order(Action.BAN, target=world.owner_id("bob"))
    world.restart()
    world.wait(world.params.gone_s + 1)
    status = world.coordinator.read_status()
    assert (status.nodes_live, status.nodes_stale, status.nodes_gone) == (0, 0, 4)
    with pytest.raises(ApiError, match="left the run; join again"):
        world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    world.join("w1", "ann")
    world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert world.coordinator.read_status().nodes_live == 1


def test_status_names_the_queue_the_cut_and_the_training(world):
    world.submit("w1", world.lease("w1"))
    assert any("the queue waits for validators to judge 1 submission, for" in text for text in texts(world))
    world.judge("judge-a")
    world.work("w1")
    assert any("step 1 waits for the trainer to assemble the batch" in text for text in texts(world))
    world.cut(1)
    assert any("step 1 waits for the trainer to publish v1" in text for text in texts(world))


def test_status_shows_what_nodes_wait_for_and_which_fell_silent(world):
    wait = NodeWait(name="weights", for_whom="the relays", since_ms=world.now_ms)
    world.coordinator.heartbeat(world.id("w1"), Heartbeat(role="worker", wait=wait))
    world.coordinator.heartbeat(world.id("judge-a"), Heartbeat(role="validator"))
    world.wait(20)
    name = world.id("w1")[:8]
    assert f"worker {name} waits for the relays: weights, for 20 s" in texts(world)
    assert not any("a heartbeat" in text for text in texts(world))
    world.wait(30)
    assert f"validator {world.id('judge-a')[:8]} waits for a heartbeat, for 50 s" in texts(world)
    assert f"worker {name} waits for a heartbeat, for 50 s" in texts(world)
    world.run(world.coordinator.leave(world.id("w1")))
    assert not any(name in text for text in texts(world))


def test_status_lists_live_nodes_with_the_rates_that_they_report(world):
    world.coordinator.heartbeat(world.id("w1"), Heartbeat(role="worker", version=2, tokens_per_s=1500))
    world.coordinator.heartbeat(world.id("judge-a"), Heartbeat(role="validator", tokens_per_s=40))
    listed = {node.node: node for node in world.coordinator.read_status().nodes}
    assert {name: (node.role, node.version, node.tokens_per_s) for name, node in listed.items()} == {
        world.id("judge-a"): ("validator", -1, 40),
        world.id("w1"): ("worker", 2, 1500),
    }
    cache = world.coordinator.cache
    assert [cache.sum_rates(role, world.now_ms) for role in ("worker", "validator")] == [1500, 40]
    world.wait(46)
    assert world.coordinator.read_status().nodes == () and cache.sum_rates("worker", world.now_ms) == 0


def test_nodes_that_report_most_displace_nobody_from_status(world):
    world.work("w1")
    for number in range(MAX_LISTED + 6):
        world.join(f"evil-{number}", f"mallory {number}")
        beat = Heartbeat(role="trainer", tokens_per_s=MAX_TOKENS_PER_S)
        world.coordinator.heartbeat(world.id(f"evil-{number}"), beat)
    for name in ("w1", "judge-a"):
        world.coordinator.heartbeat(world.id(name), Heartbeat(role="worker", tokens_per_s=1))
    listed = world.coordinator.read_status().nodes
    assert len(listed) == MAX_LISTED
    assert [node.node for node in listed[:2]] == [world.id("judge-a"), world.id("w1")]
    assert [node.role for node in listed] == ["validator", *["worker"] * (MAX_LISTED - 1)]


def test_the_reason_of_a_wait_is_shown_with_it(world):
    wait = NodeWait(name="disk", for_whom="room on its disk", since_ms=world.now_ms, reason="a: No space left")
    world.coordinator.heartbeat(world.id("w1"), Heartbeat(role="worker", wait=wait))
    assert f"worker {world.id('w1')[:8]} waits for room on its disk: disk, for 0 s: a: No space left" in texts(world)


def test_a_role_without_any_live_node_is_named_once(world):
    world.wait(46)
    assert "the run waits for a heartbeat from any validator, for 46 s" in texts(world)
    assert "the run waits for a heartbeat from any trainer, for 46 s" in texts(world)
    world.coordinator.heartbeat(world.id("judge-b"), Heartbeat(role="validator"))
    assert not any("any validator" in text for text in texts(world))


def test_a_full_store_is_reported_until_it_accepts_a_file_again(world, monkeypatch):
    lease = world.lease("w1")
    with monkeypatch.context() as patch:
        patch.setattr(world.coordinator.blobs, "put", refuse_blob)
        with pytest.raises(FullError):
            world.submit("w1", lease)
    world.wait(7)
    assert "the run waits for free space for files on the coordinator's disk, for 7 s" in texts(world)
    world.submit("w1", lease)
    assert not any("free space" in text for text in texts(world))


async def refuse_blob(name, size, chunks):
    raise FullError("the blob store has no space for this blob now; try again later")


def test_what_nobody_judges_becomes_an_alarm(world):
    world.submit("w1", world.lease("w1"))
    world.wait(world.params.opinion_s + 1)
    assert any("validators" in alarm for alarm in world.coordinator.read_status().alarms)


def test_offers_that_nobody_takes_are_named(world):
    world.work("w1", Verdict.SOFT)
    assert any("a worker to take 1 offered group" in text for text in texts(world))


def test_a_stopped_run_waits_for_its_operator_and_for_no_groups(world):
    world.run(world.coordinator.return_lease(world.id("w1"), world.lease("w1").lease))
    world.order(Action.STOP)
    world.wait(10**4)
    assert not any("groups" in text or "offered" in text for text in texts(world))
    assert "the run waits for the operator to resume it, for 10000 s" in texts(world)
    world.order(Action.RESUME)
    assert any("a worker to take 1 offered group" in text for text in texts(world))


def test_no_wait_of_a_node_is_overdue_while_the_operator_has_stopped_the_run(world):
    wait = NodeWait(name="batch", for_whom="the groups of step 1", since_ms=world.now_ms, deadline_ms=world.now_ms + 1)
    world.coordinator.heartbeat(world.id("trainer"), Heartbeat(role="trainer", wait=wait))
    world.wait(20)
    world.order(Action.STOP)
    assert not any("past its deadline" in text for text in texts(world))
    world.order(Action.RESUME)
    assert any("batch, for 20 s, 20 s past its deadline" in text for text in texts(world))


def test_credit_to_pay_out_is_shown_as_waiting_for_the_operator(world):
    world.work("w1")
    world.work("w1")
    world.wait(world.params.challenge_s)
    world.redeem("ann", 700, "a" * 32)
    world.wait(62)
    owner = world.owner_id("ann")[:8]
    start = f"owner {owner} waits for the operator to pay out 700 micro-credits, for 62 s: shoal admin redeemed or "
    assert f"{start}unredeemed, request {'a' * 32}" in texts(world)
    for number in range(10):
        world.redeem("ann", 1, f"{number:032x}")
    waiting = [text for text in texts(world) if "pay out" in text]
    assert len(waiting) == 9 and waiting[-1].startswith("3 more waits for the operator to pay out")
    for request in ("a" * 32, *(f"{number:032x}" for number in range(10))):
        world.order(Action.REDEEM_DONE, request=request)
    assert not any("pay out" in text for text in texts(world))


def test_nobody_waits_for_a_banned_owner(world):
    world.coordinator.heartbeat(world.id("w1"), Heartbeat(role="worker"))
    world.wait(50)
    name = world.id("w1")[:8]
    assert f"worker {name} waits for a heartbeat, for 50 s" in texts(world)
    world.order(Action.BAN, target=world.owner_id("ann"))
    assert not any(name in text for text in texts(world))


def test_a_finished_run_waits_for_nothing(make_world):
    world = make_world(steps=1, groups_per_batch=1)
    world.join("w1", "ann")
    world.publish(0)
    world.work("w1")
    world.train(1)
    status = world.coordinator.read_status()
    assert status.finished and status.waits == ()
    assert world.coordinator.heartbeat(world.id("w1"), Heartbeat()).finished


def test_a_submission_is_explained_with_numbers_and_postings(world):
    submission = world.convict("w1")
    text = world.coordinator.explain(submission)
    for part in (
        "rejected_hard",
        "toploc: 0.5, threshold 0.25 at rollout 1: FAILED",
        world.id("judge-b"),
        "failed: toploc",
        "Two validators found it faked, so its owner was banned.",
        "  the same findings as in round 1",
        "Its owner may appeal until 2023-11-21 22:13 UTC, but not now: an appeal takes 2 validator owners that did not "
        "judge it yet, and only 1 of the run's 3 validator owners is available",
    ):
        assert part in text
    assert text.count("toploc: 0.5") == 1
    first, second = world.coordinator.list_findings(submission)
    assert first == "round 1: toploc: 0.5, threshold 0.25 at rollout 1: FAILED"
    assert second == "round 2: the same 1 value as in round 1"
    world.work("w2")
    accepted = world.work("w2")
    text = world.coordinator.explain(accepted)
    assert f"pending:{world.owner_id('bob')}: +2000 micro-credits (+0.002000), pay held until" in text
    assert "appeal" not in text
    with pytest.raises(ConfigError, match="no such submission"):
        world.coordinator.explain("s999")


def test_an_appeal_that_is_possible_is_explained_with_its_command(world):
    submission = world.work("w1", Verdict.SOFT)
    until = "Its owner may appeal until 2023-11-21 22:13 UTC"
    assert f"{until}: shoal owner appeal URL {submission} --owner FILE" in world.coordinator.explain(submission)


def test_many_findings_of_a_check_are_one_line_with_the_worst_and_a_count(world):
    submission = world.submit("w1", world.lease("w1"))
    said = world.describe_verdict(world.take("judge-a"), Verdict.SOFT)
    values = [("logprob", f"0.{value}", value < 3, f"g31.{value}") for value in range(1, 10)]
    values += [("toploc", "0.1", True, "g31.1"), ("toploc", "0.2", True, "g31.2")]
    findings = [
        Finding(check=check, statistic=number, threshold="0.25", passed=passed, where=where)
        for check, number, passed, where in values
    ]
    world.post("judge-a", said.model_copy(update={"findings": tuple(findings)}))
    text = world.coordinator.explain(submission)
    shown = [line for line in text.splitlines() if "threshold" in line]
    assert shown == [
        "  logprob: 0.9, threshold 0.25 at g31.9: FAILED, the worst; 7 of 9 failed",
        "  toploc: 0.2, threshold 0.25 at g31.2: passed, the worst; all 2 passed",
    ]
    assert "rejected_soft, failed: logprob; paid 0" in text, "each check is named once"
    every = world.coordinator.list_findings(submission)
    assert len(every) == 11 and every[0] == "round 1: logprob: 0.1, threshold 0.25 at g31.1: passed"


def test_a_rejection_is_in_the_answers_to_the_nodes_heartbeats(world):
    names = [world.work("w1", Verdict.SOFT) for _ in range(2)]
    world.work("w1")
    answer = world.coordinator.heartbeat(world.id("w1"), Heartbeat())
    assert [(notice.submission, notice.because) for notice in answer.rejected] == [
        (name, "failed: toploc") for name in names
    ]
    assert world.coordinator.heartbeat(world.id("w2"), Heartbeat()).rejected == ()


def test_an_account_shows_where_the_credit_of_an_owner_is(world):
    for _ in range(2):
        world.work("w2")
    account = world.coordinator.read_account(world.owner_id("bob"))
    assert account is not None and (account.accepted, account.earned) == (2, 4000)
    assert (account.stake, account.pending, account.avail) == (2000, 2000, 0)
    world.wait(101)
    account = world.coordinator.read_account(world.owner_id("bob"))
    assert account is not None and (account.stake, account.pending, account.avail) == (2000, 0, 2000)
    assert world.coordinator.read_account("0" * 64) is None


def test_leaders_are_those_with_the_most_accepted_tokens(world):
    world.work("w2")
    world.work("w2")
    world.work("w1")
    first, second = world.coordinator.read_leaders(2)
    assert (first.owner, first.tokens, second.owner) == (world.owner_id("bob"), 400, world.owner_id("ann"))


def test_leaders_show_what_their_nodes_may_do(world):
    scopes = {line.owner: line.scopes for line in world.coordinator.read_leaders(100)}
    assert scopes[world.owner_id("bob")] == ("work",)
    assert {"validate", "train"} <= {scope for found in scopes.values() for scope in found}


def test_a_key_leads_from_an_owner_or_a_node_to_its_rejections(world, log):
    submission, bob, node = world.convict("w2"), world.owner_id("bob"), world.id("w2")
    assert [text for text in log.messages if text.startswith(f"owner {bob}: ban by event ")] == [
        text for text in log.messages if text.endswith(f": hard verdict on {submission}")
    ]
    for prefix in (bob, bob[:8], node[:8], node):
        (owner,) = world.coordinator.find_key(prefix).owners
        assert owner.owner == bob and owner.standing is Standing.BANNED and owner.rejected == 1
        assert owner.rejections == (submission,)
        assert owner.ban.startswith(f"hard verdict on {submission} (event ")
        found = {line.node: line for line in owner.nodes}[node]
        assert found.scopes == ("work",) and not found.ban
    assert not world.coordinator.find_key("0" * 64).owners


def test_an_owner_with_many_nodes_is_described_by_the_one_that_was_asked_for(world):
    for number in range(20):
        world.join(f"x{number}", "bob")
    asked = max(world.id(f"x{number}") for number in range(20))
    (owner,) = world.coordinator.find_key(asked[:16]).owners
    assert owner.nodes[0].node == asked and len(owner.nodes) == MAX_NODES


def test_a_secret_that_does_not_match_the_genesis_is_refused(world):
    with pytest.raises(ConfigError, match="beacon secret"):
        Coordinator(world.coordinator.ledger, run="demo", key=world.key, secret=bytes(32), blobs=world.blobs)


def test_a_clock_that_was_wrong_stops_no_deadline_after_a_restart_and_is_reported(make_world):
    world = make_world(groups_per_batch=2, async_level=0)
    world.join("w1", "ann")
    world.join("w2", "bob")
    world.publish(0)
    world.wait(30 * 86_400)  # the system clock is a month ahead
    lease = world.lease("w1")
    world.now_ms -= 30 * 86_400_000
    world.restart()
    assert any("2592000 s ahead of the system clock" in alarm for alarm in world.coordinator.read_status().alarms)
    world.wait(world.params.lease_first_s)
    assert world.query(find_lease, lease.lease).state == "expired"


def test_strangers_crowd_nobody_out_of_status_and_raise_no_alarm(make_world):
    world = make_world()
    world.join("w1", "ann")
    lie = NodeWait(name="run this", for_whom="the operator", since_ms=0, deadline_ms=1)
    for number in range(40):
        world.join(f"evil-{number}", f"mallory {number}")
        world.coordinator.heartbeat(world.id(f"evil-{number}"), Heartbeat(role="trainer", wait=lie))
    wait = NodeWait(name="weights", for_whom="the relays", since_ms=world.now_ms, deadline_ms=world.now_ms + 5000)
    world.coordinator.heartbeat(world.id("judge-a"), Heartbeat(role="worker", wait=wait))
    world.wait(10)
    status = world.coordinator.read_status()
    said = [info.text for info in status.waits if info.name == "node"]
    assert len(said) <= MAX_REPORTED
    assert [text for text in said if text.startswith("validator")], "the run's own nodes are listed"
    assert not [text for text in said if text.startswith("trainer")], "the role that a node claims does not count"
    assert [alarm for alarm in status.alarms if "mallory" in alarm or "the operator" in alarm] == []
    assert [alarm for alarm in status.alarms if "the relays: weights" in alarm]


def test_expected_files_are_shown_with_their_deadline(world):
    world.commit("w1", world.make_manifest(world.lease("w1")))
    world.wait(30)
    text = f"the run waits for files that nodes announced, for 30 s, deadline in {world.params.upload_s - 30 + 10} s"
    assert f"{text}: 1 of them" in texts(world)
    world.wait(world.params.upload_s)
    assert not any("announced" in text for text in texts(world)), "it was given up"


def test_files_that_nobody_gives_up_in_time_are_an_alarm(world):
    """The coordinator checks every second; if it does not, its deadlines mean nothing."""
    world.commit("w1", world.make_manifest(world.lease("w1")))
    world.now_ms += 1000 * (world.params.upload_s + 11)
    assert any("files that nodes announced" in alarm for alarm in world.coordinator.read_status().alarms)


def test_second_opinions_and_appeals_are_shown(world):
    rejected = world.work("w1", Verdict.SOFT)
    world.appeal("ann", rejected)
    world.wait(5)
    assert any("the queue waits for validators to judge appeals, for 5 s" in text for text in texts(world))
    world.judge("judge-b", Verdict.SOFT)
    world.work("w2", Verdict.HARD)
    world.wait(5)
    shown = texts(world)
    assert any("the queue waits for a second verdict on disputed submissions, for 5 s" in text for text in shown)
    assert not any("appeals" in text for text in shown)


def test_what_is_left_to_the_trainer_is_overdue_after_its_time(make_world):
    world = make_world(train_s=100)
    world.wait(101)
    assert any("publish v0" in alarm for alarm in world.coordinator.read_status().alarms)
    for node, owner in (("w1", "ann"), ("w2", "bob")):
        world.join(node, owner)
    world.publish(0)
    for node in ("w1", "w2"):
        world.work(node)
    for what, go_on in (("assemble the batch", lambda: world.cut(1)), ("publish v1", lambda: world.train(1))):
        world.wait(99)
        assert not world.coordinator.read_status().alarms
        world.wait(2)
        alarms = world.coordinator.read_status().alarms
        assert any(f"step 1 waits for the trainer to {what}" in alarm for alarm in alarms)
        go_on()


def test_an_offer_that_nobody_takes_is_overdue_in_the_end(world):
    world.run(world.coordinator.return_lease(world.id("w1"), world.lease("w1").lease))
    world.wait(2 * world.params.lease_first_s + world.params.upload_s + 1)
    assert any("to take 1 offered group" in alarm for alarm in world.coordinator.read_status().alarms)


@pytest.mark.parametrize("call", ["put", "has", "open"])
def test_a_store_that_does_not_answer_is_reported(world, monkeypatch, call):
    """And short waits are not."""
    lease = world.lease("w1")
    submission = world.commit("w1", world.make_manifest(lease)).submission
    waits = {}
    real = getattr(world.blobs, call)

    async def hang(*values):
        for seconds in (0, 7, 70):
            world.now_ms += 1000 * seconds
            waits[seconds] = [wait for wait in world.coordinator.read_status().waits if wait.owner == submission]
        return await real(*values)

    monkeypatch.setattr(world.blobs, call, hang)
    if call == "has":
        with pytest.raises(ApiError, match="has not arrived"):
            world.run(world.coordinator.receive(world.id("w1"), submission))
    else:
        world.upload("w1", submission, lease.lease.encode())
    if call == "open":
        world.take("judge-a")
        world.run(world.coordinator.open_blob(world.id("judge-a"), submission))
    assert waits[0] == [] and len(waits[7]) == 1
    assert waits[70][0].overdue == (call != "put"), "an upload ends by its own rules"


def test_a_ledger_that_does_not_answer_is_reported(world, monkeypatch):
    alarms = []
    real = leases._find_refusal

    def hang(decision, caller):
        world.now_ms += 11_000
        alarms.extend(world.coordinator.read_status().alarms)
        return real(decision, caller)

    monkeypatch.setattr(leases, "_find_refusal", hang)
    world.ask("w1")
    assert any(alarm.startswith("overdue: decision grant_lease waits for the ledger, for 11 s") for alarm in alarms)


def test_an_event_that_memory_cannot_follow_stops_the_run(world, monkeypatch):
    """Otherwise the coordinator would continue with a cache that lacks an event."""

    def fail(events):
        raise KeyError("what it is about")

    with monkeypatch.context() as patch:
        patch.setattr(world.coordinator.cache, "take_events", fail)
        world.lease("w1")
    with pytest.raises(WriterStoppedError, match=r"applying an event to the cache failed \(KeyError"):
        world.ask("w1")
    world.restart()
    assert len(world.coordinator.cache.leases) == 1
