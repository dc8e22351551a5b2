"""The manifest of a version: an append-only log of signed lines that can be read while it is still being written.

    head -> hashes ... [delta | no_delta anywhere between] ... hashes -> end

Invariants:
- `feed` takes the next line of this log, or raises `ManifestError` and leaves the log unchanged;
- lines are numbered, so none can be repeated, dropped or moved; the signature binds each line to its head;
- memory is bounded by what the head declares, and the head by `records`: 32 bytes per shard. The lines themselves stay
  in a file (`LineBuffer.keep_in`);
- a complete log has the hash of every shard, and roots that follow from them.
"""

from dataclasses import dataclass

from shoal.shardcast.errors import ManifestError
from shoal.shardcast.format import records
from shoal.shardcast.format.hashing import HASH_BYTES, hash_root
from shoal.shardcast.format.layout import File, ShardLayout, count_shards
from shoal.shardcast.format.records import Delta, End, Hashes, LineBuffer, ManifestHead, NoDelta, Record

FULL, DELTA = "full", "delta"
"""Names of the two blobs of a version."""


@dataclass(frozen=True, slots=True)
class VerifiedLine:
    """A line that was verified as the next one, and its record."""

    line: bytes
    record: Record
    digest: str


class ManifestLog:
    """The lines of one version so far, all of them verified."""

    def __init__(self, publisher: str, run: str) -> None:
        self.publisher = publisher
        self.run = run
        self.lines = LineBuffer()
        self.digest = ""
        self.ended = False
        self.delta_settled = False
        """whether it is known if there is a delta"""
        self.delta: ShardLayout | None = None
        self._head: ManifestHead | None = None
        self._full: ShardLayout | None = None
        self.root: str | None = None
        """root of the full blob, once the log is complete"""
        self.delta_root: str | None = None
        """root of the delta blob, once the log is complete and if there is one"""
        self.parent_root: str | None = None
        """root of the blob that the delta applies to"""
        self._hashes = {FULL: bytearray(), DELTA: bytearray()}

    def feed(self, line: bytes) -> Record:
        """Append the next line, with or without its newline."""
        checked = self.check(line)
        self.commit(checked)
        return checked.record

    def check(self, line: bytes) -> VerifiedLine:
        """Verify that this is the next line, without changing anything."""
        line = line.removesuffix(b"\n")
        body = records.open_line(line, self.publisher, self.digest)
        number, record = records.decode_body(body)
        if self.ended:
            raise ManifestError("line after the end of the manifest")
        if number != len(self.lines):
            raise ManifestError(f"line {number} instead of line {len(self.lines)}")
        self._check_record(record)
        return VerifiedLine(line, record, self.digest or records.digest_head(body))

    def commit(self, checked: VerifiedLine) -> None:
        """Append a line that `check` returned, with no other line in between."""
        record = checked.record
        self.lines.append(checked.line)
        self.digest = checked.digest
        match record:
            case ManifestHead():
                self._head, self._full = record, ShardLayout(record.files, record.shard_size)
                self.delta_settled = record.parent is None
            case Hashes():
                self._hashes[FULL] += b"".join(record.hashes)
            case Delta():
                self.delta = ShardLayout([File(DELTA, record.size)], self.head.shard_size)
                self.parent_root = record.parent_root.hex()
                self._hashes[DELTA] += b"".join(record.hashes)
                self.delta_settled = True
            case NoDelta():
                self.delta_settled = True
            case End():
                self.root, self.ended = record.root.hex(), True
                self.delta_root = None if record.delta_root is None else record.delta_root.hex()

    @property
    def head(self) -> ManifestHead:
        assert self._head is not None, "a log must begin with its head"
        return self._head

    @property
    def full(self) -> ShardLayout:
        assert self._full is not None, "a log must begin with its head"
        return self._full

    @property
    def num_hashes(self) -> int:
        """Number of shards of the full blob with known hashes; these are the first ones."""
        return len(self._hashes[FULL]) // HASH_BYTES

    def hash_of(self, blob: str, index: int) -> bytes | None:
        """The hash of a shard; None while it is unknown."""
        hashes = self._hashes[blob]
        return bytes(hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES]) or None

    def compute_end(self) -> End:
        """The record that ends this log, when all hashes are known."""
        root = self._compute_root(FULL, self.full)
        return End(root, None if self.delta is None else self._compute_root(DELTA, self.delta))

    def _compute_root(self, blob: str, layout: ShardLayout) -> bytes:
        return hash_root(layout.total, layout.shard_size, self._hashes[blob])

    def _check_record(self, record: Record) -> None:
        if isinstance(record, ManifestHead) != (self._head is None):
            raise ManifestError("a log must begin with its head, and have only one")
        match record:
            case ManifestHead():
                if record.run != self.run:
                    raise ManifestError("version of a different run")
            case Hashes():
                self._check_hashes(record)
            case Delta() | NoDelta():
                self._check_delta(record)
            case End():
                self._check_end(record)

    def _check_hashes(self, record: Hashes) -> None:
        if record.first != self.num_hashes:
            raise ManifestError(f"hashes from shard {record.first} on instead of shard {self.num_hashes}")
        if record.first + len(record.hashes) > len(self.full.shards):
            raise ManifestError("more hashes than shards")

    def _check_delta(self, record: Delta | NoDelta) -> None:
        if self.delta_settled:
            raise ManifestError("unexpected or second delta")
        if isinstance(record, NoDelta):
            return
        if record.size > self.full.total:
            raise ManifestError("delta larger than the full version")
        if len(record.hashes) != count_shards(record.size, self.head.shard_size):
            raise ManifestError("delta with a wrong number of hashes")

    def _check_end(self, record: End) -> None:
        if self.num_hashes != len(self.full.shards) or not self.delta_settled:
            raise ManifestError("end before the hashes of all shards and the delta record")
        if record != self.compute_end():
            raise ManifestError("wrong root in the end record")
