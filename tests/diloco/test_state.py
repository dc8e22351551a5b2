import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.diloco.state import FragmentState, OuterState, StateError, decode_state, encode_state, start_state
from shoal.util.canonical import encode_canonical

SIZES = (5, 3)


def make_state() -> OuterState:
    generator = np.random.default_rng(0)
    parts = tuple(
        FragmentState(i, 4 + i, *generator.standard_normal((2, size)).astype(np.float32))
        for i, size in enumerate(SIZES)
    )
    return OuterState(parts, step=90, members=("a", "b"), lanes=(3, 4, 5))


def test_a_state_comes_back_as_it_was() -> None:
    state = make_state()
    again = decode_state(encode_state(state), SIZES)
    assert again.hash == state.hash and (again.step, again.members, again.lanes) == (90, ("a", "b"), (3, 4, 5))
    for old, new in zip(state.fragments, again.fragments, strict=True):
        assert new.round == old.round and (new.theta == old.theta).all() and (new.momentum == old.momentum).all()


def test_the_hash_covers_every_bit() -> None:
    part = make_state().fragments[0]
    flipped = np.array(part.momentum)
    flipped.view(np.uint32)[2] ^= 1
    hashes = {
        part.hash,
        FragmentState(part.index, part.round, part.theta, flipped).hash,
        FragmentState(part.index, part.round + 1, part.theta, part.momentum).hash,
        FragmentState(part.index + 1, part.round, part.theta, part.momentum).hash,
        FragmentState(part.index, part.round, part.momentum, part.theta).hash,
    }
    assert len(hashes) == 5
    state = make_state()
    others = [OuterState(state.fragments, 91, state.members, state.lanes), OuterState(state.fragments, 90, ("a",))]
    assert len({state.hash, *(other.hash for other in others)}) == 3


def test_a_start_has_no_momentum() -> None:
    state = start_state((np.ones(3), np.zeros(2)), lanes=4)
    assert state.sizes == (3, 2) and state.lanes == (0,) * 4
    assert all(part.round == 0 and not part.momentum.any() for part in state.fragments)


@pytest.mark.parametrize("sizes", [(5, 4), (5,), (3, 5), (1 << 40, 3)])
def test_a_state_of_another_model_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(StateError):
        decode_state(encode_state(make_state()), sizes)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 400), flip=st.integers(1, 255))
def test_every_changed_byte_is_detected(position: int, flip: int) -> None:
    data = bytearray(encode_state(make_state()))
    data[position % len(data)] ^= flip
    try:
        found = decode_state(bytes(data), SIZES)
    except StateError:
        return
    # Only the positions may change: the averager is trusted for them, and they have no separate hash.
    assert [part.hash for part in found.fragments] == [part.hash for part in make_state().fragments]


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"step": True},
        {"members": [1]},
        {"lanes": ["x"]},
        {"fragments": [[0, "x"]]},
        {"more": 1},
        {"version": 2},
    ],
)
def test_a_header_of_the_wrong_form_is_refused(change: dict[str, object]) -> None:
    state = make_state()
    header = encode_canonical(state._header() | change)
    data = encode_state(state)
    (length,) = struct.unpack_from("<I", data)
    with pytest.raises(StateError):
        decode_state(struct.pack("<I", len(header)) + header + data[4 + length :], SIZES)


@given(st.binary(max_size=64))
def test_random_bytes_are_not_a_state(data: bytes) -> None:
    with pytest.raises(StateError):
        decode_state(data, SIZES)
