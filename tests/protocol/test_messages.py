"""Messages: only the defined fields, and signatures that match."""

import pytest
from pydantic import ValidationError

from shoal.identity.keys import Key
from shoal.net.api_error import ApiError
from shoal.protocol.messages import (
    MAX_TOKENS_PER_S,
    Action,
    AppealStatement,
    Command,
    Finding,
    Heartbeat,
    Manifest,
    RolloutEntry,
    Verdict,
    VerdictStatement,
    VersionStatement,
    open_message,
    sign_message,
)

KEY = Key.generate()
MANIFEST = Manifest(
    lease="l1", fence=1, blob="a" * 64, size=5, version=0, rollouts=(RolloutEntry(hash="b" * 64, tokens=1),)
)
SIGNABLE = [
    MANIFEST,
    VerdictStatement(submission="s1", round=1, verdict=Verdict.SOFT),
    VersionStatement(version=1, root="a" * 64, manifest="b" * 64, batch=""),
    AppealStatement(submission="s1"),
    Command(nonce="a" * 32, action=Action.STOP),
    Command(nonce="a" * 32, action=Action.BAN, target="a" * 64),
]


@pytest.mark.parametrize("message", SIGNABLE, ids=lambda message: type(message).__name__)
def test_a_message_signed_for_one_run_by_one_key_is_that(message):
    signature = sign_message(KEY, "demo", message)
    statement = open_message("demo", KEY.public, message, signature)
    assert (statement.actor, statement.run) == (KEY.public, "demo")
    assert type(message).model_validate_json(statement.body) == message
    for run, actor in (("other", KEY.public), ("demo", Key.generate().public)):
        with pytest.raises(ApiError, match="invalid signature"):
            open_message(run, actor, message, signature)


def test_a_changed_message_has_no_signature():
    signature = sign_message(KEY, "demo", MANIFEST)
    with pytest.raises(ApiError):
        open_message("demo", KEY.public, MANIFEST.model_copy(update={"size": 6}), signature)


def test_a_signature_of_one_kind_holds_for_no_other():
    signature = sign_message(KEY, "demo", AppealStatement(submission="s1"))
    verdict = VerdictStatement(submission="s1", round=1, verdict=Verdict.SOFT)
    with pytest.raises(ApiError):
        open_message("demo", KEY.public, verdict, signature)


@pytest.mark.parametrize(
    "changes",
    [
        {"lease": "s1"},
        {"lease": "l1\n"},
        {"lease": "../l1"},
        {"fence": -1},
        {"fence": 1.0},
        {"size": 2**53 + 1},
        {"blob": "A" * 64},
        {"rollouts": ()},
        {"rollouts": [{"hash": "b" * 64, "tokens": 1}] * 257},
        {"extra": 1},
        {"version": True},
    ],
)
def test_a_manifest_takes_nothing_else(changes):
    with pytest.raises(ValidationError):
        Manifest.model_validate({**MANIFEST.model_dump(), **changes})


@pytest.mark.parametrize("rate", [-1, 0.5, float("nan"), float("inf"), MAX_TOKENS_PER_S + 1, "5"])
def test_a_reported_rate_is_a_bounded_integer(rate):
    assert Heartbeat(tokens_per_s=MAX_TOKENS_PER_S).tokens_per_s == MAX_TOKENS_PER_S
    with pytest.raises(ValidationError):
        Heartbeat.model_validate({"tokens_per_s": rate})


@pytest.mark.parametrize("number", ["0.5", "-1", "1e-9", "12345.678e3"])
def test_measured_numbers_are_text(number):
    assert Finding(check="x", statistic=number, threshold="1", passed=True).statistic == number


@pytest.mark.parametrize("number", ["nan", "inf", "", "1e9999", "0x1", "1" * 30, " 1"])
def test_what_is_no_number_is_refused(number):
    with pytest.raises(ValidationError):
        Finding(check="x", statistic=number, threshold="1", passed=True)
