"""The manifest of a version: an append-only log of signed lines that can be read while it is still being written.

    head -> hashes ... [delta | no_delta anywhere between] ... hashes -> end

Invariants:
- `feed` takes the next line of this log or raises `ManifestError` and leaves the log as it was;
- lines are numbered, so none can be repeated, dropped or put elsewhere; each names its head through the signature;
- memory is bounded by what the head declares, and the head by `records`: 32 bytes per shard, the lines themselves are
  left in a file (`Lines.keep_in`);
- an ended log has the hash of every shard, and roots that follow from them.
"""

from dataclasses import dataclass

from shoal.shardcast.errors import ManifestError
from shoal.shardcast.hashing import HASH_BYTES, hash_root
from shoal.shardcast.layout import File, Layout, count_shards
from shoal.shardcast.lines import Lines
from shoal.shardcast.records import (
    Delta,
    End,
    Hashes,
    Head,
    NoDelta,
    Record,
    decode_body,
    digest_head,
    open_line,
    strip_newline,
)

FULL, DELTA = "full", "delta"
"""Names of the two blobs of a version."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A line that was found to be the next one, and what it says."""

    line: bytes
    record: Record
    digest: str


class ManifestLog:
    """The lines of one version so far, all of them verified."""

    def __init__(self, publisher: str, run: str) -> None:
        self.publisher = publisher
        self.run = run
        self.lines = Lines()
        self.digest = ""
        self.ended = False
        self.delta_settled = False
        """whether it is known if there is a delta"""
        self.delta: Layout | None = None
        self._head: Head | None = None
        self._full: Layout | None = None
        self._end: End | None = None
        self._parent_root: bytes | None = None
        self._hashes = {FULL: bytearray(), DELTA: bytearray()}

    def feed(self, line: bytes) -> Record:
        """Take the next line, with or without its newline."""
        checked = self.check(line)
        self.commit(checked)
        return checked.record

    def check(self, line: bytes) -> Checked:
        """Verify that this is the next line, and change nothing."""
        line = strip_newline(line)
        body = open_line(line, self.publisher, self.digest)
        number, record = decode_body(body)
        if self.ended:
            raise ManifestError("a line after the last")
        if number != len(self.lines):
            raise ManifestError(f"line {number} where line {len(self.lines)} comes next")
        self._check_record(record)
        return Checked(line, record, self.digest or digest_head(body))

    def commit(self, checked: Checked) -> None:
        """Take a line that `check` returned, with no other line between."""
        record = checked.record
        self.lines.append(checked.line)
        self.digest = checked.digest
        match record:
            case Head():
                self._head, self._full = record, Layout(record.files, record.shard_size)
                self.delta_settled = record.parent is None
            case Hashes():
                self._hashes[FULL] += b"".join(record.hashes)
            case Delta():
                self.delta = Layout([File(DELTA, record.size)], self.head.shard_size)
                self._parent_root = record.parent_root
                self._hashes[DELTA] += b"".join(record.hashes)
                self.delta_settled = True
            case NoDelta():
                self.delta_settled = True
            case End():
                self._end, self.ended = record, True

    @property
    def head(self) -> Head:
        assert self._head is not None, "a log begins with its head"
        return self._head

    @property
    def full(self) -> Layout:
        assert self._full is not None, "a log begins with its head"
        return self._full

    @property
    def num_hashes(self) -> int:
        """Shards of the full blob whose hashes are known; they are the first ones."""
        return len(self._hashes[FULL]) // HASH_BYTES

    @property
    def parent_root(self) -> str | None:
        """Root of the blob that the delta is to be applied to."""
        return None if self._parent_root is None else self._parent_root.hex()

    @property
    def root(self) -> str | None:
        """Root of the full blob, once the log has ended."""
        return None if self._end is None else self._end.root.hex()

    @property
    def delta_root(self) -> str | None:
        """Root of the delta blob, once the log has ended and if there is one."""
        return None if self._end is None or self._end.delta_root is None else self._end.delta_root.hex()

    def hash_of(self, blob: str, index: int) -> bytes | None:
        """The hash of a shard, None while it is not known."""
        hashes = self._hashes[blob]
        return bytes(hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]) or None

    def compute_end(self) -> End:
        """The record that ends this log, all hashes being known."""
        root = self._compute_root(FULL, self.full)
        return End(root, None if self.delta is None else self._compute_root(DELTA, self.delta))

    def _compute_root(self, blob: str, layout: Layout) -> bytes:
        return hash_root(layout.total, layout.shard_size, self._hashes[blob])

    def _check_record(self, record: Record) -> None:
        if isinstance(record, Head) != (self._head is None):
            raise ManifestError("a log begins with its head, and has one")
        match record:
            case Head():
                if record.run != self.run:
                    raise ManifestError("a version of another run")
            case Hashes():
                self._check_hashes(record)
            case Delta() | NoDelta():
                self._check_delta(record)
            case End():
                self._check_end(record)

    def _check_hashes(self, record: Hashes) -> None:
        if record.first != self.num_hashes:
            raise ManifestError(f"hashes from shard {record.first} on where shard {self.num_hashes} comes next")
        if record.first + len(record.hashes) > len(self.full.shards):
            raise ManifestError("more hashes than shards")

    def _check_delta(self, record: Delta | NoDelta) -> None:
        if self.delta_settled:
            raise ManifestError("a delta where none was announced, or a second one")
        if isinstance(record, NoDelta):
            return
        if record.size > self.full.total:
            raise ManifestError("a delta larger than the full version")
        if len(record.hashes) != count_shards(record.size, self.head.shard_size):
            raise ManifestError("a delta with another number of hashes than of shards")

    def _check_end(self, record: End) -> None:
        if self.num_hashes != len(self.full.shards) or not self.delta_settled:
            raise ManifestError("an end before the hashes of all shards and the word about a delta")
        if record != self.compute_end():
            raise ManifestError("an end with a root that does not follow from the hashes")
