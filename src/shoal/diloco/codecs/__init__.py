"""Codecs of pseudo-gradients by name; one module per family, with formula, citation and error bound."""

from shoal.diloco.codecs.base import FLOAT, HALF, Codec, CodecError, encode_feedback
from shoal.diloco.codecs.blocks import Int4Codec, Int8Codec
from shoal.diloco.codecs.floats import FloatCodec
from shoal.diloco.codecs.topk import TopKCodec

__all__ = ["CODECS", "Codec", "CodecError", "encode_feedback", "find_codec"]

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (FloatCodec("fp32", FLOAT), FloatCodec("fp16", HALF), Int8Codec(), Int4Codec(), TopKCodec())
}


def find_codec(name: str) -> Codec:
    """Return the codec of that name. Names from outside are only looked up in the table."""
    codec = CODECS.get(name)
    if codec is None:
        raise CodecError(f"unknown codec {name[:40]!r}; available: {', '.join(sorted(CODECS))}")
    return codec
