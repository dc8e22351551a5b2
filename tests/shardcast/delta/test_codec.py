"""Blocks and planes: every bit pattern survives; damaged bytes give an error or a different block, never a crash."""

import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.shardcast.delta.codec import (
    BLOCK_BYTES,
    BLOCK_ELEMENTS,
    MAX_PAYLOAD_BYTES,
    WIDTHS,
    BlockEncoding,
    EncodedBlock,
    block_elements,
    decode_block,
    encode_block,
    encode_fresh,
    sum_block,
)
from shoal.shardcast.delta.stream import DeltaError, Method, PayloadReader, count_bytes, read_stream, write_stream

Elements = NDArray[Any]


def encode(base: Elements, block: Elements) -> EncodedBlock:
    return encode_block(base.copy(), block, np.ones(-(-len(block) // 8) * 8, dtype=np.bool_))


def join_parts(parts: list[Any]) -> bytes:
    return b"".join(bytes(memoryview(part)) for part in parts)


def decode(form: int, payload: bytes, base: Elements) -> Elements:
    block = base.copy()
    decode_block(form, payload, block)
    return block


def check_round_trip(base: Elements, block: Elements) -> EncodedBlock:
    encoded = encode(base, block)
    payload = join_parts(encoded.parts)
    assert len(payload) <= MAX_PAYLOAD_BYTES
    assert np.array_equal(decode(encoded.form, payload, base), block)
    assert encoded.num_changed == np.count_nonzero(base != block)
    return encoded


def draw_block(width: int, count: int, seed: int) -> Elements:
    return np.frombuffer(np.random.default_rng(seed).bytes(width * count), dtype=f"<u{width}").copy()


def change_some(base: Elements, share: float, seed: int, largest: int = 2) -> Elements:
    """Move a share of elements by up to `largest` units in the last place."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, largest + 1, len(base)) * rng.choice([-1, 1], len(base))
    steps[rng.random(len(base)) >= share] = 0
    return base + steps.astype(np.int64).view(np.uint64).astype(base.dtype)


widths = st.sampled_from(WIDTHS)
seeds = st.integers(0, 1 << 30)


@given(widths, st.integers(1, 3000), st.floats(0, 1), st.sampled_from([1, 2, 20, 100]), seeds)
def test_a_block_with_any_share_of_changes_survives(
    width: int, count: int, share: float, largest: int, seed: int
) -> None:
    base = draw_block(width, count, seed)
    check_round_trip(base, change_some(base, share, seed, largest))


@given(widths, st.data())
def test_any_two_blocks_survive(width: int, data: st.DataObject) -> None:
    values = st.integers(0, 256**width - 1)
    pairs = data.draw(st.lists(st.tuples(values, values), min_size=1, max_size=200))
    base, block = np.array(pairs, dtype=f"<u{width}").T.copy()
    check_round_trip(base, block)


@pytest.mark.parametrize("width", WIDTHS)
def test_patterns_wrap_around_at_both_ends(width: int) -> None:
    largest, half = 256**width - 1, 256**width // 2
    base = np.array([0, largest, half, half - 1, 0, largest] + [5] * 94, dtype=f"<u{width}")
    block = np.array([largest, 0, half - 1, half, half, half] + [5] * 94, dtype=f"<u{width}")
    assert check_round_trip(base, block).form is BlockEncoding.SPARSE
    check_round_trip(base[:6], block[:6])


def test_nan_payloads_and_signed_zeros_are_patterns_like_others() -> None:
    base = np.array([0x7FC00000, 0x7FC00001, 0x80000000, 0x7F800001, 0xFFC12345] + [0] * 20, dtype=np.uint32)
    block = np.array([0x7FC00001, 0x7FC00000, 0x00000000, 0xFF800001, 0x7FC00000] + [0] * 20, dtype=np.uint32)
    assert check_round_trip(base, block).num_changed == 5


@pytest.mark.parametrize("place", [0, 1, 7, 8, 500, 998, 999, 1000])
def test_a_single_change_is_found_wherever_it_is(place: int) -> None:
    base = draw_block(2, 1001, 0)
    block = base.copy()
    block[place] ^= 1
    encoded = check_round_trip(base, block)
    assert encoded.form is BlockEncoding.SPARSE
    assert count_bytes(encoded.parts) < 40


def test_equal_blocks_take_nothing() -> None:
    base = draw_block(2, 1001, 0)
    encoded = check_round_trip(base, base.copy())
    assert encoded == EncodedBlock(BlockEncoding.SAME, [], 0)


def test_the_form_follows_the_share_of_changes() -> None:
    base = draw_block(2, 20_000, 0)
    forms = [check_round_trip(base, change_some(base, share, 1)).form for share in (0, 0.001, 0.05, 0.3, 0.5, 1)]
    assert forms == [
        BlockEncoding.SAME,
        BlockEncoding.SPARSE,
        BlockEncoding.SPARSE,
        BlockEncoding.SPARSE,
        BlockEncoding.DENSE,
        BlockEncoding.DENSE,
    ]


def test_a_block_that_has_nothing_to_do_with_its_base_is_fresh() -> None:
    base, block = draw_block(2, 20_000, 0), np.repeat(draw_block(2, 20, 1), 1000)
    assert check_round_trip(base, block).form is BlockEncoding.FRESH


@pytest.mark.parametrize("width", WIDTHS)
def test_a_full_block_of_noise_stays_within_the_bounds_of_a_payload(width: int) -> None:
    count = block_elements(width)
    check_round_trip(draw_block(width, count, 0), draw_block(width, count, 1))


def test_a_block_has_at_most_so_many_elements_and_bytes() -> None:
    assert {width: block_elements(width) for width in WIDTHS} == {
        1: BLOCK_ELEMENTS,
        2: BLOCK_ELEMENTS,
        4: BLOCK_ELEMENTS // 2,
        8: BLOCK_ELEMENTS // 4,
    }
    assert 2 * BLOCK_ELEMENTS == BLOCK_BYTES


@pytest.mark.parametrize("share", [0.003, 0.007, 0.02, 0.1])
def test_steps_of_one_unit_take_little_more_than_their_entropy(share: float) -> None:
    base = draw_block(2, 1 << 20, 0)
    encoded = check_round_trip(base, change_some(base, share, 1, largest=1))
    share = encoded.num_changed / len(base)
    place_bits = -np.log2(share) - (1 - share) / share * np.log2(1 - share)
    assert count_bytes(encoded.parts) * 8 / encoded.num_changed < 1.07 * (place_bits + 1)


def test_neighbouring_changes_cost_no_bits_for_places() -> None:
    base = draw_block(2, 1 << 18, 0)
    block = base.copy()
    block[1000:50_000] += 1
    encoded = check_round_trip(base, block)
    assert encoded.form is BlockEncoding.SPARSE
    assert count_bytes(encoded.parts) < 300


@given(widths, st.integers(1, 300), seeds)
def test_a_fresh_block_needs_no_base(width: int, count: int, seed: int) -> None:
    block = draw_block(width, count, seed)
    encoded = encode_fresh(block)
    assert np.array_equal(
        decode(BlockEncoding.FRESH, join_parts(encoded.parts), draw_block(width, count, seed + 1)), block
    )


@given(st.sampled_from([0.002, 0.05, 0.3, 1.0]), widths, seeds, st.data())
def test_a_damaged_payload_gives_another_block_or_one_error(
    share: float, width: int, seed: int, data: st.DataObject
) -> None:
    base = draw_block(width, 2000, seed)
    encoded = encode(base, change_some(base, share, seed))
    payload = bytearray(join_parts(encoded.parts) or b"\0")
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    del payload[data.draw(st.integers(0, len(payload))) :]
    form = data.draw(st.one_of(st.just(int(encoded.form)), st.integers(0, 5)))
    with suppress(DeltaError):
        assert decode(form, bytes(payload), base).shape == base.shape


@given(st.binary(max_size=60), st.integers(0, 255), widths)
def test_arbitrary_bytes_give_a_block_or_one_error(payload: bytes, form: int, width: int) -> None:
    with suppress(DeltaError):
        assert len(decode(form, payload, np.zeros(100, dtype=f"<u{width}"))) == 100


def sparse_payload(count: int, shift: int, gap_planes: int, planes: int, *streams: bytes) -> bytes:
    stored = [struct.pack("<BI", Method.STORED, len(stream)) + stream for stream in streams]
    return struct.pack("<IBBB", count, shift, gap_planes, planes) + b"".join(stored)


LOW_BITS_36 = [b"\x80" if 36 >> bit & 1 else b"\0" for bit in range(6)]
"""The planes of bits of the single number 36."""


def test_the_smallest_sparse_block_is_what_the_format_says() -> None:
    base = np.arange(100, dtype=np.uint16)
    block = base.copy()
    block[3] += 1
    payload = sparse_payload(1, 0, 1, 1, b"\x03", b"\x01")
    assert join_parts(encode(base, block).parts) == payload
    assert np.array_equal(decode(BlockEncoding.SPARSE, payload, base), block)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(sparse_payload(0, 0, 1, 1), id="no change"),
        pytest.param(sparse_payload(41, 0, 1, 1, bytes(41), bytes(41)), id="more changes than sparse may have"),
        pytest.param(sparse_payload(0xFFFFFFFF, 0, 1, 1), id="a count that would take 16 GB"),
        pytest.param(sparse_payload(1, 17, 1, 1, *[b"\0"] * 19), id="a shift that is too large"),
        pytest.param(sparse_payload(1, 0, 4, 1, *[b"\0"] * 5), id="too many planes of gaps"),
        pytest.param(sparse_payload(1, 0, 0, 1, b"\0"), id="no plane of gaps"),
        pytest.param(sparse_payload(1, 0, 1, 3, *[b"\0"] * 4), id="more planes than an element has bytes"),
        pytest.param(sparse_payload(1, 0, 1, 1, b"\x64", b"\0"), id="one element beyond the end"),
        pytest.param(sparse_payload(2, 0, 1, 1, b"\x62\x01", b"\0\0"), id="the second beyond the end"),
        pytest.param(sparse_payload(1, 6, 1, 1, *[b"\x80"] * 6, b"\x01", b"\0"), id="low bits lead beyond the end"),
        pytest.param(sparse_payload(1, 6, 1, 1, *LOW_BITS_36, b"\x01", b"\0"), id="low bits lead one beyond the end"),
        pytest.param(sparse_payload(1, 16, 3, 1, *[b"\0"] * 18, b"\x01", b"\0"), id="a gap that wraps around to 0"),
        pytest.param(sparse_payload(1, 0, 1, 1, b"\x03", b"\0") + b"\0", id="something after the end"),
        pytest.param(sparse_payload(1, 0, 1, 1, b"\x03"), id="no differences"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_an_impossible_sparse_block_is_refused(payload: bytes) -> None:
    with pytest.raises(DeltaError, match="damaged"):
        decode(BlockEncoding.SPARSE, payload, np.zeros(100, dtype=np.uint16))


@pytest.mark.parametrize("gap", [(0, b"\x64"), (6, *LOW_BITS_36, b"\x01")])
def test_the_last_element_can_be_changed(gap: tuple[Any, ...]) -> None:
    payload = sparse_payload(1, gap[0], 1, 1, *gap[1:], b"\x01")
    assert decode(BlockEncoding.SPARSE, payload, np.zeros(101, dtype=np.uint16)).tolist() == [0] * 100 + [1]


@pytest.mark.parametrize("form", [BlockEncoding.DENSE, BlockEncoding.FRESH])
def test_elements_of_more_bytes_than_they_have_are_refused(form: BlockEncoding) -> None:
    encoded = join_parts(encode_fresh(np.full(10, 1 << 20, dtype=np.uint32)).parts)
    with pytest.raises(DeltaError, match="too many bytes"):
        decode(form, encoded, np.zeros(10, dtype=np.uint16))


@pytest.mark.parametrize("form", [4, 255])
def test_an_unknown_form_is_refused(form: int) -> None:
    with pytest.raises(DeltaError, match="unknown"):
        decode(form, b"", np.zeros(10, dtype=np.uint16))


def test_a_same_block_has_no_payload() -> None:
    with pytest.raises(DeltaError, match="longer than its content"):
        decode(BlockEncoding.SAME, b"x", np.zeros(10, dtype=np.uint16))


def test_the_checksum_notices_a_single_bit() -> None:
    block = draw_block(1, 4096, 0)
    before = sum_block(block)
    assert before == sum(struct.unpack("<512Q", block.tobytes())) % 2**64
    block[77] ^= 64
    assert sum_block(block) != before


planes = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.lists(st.integers(0, 20), min_size=1, max_size=300).map(bytes),
    st.builds(
        lambda values, value: bytes([*values, value]), st.lists(st.integers(0, 14), min_size=64), st.integers(0, 255)
    ),
)


@given(planes)
def test_planes_come_back_in_whatever_form_they_are_written(plane: bytes) -> None:
    parts: list[Any] = []
    write_stream(np.frombuffer(plane, dtype=np.uint8), parts)
    reader = PayloadReader(join_parts(parts))
    assert bytes(read_stream(reader, len(plane))) == plane
    reader.check_end()


@pytest.mark.parametrize(
    ("plane", "method"),
    [
        (bytes(range(256)), Method.STORED),
        (b"\xf0\xf1" * 500, Method.ZSTD),
        (b"\x01\x00\x02" * 500, Method.NIBBLES),
        (b"\x01" * 99 + b"\xff", Method.NIBBLES),
        (b"\x01" * 63, Method.ZSTD),
    ],
)
def test_planes_take_the_form_that_suits_them(plane: bytes, method: Method) -> None:
    parts: list[Any] = []
    write_stream(np.frombuffer(plane, dtype=np.uint8), parts)
    assert join_parts(parts)[0] == method
    assert count_bytes(parts) <= len(plane) + 5


@given(planes, st.integers(-5, 300))
def test_a_plane_of_another_length_than_expected_is_refused(plane: bytes, more: int) -> None:
    size = max(1, len(plane) + (more or 1))
    if size == len(plane):
        return
    parts: list[Any] = []
    write_stream(np.frombuffer(plane, dtype=np.uint8), parts)
    paired = parts[0][0] == Method.NIBBLES and (size + 1) // 2 == (len(plane) + 1) // 2
    with suppress(DeltaError):
        assert len(read_stream(PayloadReader(join_parts(parts)), size)) == size
        assert paired, "only the half of the last byte that pads an odd number can pass for a value"


@pytest.mark.parametrize(("escapes", "nibble"), [(1, 0x11), (0, 0x1F), (2, 0x1F), (101, 0x11)])
def test_escapes_and_their_values_must_agree(escapes: int, nibble: int) -> None:
    pairs = struct.pack("<BI", Method.STORED, 50) + bytes([nibble]) + bytes(49)
    values = struct.pack("<BI", Method.STORED, escapes) + bytes(escapes)
    with pytest.raises(DeltaError, match="an escape"):
        read_stream(PayloadReader(struct.pack("<BI", Method.NIBBLES, escapes) + pairs + values), 100)


def test_nibbles_are_not_nested() -> None:
    inner = struct.pack("<BIBI", Method.NIBBLES, 0, Method.NIBBLES, 0) + bytes(50)
    with pytest.raises(DeltaError, match="unknown"):
        read_stream(PayloadReader(inner), 100)


def test_a_stream_that_claims_gigabytes_is_refused() -> None:
    for method in Method:
        with pytest.raises(DeltaError, match="damaged"):
            read_stream(PayloadReader(struct.pack("<BI", method, 0xFFFFFFFF)), 1000)


def write_sparse(gaps: NDArray[np.uint32], shift: int) -> bytes:
    """Changes of one unit at these gaps, with a given number of low bits split off."""
    parts: list[Any] = [struct.pack("<IBBB", len(gaps), shift, 3, 1)]
    for bit in range(shift):
        write_stream(np.packbits((gaps >> bit & 1).astype(np.uint8)), parts)
    for plane in range(3):
        write_stream((gaps >> shift >> 8 * plane & 0xFF).astype(np.uint8), parts)
    write_stream(np.ones(len(gaps), dtype=np.uint8), parts)
    return join_parts(parts)


@pytest.mark.parametrize("shift", range(17))
def test_gaps_come_back_however_many_of_their_bits_are_split_off(shift: int) -> None:
    gaps = np.random.default_rng(shift).integers(0, 200_000, size=9, dtype=np.uint32)
    base = np.zeros(BLOCK_ELEMENTS, dtype="<u2")
    assert list(np.flatnonzero(decode(BlockEncoding.SPARSE, write_sparse(gaps, shift), base))) == list(
        np.cumsum(gaps + 1) - 1
    )


def test_gaps_whose_sum_overflows_are_refused() -> None:
    gaps = np.full(65537, 65535, dtype=np.uint32)  # their sum slightly exceeds 2^32, so it wraps in 32 bits
    with pytest.raises(DeltaError, match="outside its block"):
        decode(BlockEncoding.SPARSE, write_sparse(gaps, 16), np.zeros(BLOCK_ELEMENTS, dtype="<u2"))
