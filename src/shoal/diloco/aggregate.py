"""The mean of a round's updates: robust against a single bad update, and bitwise identical wherever it is computed.

    decode -> refuse what is incomplete or not finite -> clip norms -> cap weights -> (trimmed) mean -> encode

- Peers are taken in order of their ids and summed in fp64, element by element. The order of arrival, the number of
  threads and the machine do not affect the result.
- Norms above `clip` times the median norm are scaled down to it, and token weights are capped likewise, from three
  peers on (with two, nobody knows which one is bad). For an even number the lower of the two middle values counts: the
  honest majority holds it.
- The trimmed mean leaves out the lowest and the highest floor(k / 4) values of every coordinate, from four peers on
  (Yin et al., arXiv 1803.01498), and weights the rest by tokens.
- Vectors are decoded piece by piece, twice, so memory does not grow with the number of peers.
- One bad peer of four can then move a coordinate no further than its honest neighbours lie apart.
- All of this holds among the peers that a run knows. Others (`OpenPeers`) are averaged by themselves, clipped to the
  norms and weights of the known ones, and added with at most `share` of their weight, however many they are. With m the
  mean of the known peers, c the clip and n their lower median norm, open peers move the result by at most
  share / (1 + share) (|m| + c n), and nothing is averaged without a known peer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np

from shoal.diloco.background import PIECE, run_pieces
from shoal.diloco.codecs import Codec, CodecError, encode_feedback, find_codec
from shoal.diloco.codecs.base import FLOAT, ReadPiece
from shoal.diloco.outer import UpdateGuard
from shoal.diloco.round import MAX_TOKENS, RoundKey, Update

CLIP_FROM = 3
TRIM_SHARE = 4
"""One of this many values is left out at each end. Changing breaks: agreement between peers of different releases."""


@dataclass(frozen=True, slots=True)
class RejectionReason:
    """Why an update is not in the mean."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The mean of a round, identical for everyone."""

    payload: bytes
    """empty if no update could be used"""
    peers: tuple[str, ...]
    """peers whose whole vector is in it, in order of id"""
    refused: tuple[RejectionReason, ...] = ()
    clipped: tuple[str, ...] = ()
    """those of `peers` whose norm was scaled down"""
    residual: np.ndarray | None = None
    """what the codec lost, to be added to the fragment's next aggregate"""


@dataclass(frozen=True, slots=True)
class OpenPeers:
    """The peers that nobody vouches for, and how much they may weigh together."""

    peers: frozenset[str] = frozenset()
    share: float = 0.0
    """of the weight of the other peers"""


NO_OPEN_PEERS = OpenPeers()


@dataclass(frozen=True, slots=True)
class _Sound:
    """An update that is complete and finite."""

    peer: str
    tokens: int
    read: ReadPiece
    norm: float


def aggregate_updates(
    key: RoundKey,
    updates: Sequence[Update],
    size: int,
    codec_name: str,
    guard: UpdateGuard,
    residual: np.ndarray | None = None,
    open_peers: OpenPeers = NO_OPEN_PEERS,
) -> Aggregate:
    """The encoded mean of these updates of `size` elements, with the refused peers and the reasons."""
    codec = find_codec(codec_name)
    refused: list[RejectionReason] = []
    sound: list[_Sound] = []
    seen: set[str] = set()
    for update in sorted(updates, key=lambda update: (update.peer, update.payload)):
        try:
            sound.append(_open_update(key, update, size, codec, seen))
        except CodecError as error:
            refused.append(RejectionReason(update.peer, str(error)))
    known = [found for found in sound if found.peer not in open_peers.peers]
    others = [found for found in sound if found.peer in open_peers.peers]
    if not known:
        return Aggregate(b"", (), tuple(refused), residual=residual)
    factors = _clip_norms([found.norm for found in known], guard.clip)
    weights = _cap_weights([found.tokens for found in known], guard.clip)
    mean = _average_readers(_scale_readers(known, factors), size, weights, guard.mode)
    clipped = _name_clipped(known, factors)
    if others:
        norm = guard.clip * median_low([found.norm for found in known])
        factors = [norm / found.norm if found.norm > norm else 1.0 for found in others]
        limit = guard.clip * median_low([found.tokens for found in known])
        own = [min(float(found.tokens), limit) for found in others]
        share = min(sum(own) / sum(weights), open_peers.share)
        added = _average_readers(_scale_readers(others, factors), size, own, guard.mode)
        mean = ((mean.astype(np.float64) + share * added.astype(np.float64)) / (1.0 + share)).astype(FLOAT)
        clipped += _name_clipped(others, factors)
    payload, residual = _encode_mean(codec, mean, residual)
    return Aggregate(payload, tuple(found.peer for found in sound), tuple(refused), tuple(sorted(clipped)), residual)


def measure_payload(codec: Codec, payload: bytes, size: int) -> float:
    """The norm of a payload's vector, decoded piece by piece; `CodecError` if an element is not finite."""
    read = codec.open_payload(payload, size)
    return math.sqrt(sum_squares(read, size))


def _encode_mean(codec: Codec, mean: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray | None]:
    """Like `encode_feedback`, but drops the previous residual if the codec's limit leaves no room for it."""
    try:
        return encode_feedback(codec, mean, residual)
    except CodecError:
        return encode_feedback(codec, mean, None)  # a mean of decoded values can always be encoded


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
    """The factor for each vector."""
    if len(norms) < CLIP_FROM:
        return [1.0] * len(norms)
    limit = clip * median_low(norms)
    return [limit / norm if norm > limit else 1.0 for norm in norms]


def _scale_readers(sound: Sequence[_Sound], factors: Sequence[float]) -> list[ReadPiece]:
    return [_scale_reader(found.read, factor) for found, factor in zip(sound, factors, strict=True)]


def _name_clipped(sound: Sequence[_Sound], factors: Sequence[float]) -> list[str]:
    return [found.peer for found, factor in zip(sound, factors, strict=True) if factor < 1.0]


def _scale_reader(read: ReadPiece, factor: float) -> ReadPiece:
    if factor == 1.0:
        return read
    return lambda piece: (read(piece).astype(np.float64) * factor).astype(FLOAT)


def _cap_weights(tokens: list[int], clip: float) -> list[float]:
    if len(tokens) < CLIP_FROM:
        return [float(count) for count in tokens]
    limit = clip * median_low(tokens)
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
    """Reduce (peers, elements) to one value per column; sums run over the peers in order."""
    num_peers = len(rows)
    trim = {"mean": 0, "trimmed": num_peers // TRIM_SHARE, "median": (num_peers - 1) // 2}[mode]
    ranks = _rank_rows(rows) if trim else None
    total, weight = np.zeros(rows.shape[1]), np.zeros(rows.shape[1])
    for index, row in enumerate(rows):
        # Values left out add zero, so trimming nothing changes nothing.
        kept = 1.0 if ranks is None else ((ranks[index] >= trim) & (ranks[index] < num_peers - trim))
        share = weights[index] * kept
        total += row * share
        weight += share
    mean: np.ndarray = (total / weight).astype(FLOAT)
    return mean


def _rank_rows(rows: np.ndarray) -> np.ndarray:
    """Rank of each value in its column, equal ones in order of peers. Counting is faster than sorting here."""
    ranks = np.zeros(rows.shape, dtype=np.int16)
    for low in range(len(rows)):
        for high in range(low + 1, len(rows)):
            is_before = rows[low] <= rows[high]
            ranks[high] += is_before
            ranks[low] += ~is_before
    return ranks


def sum_squares(read: ReadPiece, size: int) -> float:
    """Sum of squares by pieces and pairwise halving: only whole-vector additions, in a fixed order."""
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
