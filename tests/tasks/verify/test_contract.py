"""What holds for every verifier."""

import pytest

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import MAX_COMPLETION_CHARS
from shoal.tasks.verify.base import (
    Agreement,
    Attempt,
    compare_claim,
    give_up,
    is_firm,
    list_verifiers,
    mark_near,
    open_verifier,
    own_fault,
    score_safely,
)

INFOS = {
    "math": {"answer": "72"},
    "code": {"test": "assert f(1) == 2", "entry_point": "f"},
    "text_exact": {"answer": "72"},
    "text_fuzzy": {"answer": "72"},
    "text_rules": {"instruction_id_list": ["startend:end_checker"], "kwargs": [{"end_phrase": "72"}]},
    "json_schema": {"schema": {"const": 72}},
}
RIGHT = dict.fromkeys(INFOS, "72") | {"math": "#### 72", "code": "def f(x): return x + 1"}


HOSTILE = ["\x00", "\ud800", "7\u202e2", "```\n```", "</think>", "{" * 9999, "\\" * 9999, "\n" * 9999]


@pytest.fixture(scope="module", params=sorted(INFOS))
def verifier(request, boxes):
    if request.param == "code":
        yield boxes
        return
    found = open_verifier(request.param)
    yield found
    found.close()


def test_every_task_type_has_its_verifier():
    assert set(INFOS) <= set(list_verifiers())
    with pytest.raises(ConfigError, match="text_exact"):
        open_verifier("poetry")


def test_a_verifier_names_itself_and_its_version(verifier):
    assert verifier.stamp.startswith(f"{verifier.name}/{verifier.version}")
    assert verifier.expensive is (verifier.name == "code")
    with pytest.raises(ConfigError):
        verifier.check_info({})


def test_many_are_scored_like_one_in_their_order(verifier):
    info = INFOS[verifier.name]
    verifier.check_info(info)
    texts = [RIGHT[verifier.name], "no", RIGHT[verifier.name], ""]
    scores = verifier.score_many([Attempt(info, "", text) for text in texts])
    assert scores == [verifier.score(info, "", text) for text in texts]
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_makes_a_verifier_raise(verifier, text):
    score = verifier.score(INFOS[verifier.name], "", text)
    assert 0.0 <= score.value < 1.0 and score.reason.isascii()


def test_what_is_too_long_is_not_read(verifier):
    text = " " * MAX_COMPLETION_CHARS + RIGHT[verifier.name]
    assert score_safely(verifier, INFOS[verifier.name], "", text) == Score(0.0, "too long")


def test_a_claim_is_not_rejected_if_the_score_is_not_firm():
    firm, near = Score(0.0, "wrong"), mark_near(Score(1.0, "passed"))
    assert compare_claim(1.0, firm) is Agreement.DIFFERS
    assert compare_claim(0.0, firm) is Agreement.AGREES
    assert compare_claim(1.0, give_up("late")) is Agreement.UNSURE
    assert compare_claim(0.0, give_up("late")) is Agreement.AGREES
    assert compare_claim(0.0, own_fault("no box")) is Agreement.UNSURE, "it says nothing about the completion"
    assert compare_claim(0.0, near) is Agreement.UNSURE
    assert compare_claim(1.0, near) is Agreement.AGREES
    assert mark_near(near) == near and not is_firm(near)
