"""The outer state: what all peers of a run share, and what a new peer must be given.

Invariants:
- a fragment's hash covers its index, round, weights and momentum, so two peers with the same hash continue identically;
- arrays are flat, fp32, little-endian and never written to: a new state is a new object;
- as bytes, a state is a header in canonical JSON and the arrays one after the other. Their sizes come from the plan of
  the run and never from the bytes.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.util.canonical import CanonicalError, decode_canonical, encode_canonical

STATE_VERSION = 1
"""Changing breaks: every checkpoint and every join between releases."""
MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_FLOAT = np.dtype("<f4")


Count = Annotated[int, Field(ge=0)]


class StateError(ValueError):
    """The bytes are not an outer state of this plan."""


@dataclass(frozen=True)
class FragmentState:
    """Outer weights and momentum of one fragment."""

    index: int
    round: int
    """number of completed rounds"""
    theta: np.ndarray
    momentum: np.ndarray

    @cached_property
    def hash(self) -> str:
        """SHA-256 in hex over all fields."""
        digest = hashlib.sha256(b"shoal-diloco-fragment-v1\0")
        digest.update(struct.pack("<QQQ", self.index, self.round, self.theta.size))
        for array in (self.theta, self.momentum):
            digest.update(np.ascontiguousarray(array, dtype=_FLOAT).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class OuterState:
    """All fragments, and the positions of the inner schedule and the data."""

    fragments: tuple[FragmentState, ...]
    step: int = 0
    """position of the inner schedule"""
    members: tuple[str, ...] = ()
    """peers that read the data, in order of id"""
    lanes: tuple[int, ...] = ()
    """sequences read so far of every data lane"""
    number: int = 0
    """number of the outcome that the positions are from (`Outcome.number`); redundant, therefore not in the hash"""

    @cached_property
    def hash(self) -> str:
        """SHA-256 in hex over the fragments' hashes and the positions."""
        return hashlib.sha256(b"shoal-diloco-state-v1\0" + encode_canonical(self._header())).hexdigest()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(fragment.theta.size for fragment in self.fragments)

    @property
    def rounds(self) -> tuple[int, ...]:
        """Completed rounds of every fragment."""
        return tuple(fragment.round for fragment in self.fragments)

    def _header(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "step": self.step,
            "members": list(self.members),
            "lanes": list(self.lanes),
            "fragments": [[part.round, part.hash] for part in self.fragments],
        }


def start_state(thetas: tuple[np.ndarray, ...], lanes: int = 0) -> OuterState:
    """The state before the first round: these weights, no momentum, nothing read."""
    parts = tuple(
        FragmentState(index, 0, np.array(theta, dtype=_FLOAT).ravel(), np.zeros(theta.size, dtype=_FLOAT))
        for index, theta in enumerate(thetas)
    )
    return OuterState(parts, lanes=(0,) * lanes)


def encode_state(state: OuterState) -> bytes:
    """Encode as header length, header, then theta and momentum of every fragment."""
    header = encode_canonical(state._header())
    arrays = [array.astype(_FLOAT, copy=False).tobytes() for p in state.fragments for array in (p.theta, p.momentum)]
    return b"".join([_LENGTH.pack(len(header)), header, *arrays])


def decode_state(data: bytes, sizes: tuple[int, ...]) -> OuterState:
    """Decode a state; it must have fragments of these sizes, and every hash must match."""
    if len(data) < _LENGTH.size:
        raise StateError("shorter than its length field")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or len(data) != start + 8 * sum(sizes):
        raise StateError(f"wrong length {len(data)} for a header and {sum(sizes)} weights with momentum")
    header = _read_header(data[_LENGTH.size : start])
    if len(header.fragments) != len(sizes):
        raise StateError(f"header: {len(header.fragments)} fragments instead of {len(sizes)}")
    fragments = []
    for index, (size, (number, digest)) in enumerate(zip(sizes, header.fragments, strict=True)):
        theta, momentum = np.frombuffer(data, dtype=_FLOAT, count=2 * size, offset=start).reshape(2, size)
        part = FragmentState(index, number, theta, momentum)
        if part.hash != digest:
            raise StateError(f"fragment {index} does not match its hash")
        fragments.append(part)
        start += 8 * size
    return OuterState(tuple(fragments), header.step, header.members, header.lanes)


class _StateHeader(BaseModel):
    """The header before the arrays."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1]
    step: Count
    members: tuple[str, ...]
    lanes: tuple[Count, ...]
    fragments: tuple[tuple[Count, str], ...]
    """round and hash of each fragment"""


def _read_header(data: bytes) -> _StateHeader:
    try:
        decode_canonical(data, max_bytes=MAX_HEADER_BYTES)  # a state has exactly one encoding
        return _StateHeader.model_validate_json(data)
    except CanonicalError as error:
        raise StateError(f"header: {error}") from None
    except ValidationError:
        raise StateError("header: not an outer state of version 1") from None
