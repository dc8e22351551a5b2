"""Randomly modified files: the result is within the bounds, or a `FormError`; nothing else."""

import copy
import tracemalloc
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.rollout import Finish
from shoal.submission.limits import PROOF_BYTES, FormError, SubmissionLimits
from shoal.submission.read import SubmissionContents

FUZZ = settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
EXTREMES = [0, 1, -1, 2, 3, 7, 100, 2**15, 2**20, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)]
MOST_BYTES = 4_000_000


def try_read(reader: Any, data: bytes, bounds: SubmissionLimits) -> None:
    contents, reason = None, ""
    tracemalloc.start()
    try:
        contents = reader.read(data, bounds)
    except FormError as error:
        reason = str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES
    assert reason.isascii() and reason.isprintable() and len(reason) < 400
    if contents is not None:
        check_sound(contents, bounds)


def check_sound(contents: SubmissionContents, bounds: SubmissionLimits) -> None:
    """Everything that later stages may rely on."""
    assert 1 <= len(contents.rollouts) <= bounds.max_rollouts
    indices = [group.index for group in contents.groups]
    assert indices == sorted(set(indices))
    assert min(indices) >= 0
    for group in contents.groups:
        assert [rollout.id for rollout in group.rollouts] == [f"g{group.index}.{n}" for n in range(bounds.group_size)]
        assert len(group.scores) == bounds.group_size
        assert all(0 <= score.value <= 1 for score in group.scores)
        for rollout in group.rollouts:
            assert 1 <= len(rollout.token_ids) == len(rollout.logprobs) <= bounds.max_tokens
            assert 1 <= len(rollout.prompt_ids) <= bounds.max_prompt_tokens
            assert rollout.token_ids.dtype == rollout.prompt_ids.dtype == np.int32
            assert rollout.logprobs.dtype == np.float32
            for ids in (rollout.token_ids, rollout.prompt_ids):
                assert ids.min() >= 0 and ids.max() < bounds.vocab_size
            assert np.isfinite(rollout.logprobs).all()
            assert isinstance(rollout.finish, Finish)
            assert rollout.version >= 0
            assert 0 <= rollout.seed < 2**64
    assert set(contents.proofs) == {rollout.id for rollout in contents.rollouts}
    for proofs in contents.proofs.values():
        assert len(proofs) <= bounds.max_proofs
        assert all(isinstance(proof, bytes) and len(proof) <= PROOF_BYTES for proof in proofs)
    assert len(contents.entries) == len(contents.rollouts)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bits_do_no_harm(reader, good, bounds, flips):
    data = bytearray(good)
    for place, mask in flips:
        data[place % len(data)] ^= mask
    try_read(reader, bytes(data), bounds)


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bits_of_the_footer_do_no_harm(reader, good, bounds, flips):
    data = bytearray(good)
    length = int.from_bytes(data[-8:-4], "little")
    for place, mask in flips:
        data[-8 - 1 - place % length] ^= mask
    try_read(reader, bytes(data), bounds)


@settings(FUZZ, max_examples=60)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.binary(max_size=30))
def test_pieces_replaced_do_no_harm(reader, good, bounds, start, length, piece):
    start %= len(good)
    try_read(reader, good[:start] + piece + good[start + length % 100 :], bounds)


def list_numbers(value: Any) -> list[tuple[list[Any], int]]:
    """Positions of the numbers in a footer: lists of Thrift values, and indices into them."""
    match value:
        case dict():
            return [place for entry in value.values() for place in list_entry(entry)]
        case [int(kind), list(values)] if kind in (5, 6):
            return [(values, place) for place in range(len(values))]
        case [12, list(values)]:
            return [place for item in values for place in list_numbers(item)]
    return []


def list_entry(entry: list[Any]) -> list[tuple[list[Any], int]]:
    kind, value = entry
    if kind in (3, 4, 5, 6):
        return [(entry, 1)]
    return list_numbers(value) if kind in (9, 12) else []


@FUZZ
@given(st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(EXTREMES)), min_size=1, max_size=3))
def test_a_footer_with_other_numbers_does_no_harm(reader, good, take_apart, bounds, changes):
    footer = take_apart(good)
    places = list_numbers(footer.fields)
    assert len(places) > 100
    for number, value in changes:
        where, index = places[number % len(places)]
        where[index] = value
    try_read(reader, footer.build(), bounds)


@FUZZ
@given(st.data())
def test_a_page_with_other_numbers_does_no_harm(reader, good, take_apart, bounds, data):
    footer = take_apart(good)
    column = data.draw(st.sampled_from(["group", "seed", "reason", "token_ids", "logprobs", "proofs"]))
    header, body = copy.deepcopy(footer.page(column))
    places = list_numbers(header)
    for _ in range(data.draw(st.integers(1, 2))):
        where, index = data.draw(st.sampled_from(places))
        where[index] = data.draw(st.sampled_from(EXTREMES))
    raw = bytearray(body)
    for place, mask in data.draw(st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=3)):
        raw[place % len(raw)] ^= mask
    footer.graft(column, [(header, bytes(raw))])
    try_read(reader, footer.build(), bounds)
