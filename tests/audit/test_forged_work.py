"""Members, work and steps forged in an honest ledger, with hashes and signatures recomputed: `verify` names them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.identity.delegation import Grant, Scope, sign_delegation, sign_revocation
from shoal.ledger.event import Event, EventKind, encode_body
from shoal.protocol.params import hash_batch

FORGERIES: dict[str, tuple[Callable[[Any], list[Event]], str]] = {}


def expect(words: str) -> Callable[[Any], Any]:
    """Mark a function that forges a ledger, with the text of the expected finding."""

    def note(make: Any) -> Any:
        FORGERIES[make.__name__] = make, words
        return make

    return note


# Members


@expect("invalid delegation")
def join_without_an_owner(forge):
    key = forge.stranger.public
    body = {"delegation": "", "digest": "0" * 64, "max_leases": 9, "not_after_ms": 2**52, "not_before_ms": 0}
    return forge.append(forge.say(EventKind.NODE_JOIN, key, **body, owner=key, scopes=["work"]))


@expect("for another run")
def join_with_the_word_for_another_run(forge):
    joined = forge.history.find(EventKind.NODE_JOIN)
    grant = Grant(joined.subject, "other", joined.time_ms - 1000, joined.time_ms + 1000, frozenset({Scope.WORK}), 1)
    return forge.change(joined, delegation=sign_delegation(forge.stranger, grant).decode())


@expect("max_leases is 4000, the rules require 8")
def allow_more_than_the_owner(forge):
    return forge.change(forge.history.find(EventKind.NODE_DELEGATE), max_leases=4000)


@expect("no such node")
def revoke_the_node_of_another(forge):
    document = sign_revocation(forge.stranger, forge.history.nodes["w2"].public, "demo").decode()
    return forge.append(forge.say(EventKind.NODE_REVOKE, forge.history.nodes["w2"].public, document=document))


@expect("unknown node")
def let_a_stranger_leave(forge):
    return forge.append(forge.say(EventKind.NODE_LEAVE, forge.stranger.public))


@expect("deadlines may move")
def be_away_for_longer(forge):
    away = forge.history.list(EventKind.COORDINATOR_UP)[1]
    return forge.change(away, shift_ms=away.content["shift_ms"] + 10**6)


@expect("'note' is not a field of this event")
def say_more_than_there_is(forge):
    return forge.change(forge.history.find(EventKind.COORDINATOR_DOWN), note="maintenance")


# Watches


@expect("but the rules require node.watch of")
def look_away(forge):
    return forge.swap(forge.history.find(EventKind.NODE_WATCH, state="watched"))


@expect("evidence is ")
def make_the_evidence_look_stronger(forge):
    watch = forge.history.find(EventKind.NODE_WATCH, state="watched")
    return forge.change(watch, evidence=watch.content["evidence"] + 1)


@expect("stream is 'reward'")
def watch_for_another_reason(forge):
    return forge.change(forge.history.find(EventKind.NODE_WATCH, state="watched"), stream="reward")


@expect("no decision produces it")
def watch_somebody_whose_work_is_like_that_of_others(forge):
    cut = forge.history.find(EventKind.BATCH_CUT, step=2)
    watch = forge.history.find(EventKind.NODE_WATCH, state="watched")
    fake = replace(forge.say(EventKind.NODE_WATCH, forge.name_owner("ann"), **watch.content), time_ms=cut.time_ms)
    return forge.insert(cut, fake)


@expect("but the rules require node.watch of")
def never_stop_watching(forge):
    return forge.swap(forge.history.find(EventKind.NODE_WATCH, state="over"))


@expect("numbers is [], the rules require [[200, 500000, 700000]]")
def hide_what_the_work_is_like(forge):
    outcomes = [event for event in forge.history.list(EventKind.SUB_OUTCOME) if event.content["numbers"]]
    return forge.change(outcomes[0], numbers=[])


# Second opinions


@expect("but the rules require val.doubt of")
def ask_nobody_else(forge):
    return forge.swap(forge.history.find(EventKind.VAL_DOUBT))


@expect("check_ppm is 1, the rules require 1000000")
def ask_another_about_less(forge):
    return forge.change(forge.history.find(EventKind.VAL_DOUBT), check_ppm=1)


# Leases


@expect("price is 99")
def promise_a_friend_more(forge):
    return forge.change(forge.history.find(EventKind.LEASE_GRANT), price=99)


@expect("fence is 7")
def skip_a_fence(forge):
    return forge.change(forge.history.find(EventKind.LEASE_GRANT), fence=7)


@expect("deadline_ms is")
def give_a_lease_for_ever(forge):
    grant = forge.history.find(EventKind.LEASE_GRANT)
    return forge.change(grant, deadline_ms=grant.content["deadline_ms"] + 10**9)


@expect("holds 1 lease")
def give_two_leases_at_once(forge):
    grant = forge.history.find(EventKind.LEASE_GRANT)
    body = {**grant.content, "first": 1, "request_key": "f" * 32}
    second = forge.say(EventKind.LEASE_GRANT, f"l{grant.seq + 1}", **body)
    return forge.insert(forge.history.events[grant.seq + 1], second)


@expect("banned from this run")
def give_a_lease_to_who_is_banned(forge):
    grant = forge.history.list(EventKind.LEASE_GRANT)[-1]
    node, owner = forge.history.nodes["d1"].public, forge.name_owner("dave")
    return forge.change(grant, node=node, owner=owner)


@expect("the run is finished")
def give_a_lease_when_nothing_is_left(forge):
    body = {**forge.history.find(EventKind.LEASE_GRANT).content, "request_key": "f" * 32}
    return forge.append(forge.say(EventKind.LEASE_GRANT, f"l{len(forge.history.events)}", **body))


@expect("has no effect")
def end_a_lease_too_early(forge):
    end = forge.history.find(EventKind.LEASE_END, state="expired")
    grant = forge.history.events[int(end.subject[1:])]
    return forge.insert(forge.history.events[grant.seq + 1], replace(end, time_ms=0))


@expect("failures is 9")
def blame_more_than_is_due(forge):
    return forge.change(forge.history.find(EventKind.LEASE_END, state="returned"), failures=9)


@expect("reserved is ''")
def offer_it_to_others(forge):
    return forge.change(forge.history.find(EventKind.LEASE_END, state="returned"), reserved="")


@expect("has no effect")
def cancel_a_lease_of_no_decision(forge):
    end = forge.history.find(EventKind.LEASE_END, state="cancelled")
    return forge.append(replace(end, time_ms=0))


# Submissions and verdicts


@expect("missing signature")
def promise_a_file_for_a_node(forge):
    made = forge.history.find(EventKind.SUB_COMMIT)
    return forge.swap(made, replace(made, actor=forge.history.key.public, signature=b""))


@expect("no such lease")
def deliver_the_lease_of_another(forge):
    made = forge.history.find(EventKind.SUB_COMMIT)
    return forge.swap(made, forge.sign(forge.history.nodes["w2"], EventKind.SUB_COMMIT, made.subject, **made.content))


@expect("no such submission")
def receive_what_nobody_promised(forge):
    body = forge.history.find(EventKind.SUB_RECEIPT).content
    return forge.append(forge.say(EventKind.SUB_RECEIPT, "s999", **body))


@expect("has no effect")
def receive_a_file_twice(forge):
    received = forge.history.find(EventKind.SUB_RECEIPT)
    return forge.insert(forge.history.events[received.seq + 1], replace(received, time_ms=0))


@expect("does not include the scope validate")
def let_a_worker_judge(forge):
    return forge.change(forge.history.find(EventKind.VAL_CLAIM), validator=forge.history.nodes["w2"].public)


@expect("deadline_ms is")
def let_a_validator_take_its_time(forge):
    claim = forge.history.find(EventKind.VAL_CLAIM)
    return forge.change(claim, deadline_ms=claim.content["deadline_ms"] + 1)


@expect("has no effect")
def take_a_claim_away(forge):
    lapse = forge.history.find(EventKind.VAL_LAPSE)
    claims = [event for event in forge.history.list(EventKind.VAL_CLAIM) if event.subject == lapse.subject]
    claim = next(event for event in claims if event.content["validator"] == lapse.content["validator"])
    return forge.insert(forge.history.events[claim.seq + 1], replace(lapse, time_ms=0))


@expect("unknown node")
def judge_as_a_stranger(forge):
    verdict = forge.history.find(EventKind.VAL_VERDICT)
    return forge.swap(verdict, forge.sign(forge.stranger, EventKind.VAL_VERDICT, verdict.subject, **verdict.content))


@expect("no current claim on this submission")
def judge_without_a_claim(forge):
    verdict, judge = forge.history.find(EventKind.VAL_VERDICT), forge.history.nodes["judge-e"]
    return forge.swap(verdict, forge.sign(judge, EventKind.VAL_VERDICT, verdict.subject, **verdict.content))


@expect("more validated tokens")
def validate_more_than_there_is(forge):
    verdict, judge = forge.history.find(EventKind.VAL_VERDICT), forge.history.nodes["judge-a"]
    body = {**verdict.content, "tokens": 10**6}
    return forge.swap(verdict, forge.sign(judge, EventKind.VAL_VERDICT, verdict.subject, **body))


@expect("does not belong to a decided submission")
def remove_a_file_of_nobody(forge):
    return forge.append(forge.say(EventKind.BLOB_DROP, "", blobs=["ab" * 32]))


# Steps


@expect("its beacon does not continue")
def choose_a_beacon(forge):
    return forge.change(forge.history.find(EventKind.BATCH_CUT, step=2), beacon="0" * 64)


@expect("its beacon does not continue")
def spell_a_beacon_otherwise(forge):
    cut = forge.history.find(EventKind.BATCH_CUT, step=2)
    return forge.change(cut, beacon=cut.content["beacon"].upper())


@expect("beacon")
def open_a_step_with_its_beacon(forge):
    return forge.change(forge.history.find(EventKind.STEP_OPEN, step=2), beacon="0" * 64)


@expect("lease.end")
def extend_a_lease_that_did_not_progress(forge):
    extended = forge.history.find(EventKind.LEASE_EXTEND)
    return forge.change(extended, done=0)


@expect("deadline_ms is")
def extend_a_lease_too_far(forge):
    extended = forge.history.find(EventKind.LEASE_EXTEND)
    return forge.change(extended, deadline_ms=extended.content["deadline_ms"] + 1)


@expect("strikes is")
def forget_a_strike(forge):
    rejected = forge.history.find(EventKind.SUB_OUTCOME, state="rejected_soft")
    return forge.change(rejected, strikes=0)


@expect("trial is")
def call_a_trial_something_else(forge):
    return forge.change(forge.history.find(EventKind.LEASE_GRANT, trial=1), trial=0)


@expect("no open step accepts rollouts")
def lease_another_version(forge):
    return forge.change(forge.history.find(EventKind.LEASE_GRANT, version=0), version=1)


@expect("no decision produces it")
def open_a_step_too_early(forge):
    opened = forge.history.find(EventKind.STEP_OPEN, step=3)
    return forge.insert(forge.history.find(EventKind.LEASE_GRANT), replace(opened, time_ms=0))


@expect("step 1 has 0 of 4 groups")
def cut_a_batch_too_early(forge):
    cut = forge.say(EventKind.BATCH_CUT, "step-1", beacon="0" * 64, groups=0, hash=hash_batch([]), step=1)
    return forge.insert(forge.history.find(EventKind.LEASE_GRANT), cut)


@expect("hash is")
def cut_another_batch(forge):
    return forge.change(forge.history.find(EventKind.BATCH_CUT, step=1), groups=0, hash=hash_batch([]))


@expect("does not include the scope train")
def publish_as_a_worker(forge):
    version, worker = forge.history.find(EventKind.VERSION_PUBLISH, version=1), forge.history.nodes["w1"]
    return forge.swap(version, forge.sign(worker, EventKind.VERSION_PUBLISH, version.subject, **version.content))


@expect("different batch than was cut")
def publish_what_was_trained_on_something_else(forge):
    version, trainer = forge.history.find(EventKind.VERSION_PUBLISH, version=1), forge.history.nodes["trainer"]
    body = {**version.content, "batch": "0" * 64}
    return forge.swap(version, forge.sign(trainer, EventKind.VERSION_PUBLISH, version.subject, **body))


@expect("its secret does not continue")
def reveal_another_secret(forge):
    return forge.change(forge.history.find(EventKind.ADMIN, action="finish"), secret="0" * 64)


@expect("not the genesis of a run")
def begin_without_parameters(forge):
    genesis = forge.history.events[0]
    body = {name: value for name, value in genesis.content.items() if name != "params"}
    return forge.swap(genesis, replace(genesis, body=encode_body(body)))


@pytest.mark.parametrize("name", list(FORGERIES))
def test_work_that_the_coordinator_invents_is_named(name, check_named):
    check_named(*FORGERIES[name])


def test_of_every_kind_about_work_something_is_forged(forge):
    forged = [make(forge) for make, _ in FORGERIES.values()]
    assert {events[forge.find_place(events)].kind for events in forged} >= {
        kind
        for kind in EventKind
        if kind.split(".")[0]
        in ("genesis", "coordinator", "node", "step", "lease", "sub", "val", "batch", "version", "blob")
        and kind not in (EventKind.NODE_STANDING, EventKind.SUB_OUTCOME)
    }
