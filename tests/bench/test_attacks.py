"""The attacks do what they say, and leave everything else as in honest work."""

import math

import numpy as np
import torch

from altered import step_back
from attacks import ATTACKS
from shoal.rollout import Finish
from shoal.toploc.replay import replay_rollouts
from stage import GROUP, Stage


def test_a_step_back_moves_weights_by_at_most_about_the_rate(stage: Stage) -> None:
    older = step_back(stage.model, stage.honest.rollouts, 1e-4)
    pairs = zip(older.state_dict().values(), stage.model.state_dict().values(), strict=True)
    moved = torch.cat([(a - b).abs().flatten() for a, b in pairs])
    assert 1e-6 < float(moved.mean()) < 3e-4
    assert float(moved.max()) < 1e-3


def test_every_attack_hands_in_what_was_asked(stage: Stage) -> None:
    for attack in ATTACKS.values():
        if "float32" not in attack.dtypes or attack.name.startswith("bf16"):
            continue
        work = attack.run(stage)
        assert [rollout.id for rollout in work.rollouts] == [request.id for request in stage.requests], attack.name
        for rollout, request in zip(work.rollouts, stage.requests, strict=True):
            assert tuple(rollout.prompt_ids) == request.prompt_ids
            assert (rollout.seed, rollout.temperature) == (request.seed, request.temperature)
            assert len(work.proofs[rollout.id]) == math.ceil(rollout.num_tokens / 32), attack.name


def test_those_who_choose_otherwise_state_honest_logprobs(stage: Stage) -> None:
    for name in ("temperature 0.9", "top-p 0.95", "5 tokens edited", "laundered: int4 writes"):
        work = ATTACKS[name].run(stage)
        replays = replay_rollouts(stage.model, work.rollouts, eos_id=stage.eos_id)
        for rollout, replay in zip(work.rollouts, replays, strict=True):
            assert np.allclose(rollout.logprobs, replay.logprobs, atol=1e-3), name


def test_an_edit_changes_one_draw_and_writes_on_honestly(stage: Stage) -> None:
    work = ATTACKS["1 token edited"].run(stage)
    replays = replay_rollouts(stage.model, work.rollouts, eos_id=stage.eos_id)
    odd = [int((replay.distances > 1e-6).sum()) for replay in replays]
    assert set(odd) == {1}


def test_a_forced_end_ends_at_half_the_honest_length(stage: Stage) -> None:
    pairs = zip(ATTACKS["cut off with a forced end"].run(stage).rollouts, stage.honest.rollouts, strict=True)
    for rollout, honest in pairs:
        assert rollout.num_tokens == honest.num_tokens // 2 + 1
        assert rollout.finish is Finish.STOP
        assert rollout.token_ids[:-1].tolist() == honest.token_ids[: honest.num_tokens // 2].tolist()


def test_lent_proofs_come_from_another_prompt(stage: Stage) -> None:
    work = ATTACKS["proof of another rollout"].run(stage)
    lender = stage.honest.rollouts[GROUP]
    assert work.proofs[stage.honest.rollouts[0].id][0] == stage.honest.proofs[lender.id][0]
