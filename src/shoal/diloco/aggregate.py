"""The mean of a round's updates that no single bad one can spoil, and that comes out alike wherever it is computed.

    decode -> refuse what is not whole and finite -> clip norms -> cap weights -> (trimmed) mean -> encode

- Peers are taken in order of their ids and summed in fp64, element by element, so the order of arrival, the number of
  threads and the machine do not show in the result.
- Norms above `clip` times the median norm are scaled down to it, and token weights capped likewise, from three peers on
  (of two nobody knows which is the bad one).
- The trimmed mean leaves out the lowest and the highest floor(k / 4) values of every coordinate, from four peers on
  (Yin et al., arXiv 1803.01498), and weights the rest by tokens.
- Vectors are decoded a piece at a time, twice: memory does not grow with the number of peers.
- One bad peer of four can then move a coordinate no further than its honest neighbours lie apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.diloco.codecs import Codec, CodecError, encode_feedback, find_codec
from shoal.diloco.codecs.base import FLOAT, ReadPiece
from shoal.diloco.pieces import PIECE, run_pieces
from shoal.diloco.plan import Guard
from shoal.diloco.round import MAX_TOKENS, RoundKey, Update

CLIP_FROM = 3
TRIM_SHARE = 4
"""One of so many values is left out at each end. Changing breaks: agreement between peers of different releases."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why an update is not in the mean."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The mean of a round, as everyone gets it."""

    payload: bytes
    """empty if nobody's update could be used"""
    peers: tuple[str, ...]
    """whose whole vector is in it, in order of id"""
    refused: tuple[Refusal, ...] = ()
    clipped: tuple[str, ...] = ()
    """of `peers`, whose norm was scaled down"""
    residual: np.ndarray | None = None
    """what the codec lost, for the fragment's next aggregate"""


@dataclass(frozen=True, slots=True)
class _Sound:
    """An update that is whole and finite."""

    peer: str
    tokens: int
    read: ReadPiece
    norm: float


def aggregate_updates(
    key: RoundKey,
    updates: Sequence[Update],
    size: int,
    codec_name: str,
    guard: Guard,
    residual: np.ndarray | None = None,
) -> Aggregate:
    """The encoded mean of these updates of `size` elements, and who was refused and why."""
    codec = find_codec(codec_name)
    refused: list[Refusal] = []
    sound: list[_Sound] = []
    seen: set[str] = set()
    for update in sorted(updates, key=lambda update: (update.peer, update.payload)):
        try:
            sound.append(_open_update(key, update, size, codec, seen))
        except CodecError as error:
            refused.append(Refusal(update.peer, str(error)))
    if not sound:
        return Aggregate(b"", (), tuple(refused), residual=residual)
    factors = _clip_norms([found.norm for found in sound], guard.clip)
    weights = _cap_weights([found.tokens for found in sound], guard.clip)
    readers = [_scale_reader(found.read, factor) for found, factor in zip(sound, factors, strict=True)]
    payload, residual = _encode_mean(codec, _average_readers(readers, size, weights, guard.mode), residual)
    clipped = tuple(found.peer for found, factor in zip(sound, factors, strict=True) if factor < 1.0)
    return Aggregate(payload, tuple(found.peer for found in sound), tuple(refused), clipped, residual)


def measure_payload(codec: Codec, payload: bytes, size: int) -> float:
    """The norm of a payload's vector; `CodecError` if any of it is no number. A piece at a time is in memory."""
    read = codec.open_payload(payload, size)
    return math.sqrt(sum_squares(read, size))


def _encode_mean(codec: Codec, mean: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray | None]:
    """As `encode_feedback`; what was lost before is given up where the codec's limit leaves no room for it."""
    try:
        return encode_feedback(codec, mean, residual)
    except CodecError:
        return encode_feedback(codec, mean, None)  # a mean of what was decoded can always be encoded


def _open_update(key: RoundKey, update: Update, size: int, codec: Codec, seen: set[str]) -> _Sound:
    if update.key != key:
        raise CodecError("made for another round, or from another outer state")
    if update.codec != codec.name:
        raise CodecError(f"codec {update.codec[:40]!r} instead of {codec.name}")
    if not 0 < update.tokens <= MAX_TOKENS:
        raise CodecError("a token count that is not above zero, or absurd")
    if update.peer in seen:
        raise CodecError("a second update in the same round")
    norm = measure_payload(codec, update.payload, size)
    seen.add(update.peer)
    return _Sound(update.peer, update.tokens, codec.open_payload(update.payload, size), norm)


def _clip_norms(norms: list[float], clip: float) -> list[float]:
    """What to multiply each vector with."""
    if len(norms) < CLIP_FROM:
        return [1.0] * len(norms)
    limit = clip * _find_median(norms)
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def _scale_reader(read: ReadPiece, factor: float) -> ReadPiece:
    if factor == 1.0:
        return read
    return lambda piece: (read(piece).astype(np.float64) * factor).astype(FLOAT)


def _cap_weights(tokens: list[int], clip: float) -> list[float]:
    if len(tokens) < CLIP_FROM:
        return [float(count) for count in tokens]
    limit = clip * _find_median([float(count) for count in tokens])
    return [min(float(count), limit) for count in tokens]


def _average_readers(readers: list[ReadPiece], size: int, weights: list[float], mode: str) -> np.ndarray:
    result = np.empty(size, dtype=FLOAT)
    column = np.array(weights, dtype=np.float64)[:, None]

    def average_piece(piece: slice) -> None:
        rows = np.stack([read(piece) for read in readers]).astype(np.float64)
        result[piece] = _average_rows(rows, column, mode)

    run_pieces(size, average_piece)
    return result


def _average_rows(rows: np.ndarray, weights: np.ndarray, mode: str) -> np.ndarray:
    """One value per column of (peers, elements); sums run over the peers one after the other."""
    num_peers = len(rows)
    trim = {"mean": 0, "trimmed": num_peers // TRIM_SHARE, "median": (num_peers - 1) // 2}[mode]
    ranks = _rank_rows(rows) if trim else None
    total, weight = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for index, row in enumerate(rows):
        # What is left out adds zero, so trimming nothing changes nothing.
        kept = 1.0 if ranks is None else ((ranks[index] >= trim) & (ranks[index] < num_peers - trim))
        share = weights[index] * kept
        total += row * share
        weight += share
    mean: np.ndarray = (total / weight).astype(FLOAT)
    return mean


def _rank_rows(rows: np.ndarray) -> np.ndarray:
    """How many values of its column come before each, equal ones in order of peers. Counting beats sorting here."""
    ranks = np.zeros(rows.shape, dtype=np.int16)
    for low in range(len(rows)):
        for high in range(low + 1, len(rows)):
            is_before = rows[low] <= rows[high]
            ranks[high] += is_before
            ranks[low] += ~is_before
    return ranks


def _find_median(values: list[float]) -> float:
    """The lower of the two in the middle, where there are two: the honest majority holds it."""
    return sorted(values)[(len(values) - 1) // 2]


def sum_squares(read: ReadPiece, size: int) -> float:
    """Sum of squares by pieces and halving: additions of whole vectors only, whose order nothing changes."""
    sums = np.zeros(-(-size // PIECE))

    def sum_piece(piece: slice) -> None:
        sums[piece.start // PIECE] = _sum_halves(read(piece).astype(np.float64) ** 2)

    run_pieces(size, sum_piece)
    return _sum_halves(sums)


def _sum_halves(values: np.ndarray) -> float:
    while values.size > 1:
        half = values.size // 2
        values, odd = values[:half] + values[half : 2 * half], values[2 * half :]
        if odd.size:
            values[0] += odd[0]
    return float(values[0]) if values.size else 0.0
