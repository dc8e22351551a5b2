"""The mean of a round's updates that no single bad one can spoil, and that comes out alike wherever it is computed.

    decode -> refuse what is not whole and finite -> clip norms -> cap weights -> (trimmed) mean -> encode

- Peers are taken in order of their ids and summed in fp64, element by element, so the order of arrival, the number of
  threads and the machine do not show in the result.
- Norms above `clip` times the median norm are scaled down to it, and token weights capped likewise, from three peers on
  (of two nobody knows which is the bad one).
- The trimmed mean leaves out the lowest and the highest floor(k / 4) values of every coordinate, from four peers on
  (Yin et al., arXiv 1803.01498), and weights the rest by tokens.
- One bad peer of four can then move a coordinate no further than its honest neighbours lie apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.diloco.codecs import Codec, CodecError, encode_feedback, find_codec
from shoal.diloco.codecs.base import FLOAT
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
    sound: list[tuple[Update, np.ndarray]] = []
    seen: set[str] = set()
    for update in sorted(updates, key=lambda update: (update.peer, update.payload)):
        try:
            sound.append((update, _open_update(key, update, size, codec, seen)))
        except CodecError as error:
            refused.append(Refusal(update.peer, str(error)))
    if not sound:
        return Aggregate(b"", (), tuple(refused), residual=residual)
    vectors, clipped = _clip_norms([vector for _, vector in sound], guard.clip)
    weights = _cap_weights([update.tokens for update, _ in sound], guard.clip)
    payload, residual = _encode_mean(codec, _average_vectors(vectors, weights, guard.mode), residual)
    peers = tuple(update.peer for update, _ in sound)
    return Aggregate(payload, peers, tuple(refused), tuple(peers[i] for i in clipped), residual)


def _encode_mean(codec: Codec, mean: np.ndarray, residual: np.ndarray | None) -> tuple[bytes, np.ndarray | None]:
    """As `encode_feedback`; what was lost before is given up where the codec's limit leaves no room for it."""
    try:
        return encode_feedback(codec, mean, residual)
    except CodecError:
        return encode_feedback(codec, mean, None)  # a mean of what was decoded can always be encoded


def _open_update(key: RoundKey, update: Update, size: int, codec: Codec, seen: set[str]) -> np.ndarray:
    if update.key != key:
        raise CodecError("made for another round, or from another outer state")
    if update.codec != codec.name:
        raise CodecError(f"codec {update.codec[:40]!r} instead of {codec.name}")
    if not 0 < update.tokens <= MAX_TOKENS:
        raise CodecError("a token count that is not above zero, or absurd")
    if update.peer in seen:
        raise CodecError("a second update in the same round")
    vector = codec.decode(update.payload, size)
    seen.add(update.peer)
    return vector


def _clip_norms(vectors: list[np.ndarray], clip: float) -> tuple[list[np.ndarray], list[int]]:
    if len(vectors) < CLIP_FROM:
        return vectors, []
    norms = [float(np.sqrt(sum_squares(vector))) for vector in vectors]
    limit = clip * _find_median(norms)
    clipped = [i for i, norm in enumerate(norms) if norm > limit]
    for i in clipped:
        vectors[i] = (vectors[i].astype(np.float64) * (limit / norms[i])).astype(FLOAT)
    return vectors, clipped


def _cap_weights(tokens: list[int], clip: float) -> list[float]:
    if len(tokens) < CLIP_FROM:
        return [float(count) for count in tokens]
    limit = clip * _find_median([float(count) for count in tokens])
    return [min(float(count), limit) for count in tokens]


def _average_vectors(vectors: list[np.ndarray], weights: list[float], mode: str) -> np.ndarray:
    result = np.empty_like(vectors[0])
    column = np.array(weights, dtype=np.float64)[:, None]

    def average_piece(piece: slice) -> None:
        rows = np.stack([vector[piece] for vector in vectors]).astype(np.float64)
        result[piece] = _average_rows(rows, column, mode)

    run_pieces(result.size, average_piece)
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


def sum_squares(vector: np.ndarray) -> float:
    """Sum of squares by pieces and halving: additions of whole vectors only, whose order nothing changes."""
    sums = np.zeros(-(-vector.size // PIECE))

    def sum_piece(piece: slice) -> None:
        sums[piece.start // PIECE] = _sum_halves(vector[piece].astype(np.float64) ** 2)

    run_pieces(vector.size, sum_piece)
    return _sum_halves(sums)


def _sum_halves(values: np.ndarray) -> float:
    while values.size > 1:
        half = values.size // 2
        values, odd = values[:half] + values[half : 2 * half], values[2 * half :]
        if odd.size:
            values[0] += odd[0]
    return float(values[0]) if values.size else 0.0
