"""Writing a submission."""

import hashlib
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from shoal.rollout import Score, VersionRange
from shoal.submission.columns import COLUMN_NAMES
from shoal.submission.write import encode_groups, hash_tokens, write_submission


def test_a_file_is_what_its_manifest_says(tmp_path, groups, make_proofs):
    written = write_submission(tmp_path / "a.parquet", groups, make_proofs(groups))
    data = written.path.read_bytes()
    assert written.sha256 == hashlib.sha256(data).hexdigest()
    assert written.size == len(data)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [entry.tokens for entry in written.entries] == [3, 40, 64, 1]
    assert [entry.hash for entry in written.entries] == [hash_tokens(rollout.token_ids) for rollout in rollouts]


def test_the_same_rollouts_give_the_same_bytes(groups, make_proofs):
    assert encode_groups(groups, make_proofs(groups)) == encode_groups(groups, make_proofs(groups))


def test_others_read_it_as_parquet_one_row_per_rollout(tmp_path, groups, make_proofs):
    proofs = make_proofs(groups)
    path = write_submission(tmp_path / "a.parquet", groups, proofs).path
    table = pq.read_table(path)
    assert tuple(table.column_names) == COLUMN_NAMES
    rows = table.to_pylist()
    assert [(row["group"], row["sample"], row["task_id"]) for row in rows] == [
        (3, 0, "sort-3"),
        (3, 1, "sort-3"),
        (5, 0, "sort-5"),
        (5, 1, "sort-5"),
    ]
    rollout = groups[1].rollouts[0]
    assert rows[2]["token_ids"] == rollout.token_ids.tolist()
    assert rows[2]["logprobs"] == rollout.logprobs.tolist()
    assert rows[2]["prompt_ids"] == rollout.prompt_ids.tolist()
    assert rows[2]["proofs"] == proofs["g5.0"]
    assert (rows[3]["finish"], rows[3]["version"], rows[3]["seed"]) == ("length", 4, 2**64 - 2)
    assert (rows[3]["temperature"], rows[3]["reward"], rows[3]["reason"]) == (0.7, 1 / 3, "reason 1")


def test_a_long_reason_is_cut(make_group, make_proofs, tmp_path):
    group = make_group(1)
    group = replace(group, scores=(Score(0.0, "x" * 300), Score(0.0, "")))
    path = write_submission(tmp_path / "a", [group], make_proofs([group])).path
    assert pq.read_table(path)["reason"].to_pylist() == ["x" * 256, ""]


def test_what_no_reader_would_accept_is_not_written(make_group, make_proofs):
    one, two = make_group(3), make_group(5)
    proofs = make_proofs([one, two])
    with pytest.raises(AssertionError, match="ascending"):
        encode_groups([two, one], proofs)
    with pytest.raises(AssertionError, match="ascending"):
        encode_groups([one, one], proofs)
    with pytest.raises(AssertionError, match="order of sample"):
        encode_groups([replace(one, rollouts=one.rollouts[::-1])], proofs)
    with pytest.raises(KeyError):
        encode_groups([one], {})
    first = one.rollouts[0]
    mixed = replace(first, versions=(VersionRange(1, 0, 1), VersionRange(2, 1, first.num_tokens)))
    with pytest.raises(AssertionError, match="one version only"):
        encode_groups([replace(one, rollouts=(mixed, one.rollouts[1]))], proofs)


def test_the_hash_of_tokens_is_known_and_of_tokens_alone():
    ids = np.array([1, 2, 300], dtype=np.int32)
    raw = b"shoal-tokens-1\0" + b"\x01\0\0\0\x02\0\0\0\x2c\x01\0\0"
    assert hash_tokens(ids) == hashlib.sha256(raw).hexdigest()
    assert hash_tokens(ids.astype(np.int64)) == hash_tokens(ids)
    assert hash_tokens(ids[:2]) != hash_tokens(ids)
    assert hash_tokens(ids[::-1]) != hash_tokens(ids)
