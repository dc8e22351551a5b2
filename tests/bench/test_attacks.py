"""The attacks do what they say, and leave everything else as honest work has it."""

import math

import numpy as np
import pytest
import torch

import shoal.engine.torch as engine_module
from altered import drop_layers, map_linears, round_channels, round_groups, step_back
from attacks import ATTACKS, claim_tokens, keep_nucleus, plan_uniforms
from shoal.engine.choice import choose_tokens
from shoal.rollout import Finish
from shoal.toploc.replay import replay_rollouts
from stage import GROUP, Stage


def test_a_nucleus_is_the_fewest_likeliest_tokens_that_reach_the_share() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.5, 0.15, 0.25]]))
    assert keep_nucleus(logits, 0.7).isfinite().tolist() == [[False, True, False, True]]
    assert keep_nucleus(logits, 0.76).isfinite().tolist() == [[False, True, True, True]]


def test_claimed_logprobs_are_those_of_honest_sampling() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)]])
    _, logprobs = claim_tokens(logits, torch.tensor([1.0]), torch.tensor([1]))
    assert float(logprobs) == pytest.approx(math.log(0.75))


def test_planned_draws_are_those_of_their_places(stage: Stage) -> None:
    first, second = stage.requests[:2]
    draws = plan_uniforms([first, second], {second.id: [3, 0]})
    from shoal.seeds import token_uniforms

    assert draws.tolist() == token_uniforms(second.seed, 0, 4)[[3, 0]].tolist()


def test_int8_has_one_scale_per_channel_and_errs_by_half_a_level() -> None:
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    scale = weight.abs().amax(1, keepdim=True) / 127
    levels = round_channels(weight) / scale
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert bool(((round_channels(weight) - weight).abs() <= scale * 0.5001).all())


def test_int4_has_at_most_fifteen_levels_per_group() -> None:
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    groups = round_groups(weight).reshape(-1, 32)
    assert all(len(group.unique()) <= 15 for group in groups)
    assert not torch.equal(groups.view(weight.shape), weight)


def test_altered_models_leave_the_true_one_alone(stage: Stage) -> None:
    before = {name: tensor.clone() for name, tensor in stage.model.state_dict().items()}
    map_linears(stage.model, round_groups)
    shorter = drop_layers(stage.model)
    assert len(shorter.model.layers) == shorter.config.num_hidden_layers == 1
    assert stage.model.config.num_hidden_layers == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in stage.model.state_dict().items())


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


def test_the_engine_chooses_honestly_again_after_an_attack_that_breaks(stage: Stage) -> None:
    def choose(*_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raise KeyError("broken")

    with pytest.raises(KeyError):
        stage.generate(stage.model, choose=choose)
    assert engine_module.choose_tokens is choose_tokens
