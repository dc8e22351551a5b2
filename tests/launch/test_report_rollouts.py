"""Rollouts in the report: the first batch and the last, as text that stays on its line."""

from pathlib import Path

import numpy as np
import pytest

from shoal.launch.layout import SwarmPaths
from shoal.launch.report import NUM_GROUPS, NUM_ROLLOUTS, describe_rollouts, format_page
from shoal.policy.tokenizer import build_tokenizer, encode_completion, encode_prompt
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange
from shoal.train.rollout_files import MAX_CHARS, write_groups

TOKENIZER = build_tokenizer("abc=<>\n")


def make_group(index: int, answers: list[str], version: int) -> Group:
    rollouts = [
        Rollout(
            id=f"g{index}.{number}",
            prompt_ids=np.array(encode_prompt(TOKENIZER, "cab="), dtype=np.int32),
            token_ids=np.array(encode_completion(TOKENIZER, answer), dtype=np.int32),
            logprobs=np.zeros(len(answer) + 1, dtype=np.float32),
            finish=Finish.STOP,
            versions=(VersionRange(version, 0, len(answer) + 1),),
            temperature=1.0,
            seed=number,
        )
        for number, answer in enumerate(answers)
    ]
    scores = tuple(Score(float(answer == "abc"), "") for answer in answers)
    return Group(index=index, task_id=f"t{index}", rollouts=tuple(rollouts), scores=scores)


@pytest.fixture
def layout(tmp_path: Path) -> SwarmPaths:
    found = SwarmPaths(tmp_path)
    (tmp_path / "rollouts").mkdir()
    return found


def write_step(layout: SwarmPaths, step: int, groups: list[Group]) -> None:
    write_groups(layout.root / "rollouts" / f"step-{step:06d}.parquet", groups, TOKENIZER.decode)


def test_the_first_batch_and_the_last_are_shown_with_rewards_and_versions(layout: SwarmPaths) -> None:
    for step, answer in ((1, "cba"), (2, "bca"), (12, "abc")):
        write_step(layout, step, [make_group(0, [answer, "ab"], version=step - 1)])
    first, last = describe_rollouts(layout).blocks
    assert "step 1\n" in first and "v0     reward 0.00  cba<eos>" in first and "0 of 2 pass" in first
    assert "step 12\n" in last and "v11    reward 1.00  abc<eos>" in last and "1 of 2 pass" in last
    assert "prompt  cab=" in first


def test_a_run_of_one_step_shows_it_once_and_large_batches_are_cut(layout: SwarmPaths) -> None:
    groups = [make_group(index, ["a" * 2 * MAX_CHARS] * 9, version=0) for index in range(9)]
    write_step(layout, 1, groups)
    (block,) = describe_rollouts(layout).blocks
    assert block.count("prompt") == NUM_GROUPS and block.count("reward") == NUM_GROUPS * NUM_ROLLOUTS
    assert "a" * MAX_CHARS in block and "a" * (MAX_CHARS + 1) not in block


def test_what_a_model_wrote_stays_text_on_its_own_line(layout: SwarmPaths) -> None:
    write_step(layout, 1, [make_group(0, ["<b>\nc", "abc"], version=0)])
    section = describe_rollouts(layout)
    assert "<b>\\nc" in section.blocks[0]
    assert "<b>" not in format_page("run", [section], b"")


def test_a_run_that_kept_no_rollouts_says_so(tmp_path: Path) -> None:
    section = describe_rollouts(SwarmPaths(tmp_path))
    assert section.blocks == [] and "None were kept" in section.text
