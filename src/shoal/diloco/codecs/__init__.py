"""Codecs of pseudo-gradients by name; one page each, with formula, citation and bound."""

from shoal.diloco.codecs.base import Codec, CodecError, encode_feedback
from shoal.diloco.codecs.fp16 import Fp16Codec
from shoal.diloco.codecs.fp32 import Fp32Codec
from shoal.diloco.codecs.int4 import Int4Codec
from shoal.diloco.codecs.int8 import Int8Codec
from shoal.diloco.codecs.topk import TopKCodec

__all__ = ["CODECS", "Codec", "CodecError", "encode_feedback", "find_codec"]

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Fp32Codec(), Fp16Codec(), Int8Codec(), Int4Codec(), TopKCodec())
}


def find_codec(name: str) -> Codec:
    """The codec of that name; a name from outside is looked up, never built."""
    codec = CODECS.get(name)
    if codec is None:
        raise CodecError(f"{name[:40]!r}: no such codec; there are {', '.join(sorted(CODECS))}")
    return codec
