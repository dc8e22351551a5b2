"""Credit, guilt and commands forged in an honest ledger, with hashes and signatures recomputed: `verify` names them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shoal.ledger.event import Event, EventKind, Posting, move_credit

MILLIARD = 10**9
FORGERIES: dict[str, tuple[Callable[[Any], list[Event]], str]] = {}


def expect(words: str) -> Callable[[Any], Any]:
    """Mark a function that forges a ledger, with the text of the expected finding."""

    def note(make: Any) -> Any:
        FORGERIES[make.__name__] = make, words
        return make

    return note


def find_accepted(forge: Any) -> Event:
    return forge.history.find(EventKind.SUB_OUTCOME, state="accepted", appeal=0)


def double_postings(event: Event) -> list[Posting]:
    return [Posting(name, 2 * amount) for name, amount in event.postings]


# Pay


@expect("has no effect")
def pay_for_no_submission(forge):
    bob = forge.name_owner("bob")
    moved = move_credit("mint", f"pending:{bob}", MILLIARD)
    hold = {"amount": MILLIARD, "number": 0, "owner": bob}
    values = {**find_accepted(forge).content, "owner": bob, "paid": MILLIARD, "holds": [hold]}
    return forge.append(forge.say(EventKind.SUB_OUTCOME, "s999", moved, **values))


@expect("sub.outcome of")
def pay_twice(forge):
    paid = forge.history.find(EventKind.SUB_OUTCOME, state="accepted", purse="pending")
    return forge.insert(forge.history.events[paid.seq + 1], replace(paid, time_ms=0))


@expect("paid is")
def pay_more(forge):
    paid = find_accepted(forge)
    return forge.change(paid, double_postings(paid), paid=2 * paid.content["paid"])


@expect(", the rules require")
def pay_more_and_do_not_say_so(forge):
    paid = find_accepted(forge)
    return forge.change(paid, double_postings(paid))


@expect("state is 'accepted', the rules require 'rejected_soft'")
def accept_what_was_rejected(forge):
    return forge.change(forge.history.find(EventKind.SUB_OUTCOME, state="rejected_soft"), state="accepted")


@expect("signals is")
def deny_a_signal(forge):
    return forge.change(find_accepted(forge), signals=[0])


@expect("width is")
def widen_a_friend(forge):
    return forge.change(find_accepted(forge), width=16)


@expect("has a different time")
def split_a_decision(forge):
    outcome = find_accepted(forge)
    return forge.swap(outcome, replace(outcome, time_ms=outcome.time_ms + 1))


@expect("has no effect")
def free_what_was_not_held(forge):
    bob = forge.name_owner("bob")
    moved = move_credit(f"pending:{bob}", f"avail:{bob}", 1)
    return forge.append(forge.say(EventKind.CREDIT_POST, bob, moved, amount=1, holds=[]))


@expect("has no effect")
def free_pay_too_early(forge):
    early = forge.history.find(EventKind.CREDIT_POST)
    (seq, _), *_ = early.content["holds"]
    after = next(event for event in forge.history.events[seq + 1 :] if event.kind == EventKind.LEASE_GRANT)
    return forge.insert(after, replace(early, time_ms=0))


@expect("amount is")
def free_more_than_was_held(forge):
    post = forge.history.find(EventKind.CREDIT_POST)
    return forge.change(post, amount=post.content["amount"] + 1)


@expect("free_ms is 0")
def unbond_at_once(forge):
    return forge.change(forge.history.find(EventKind.STAKE_UNBOND, state="waiting"), free_ms=0)


@expect("has no effect")
def give_a_bond_back_too_early(forge):
    waiting = forge.history.find(EventKind.STAKE_UNBOND, state="waiting")
    moved = move_credit(f"unbond:{waiting.subject}", f"avail:{waiting.subject}", waiting.content["amount"])
    early = forge.say(EventKind.STAKE_UNBOND, waiting.subject, moved, bond=waiting.seq, state="released")
    return forge.insert(forge.history.events[waiting.seq + 1], early)


@expect("missing signature")
def ask_for_the_bond_of_another(forge):
    asked = forge.history.find(EventKind.STAKE_REQUEST)
    return forge.swap(asked, replace(asked, actor=forge.history.key.public, signature=b""))


@expect("missing signature")
def redeem_in_the_name_of_another(forge):
    asked = forge.history.find(EventKind.REDEEM_REQUEST)
    return forge.swap(asked, replace(asked, actor=forge.history.key.public, signature=b""))


@expect("missing signature")
def pay_out_without_the_operator(forge):
    done = forge.history.find(EventKind.REDEEM_DONE)
    return forge.swap(done, replace(done, actor=forge.history.key.public, signature=b""))


@expect("no open request")
def pay_out_twice(forge):
    done, operator = forge.history.find(EventKind.REDEEM_DONE), forge.history.operator
    body = forge.repeat_command(EventKind.REDEEM_DONE)
    again = forge.sign(operator, EventKind.REDEEM_DONE, done.subject, done.postings, **body)
    return forge.insert(forge.history.events[done.seq + 1], again)


@expect("no open request")
def give_back_what_was_paid_out(forge):
    done = forge.history.find(EventKind.REDEEM_DONE)
    body = forge.repeat_command(EventKind.REDEEM_FAILED, request=done.content["request"])
    return forge.append(forge.sign(forge.history.operator, EventKind.REDEEM_FAILED, "", done.postings, **body))


# Guilt


@expect("no decision produces it")
def slash_for_nothing(forge):
    ann = forge.name_owner("ann")
    body = {"amount": 1, "free_ms": 0, "owner": ann, "pending": 1, "rest": 0}
    return forge.append(forge.say(EventKind.SLASH, "s777", [Posting(f"avail:{ann}", -1), Posting("burn", 1)], **body))


@expect("the rules require")
def keep_what_was_slashed(forge):
    slash = forge.history.find(EventKind.SLASH)
    moved = [Posting("treasury" if name == "burn" else name, amount) for name, amount in slash.postings]
    return forge.change(slash, moved)


@expect("amount is 1")
def slash_less(forge):
    return forge.change(forge.history.find(EventKind.SLASH), amount=1)


@expect("missing signature")
def ban_without_a_reason(forge):
    ann = forge.name_owner("ann")
    return forge.append(forge.say(EventKind.BAN, ann, reason="we do not like you", target=ann))


@expect("but the rules require ban of")
def convict_and_do_not_ban(forge):
    ban = next(event for event in forge.history.list(EventKind.BAN) if "hard verdict" in event.content["reason"])
    return forge.swap(ban)


@expect("has no effect")
def pardon_a_friend(forge):
    dave = forge.name_owner("dave")
    return forge.append(forge.say(EventKind.UNBAN, dave, reason="a friend", target=dave))


@expect("has no effect")
def trust_who_was_banned(forge):
    return forge.append(forge.say(EventKind.NODE_STANDING, forge.name_owner("dave"), reason="time", standing="trusted"))


@expect("but the rules require node.standing of")
def keep_standing_from_who_earned_it(forge):
    return forge.swap(forge.history.find(EventKind.NODE_STANDING, standing="good"))


@expect("no such submission")
def appeal_for_another(forge):
    appeal = forge.history.find(EventKind.APPEAL)
    forged = forge.sign(
        forge.history.owners["bob"], EventKind.APPEAL, appeal.subject, appeal.postings, **appeal.content
    )
    return forge.swap(appeal, forged)


@expect("moves no credit")
def appeal_without_its_fee(forge):
    appeal = next(event for event in forge.history.list(EventKind.APPEAL) if event.postings)
    return forge.swap(appeal, replace(appeal, postings=()))


# The operator's commands


@expect("missing signature")
def change_prices_without_the_operator(forge):
    old = forge.history.find(EventKind.PARAMS).content
    return forge.append(forge.say(EventKind.PARAMS, "", action="params", params={**old["params"], "price": 999}))


@expect("must be signed by")
def change_prices_as_somebody_else(forge):
    return forge.append(forge.sign(forge.stranger, EventKind.PARAMS, "", **forge.repeat_command(EventKind.PARAMS)))


@expect("cannot change during a run")
def change_what_is_fixed(forge):
    old = forge.history.find(EventKind.PARAMS).content["params"]
    body = forge.repeat_command(EventKind.PARAMS, params={**old, "steps": 77})
    return forge.append(forge.sign(forge.history.operator, EventKind.PARAMS, "", **body))


@expect("has no effect")
def do_a_command_twice(forge):
    return forge.append(replace(forge.history.find(EventKind.PARAMS), time_ms=0))


@expect("missing signature")
def stop_the_run(forge):
    return forge.append(forge.say(EventKind.ADMIN, "", action="stop"))


@expect("was not sealed for this run")
def reveal_what_was_no_canary(forge):
    bob, canary = forge.name_owner("bob"), {"signature": "0" * 128, "submissions": []}
    body = forge.repeat_command(EventKind.CANARY_REVEAL, target=bob, canary=canary)
    return forge.append(forge.sign(forge.history.operator, EventKind.CANARY_REVEAL, bob, **body))


@expect("must be signed by")
def seal_without_the_operator(forge):
    body = forge.repeat_command(EventKind.CANARY_SEAL, seals=["ab" * 32])
    return forge.append(forge.sign(forge.stranger, EventKind.CANARY_SEAL, "", **body))


@expect("missed_by is")
def spare_a_validator(forge):
    return forge.change(forge.history.find(EventKind.CANARY_GRADE), state="caught", missed_by=[])


@pytest.mark.parametrize("name", list(FORGERIES))
def test_credit_that_the_coordinator_invents_is_named(name, check_named):
    check_named(*FORGERIES[name])


def test_of_every_kind_about_credit_something_is_forged(forge):
    forged = [make(forge) for make, _ in FORGERIES.values()]
    assert {events[forge.find_place(events)].kind for events in forged} >= {
        kind
        for kind in EventKind
        if kind.split(".")[0]
        in ("credit", "stake", "slash", "ban", "unban", "appeal", "canary", "redeem", "params", "admin")
    }
