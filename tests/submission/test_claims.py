"""The parent's own look at what its child says: every length and value, as if the child were not ours."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.submission.bounds import FormError
from shoal.submission.claims import read_claims
from shoal.submission.frame import Columns
from shoal.submission.parse import parse_submission


@pytest.fixture
def columns(good, bounds) -> Columns:
    """Of four rollouts: two groups of two."""
    parsed = parse_submission(good, bounds)
    return Columns(**{field.name: getattr(parsed, field.name).copy() for field in fields(parsed)})


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
        ("token_lengths", lambda a: put(a, 0, 0), "rollout 0: token_ids of length 0, allowed are 1 to 64"),
        ("token_lengths", lambda a: put(a, 0, -3), "rollout 0: token_ids of length -3"),
        ("token_lengths", lambda a: put(a, 0, 65), "rollout 0: token_ids of length 65"),
        ("token_lengths", lambda a: put(a, 0, 4), "token_ids: lengths that do not add up"),
        ("token_lengths", lambda a: put(put(a, 0, 4), 1, 39), "rollout 0: logprobs are not one per token"),
        ("logprob_lengths", lambda a: put(a, 2, 2**31 - 1), "rollout 2: logprobs of length"),
        ("prompt_lengths", lambda a: put(a, 1, 0), "rollout 1: prompt_ids of length 0, allowed are 1 to 32"),
        ("prompt_lengths", lambda a: put(a, 1, 33), "rollout 1: prompt_ids of length 33"),
        ("proof_lengths", lambda a: put(a, 1, 3), "rollout 1: proofs of length 3, allowed are 0 to 2"),
        ("proof_lengths", lambda a: put(a, 1, 1), "proofs: lengths that do not add up"),
        ("proof_sizes", lambda a: put(a, 4, 259), "proof 4: proofs of length 259, allowed are 0 to 258"),
        ("proof_sizes", lambda a: put(a, 4, 257), "proofs: lengths that do not add up"),
        ("proof_sizes", lambda a: put(a, 4, -1), "proof 4: proofs of length -1"),
        ("task_lengths", lambda a: put(a, 0, 0), "rollout 0: task_id of length 0"),
        ("task_lengths", lambda a: put(a, 0, 129), "rollout 0: task_id of length 129"),
        ("reason_lengths", lambda a: put(a, 0, 257), "rollout 0: reason of length 257"),
        ("reason_lengths", lambda a: put(a, 0, 0), "reason: lengths that do not add up"),
        ("finish_lengths", lambda a: put(a, 0, 9), "rollout 0: finish of length 9"),
        ("finish_lengths", lambda a: np.array([6, 4, 6, 4]), "rollout 0: finish is stople"),
        ("finish_bytes", lambda a: put(a, 0, ord("S")), "rollout 0: finish is Stop, allowed are length and stop"),
        ("finish_bytes", lambda a: put(a, 0, 0), "rollout 0: finish with other than printable"),
        ("task_bytes", lambda a: put(a, 0, 0xC3), "rollout 0: task_id with other than printable"),
        ("task_bytes", lambda a: put(a, 7, ord("x")), "rollout 0: a group of several tasks"),
        ("reason_bytes", lambda a: put(a, -1, 10), "rollout 3: reason with other than printable"),
        ("reason_bytes", lambda a: put(a, 9, 127), "rollout 1: reason with other than printable"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(
    columns, bounds, name: str, change: Callable[[np.ndarray], np.ndarray], words: str
):
    with pytest.raises(FormError, match=f"^{words}"):
        read_claims(replace(columns, **{name: change(getattr(columns, name))}), bounds)


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
    read_claims(replace(columns, **{name: change(getattr(columns, name))}), bounds)


def test_a_rollout_without_proofs_is_a_claim(columns, bounds):
    none = np.zeros(0, np.int32)
    bare = replace(columns, proof_lengths=np.zeros(4, np.int32), proof_sizes=none, proof_bytes=none.astype(np.uint8))
    assert read_claims(bare, bounds).proofs == {"g3.0": (), "g3.1": (), "g5.0": (), "g5.1": ()}


@given(st.data())
def test_one_number_changed_gives_claims_or_a_form_error(good, bounds, data):
    columns = parse_submission(good, bounds)
    name = data.draw(st.sampled_from([field.name for field in fields(columns)]))
    array = getattr(columns, name)
    place = data.draw(st.integers(0, len(array) - 1))
    if array.dtype.kind == "f":
        value: float = data.draw(st.floats(width=32))
    else:
        info = np.iinfo(array.dtype)
        value = data.draw(st.integers(info.min, info.max) | st.integers(0, 100).filter(lambda n: n <= info.max))
    try:
        contents = read_claims(replace(columns, **{name: put(array, place, value)}), bounds)
    except FormError:
        return
    assert len(contents.rollouts) == 4
    for rollout in contents.rollouts:
        assert 1 <= rollout.num_tokens <= bounds.max_tokens
        assert rollout.token_ids.max() < bounds.vocab_size
        assert np.isfinite(rollout.logprobs).all()
