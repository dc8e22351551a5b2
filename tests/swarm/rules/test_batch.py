"""What a step needs, and the name of its batch."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.messages import BatchEntry
from shoal.swarm.rules.batch import count_missing, hash_batch


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


@given(st.integers(1, 50), st.lists(st.booleans(), min_size=200, max_size=200), st.integers(1, 7), st.randoms())
def test_whoever_is_fast_the_batch_is_the_first_groups_with_a_signal(size, signals, lease, random):
    """Give out what is missing, take results in any order, until the batch is full."""
    signals += [True] * size
    next_index, on_way, accepted = 0, [], []
    while len(accepted) < size:
        while missing := count_missing(size, len(accepted), sum(count for _, count in on_way)):
            count = min(missing, lease)
            on_way.append((next_index, count))
            next_index += count
        first, count = on_way.pop(random.randrange(len(on_way)))
        accepted += [index for index in range(first, first + count) if signals[index]]
    assert not on_way
    assert sorted(accepted) == [index for index, signal in enumerate(signals) if signal][:size]
