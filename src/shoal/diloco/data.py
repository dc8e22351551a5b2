"""Text to token sequences, and which peer reads which of them.

Symbols: n sequences, L lanes, c_l how many sequences of lane l have been read so far.

    epoch of the next sequence of lane l    e = c_l div n_l        n_l sequences are in lane l
    its place in the epoch's order          p = l + L (c_l mod n_l)
    the sequence                            order_e[p]             a permutation from (seed, e)

- Lanes partition every epoch's order, so an epoch reads every sequence once, independent of which peer reads which
  lane.
- Lane l belongs to member l mod k of the k members, in order of id. When members change, lanes are reassigned with
  their counts: nothing is lost or read twice. Data that a peer read but never submitted counts as unread and is read
  again.
- If inner steps overlap with a round, a lane that is reassigned at that moment may have been read ahead by as many
  sequences as the overlap covers. A peer that joined during a round draws at random until the round is over.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shoal.diloco.reduce import find_lanes
from shoal.diloco.state import OuterState
from shoal.errors import ConfigError
from shoal.policy.tokenizer import encode_completion
from shoal.seeds import derive_seed

HUB = "hf:"
MAX_ALPHABET = 4096


def read_texts(source: str, field: str = "text") -> Iterator[str]:
    """The documents of a source: a file, a folder of files, or `hf:NAME` or `hf:NAME:SPLIT` from Hugging Face datasets.

    A .jsonl line or a .parquet row is a document, its text in `field`; any other file is one document.
    """
    if source.startswith(HUB):
        yield from _read_hub(source.removeprefix(HUB), field)
        return
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(f"data.source: no such file or folder: {source!r}")
    files = sorted(entry for entry in path.rglob("*") if entry.is_file()) if path.is_dir() else [path]
    for file in files:
        yield from _read_file(file, field)


def pack_sequences(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], length: int) -> np.ndarray:
    """Concatenate documents, each with its end token, and cut them into rows of `length` + 1 tokens.

    The last token of a row is used only as a target; a short last row is left out.
    """
    parts = [np.array(encode_completion(tokenizer, text), dtype=np.int32) for text in texts if text]
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    rows = tokens.size // (length + 1)
    return tokens[: rows * (length + 1)].reshape(rows, length + 1)


def find_alphabet(texts: Iterable[str]) -> str:
    """The characters of all documents, for the tokenizer of a model from scratch; the rarest are left out."""
    counts: dict[str, int] = {}
    for text in texts:
        for char in set(text):
            counts[char] = counts.get(char, 0) + text.count(char)
    kept = sorted(counts, key=lambda char: (-counts[char], char))[:MAX_ALPHABET]
    return "".join(sorted(kept))


class LaneReader:
    """One peer's position in the sequences of a run."""

    def __init__(self, num_sequences: int, num_lanes: int, seed: int, peer: str) -> None:
        if num_sequences < num_lanes:
            raise ConfigError(f"data: {num_sequences} sequences are fewer than the {num_lanes} lanes; use more text")
        self.num_sequences, self.num_lanes, self.seed, self.peer = num_sequences, num_lanes, seed, peer
        self._counts: dict[int, int] = {}
        self._orders: dict[int, np.ndarray] = {}
        self._num_guest = 0

    def assign(self, state: OuterState) -> None:
        """Read the lanes that this state assigns to the peer, from where the run has read them."""
        kept = self._counts
        # A lane that stays may have been read further than any round has counted yet.
        self._counts = {lane: max(state.lanes[lane], kept.get(lane, 0)) for lane in find_lanes(state, self.peer)}

    def rewind(self, state: OuterState) -> None:
        """Forget what was read but never submitted: after a restart, or when the peer's steps were dropped."""
        self._counts = {}
        self.assign(state)

    def report(self) -> tuple[tuple[int, int], ...]:
        """How far each of the peer's lanes has been read."""
        return tuple(sorted(self._counts.items()))

    def draw(self, count: int) -> np.ndarray:
        """Indices of the next sequences to train on."""
        if not self._counts:
            return self._draw_guest(count)
        return np.array([self._next_index() for _ in range(count)])

    def _next_index(self) -> int:
        lane = min(self._counts, key=lambda lane: (self._counts[lane], lane))
        count = self._counts[lane]
        self._counts[lane] = count + 1
        size = -(-(self.num_sequences - lane) // self.num_lanes)
        place = lane + self.num_lanes * (count % size)
        return int(self._find_order(count // size)[place])

    def _find_order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            # Lanes of different length end their epochs at different times, so the previous order is kept too.
            self._orders = {number: order for number, order in self._orders.items() if number >= epoch - 1}
            generator = np.random.default_rng(derive_seed("diloco-data", self.seed, epoch))
            self._orders[epoch] = generator.permutation(self.num_sequences)
        return self._orders[epoch]

    def _draw_guest(self, count: int) -> np.ndarray:
        self._num_guest += 1
        seed = derive_seed("diloco-guest", self.seed, self.peer, self._num_guest)
        return np.random.default_rng(seed).integers(self.num_sequences, size=count)


def _read_file(path: Path, field: str) -> Iterator[str]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _pick_text(_parse_line(line, path, number), field, f"{path}:{number}")
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, field)
    else:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path}: not UTF-8 text") from None


def _parse_line(line: str, path: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        raise ConfigError(f"{path}:{number}: invalid JSON") from None


def _pick_text(row: Any, field: str, where: str) -> str:
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f"{where}: no text in field {field!r}; set data.field to the field with the text")
    return text


def _read_parquet(path: Path, field: str) -> Iterator[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise ConfigError(f"{path}: no column {field!r}; set data.field to the column with the text")
            for batch in file.iter_batches(columns=[field]):
                for row in batch.to_pylist():
                    yield _pick_text(row, field, str(path))
    except pa.ArrowInvalid as error:
        raise ConfigError(f"{path}: cannot read Parquet file ({str(error).splitlines()[0]})") from None


def _read_hub(name: str, field: str) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise ConfigError(f"data.source: {HUB}{name} needs the extra datasets: pip install '.[datasets]'") from None
    path, _, split = name.partition(":")
    try:
        rows = datasets.load_dataset(path, split=split or "train")
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ConfigError(f"data.source: {HUB}{name} cannot load the dataset: {reason}") from None
    for number, row in enumerate(rows):
        yield _pick_text(row, field, f"{HUB}{name} row {number}")
