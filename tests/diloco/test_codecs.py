import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from shoal.diloco.background import MANY, PIECE
from shoal.diloco.codecs import CODECS, CodecError, blocks, encode_feedback, find_codec, topk

NAMES = sorted(CODECS)
SIZES = (0, 1, 2, 255, 256, 257, 1000)


def draw_vector(size: int, seed: int = 0, scale: float = 1e-3) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_the_length_of_a_payload_follows_from_the_number_of_elements(name: str, size: int) -> None:
    codec = find_codec(name)
    payload = codec.encode(draw_vector(size))
    assert len(payload) == codec.count_bytes(size)
    assert codec.decode(payload, size).shape == (size,)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(values=arrays(np.float32, st.integers(0, 600), elements=st.floats(-6e4, 6e4, width=32)))
def test_no_element_is_off_by_more_than_the_bound(name: str, values: np.ndarray) -> None:
    codec = find_codec(name)
    off = np.abs(codec.decode(codec.encode(values), values.size).astype(np.float64) - values)
    assert (off <= bound_error(name, values).astype(np.float64) * (1 + 1e-6)).all()


def bound_error(name: str, values: np.ndarray) -> np.ndarray:
    """The maximum error of each element after encoding and decoding, as stated in docs/diloco.md."""
    half = np.maximum(np.abs(values) * np.float32(2.0**-11), np.float32(2.0**-25))
    if name in ("int8", "int4"):
        # Half a scale of each element's block; the fp32 division before rounding may add its last bit.
        levels = {"int8": 127, "int4": 7}[name]
        scales = blocks.pick_scales(blocks.pad_blocks(values), levels).astype(np.float32)
        return np.repeat(scales * np.float32(0.5 * (1 + levels * 2.0**-22)), blocks.BLOCK)[: values.size]
    if name == "topk":
        kept = topk._pick_largest(values)
        bound = np.full_like(values, np.abs(values[kept]).min(initial=np.inf))
        bound[kept] = half[kept]
        return bound
    return half if name == "fp16" else np.zeros_like(values)


def test_bytes_per_element_are_those_of_the_pages() -> None:
    count = 1 << 20
    found = {name: find_codec(name).count_bytes(count) / count for name in NAMES}
    assert found == {"fp32": 4.0, "fp16": 2.0, "int8": 1.0078125, "int4": 0.5078125, "topk": 0.1875}


def test_int4_of_one_block_by_hand() -> None:
    codec = find_codec("int4")
    payload = codec.encode(np.array([7.0, -3.4, 0.6, -7.0, 0.0], dtype=np.float32))
    assert payload == np.float16(1.0).tobytes() + bytes([15 | 5 << 4, 9 | 1 << 4, 8 | 8 << 4])
    assert codec.decode(payload, 5).tolist() == [7.0, -3.0, 1.0, -7.0, 0.0]


@pytest.mark.parametrize("name", [name for name in NAMES if CODECS[name].has_feedback])
def test_error_feedback_brings_everything_through_in_the_end(name: str) -> None:
    """The sum sent in n rounds differs from the true sum only by the last residual, which does not grow."""
    codec, residual = find_codec(name), None
    meant, sent, sizes = np.zeros(512), np.zeros(512), []
    for round in range(300):
        vector = draw_vector(512, seed=round % 7)
        payload, residual = encode_feedback(codec, vector, residual)
        assert residual is not None
        meant, sent = meant + vector, sent + codec.decode(payload, 512)
        sizes.append(float(np.abs(residual).max()))
    assert np.abs(meant - sent - residual).max() < 1e-5
    assert max(sizes[150:]) <= 1.5 * max(sizes[:150])
    plain = sum(codec.decode(codec.encode(draw_vector(512, seed=round % 7)), 512) for round in range(300))
    assert np.abs(meant - sent).max() < 0.3 * np.abs(meant - plain).max()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_untrusted_bytes_give_finite_numbers_or_an_error(name: str, data: st.DataObject) -> None:
    codec = find_codec(name)
    count = data.draw(st.integers(0, 300))
    size = codec.count_bytes(count) + data.draw(st.sampled_from([0, 0, 0, 0, -1, 1]))
    payload = data.draw(st.binary(min_size=max(0, size), max_size=max(0, size)))
    try:
        values = codec.decode(payload, count)
    except CodecError:
        return
    assert values.shape == (count,) and np.isfinite(values).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_truncated_or_longer_payload_is_refused(name: str) -> None:
    codec = find_codec(name)
    payload = codec.encode(draw_vector(300))
    for bad in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(CodecError, match="elements"):
            codec.decode(bad, 300)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_cannot_be_encoded(name: str, bad: float) -> None:
    values = draw_vector(300)
    values[7] = bad
    with pytest.raises(CodecError, match="finite"):
        find_codec(name).encode(values)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_bad_scale_is_refused(name: str, scale: float) -> None:
    codec = find_codec(name)
    payload = np.float16(scale).tobytes() + codec.encode(draw_vector(100))[2:]
    with pytest.raises(CodecError, match="scale"):
        codec.decode(payload, 100)


def test_topk_indices_that_repeat_or_point_outside_are_refused() -> None:
    codec = find_codec("topk")
    values = np.zeros(4, dtype=np.float16).tobytes()
    for indices in ([0, 1, 1, 2], [3, 2, 1, 0], [0, 1, 2, 128]):
        with pytest.raises(CodecError, match="indices"):
            codec.decode(np.array(indices, dtype="<u4").tobytes() + values, 128)


def test_a_codec_is_looked_up_and_never_constructed_from_a_name() -> None:
    with pytest.raises(CodecError, match="unknown codec"):
        find_codec("../int4")


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_long_vector_in_pieces_and_threads_is_encoded_as_its_blocks_are(name: str) -> None:
    """Scales and levels of every block are the same as if encoded alone, whichever thread took its piece."""
    codec, size = find_codec(name), MANY * PIECE + 257
    values = draw_vector(size)
    whole = codec.decode(codec.encode(values), size)
    for start in (0, PIECE - 256, PIECE, size - 257):
        part = values[start : start + 512]
        assert (codec.decode(codec.encode(part), part.size) == whole[start : start + 512]).all()
    values[3 * PIECE] = np.nan
    with pytest.raises(CodecError, match="finite"):
        codec.encode(values)
