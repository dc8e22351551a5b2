import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity.keys import Key
from shoal.ledger.head import (
    Fork,
    ForkError,
    Head,
    HeadError,
    HeadKeeper,
    Relation,
    SignedHead,
    check_extension,
    sign_head,
)
from shoal.ledger.merkle import hash_leaf, prove_consistency, root_leaves
from shoal.util.canonical import encode_canonical

KEY = Key.generate()
LEAVES = [hash_leaf(bytes([index])) for index in range(20)]


def nodes(level: int, position: int) -> bytes:
    return root_leaves(LEAVES[position << level : (position + 1) << level])


def sign(size: int, *, time_ms: int | None = None, leaves: list[bytes] | None = None, key: Key = KEY) -> SignedHead:
    root = root_leaves((leaves or LEAVES)[:size]).hex()
    return sign_head(key, Head("demo", size, root, f"{size:064x}", size if time_ms is None else time_ms))


def open_keeper(folder: Path) -> HeadKeeper:
    return HeadKeeper(folder / "head", "demo", KEY.public)


def test_a_head_comes_back_from_its_bytes() -> None:
    head = sign(3)
    assert SignedHead.from_bytes(head.to_bytes()) == head
    head.check_signed("demo", KEY.public)


@pytest.mark.parametrize(
    "change", [{"size": 4}, {"root": "0" * 64}, {"last_hash": "0" * 64}, {"time_ms": 9}, {"run": "demo2"}]
)
def test_a_head_with_one_field_changed_is_not_signed(change: dict[str, Any]) -> None:
    head = sign(3)
    with pytest.raises(HeadError):
        replace(head, head=replace(head.head, **change)).check_signed("demo", KEY.public)


def test_a_head_of_another_run_is_refused_though_the_same_key_signed_it() -> None:
    other = sign_head(KEY, replace(sign(3).head, run="other"))
    other.check_signed("other", KEY.public)
    with pytest.raises(HeadError, match="head of a different run: other, expected demo"):
        other.check_signed("demo", KEY.public)


def test_a_head_of_another_key_is_not_signed() -> None:
    with pytest.raises(HeadError, match="not signed by"):
        sign(3, key=Key.generate()).check_signed("demo", KEY.public)


@given(st.binary(max_size=300))
def test_noise_is_no_head(data: bytes) -> None:
    with pytest.raises(HeadError):
        SignedHead.from_bytes(data)


@pytest.mark.parametrize(
    "change",
    [
        {"size": 0},
        {"size": -1},
        {"size": True},
        {"size": "3"},
        {"time_ms": None},
        {"root": "0" * 63},
        {"root": 5},
        {"run": 5},
        {"format": 2},
        {"more": 1},
        {"root": "A" * 64},
    ],
)
def test_fields_that_no_head_has_are_refused(change: dict[str, Any]) -> None:
    value: dict[str, Any] = json.loads(sign(3).to_bytes())
    value["head"] |= change
    with pytest.raises(HeadError):
        SignedHead.from_bytes(encode_canonical(value))


def test_a_head_has_one_spelling() -> None:
    data = sign(3).to_bytes()
    for other in (data.replace(b'"format":1,', b""), data.replace(b":", b": ", 1), data.replace(b"}", b" }", 1)):
        assert other != data
        with pytest.raises(HeadError):
            SignedHead.from_bytes(other)


def test_a_larger_head_extends_with_its_proof_alone() -> None:
    old, new = sign(3).head, sign(10).head
    proof = prove_consistency(nodes, 3, 10)
    assert check_extension(old, new, proof) is Relation.NEWER
    assert check_extension(old, new, None) is Relation.UNPROVEN
    assert check_extension(old, new, proof[:-1]) is Relation.BROKEN
    assert check_extension(old, new, []) is Relation.BROKEN


def test_heads_of_one_size_are_the_same_or_a_fork() -> None:
    assert check_extension(sign(3).head, sign(3).head, None) is Relation.SAME
    assert check_extension(sign(3).head, sign(3, leaves=LEAVES[::-1]).head, None) is Relation.FORK
    assert check_extension(sign(3).head, replace(sign(3).head, last_hash="0" * 64), None) is Relation.FORK


def test_a_smaller_head_is_old_if_its_time_is_and_a_fork_if_it_is_later() -> None:
    assert check_extension(sign(10).head, sign(3).head, None) is Relation.OLDER
    assert check_extension(sign(10).head, sign(3, time_ms=11).head, None) is Relation.FORK


def test_a_larger_head_of_an_earlier_time_is_a_fork() -> None:
    assert check_extension(sign(3).head, sign(10, time_ms=2).head, prove_consistency(nodes, 3, 10)) is Relation.FORK


def test_a_keeper_keeps_the_newest_head_over_restarts(tmp_path: Path) -> None:
    assert open_keeper(tmp_path).held is None
    assert open_keeper(tmp_path).offer_head(sign(3)) is Relation.NEWER
    keeper = open_keeper(tmp_path)
    assert keeper.held == sign(3)
    assert keeper.offer_head(sign(10)) is Relation.UNPROVEN
    assert keeper.held == sign(3)
    assert keeper.offer_head(sign(10), prove_consistency(nodes, 3, 10)) is Relation.NEWER
    assert keeper.offer_head(sign(3)) is Relation.OLDER
    assert open_keeper(tmp_path).held == sign(10)


def test_a_keeper_refuses_what_the_coordinator_did_not_sign(tmp_path: Path) -> None:
    keeper = open_keeper(tmp_path)
    with pytest.raises(HeadError):
        keeper.offer_head(sign(3, key=Key.generate()))
    assert keeper.held is None


@pytest.mark.parametrize(
    ("shown", "words"),
    [
        (sign(5, leaves=LEAVES[::-1]), "two ledgers of 5 events"),
        (sign(3, time_ms=50), "a ledger of 5 events, and later one of 3"),
        (sign(9, time_ms=4), "a ledger of 5 events, and one of 9 for an earlier time"),
    ],
)
def test_a_fork_is_written_down_with_both_heads_and_the_keeper_stops(
    tmp_path: Path, shown: SignedHead, words: str
) -> None:
    keeper = open_keeper(tmp_path)
    keeper.offer_head(sign(5))
    with pytest.raises(ForkError, match=words):
        keeper.offer_head(shown, [LEAVES[0]])
    evidence = Fork.from_bytes(keeper.evidence_path.read_bytes())
    assert (evidence.held, evidence.shown, evidence.proof) == (sign(5), shown, (LEAVES[0],))
    for head in (evidence.held, evidence.shown):
        head.check_signed("demo", KEY.public)
    assert keeper.held == sign(5)
    for again in (keeper, open_keeper(tmp_path)):
        with pytest.raises(ForkError, match=words):
            again.offer_head(sign(10), prove_consistency(nodes, 5, 10))


def test_a_proof_that_fails_stops_the_keeper_until_it_is_opened_again(tmp_path: Path) -> None:
    """Proofs are not signed: any intermediary can alter one, and must not be able to stop a node permanently."""
    keeper = open_keeper(tmp_path)
    keeper.offer_head(sign(5))
    assert keeper.offer_head(sign(9), [LEAVES[0]]) is Relation.BROKEN
    assert keeper.fork is None and not keeper.evidence_path.exists()
    error = keeper.note_fork(sign(9), [LEAVES[0]])
    assert not error.fork.convicts and "no proof that it begins with the 5" in str(error)
    with pytest.raises(ForkError):
        keeper.offer_head(sign(9), prove_consistency(nodes, 5, 9))
    again = open_keeper(tmp_path)
    assert (again.fork, again.doubted) == (None, sign(9))
    assert again.offer_head(sign(9), prove_consistency(nodes, 5, 9)) is Relation.NEWER
    again.end_doubt()
    assert again.doubted is None and not again.evidence_path.exists()


def test_damaged_evidence_is_refused() -> None:
    data = Fork(sign(3), sign(4), None).to_bytes()
    assert Fork.from_bytes(data).proof is None
    for bad in (b"", data[:-1], data.replace(b'"proof":null', b'"proof":[1]'), data.replace(b'"held"', b'"hold"')):
        with pytest.raises(HeadError):
            Fork.from_bytes(bad)
