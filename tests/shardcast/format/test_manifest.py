"""The log of a version: anything but its next line is refused and changes nothing."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity.keys import Key
from shoal.shardcast.errors import ManifestError
from shoal.shardcast.format.hashing import hash_root
from shoal.shardcast.format.layout import File
from shoal.shardcast.format.manifest import DELTA, FULL, ManifestLog
from shoal.shardcast.format.records import (
    Delta,
    End,
    Hashes,
    ManifestHead,
    NoDelta,
    Record,
    digest_head,
    open_line,
    sign_record,
)

KEY, OTHER = Key.generate(), Key.generate()
SIZE = 1 << 16
HASHES = tuple(bytes([number]) * 32 for number in range(5))
HEAD = ManifestHead("reef", 7, 100, SIZE, (File("a", 3 * SIZE + 1), File("b", 0), File("c", 5)), 6, False)
DELTA_RECORD = Delta(SIZE + 1, b"\x77" * 32, (b"\x88" * 32, b"\x99" * 32))
ROOT = hash_root(3 * SIZE + 6, SIZE, b"".join(HASHES))
DELTA_ROOT = hash_root(SIZE + 1, SIZE, b"".join(DELTA_RECORD.hashes))
RECORDS: list[Record] = [Hashes(0, HASHES[:2]), DELTA_RECORD, Hashes(2, HASHES[2:]), End(ROOT, DELTA_ROOT)]


def sign_all(head: ManifestHead, *records: Record, key: Key = KEY) -> list[bytes]:
    first = sign_record(key, "", 0, head)
    digest = digest_head(open_line(first, key.public, ""))
    return [first, *(sign_record(key, digest, number, record) for number, record in enumerate(records, 1))]


LINES = sign_all(HEAD, *RECORDS)
FOREIGN = [
    *sign_all(HEAD, *RECORDS, key=OTHER),
    *sign_all(replace(HEAD, run="other"), *RECORDS),
    *sign_all(replace(HEAD, serial=101), *RECORDS)[1:],
    *sign_all(replace(HEAD, version=8), *RECORDS)[1:],
]


def feed_all(lines: list[bytes]) -> ManifestLog:
    log = ManifestLog(KEY.public, "reef")
    for line in lines:
        log.feed(line)
    return log


def snapshot(log: ManifestLog) -> dict[str, Any]:
    state = copy.deepcopy({name: value for name, value in vars(log).items() if name not in ("_full", "delta", "lines")})
    return state | {
        "lines": list(log.lines),
        "full": log._full and log._full.files,
        "delta": log.delta and log.delta.files,
    }


def refuse(log: ManifestLog, line: bytes) -> str:
    before = snapshot(log)
    with pytest.raises(ManifestError) as caught:
        log.feed(line)
    assert snapshot(log) == before
    return str(caught.value)


def feed_records(*records: Record, head: ManifestHead = HEAD) -> tuple[ManifestLog, bytes]:
    """A log with all but the last record, and the line of that one."""
    *lines, last = sign_all(head, *records)
    return feed_all(lines), last


def test_a_log_says_what_its_lines_say() -> None:
    log = feed_all(LINES)
    assert (log.head, list(log.lines), log.ended, log.delta_settled) == (HEAD, LINES, True, True)
    assert log.digest == digest_head(
        json.dumps(json.loads(LINES[0])["body"], sort_keys=True, separators=(",", ":")).encode()
    )
    assert (len(log.full.shards), log.full.total) == (5, 3 * SIZE + 6)
    assert log.delta is not None and log.delta.total == SIZE + 1
    assert [log.hash_of(FULL, index) for index in range(6)] == [*HASHES, None]
    assert [log.hash_of(DELTA, index) for index in range(3)] == [*DELTA_RECORD.hashes, None]
    assert (log.root, log.delta_root, log.parent_root) == (ROOT.hex(), DELTA_ROOT.hex(), "77" * 32)


def test_a_log_can_be_read_while_it_grows() -> None:
    log = ManifestLog(KEY.public, "reef")
    seen = []
    for line in LINES:
        log.feed(line + b"\n")
        seen.append((log.num_hashes, log.delta is not None, log.delta_settled, log.ended, log.root is not None))
    assert seen == [
        (0, False, False, False, False),
        (2, False, False, False, False),
        (2, True, True, False, False),
        (5, True, True, False, False),
        (5, True, True, True, True),
    ]
    assert list(log.lines) == LINES


def test_one_newline_is_part_of_a_line_and_two_are_not() -> None:
    log = ManifestLog(KEY.public, "reef")
    refuse(log, LINES[0] + b"\n\n")
    refuse(log, b"\n" + LINES[0])
    refuse(log, LINES[0] + b"\r\n")
    refuse(log, b"")
    refuse(log, LINES[0] + b"\n" + LINES[1])


@given(st.integers(0, 4), st.integers(0, 4))
def test_no_line_but_the_next_one_is_taken(position: int, offered: int) -> None:
    log = feed_all(LINES[:position])
    if offered == position:
        log.feed(LINES[offered])
    else:
        refuse(log, LINES[offered])


@given(st.integers(0, 5), st.sampled_from(FOREIGN))
def test_no_line_of_another_key_run_version_or_publish_is_taken(position: int, line: bytes) -> None:
    refuse(feed_all(LINES[:position]), line)


@given(st.integers(0, 4), st.data())
def test_no_line_with_a_flipped_bit_is_taken_and_the_right_one_still_is(position: int, data: st.DataObject) -> None:
    log = feed_all(LINES[:position])
    line = bytearray(LINES[position])
    line[data.draw(st.integers(0, len(line) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    refuse(log, bytes(line))
    log.feed(LINES[position])


@given(st.permutations(range(5)))
def test_shuffled_lines_never_give_an_ended_log(order: list[int]) -> None:
    log = ManifestLog(KEY.public, "reef")
    for number in order:
        try:
            log.feed(LINES[number])
        except ManifestError:
            continue
    assert list(log.lines) == LINES[: len(log.lines)]
    assert log.ended == (list(order) == sorted(order))


@given(st.integers(0, 5), st.binary(max_size=400))
def test_any_other_bytes_are_refused(position: int, line: bytes) -> None:
    refuse(feed_all(LINES[:position]), line)


def test_a_second_head_is_refused_and_so_is_a_log_without_one() -> None:
    log, line = feed_records(replace(HEAD, serial=101))
    assert "must begin with its head" in refuse(log, line)
    empty = ManifestLog(KEY.public, "reef")
    assert "must begin with its head" in refuse(empty, sign_record(KEY, "", 0, RECORDS[0]))


def test_hashes_must_follow_on_those_before_and_not_go_beyond_the_last_shard() -> None:
    for records in (
        (Hashes(1, HASHES[:1]),),
        (Hashes(0, HASHES[:2]), Hashes(0, HASHES[:2])),
        (Hashes(0, HASHES[:2]), Hashes(1, HASHES[:2])),
        (Hashes(0, HASHES[:2]), Hashes(3, HASHES[:2])),
    ):
        assert "instead of" in refuse(*feed_records(*records))
    assert "more hashes than shards" in refuse(*feed_records(Hashes(0, (*HASHES, HASHES[0]))))
    assert "more hashes than shards" in refuse(*feed_records(Hashes(0, HASHES), Hashes(5, HASHES[:1])))


def test_a_delta_comes_once_and_only_if_it_was_announced() -> None:
    for first in (DELTA_RECORD, NoDelta("no")):
        for second in (DELTA_RECORD, NoDelta("no")):
            assert "second delta" in refuse(*feed_records(first, second))
    orphan = replace(HEAD, parent=None)
    for record in (DELTA_RECORD, NoDelta("no")):
        assert "unexpected" in refuse(*feed_records(record, head=orphan))
    assert feed_all(sign_all(orphan)).delta_settled


def test_a_delta_is_no_larger_than_the_version_and_has_a_hash_per_shard() -> None:
    total = 3 * SIZE + 6
    hashes = HASHES[:4]
    assert "larger" in refuse(*feed_records(Delta(total + 1, bytes(32), hashes)))
    for size in (3 * SIZE, 4 * SIZE + 1):
        with pytest.raises(ManifestError, match=r"wrong number|larger"):
            feed_all(sign_all(HEAD, Delta(size, bytes(32), hashes)))
    feed_all(sign_all(HEAD, Delta(total, bytes(32), hashes)))


def test_an_end_needs_all_hashes_the_delta_record_and_matching_roots() -> None:
    whole = Hashes(0, HASHES)
    end = End(ROOT, None)
    assert "end before the hashes" in refuse(*feed_records(Hashes(0, HASHES[:4]), NoDelta("no"), end))
    assert "end before the hashes" in refuse(*feed_records(whole, end))
    for wrong in (End(DELTA_ROOT, None), End(ROOT, DELTA_ROOT), End(bytes(32), None)):
        assert "wrong root" in refuse(*feed_records(whole, NoDelta("no"), wrong))
    for wrong in (End(ROOT, None), End(ROOT, ROOT)):
        assert "wrong root" in refuse(*feed_records(whole, DELTA_RECORD, wrong))
    assert feed_all(sign_all(HEAD, whole, NoDelta("no"), end)).delta_root is None


def test_nothing_follows_the_end() -> None:
    assert "after the end" in refuse(*feed_records(*RECORDS, NoDelta("no")))
    assert "after the end" in refuse(*feed_records(*RECORDS, End(ROOT, DELTA_ROOT)))


def test_a_version_without_a_byte_ends_right_after_its_head() -> None:
    head = replace(HEAD, files=(File("a", 0),), parent=None)
    assert feed_all(sign_all(head, End(hash_root(0, SIZE, b""), None))).ended


def test_a_log_can_say_how_it_will_end() -> None:
    log = feed_all(LINES[:-1])
    assert log.compute_end() == RECORDS[-1]
