import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.diloco.data import LaneReader, find_alphabet, pack_sequences, read_texts
from shoal.diloco.reduce import find_lanes, settle_lanes
from shoal.diloco.round import RoundKey, Update
from shoal.diloco.state import OuterState
from shoal.errors import ConfigError
from shoal.policy.tokenizer import build_tokenizer

KEY = RoundKey("run", 0, 0, "")


def make_state(members: str, lanes: tuple[int, ...]) -> OuterState:
    return OuterState((), 0, tuple(sorted(members)), lanes)


def make_update(reader: LaneReader) -> Update:
    return Update(KEY, reader.peer, 1, 1, b"", "fp32", reader.report())


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_an_epoch_reads_every_sequence_once_however_peers_come_and_go(data: st.DataObject) -> None:
    """Peers join, leave and die, and read at different speeds; only submitted data counts."""
    num_lanes = data.draw(st.integers(1, 8))
    num_sequences = data.draw(st.integers(num_lanes, 24))
    state = make_state("a", (0,) * num_lanes)
    readers: dict[str, LaneReader] = {}
    read: list[tuple[int, int]] = []  # (lane's epoch, sequence)
    for _ in range(60):
        names = data.draw(st.sets(st.sampled_from("abcde"), min_size=1))
        dead = data.draw(st.sets(st.sampled_from(state.members), max_size=len(state.members) - 1))
        updates, drawn = [], []
        for name in state.members:
            reader = readers.setdefault(name, LaneReader(num_sequences, num_lanes, 7, name))
            reader.rewind(state)
            if not find_lanes(state, name):
                continue
            before = dict(reader.report())
            found = reader.draw(data.draw(st.integers(1, 4)))
            if name not in dead:
                updates.append(make_update(reader))
                drawn += list(
                    zip(_find_epochs(before, dict(reader.report()), num_sequences, num_lanes), found, strict=True)
                )
        read += drawn
        state = make_state("".join(names), settle_lanes(state, updates))
        if min(state.lanes) > -(-num_sequences // num_lanes):
            break
    for epoch in {epoch for epoch, _ in read}:
        mine = [sequence for number, sequence in read if number == epoch]
        assert len(mine) == len(set(mine)), "read twice"
        complete = all(
            count >= (epoch + 1) * _size(lane, num_sequences, num_lanes) for lane, count in enumerate(state.lanes)
        )
        assert not complete or sorted(mine) == list(range(num_sequences)), "lost"


def _size(lane: int, num_sequences: int, num_lanes: int) -> int:
    return -(-(num_sequences - lane) // num_lanes)


def _find_epochs(before: dict[int, int], after: dict[int, int], num_sequences: int, num_lanes: int) -> list[int]:
    """The epoch of every sequence drawn, in the order of drawing: always from the lane that is furthest behind."""
    counts, found = dict(before), []
    while counts != after:
        lane = min(counts, key=lambda lane: (counts[lane], lane))
        found.append(counts[lane] // _size(lane, num_sequences, num_lanes))
        counts[lane] += 1
    return found


def test_peers_read_disjoint_lanes_and_the_same_on_every_machine() -> None:
    state = make_state("abc", (0,) * 6)
    readers = [LaneReader(100, 6, 3, name) for name in "abc"]
    for reader in readers:
        reader.assign(state)
    found = [reader.draw(20).tolist() for reader in readers]
    assert len({index for mine in found for index in mine}) == 60
    again = LaneReader(100, 6, 3, "b")
    again.assign(state)
    assert again.draw(20).tolist() == found[1]
    other = LaneReader(100, 6, 4, "b")
    other.assign(state)
    assert other.draw(20).tolist() != found[1]


def test_a_peer_moves_only_its_own_lanes_and_only_forwards() -> None:
    state = make_state("ab", (5, 5, 5, 5))
    thief = Update(KEY, "a", 1, 1, b"", "fp32", ((0, 9), (1, 99), (2, 3), (77, 1), (-1, 50)))
    assert settle_lanes(state, [thief]) == (9, 5, 5, 5)


def test_a_peer_that_is_not_yet_a_member_reads_something_and_moves_nothing() -> None:
    reader = LaneReader(50, 4, 0, "new")
    reader.assign(make_state("ab", (0,) * 4))
    assert reader.report() == () and set(reader.draw(10)) <= set(range(50))


def test_lanes_without_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match="more text"):
        LaneReader(3, 8, 0, "a")


def test_text_jsonl_and_parquet_are_read_alike(tmp_path: Path) -> None:
    texts = ["one two", "three"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"body": texts, "other": [1, 2]}), tmp_path / "b.parquet")
    for number, text in enumerate(texts):
        (tmp_path / f"c{number}.txt").write_text(text)
    assert list(read_texts(str(tmp_path), "body")) == texts * 3


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b"{}\n", "a.jsonl:1"),
        ("a.jsonl", b"{\n", "invalid JSON"),
        ("a.parquet", b"x", "Parquet"),
        ("a.txt", b"\xff", "UTF-8"),
    ],
)
def test_a_bad_file_is_reported_by_name(tmp_path: Path, name: str, content: bytes, reason: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason):
        list(read_texts(str(tmp_path / name)))


def test_packing_loses_no_token_but_the_last_short_row() -> None:
    tokenizer = build_tokenizer(find_alphabet(["abc"]))
    rows = pack_sequences(tokenizer, ["abca", "", "bb"], 2)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in "abc"}
    stream = [
        ids["a"],
        ids["b"],
        ids["c"],
        ids["a"],
        tokenizer.eos_token_id,
        ids["b"],
        ids["b"],
        tokenizer.eos_token_id,
    ]
    assert rows.tolist() == np.array(stream[:6]).reshape(2, 3).tolist()


def test_a_dataset_of_the_hub_is_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(read_texts(f"hf:{folder}")) == ["one", "two"]
    with pytest.raises(ConfigError, match="cannot load the dataset"):
        list(read_texts(f"hf:{tmp_path / 'none'}:train"))
