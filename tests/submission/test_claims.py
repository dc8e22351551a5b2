"""The parent's checks of its child's output: every length and value, as if from an untrusted process."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.submission.columns import ARRAYS, Columns
from shoal.submission.limits import FormError
from shoal.submission.parse import parse_submission
from shoal.submission.read import read_claims


@pytest.fixture
def columns(good, bounds) -> Columns:
    """Four rollouts: two groups of two."""
    return parse_submission(good, bounds)


def change_array(columns: Columns, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Columns:
    """The columns with one array replaced: the values of a column, `column/0` for its lengths, `proofs/1` for sizes."""
    column, _, level = name.partition("/")
    arrays = list(columns[column])
    place = int(level) if level else -1
    arrays[place] = change(arrays[place].copy())
    return {**columns, column: tuple(arrays)}


def put(array: np.ndarray, place: int, value: Any) -> np.ndarray:
    other = array.copy()
    other[place] = value
    return other


def test_good_columns_are_claims(columns, bounds, groups, make_proofs, is_same):
    assert is_same(read_claims(columns, bounds), groups, make_proofs(groups))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("group", lambda a: put(a, 1, 4), "rollout 1: group out of order"),
        ("group", lambda a: a[::-1], "groups out of order"),
        ("group", lambda a: np.full_like(a, 3), "groups out of order"),
        ("group", lambda a: np.array([-1, -1, 5, 5]), "rollout 0: group out of range"),
        ("group", lambda a: np.array([3, 3, 2**53 + 1, 2**53 + 1]), "rollout 2: group out of range"),
        ("sample", lambda a: put(a, 3, 0), "rollout 3: sample out of order"),
        ("sample", lambda a: a + 1, "rollout 0: sample out of order"),
        ("version", lambda a: put(a, 2, -1), "rollout 2: version out of range"),
        ("version", lambda a: put(a, 2, 2**53 + 1), "rollout 2: version out of range"),
        ("temperature", lambda a: put(a, 1, np.nan), "rollout 1: temperature"),
        ("temperature", lambda a: put(a, 1, np.inf), "rollout 1: temperature"),
        ("temperature", lambda a: put(a, 1, -0.1), "rollout 1: temperature"),
        ("reward", lambda a: put(a, 0, np.nan), "rollout 0: reward"),
        ("reward", lambda a: put(a, 0, -0.5), "rollout 0: reward outside of 0 to 1"),
        ("reward", lambda a: put(a, 3, 1.5), "rollout 3: reward outside of 0 to 1"),
        ("logprobs", lambda a: put(a, 0, np.nan), "rollout 0: logprobs that are not finite"),
        ("logprobs", lambda a: put(a, -1, -np.inf), "rollout 3: logprobs that are not finite"),
        ("token_ids", lambda a: put(a, 3, 50), "rollout 1: token_ids outside of the vocabulary of 50"),
        ("token_ids", lambda a: put(a, 2, -1), "rollout 0: token_ids outside"),
        ("prompt_ids", lambda a: put(a, -1, 2**31 - 1), "rollout 3: prompt_ids outside"),
        ("token_ids/0", lambda a: put(a, 0, 0), "rollout 0: token_ids of length 0, allowed are 1 to 64"),
        ("token_ids/0", lambda a: put(a, 0, -3), "rollout 0: token_ids of length -3"),
        ("token_ids/0", lambda a: put(a, 0, 65), "rollout 0: token_ids of length 65"),
        ("token_ids/0", lambda a: put(a, 0, 4), "token_ids: lengths that do not add up"),
        ("token_ids/0", lambda a: put(put(a, 0, 4), 1, 39), "rollout 0: logprobs are not one per token"),
        ("logprobs/0", lambda a: put(a, 2, 2**31 - 1), "rollout 2: logprobs of length"),
        ("prompt_ids/0", lambda a: put(a, 1, 0), "rollout 1: prompt_ids of length 0, allowed are 1 to 32"),
        ("prompt_ids/0", lambda a: put(a, 1, 33), "rollout 1: prompt_ids of length 33"),
        ("proofs/0", lambda a: put(a, 1, 3), "rollout 1: proofs of length 3, allowed are 0 to 2"),
        ("proofs/0", lambda a: put(a, 1, 1), "proofs: lengths that do not add up"),
        ("proofs/1", lambda a: put(a, 4, 259), "proofs 4 of length 259, allowed are 0 to 258"),
        ("proofs/1", lambda a: put(a, 4, 257), "proofs: lengths that do not add up"),
        ("proofs/1", lambda a: put(a, 4, -1), "proofs 4 of length -1"),
        ("task_id/0", lambda a: put(a, 0, 0), "rollout 0: task_id of length 0"),
        ("task_id/0", lambda a: put(a, 0, 129), "rollout 0: task_id of length 129"),
        ("reason/0", lambda a: put(a, 0, 257), "rollout 0: reason of length 257"),
        ("reason/0", lambda a: put(a, 0, 0), "reason: lengths that do not add up"),
        ("finish/0", lambda a: put(a, 0, 9), "rollout 0: finish of length 9"),
        ("finish/0", lambda a: np.array([6, 4, 6, 4]), "rollout 0: finish is stople"),
        ("finish", lambda a: put(a, 0, ord("S")), "rollout 0: finish is Stop, allowed are length and stop"),
        ("finish", lambda a: put(a, 0, 0), "rollout 0: finish with other than printable"),
        ("task_id", lambda a: put(a, 0, 0xC3), "rollout 0: task_id with other than printable"),
        ("task_id", lambda a: put(a, 7, ord("x")), "rollout 0: a group of several tasks"),
        ("reason", lambda a: put(a, -1, 10), "rollout 3: reason with other than printable"),
        ("reason", lambda a: put(a, 9, 127), "rollout 1: reason with other than printable"),
    ],
)
def test_an_invalid_value_is_refused_by_name(
    columns, bounds, name: str, change: Callable[[np.ndarray], np.ndarray], words: str
):
    with pytest.raises(FormError, match=f"^{words}"):
        read_claims(change_array(columns, name, change), bounds)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seed", lambda a: put(a, 0, 2**64 - 1)),
        ("version", lambda a: put(a, 0, 2**53)),
        ("temperature", lambda a: put(a, 0, 0.0)),
        ("logprobs", lambda a: put(a, 0, 3.0)),
    ],
)
def test_what_only_later_stages_can_judge_passes(columns, bounds, name, change):
    read_claims(change_array(columns, name, change), bounds)


def test_a_rollout_without_proofs_is_a_claim(columns, bounds):
    none = (np.zeros(4, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    assert read_claims({**columns, "proofs": none}, bounds).proofs == {"g3.0": (), "g3.1": (), "g5.0": (), "g5.1": ()}


@given(st.data())
def test_one_number_changed_gives_claims_or_a_form_error(good, bounds, data):
    columns = parse_submission(good, bounds)
    spec = data.draw(st.sampled_from(ARRAYS))
    array = columns[spec.column.name][spec.level]
    place = data.draw(st.integers(0, len(array) - 1))
    if array.dtype.kind == "f":
        value: float = data.draw(st.floats(width=32))
    else:
        info = np.iinfo(array.dtype)
        value = data.draw(st.integers(info.min, info.max) | st.integers(0, 100).filter(lambda n: n <= info.max))
    changed = change_array(columns, f"{spec.column.name}/{spec.level}", lambda array: put(array, place, value))
    try:
        contents = read_claims(changed, bounds)
    except FormError:
        return
    assert len(contents.rollouts) == 4
    for rollout in contents.rollouts:
        assert 1 <= rollout.num_tokens <= bounds.max_tokens
        assert rollout.token_ids.max() < bounds.vocab_size
        assert np.isfinite(rollout.logprobs).all()
