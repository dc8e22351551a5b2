"""The outer state: what all peers of a run hold alike, and what a newcomer has to be given.

Invariants:
- a fragment's hash covers its index, round, weights and momentum, so two peers with one hash go on alike;
- arrays are flat, fp32, little-endian and never written to: a new state is a new object;
- as bytes, a state is a header in canonical JSON and the arrays one after the other. Their sizes come from the plan of
  the run and never from the bytes.
"""

import hashlib
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from shoal.canonical import CanonicalError, decode_canonical, encode_canonical

STATE_VERSION = 1
"""Changing breaks: every checkpoint and every join between releases."""
MAX_HEADER_BYTES = 1 << 20
_LENGTH = struct.Struct("<I")
_FLOAT = np.dtype("<f4")


class StateError(ValueError):
    """Bytes that are no outer state of this plan."""


@dataclass(frozen=True)
class FragmentState:
    """Outer weights and momentum of one fragment."""

    index: int
    round: int
    """rounds it has behind it"""
    theta: np.ndarray
    momentum: np.ndarray

    @cached_property
    def hash(self) -> str:
        """SHA-256 in hex over everything in it."""
        digest = hashlib.sha256(b"shoal-diloco-fragment-v1\0")
        digest.update(struct.pack("<QQQ", self.index, self.round, self.theta.size))
        for array in (self.theta, self.momentum):
            digest.update(np.ascontiguousarray(array, dtype=_FLOAT).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class OuterState:
    """All fragments, the position of the inner schedule and that of the data."""

    fragments: tuple[FragmentState, ...]
    step: int = 0
    """position of the inner schedule"""
    members: tuple[str, ...] = ()
    """who reads the data, in order of id"""
    lanes: tuple[int, ...] = ()
    """sequences read so far of every data lane"""
    number: int = 0
    """of the outcome that the positions are from (`Outcome.number`); not in the hash, for it says nothing new"""

    @cached_property
    def hash(self) -> str:
        """SHA-256 in hex over the fragments' hashes and the positions."""
        return hashlib.sha256(b"shoal-diloco-state-v1\0" + encode_canonical(self._header())).hexdigest()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(fragment.theta.size for fragment in self.fragments)

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
    """Header length, header, then theta and momentum of every fragment."""
    header = encode_canonical(state._header())
    arrays = [array.astype(_FLOAT, copy=False).tobytes() for p in state.fragments for array in (p.theta, p.momentum)]
    return b"".join([_LENGTH.pack(len(header)), header, *arrays])


def decode_state(data: bytes, sizes: tuple[int, ...]) -> OuterState:
    """The state these bytes spell, if it has fragments of these sizes and every hash is right."""
    if len(data) < _LENGTH.size:
        raise StateError("shorter than its length field")
    (length,) = _LENGTH.unpack_from(data)
    start = _LENGTH.size + length
    if length > MAX_HEADER_BYTES or len(data) != start + 8 * sum(sizes):
        raise StateError(f"{len(data)} bytes, which is not a header and {sum(sizes)} weights with momentum")
    step, members, lanes, rounds = _read_header(data[_LENGTH.size : start], len(sizes))
    fragments = []
    for index, (size, (number, digest)) in enumerate(zip(sizes, rounds, strict=True)):
        theta, momentum = np.frombuffer(data, dtype=_FLOAT, count=2 * size, offset=start).reshape(2, size)
        part = FragmentState(index, number, theta, momentum)
        if part.hash != digest:
            raise StateError(f"fragment {index} is not what its hash says")
        fragments.append(part)
        start += 8 * size
    return OuterState(tuple(fragments), step, members, lanes)


def _read_header(
    data: bytes, num_fragments: int
) -> tuple[int, tuple[str, ...], tuple[int, ...], list[tuple[int, str]]]:
    try:
        header = decode_canonical(data, max_bytes=MAX_HEADER_BYTES)
    except CanonicalError as error:
        raise StateError(f"header: {error}") from None
    match header:
        case {
            "version": 1,
            "step": int(step),
            "members": [*members],
            "lanes": [*lanes],
            "fragments": [*rounds],
        } if len(header) == 5:
            pass
        case _:
            raise StateError("header: not that of an outer state of version 1")
    pairs = [(r[0], r[1]) for r in rounds if isinstance(r, list) and len(r) == 2]
    is_sound = (
        len(pairs) == len(rounds) == num_fragments
        and all(_is_count(number) and isinstance(digest, str) for number, digest in pairs)
        and all(isinstance(name, str) for name in members)
        and all(_is_count(value) for value in (step, *lanes))
    )
    if not is_sound:
        raise StateError("header: a field of the wrong type")
    return step, tuple(members), tuple(lanes), pairs


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
