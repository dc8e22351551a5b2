"""Members, work and steps that are forged in an honest ledger, chained and signed anew: `verify` names them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.swarm.delegation import Grant, Scope, sign_delegation, sign_revocation
from shoal.swarm.event import Event, Kind, encode_body
from shoal.swarm.rules.batch import hash_batch

FORGERIES: dict[str, tuple[Callable[[Any], list[Event]], str]] = {}


def says(words: str) -> Callable[[Any], Any]:
    """A way to forge a ledger, and what the finding says of it."""

    def note(make: Any) -> Any:
        FORGERIES[make.__name__] = make, words
        return make

    return note


# Members


@says("not a delegation")
def join_without_an_owner(forge):
    key = forge.stranger.public
    body = {"delegation": "", "digest": "0" * 64, "max_leases": 9, "not_after_ms": 2**52, "not_before_ms": 0}
    return forge.append(forge.say(Kind.NODE_JOIN, key, **body, owner=key, scopes=["work"]))


@says("for another run")
def join_with_the_word_for_another_run(forge):
    joined = forge.history.find(Kind.NODE_JOIN)
    grant = Grant(joined.subject, "other", joined.time_ms - 1000, joined.time_ms + 1000, frozenset({Scope.WORK}), 1)
    return forge.change(joined, delegation=sign_delegation(forge.stranger, grant).decode())


@says("max_leases is 4000, by the rules 8")
def allow_more_than_the_owner(forge):
    return forge.change(forge.history.find(Kind.NODE_DELEGATE), max_leases=4000)


@says("no such node")
def revoke_the_node_of_another(forge):
    document = sign_revocation(forge.stranger, forge.history.nodes["w2"].public, "demo").decode()
    return forge.append(forge.say(Kind.NODE_REVOKE, forge.history.nodes["w2"].public, document=document))


@says("not known to this run")
def let_a_stranger_leave(forge):
    return forge.append(forge.say(Kind.NODE_LEAVE, forge.stranger.public))


@says("deadlines may move")
def be_away_for_longer(forge):
    away = forge.history.list(Kind.COORDINATOR_UP)[1]
    return forge.change(away, shift_ms=away.content["shift_ms"] + 10**6)


@says("'note' does not belong there")
def say_more_than_there_is(forge):
    return forge.change(forge.history.find(Kind.COORDINATOR_DOWN), note="maintenance")


# Watches


@says("where by the rules node.watch of")
def look_away(forge):
    return forge.swap(forge.history.find(Kind.NODE_WATCH, state="watched"))


@says("evidence is ")
def make_the_evidence_look_stronger(forge):
    watch = forge.history.find(Kind.NODE_WATCH, state="watched")
    return forge.change(watch, evidence=watch.content["evidence"] + 1)


@says("stream is 'reward'")
def watch_for_another_reason(forge):
    return forge.change(forge.history.find(Kind.NODE_WATCH, state="watched"), stream="reward")


@says("follows from no decision")
def watch_somebody_whose_work_is_like_that_of_others(forge):
    cut = forge.history.find(Kind.BATCH_CUT, step=2)
    watch = forge.history.find(Kind.NODE_WATCH, state="watched")
    fake = replace(forge.say(Kind.NODE_WATCH, forge.name_owner("ann"), **watch.content), time_ms=cut.time_ms)
    return forge.insert(cut, fake)


@says("where by the rules node.watch of")
def never_stop_watching(forge):
    return forge.swap(forge.history.find(Kind.NODE_WATCH, state="over"))


@says("numbers is [], by the rules [[200, 500000, 700000]]")
def hide_what_the_work_is_like(forge):
    outcomes = [event for event in forge.history.list(Kind.SUB_OUTCOME) if event.content["numbers"]]
    return forge.change(outcomes[0], numbers=[])


# Second opinions


@says("where by the rules val.doubt of")
def ask_nobody_else(forge):
    return forge.swap(forge.history.find(Kind.VAL_DOUBT))


@says("check_ppm is 1, by the rules 1000000")
def ask_another_about_less(forge):
    return forge.change(forge.history.find(Kind.VAL_DOUBT), check_ppm=1)


# Leases


@says("price is 99")
def promise_a_friend_more(forge):
    return forge.change(forge.history.find(Kind.LEASE_GRANT), price=99)


@says("fence is 7")
def skip_a_fence(forge):
    return forge.change(forge.history.find(Kind.LEASE_GRANT), fence=7)


@says("deadline_ms is")
def give_a_lease_for_ever(forge):
    grant = forge.history.find(Kind.LEASE_GRANT)
    return forge.change(grant, deadline_ms=grant.content["deadline_ms"] + 10**9)


@says("holds 1 leases")
def give_two_leases_at_once(forge):
    grant = forge.history.find(Kind.LEASE_GRANT)
    body = {**grant.content, "first": 1, "request_key": "f" * 32}
    second = forge.say(Kind.LEASE_GRANT, f"l{grant.seq + 1}", **body)
    return forge.insert(forge.history.events[grant.seq + 1], second)


@says("banned from this run")
def give_a_lease_to_who_is_banned(forge):
    grant = forge.history.list(Kind.LEASE_GRANT)[-1]
    node, owner = forge.history.nodes["d1"].public, forge.name_owner("dave")
    return forge.change(grant, node=node, owner=owner)


@says("the run is finished")
def give_a_lease_when_nothing_is_left(forge):
    body = {**forge.history.find(Kind.LEASE_GRANT).content, "request_key": "f" * 32}
    return forge.append(forge.say(Kind.LEASE_GRANT, f"l{len(forge.history.events)}", **body))


@says("comes to nothing")
def end_a_lease_too_early(forge):
    end = forge.history.find(Kind.LEASE_END, state="expired")
    grant = forge.history.events[int(end.subject[1:])]
    return forge.insert(forge.history.events[grant.seq + 1], replace(end, time_ms=0))


@says("failures is 9")
def blame_more_than_is_due(forge):
    return forge.change(forge.history.find(Kind.LEASE_END, state="returned"), failures=9)


@says("reserved is ''")
def offer_it_to_others(forge):
    return forge.change(forge.history.find(Kind.LEASE_END, state="returned"), reserved="")


@says("comes to nothing")
def cancel_a_lease_of_no_decision(forge):
    end = forge.history.find(Kind.LEASE_END, state="cancelled")
    return forge.append(replace(end, time_ms=0))


# Submissions and verdicts


@says("nobody signed it")
def promise_a_file_for_a_node(forge):
    made = forge.history.find(Kind.SUB_COMMIT)
    return forge.swap(made, replace(made, actor=forge.history.key.public, signature=b""))


@says("no such lease")
def deliver_the_lease_of_another(forge):
    made = forge.history.find(Kind.SUB_COMMIT)
    return forge.swap(made, forge.sign(forge.history.nodes["w2"], Kind.SUB_COMMIT, made.subject, **made.content))


@says("no such submission")
def receive_what_nobody_promised(forge):
    body = forge.history.find(Kind.SUB_RECEIPT).content
    return forge.append(forge.say(Kind.SUB_RECEIPT, "s999", **body))


@says("comes to nothing")
def receive_a_file_twice(forge):
    received = forge.history.find(Kind.SUB_RECEIPT)
    return forge.insert(forge.history.events[received.seq + 1], replace(received, time_ms=0))


@says("did not allow this node to validate")
def let_a_worker_judge(forge):
    return forge.change(forge.history.find(Kind.VAL_CLAIM), validator=forge.history.nodes["w2"].public)


@says("deadline_ms is")
def let_a_validator_take_its_time(forge):
    claim = forge.history.find(Kind.VAL_CLAIM)
    return forge.change(claim, deadline_ms=claim.content["deadline_ms"] + 1)


@says("comes to nothing")
def take_a_claim_away(forge):
    lapse = forge.history.find(Kind.VAL_LAPSE)
    claims = [event for event in forge.history.list(Kind.VAL_CLAIM) if event.subject == lapse.subject]
    claim = next(event for event in claims if event.content["validator"] == lapse.content["validator"])
    return forge.insert(forge.history.events[claim.seq + 1], replace(lapse, time_ms=0))


@says("not known to this run")
def judge_as_a_stranger(forge):
    verdict = forge.history.find(Kind.VAL_VERDICT)
    return forge.swap(verdict, forge.sign(forge.stranger, Kind.VAL_VERDICT, verdict.subject, **verdict.content))


@says("no claim on this submission")
def judge_without_a_claim(forge):
    verdict, judge = forge.history.find(Kind.VAL_VERDICT), forge.history.nodes["judge-e"]
    return forge.swap(verdict, forge.sign(judge, Kind.VAL_VERDICT, verdict.subject, **verdict.content))


@says("more validated tokens")
def validate_more_than_there_is(forge):
    verdict, judge = forge.history.find(Kind.VAL_VERDICT), forge.history.nodes["judge-a"]
    body = {**verdict.content, "tokens": 10**6}
    return forge.swap(verdict, forge.sign(judge, Kind.VAL_VERDICT, verdict.subject, **body))


@says("is not one of a decided submission")
def remove_a_file_of_nobody(forge):
    return forge.append(forge.say(Kind.BLOB_DROP, "", blobs=["ab" * 32]))


# Steps


@says("its beacon is not the next")
def choose_a_beacon(forge):
    return forge.change(forge.history.find(Kind.STEP_OPEN, step=2), beacon="0" * 64)


@says("its beacon is not the next")
def spell_a_beacon_otherwise(forge):
    opened = forge.history.find(Kind.STEP_OPEN, step=2)
    return forge.change(opened, beacon=opened.content["beacon"].upper())


@says("follows from no decision")
def open_a_step_too_early(forge):
    opened = forge.history.find(Kind.STEP_OPEN, step=3)
    return forge.insert(forge.history.find(Kind.LEASE_GRANT), replace(opened, time_ms=0))


@says("step 1 has 0 of 4 groups")
def cut_a_batch_too_early(forge):
    cut = forge.say(Kind.BATCH_CUT, "step-1", groups=0, hash=hash_batch([]), step=1)
    return forge.insert(forge.history.find(Kind.LEASE_GRANT), cut)


@says("hash is")
def cut_another_batch(forge):
    return forge.change(forge.history.find(Kind.BATCH_CUT, step=1), groups=0, hash=hash_batch([]))


@says("did not allow this node to train")
def publish_as_a_worker(forge):
    version, worker = forge.history.find(Kind.VERSION_PUBLISH, version=1), forge.history.nodes["w1"]
    return forge.swap(version, forge.sign(worker, Kind.VERSION_PUBLISH, version.subject, **version.content))


@says("not the batch that was cut")
def publish_what_was_trained_on_something_else(forge):
    version, trainer = forge.history.find(Kind.VERSION_PUBLISH, version=1), forge.history.nodes["trainer"]
    body = {**version.content, "batch": "0" * 64}
    return forge.swap(version, forge.sign(trainer, Kind.VERSION_PUBLISH, version.subject, **body))


@says("its secret is not the next")
def reveal_another_secret(forge):
    return forge.change(forge.history.find(Kind.ADMIN, action="finish"), secret="0" * 64)


@says("not the genesis of a run")
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
        for kind in Kind
        if kind.split(".")[0]
        in ("genesis", "coordinator", "node", "step", "lease", "sub", "val", "batch", "version", "blob")
        and kind not in (Kind.NODE_STANDING, Kind.SUB_OUTCOME)
    }
