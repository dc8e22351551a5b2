"""What a step needs, and the hash of its batch."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.messages import BatchEntry
from shoal.protocol.params import RunParams, count_missing, hash_batch, is_exhausted


def make_entry(index, **changes):
    values = {"index": index, "submission": f"s{index}", "place": 0, "version": 0, "blob": "0" * 64}
    return BatchEntry(**{**values, **changes})


def test_the_hash_is_that_of_plain_json():
    entries = [make_entry(1), make_entry(4, version=2)]
    plain = [
        {"blob": "0" * 64, "index": 1, "place": 0, "submission": "s1", "version": 0},
        {"blob": "0" * 64, "index": 4, "place": 0, "submission": "s4", "version": 2},
    ]
    assert hash_batch(entries) == hashlib.sha256(json.dumps(plain, separators=(",", ":")).encode()).hexdigest()
    assert hash_batch(entries) != hash_batch([make_entry(1), make_entry(4, version=3)])


def test_a_batch_out_of_order_is_a_bug():
    with pytest.raises(AssertionError):
        hash_batch([make_entry(4), make_entry(1)])


@given(
    st.integers(1, 50),
    st.integers(0, 150),
    st.lists(st.booleans(), min_size=200, max_size=200),
    st.integers(1, 7),
    st.randoms(),
)
def test_the_batch_is_the_first_groups_with_a_signal_regardless_of_speed(size, more, signals, lease, random):
    """Grant what is missing, accept results in any order, until the batch is full or no group is left."""
    params = RunParams(groups_per_batch=size, max_groups=size + more)
    next_index, on_way, accepted = 0, [], []

    def count_on_way():
        return sum(count for _, count in on_way)

    while len(accepted) < size and not is_exhausted(params, count_on_way(), next_index):
        while missing := count_missing(params, len(accepted), count_on_way(), next_index):
            count = min(missing, lease)
            on_way.append((next_index, count))
            next_index += count
        first, count = on_way.pop(random.randrange(len(on_way)))
        accepted += [index for index in range(first, first + count) if signals[index]]
    assert not on_way
    drawn = signals[: params.max_groups]
    assert sorted(accepted) == [index for index, signal in enumerate(drawn) if signal][:size]


def test_without_a_bound_a_step_continues_until_it_is_full():
    params = RunParams(groups_per_batch=3)
    assert count_missing(params, 0, 0, 10**6) == 3
    assert not is_exhausted(params, 0, 10**6)
