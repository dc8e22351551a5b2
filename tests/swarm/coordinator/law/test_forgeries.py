"""One thing forged in an honest ledger, chained and signed anew: `verify` names it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.keys import Key
from shoal.swarm.delegation import Grant, Scope, sign_delegation, sign_revocation
from shoal.swarm.event import Event, Kind, encode_body
from shoal.swarm.postings import Posting, move_credit
from shoal.swarm.rules.batch import hash_batch

Forgery = Callable[[Any], list[Event]]
FORGERIES: dict[str, tuple[Forgery, str]] = {}
STRANGER = Key.generate()
MILLIARD = 10**9


def says(words: str) -> Callable[[Forgery], Forgery]:
    """A way to forge a ledger, and what the finding says of it."""

    def note(make: Forgery) -> Forgery:
        FORGERIES[make.__name__] = make, words
        return make

    return note


def find_accepted(forge: Any) -> Event:
    return forge.history.find(Kind.SUB_OUTCOME, state="accepted", appeal=0)


def double_postings(event: Event) -> list[Posting]:
    return [Posting(name, 2 * amount) for name, amount in event.postings]


def name_owner(forge: Any, owner: str) -> str:
    return forge.history.owners[owner].public


def make_command(forge: Any, kind: Kind, **values: Any) -> dict[str, Any]:
    """What the operator said, said once more with another nonce."""
    return {**forge.history.find(kind).content, "nonce": "c" * 32, **values}


# Pay


@says("comes to nothing")
def pay_for_no_submission(forge):
    bob = name_owner(forge, "bob")
    moved = move_credit("mint", f"pending:{bob}", MILLIARD)
    hold = {"amount": MILLIARD, "number": 0, "owner": bob}
    values = {**find_accepted(forge).content, "owner": bob, "paid": MILLIARD, "holds": [hold]}
    return forge.append(forge.say(Kind.SUB_OUTCOME, "s999", moved, **values))


@says("sub.outcome of")
def pay_twice(forge):
    paid = forge.history.find(Kind.SUB_OUTCOME, state="accepted", purse="pending")
    return forge.insert(forge.history.events[paid.seq + 1], replace(paid, time_ms=0))


@says("paid is")
def pay_more(forge):
    paid = find_accepted(forge)
    return forge.change(paid, double_postings(paid), paid=2 * paid.content["paid"])


@says(", by the rules")
def pay_more_and_do_not_say_so(forge):
    paid = find_accepted(forge)
    return forge.change(paid, double_postings(paid))


@says("state is 'accepted', by the rules 'rejected_soft'")
def accept_what_was_rejected(forge):
    return forge.change(forge.history.find(Kind.SUB_OUTCOME, state="rejected_soft"), state="accepted")


@says("signals is")
def deny_a_signal(forge):
    return forge.change(find_accepted(forge), signals=[0])


@says("width is")
def widen_a_friend(forge):
    return forge.change(find_accepted(forge), width=16)


@says("has another time")
def split_a_decision(forge):
    outcome = find_accepted(forge)
    return forge.swap(outcome, replace(outcome, time_ms=outcome.time_ms + 1))


@says("comes to nothing")
def free_what_was_not_held(forge):
    bob = name_owner(forge, "bob")
    moved = move_credit(f"pending:{bob}", f"avail:{bob}", 1)
    return forge.append(forge.say(Kind.CREDIT_POST, bob, moved, amount=1, holds=[]))


@says("comes to nothing")
def free_pay_too_early(forge):
    early = forge.history.find(Kind.CREDIT_POST)
    (seq, _), *_ = early.content["holds"]
    after = next(event for event in forge.history.events[seq + 1 :] if event.kind == Kind.LEASE_GRANT)
    return forge.insert(after, replace(early, time_ms=0))


@says("amount is")
def free_more_than_was_held(forge):
    post = forge.history.find(Kind.CREDIT_POST)
    return forge.change(post, amount=post.content["amount"] + 1)


@says("free_ms is 0")
def unbond_at_once(forge):
    return forge.change(forge.history.find(Kind.STAKE_UNBOND, state="waiting"), free_ms=0)


@says("comes to nothing")
def give_a_bond_back_too_early(forge):
    waiting = forge.history.find(Kind.STAKE_UNBOND, state="waiting")
    moved = move_credit(f"unbond:{waiting.subject}", f"avail:{waiting.subject}", waiting.content["amount"])
    early = forge.say(Kind.STAKE_UNBOND, waiting.subject, moved, bond=waiting.seq, state="released")
    return forge.insert(forge.history.events[waiting.seq + 1], early)


@says("nobody signed it")
def ask_for_the_bond_of_another(forge):
    asked = forge.history.find(Kind.STAKE_REQUEST)
    return forge.swap(asked, replace(asked, actor=forge.history.key.public, signature=b""))


@says("nobody signed it")
def redeem_in_the_name_of_another(forge):
    asked = forge.history.find(Kind.REDEEM_REQUEST)
    return forge.swap(asked, replace(asked, actor=forge.history.key.public, signature=b""))


@says("nobody signed it")
def pay_out_without_the_operator(forge):
    done = forge.history.find(Kind.REDEEM_DONE)
    return forge.swap(done, replace(done, actor=forge.history.key.public, signature=b""))


@says("no open request")
def pay_out_twice(forge):
    done, operator = forge.history.find(Kind.REDEEM_DONE), forge.history.operator
    body = make_command(forge, Kind.REDEEM_DONE)
    again = forge.sign(operator, Kind.REDEEM_DONE, done.subject, done.postings, **body)
    return forge.insert(forge.history.events[done.seq + 1], again)


@says("no open request")
def give_back_what_was_paid_out(forge):
    done = forge.history.find(Kind.REDEEM_DONE)
    body = make_command(forge, Kind.REDEEM_FAILED, request=done.content["request"])
    return forge.append(forge.sign(forge.history.operator, Kind.REDEEM_FAILED, "", done.postings, **body))


# Guilt


@says("follows from no decision")
def slash_for_nothing(forge):
    ann = name_owner(forge, "ann")
    body = {"amount": 1, "free_ms": 0, "owner": ann, "pending": 1, "rest": 0}
    return forge.append(forge.say(Kind.SLASH, "s777", [Posting(f"avail:{ann}", -1), Posting("burn", 1)], **body))


@says("by the rules")
def keep_what_was_slashed(forge):
    slash = forge.history.find(Kind.SLASH)
    moved = [Posting("treasury" if name == "burn" else name, amount) for name, amount in slash.postings]
    return forge.change(slash, moved)


@says("amount is 1")
def slash_less(forge):
    return forge.change(forge.history.find(Kind.SLASH), amount=1)


@says("nobody signed it")
def ban_without_a_reason(forge):
    ann = name_owner(forge, "ann")
    return forge.append(forge.say(Kind.BAN, ann, reason="we do not like you", target=ann))


@says("where by the rules ban of")
def convict_and_do_not_ban(forge):
    ban = next(event for event in forge.history.list(Kind.BAN) if "hard verdict" in event.content["reason"])
    return forge.swap(ban)


@says("nobody signed it")
def pardon_a_friend(forge):
    dave = name_owner(forge, "dave")
    return forge.append(forge.say(Kind.UNBAN, dave, reason="a friend", target=dave))


@says("comes to nothing")
def trust_who_was_banned(forge):
    return forge.append(forge.say(Kind.NODE_STANDING, name_owner(forge, "dave"), reason="time", standing="trusted"))


@says("where by the rules node.standing of")
def keep_standing_from_who_earned_it(forge):
    return forge.swap(forge.history.find(Kind.NODE_STANDING, standing="good"))


@says("no such submission")
def appeal_for_another(forge):
    appeal = forge.history.find(Kind.APPEAL)
    forged = forge.sign(forge.history.owners["bob"], Kind.APPEAL, appeal.subject, appeal.postings, **appeal.content)
    return forge.swap(appeal, forged)


@says("moves no credit")
def appeal_without_its_fee(forge):
    appeal = next(event for event in forge.history.list(Kind.APPEAL) if event.postings)
    return forge.swap(appeal, replace(appeal, postings=()))


# The operator's commands


@says("nobody signed it")
def change_prices_without_the_operator(forge):
    old = forge.history.find(Kind.PARAMS).content
    return forge.append(forge.say(Kind.PARAMS, "", action="params", params={**old["params"], "price": 999}))


@says("and not signed by")
def change_prices_as_somebody_else(forge):
    return forge.append(forge.sign(STRANGER, Kind.PARAMS, "", **make_command(forge, Kind.PARAMS)))


@says("fixed for the whole run")
def change_what_is_fixed(forge):
    old = forge.history.find(Kind.PARAMS).content["params"]
    body = make_command(forge, Kind.PARAMS, params={**old, "steps": 77})
    return forge.append(forge.sign(forge.history.operator, Kind.PARAMS, "", **body))


@says("comes to nothing")
def do_a_command_twice(forge):
    return forge.append(replace(forge.history.find(Kind.PARAMS), time_ms=0))


@says("nobody signed it")
def stop_the_run(forge):
    return forge.append(forge.say(Kind.ADMIN, "", action="stop"))


@says("was not sealed for this run")
def reveal_what_was_no_canary(forge):
    bob, canary = name_owner(forge, "bob"), {"signature": "0" * 128, "submissions": []}
    body = make_command(forge, Kind.CANARY_REVEAL, target=bob, canary=canary)
    return forge.append(forge.sign(forge.history.operator, Kind.CANARY_REVEAL, bob, **body))


@says("and not signed by")
def seal_without_the_operator(forge):
    body = make_command(forge, Kind.CANARY_SEAL, seals=["ab" * 32])
    return forge.append(forge.sign(STRANGER, Kind.CANARY_SEAL, "", **body))


@says("missed_by is")
def spare_a_validator(forge):
    return forge.change(forge.history.find(Kind.CANARY_GRADE), state="caught", missed_by=[])


# Members


@says("not a delegation")
def join_without_an_owner(forge):
    key = STRANGER.public
    body = {"delegation": "", "digest": "0" * 64, "max_leases": 9, "not_after_ms": 2**52, "not_before_ms": 0}
    return forge.append(forge.say(Kind.NODE_JOIN, key, **body, owner=key, scopes=["work"]))


@says("for another run")
def join_with_the_word_for_another_run(forge):
    joined = forge.history.find(Kind.NODE_JOIN)
    grant = Grant(joined.subject, "other", joined.time_ms - 1000, joined.time_ms + 1000, frozenset({Scope.WORK}), 1)
    return forge.change(joined, delegation=sign_delegation(STRANGER, grant).decode())


@says("max_leases is 4000, by the rules 8")
def allow_more_than_the_owner(forge):
    return forge.change(forge.history.find(Kind.NODE_DELEGATE), max_leases=4000)


@says("no such node")
def revoke_the_node_of_another(forge):
    document = sign_revocation(STRANGER, forge.history.nodes["w2"].public, "demo").decode()
    return forge.append(forge.say(Kind.NODE_REVOKE, forge.history.nodes["w2"].public, document=document))


@says("not known to this run")
def let_a_stranger_leave(forge):
    return forge.append(forge.say(Kind.NODE_LEAVE, STRANGER.public))


@says("deadlines may move")
def be_away_for_longer(forge):
    away = forge.history.list(Kind.COORDINATOR_UP)[1]
    return forge.change(away, shift_ms=away.content["shift_ms"] + 10**6)


@says("'note' does not belong there")
def say_more_than_there_is(forge):
    return forge.change(forge.history.find(Kind.COORDINATOR_DOWN), note="maintenance")


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
    return forge.change(grant, deadline_ms=grant.content["deadline_ms"] + MILLIARD)


@says("holds 1 leases")
def give_two_leases_at_once(forge):
    grant = forge.history.find(Kind.LEASE_GRANT)
    body = {**grant.content, "first": 1, "request_key": "f" * 32}
    second = forge.say(Kind.LEASE_GRANT, f"l{grant.seq + 1}", **body)
    return forge.insert(forge.history.events[grant.seq + 1], second)


@says("banned from this run")
def give_a_lease_to_who_is_banned(forge):
    grant = forge.history.list(Kind.LEASE_GRANT)[-1]
    node, owner = forge.history.nodes["d1"].public, name_owner(forge, "dave")
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
    return forge.swap(verdict, forge.sign(STRANGER, Kind.VAL_VERDICT, verdict.subject, **verdict.content))


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
def test_whatever_the_coordinator_invents_is_named(name, history, forge, accuse):
    make, words = FORGERIES[name]
    forged = make(forge)
    findings = accuse(forged)
    assert [finding.check for finding in findings] == ["law"], findings
    assert findings[0].text.startswith(f"event {find_place(forged, history)}: "), findings
    assert words in findings[0].text, findings


def test_of_every_kind_of_event_something_is_forged(history, forge):
    """And the history has them all, but for one that nothing makes."""
    told = {event.kind for event in history.events}
    assert told == set(Kind)
    forged = [make(forge) for make, _ in FORGERIES.values()]
    assert {events[find_place(events, history)].kind for events in forged} >= told


def find_place(forged, history):
    """The first event that is another one."""
    pairs = zip(forged, history.events, strict=False)
    return next((seq for seq, (left, right) in enumerate(pairs) if left != right), len(history.events))
