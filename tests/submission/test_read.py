"""From an honest file back to records."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.protocol.messages import MAX_NUMBER
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.submission.limits import PROOF_BYTES, PROOF_TOKENS, FormError, SubmissionLimits
from shoal.submission.read import ParserPool, read_submission
from shoal.submission.write import encode_groups, write_submission

VOCAB = 1000


def test_groups_and_proofs_come_back_as_they_were(reader, good, groups, make_proofs, is_same):
    contents = reader.read(good)
    assert is_same(contents, groups, make_proofs(groups))
    assert [rollout.id for rollout in contents.rollouts] == ["g3.0", "g3.1", "g5.0", "g5.1"]


def test_entries_are_those_of_the_manifest(reader, groups, make_proofs, tmp_path):
    written = write_submission(tmp_path / "a", groups, make_proofs(groups))
    assert reader.read(written.path.read_bytes()).entries == written.entries


def test_arrays_can_be_written_to(reader, good):
    """Torch warns about arrays that cannot."""
    rollout = reader.read(good).rollouts[0]
    assert rollout.token_ids.flags.writeable
    assert rollout.logprobs.flags.writeable


def test_reading_works_in_a_separate_event_loop(good, tmp_path, bounds):
    path = tmp_path / "a"
    path.write_bytes(good)

    async def read_twice() -> list[int]:
        async with ParserPool(size=2) as parsers:
            both = await asyncio.gather(*(read_submission(parsers, path, bounds) for _ in range(4)))
            assert [process.num_started for process in parsers.sandboxes.processes] == [1, 1]
            return [len(contents.groups) for contents in both]

    assert asyncio.run(read_twice()) == [2, 2, 2, 2]


@st.composite
def drawn_groups(draw: st.DrawFn) -> list[Group]:
    """Groups of two with every value that a claim may have."""
    ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=70).map(lambda ids: np.array(ids, np.int32))
    floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
    texts = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=40)
    groups = []
    for index in sorted(draw(st.sets(st.integers(0, MAX_NUMBER), min_size=1, max_size=3))):
        rollouts = []
        for sample in range(2):
            tokens = draw(ids)
            logprobs = np.array(draw(st.lists(floats, min_size=len(tokens), max_size=len(tokens))), np.float32)
            rollouts.append(
                Rollout(
                    id=f"g{index}.{sample}",
                    prompt_ids=draw(ids),
                    token_ids=tokens,
                    logprobs=logprobs,
                    finish=draw(st.sampled_from(Finish)),
                    versions=(VersionRange(draw(st.integers(0, MAX_NUMBER)), 0, len(tokens)),),
                    temperature=draw(st.floats(0, allow_infinity=False)),
                    seed=draw(st.integers(0, 2**64 - 1)),
                )
            )
        scores = tuple(Score(draw(st.floats(0.0, 1.0)), draw(texts)) for _ in range(2))
        groups.append(Group(index=index, task_id=draw(texts), rollouts=tuple(rollouts), scores=scores))
    return groups


@settings(max_examples=60)
@given(drawn_groups(), st.data())
def test_whatever_is_written_is_read(reader, is_same, groups, data):
    names = [rollout.id for group in groups for rollout in group.rollouts]
    own = st.lists(st.binary(max_size=PROOF_BYTES), max_size=3)
    proofs = {name: data.draw(own) for name in names}
    wide = SubmissionLimits(max_rollouts=6, group_size=2, max_tokens=70, vocab_size=VOCAB, max_prompt_tokens=70)
    assert is_same(reader.read(encode_groups(groups, proofs), wide), groups, proofs)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_rollouts": 3}, "4 rollouts, allowed are 1 to 3"),
        ({"group_size": 3}, "no whole groups of 3"),
        ({"group_size": 4}, "rollout 2: sample out of order"),
        ({"group_size": 1}, "rollout 1: sample out of order"),
        ({"max_tokens": 63}, "rollout 2: token_ids of length 64, allowed are 1 to 63"),
        ({"max_prompt_tokens": 2}, "prompt_ids"),
        ({"vocab_size": 49}, "outside of the vocabulary of 49"),
        ({"file_bytes": 1000}, "allowed are 1000"),
        ({"decoded_bytes": 1000}, "allowed are"),
    ],
)
def test_a_file_beyond_its_bounds_is_refused(reader, good, bounds, changes, words):
    with pytest.raises(FormError, match=words):
        reader.read(good, replace(bounds, **changes))


def test_the_longest_file_of_its_bounds_is_read(reader, make_group, make_proofs, is_same, bounds):
    """Every list full, every text at its maximum length: no check refuses what is allowed."""
    groups = []
    for index in range(8):
        group = make_group(index, (64, 64))
        rollouts = tuple(replace(r, prompt_ids=np.full(32, 49, np.int32)) for r in group.rollouts)
        scores = (Score(1.0, "r" * 256), Score(0.0, "s" * 256))
        groups.append(replace(group, task_id="t" * 128, rollouts=rollouts, scores=scores))
    proofs = make_proofs(groups)
    assert is_same(reader.read(encode_groups(groups, proofs), bounds), groups, proofs)


def test_the_smallest_bounds_leave_room_for_the_smallest_file(reader, make_group, is_same):
    """If a list may have at most one value, an empty one still counts as one."""
    groups = [make_group(0, (1,))]
    tight = SubmissionLimits(max_rollouts=1, group_size=1, max_tokens=1, vocab_size=50, max_prompt_tokens=3)
    for proofs in ({"g0.0": []}, {"g0.0": [b"x" * 258]}):
        assert is_same(reader.read(encode_groups(groups, proofs), tight), groups, proofs)


def test_large_files_are_read_within_their_memory(reader, make_group, make_proofs, is_same):
    groups = [make_group(index, (4096,) * 16) for index in range(4)]
    proofs = make_proofs(groups)
    wide = SubmissionLimits(max_rollouts=64, group_size=16, max_tokens=4096, vocab_size=50, max_prompt_tokens=3)
    assert is_same(reader.read(encode_groups(groups, proofs), wide), groups, proofs)


def test_proofs_are_bounded_as_toploc_makes_them():
    from shoal.toploc.proof import CHUNK_SIZE, TOPK

    assert PROOF_BYTES == 2 + 2 * TOPK
    assert PROOF_TOKENS == CHUNK_SIZE
