"""The learner compared with a second implementation: one padded batch through transformers' own forward pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig, LoraConfig, LossConfig
from shoal.engine.torch import TorchEngine
from shoal.learner.advantage import build_samples
from shoal.learner.correction import build_correction
from shoal.learner.learner import Learner
from shoal.learner.logprobs import entropy_from_logits, kl_k3, score_tokens
from shoal.learner.losses import LOSSES
from shoal.learner.losses.base import LossInputs
from shoal.policy.lora import adapter_weights, attach_adapters, base_weights
from shoal.policy.model import Policy
from shoal.policy.packing import build_packs
from shoal.rollout import Group, Request, Score

MakeGroup = Callable[..., Group]
MakePolicy = Callable[[int], Policy]

MAX_TOKENS = 16
HUGE = 1e9
"""A gradient-norm clip that never acts, so that the gradient of the last update can be read from the model."""


def build_learner(model: PreTrainedModel, *, reference: PreTrainedModel | None = None, **changes: Any) -> Learner:
    """A learner of one update; `loss` in the changes is a table of its own."""
    loss = LossConfig(**changes.pop("loss", {}))
    settings: dict[str, Any] = {"updates": 1, "warmup_steps": 0, "max_grad_norm": HUGE, "loss": loss} | changes
    return Learner(model, LearnerConfig(**settings), max_tokens=MAX_TOKENS, reference=reference)


def read_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def copy_tensors(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.numpy().tobytes() == other[name].numpy().tobytes(), name


def assert_same_gradients(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        scale = float(tensor.abs().max())
        torch.testing.assert_close(
            tensor, other[name], rtol=0, atol=1e-4 * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
        )


def score_padded(model: PreTrainedModel, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """log-probs and entropies of all completion tokens, sample by sample, from one right-padded batch."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    ids = [torch.tensor([*rollout.prompt_ids, *rollout.token_ids]).long() for rollout in rollouts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row)) for row in ids], batch_first=True)
    logits = model(input_ids=padded, attention_mask=mask).logits
    logprobs, entropies = [], []
    for row, rollout in enumerate(rollouts):
        start = len(rollout.prompt_ids)
        own = logits[row, start - 1 : start - 1 + rollout.num_tokens] / rollout.temperature
        targets = torch.from_numpy(rollout.token_ids).long()
        logprobs.append(own.log_softmax(-1).gather(1, targets[:, None])[:, 0])
        entropies.append(entropy_from_logits(own))
    return torch.cat(logprobs), torch.cat(entropies)


def flatten_rollouts(groups: Sequence[Group]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Behaviour log-probs, advantages and sample numbers of all tokens, and the samples' lengths."""
    samples = build_samples(groups, "zscore")
    lengths = torch.tensor([sample.rollout.num_tokens for sample in samples])
    behaviour = torch.cat([torch.from_numpy(sample.rollout.logprobs) for sample in samples])
    segment = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return behaviour, torch.tensor([sample.advantage for sample in samples])[segment], segment, lengths


def padded_gradients(
    model: PreTrainedModel,
    groups: Sequence[Group],
    config: LossConfig,
    *,
    old: Tensor | None = None,
    reference: PreTrainedModel | None = None,
) -> dict[str, Tensor]:
    """Gradient of the whole objective without packing; `old` defaults to the behaviour log-probs, uncorrected."""
    behaviour, advantages, segment, lengths = flatten_rollouts(groups)
    logprobs, entropies = score_padded(model, groups)
    size = len(lengths)
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=behaviour if old is None else old,
        advantages=advantages,
        segment=segment,
        num_segments=size,
    )
    loss = LOSSES[config.name]
    tokens = loss.token_loss(inputs, config).token_loss
    if old is not None:
        cap = config.correction_cap
        tokens = tokens * build_correction(old, behaviour, segment, size, kind=config.correction, cap=cap).weights
    tokens = tokens - config.entropy * entropies
    if reference is not None:
        tokens = tokens + config.kl * kl_k3(logprobs, score_padded(reference, groups)[0].detach())
    model.zero_grad()
    (loss.sample_weights(lengths, MAX_TOKENS)[segment] * tokens).sum().backward()
    return read_gradients(model)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("micro_tokens", [1, 50, 10_000])
def test_packed_gradients_equal_padded_ones(
    groups: list[Group], make_policy: MakePolicy, name: str, micro_tokens: int
) -> None:
    model, reference = make_policy(0).model, make_policy(1).model
    loss = {"name": name, "kl": 0.1, "entropy": 0.05}
    expected = padded_gradients(model, groups, LossConfig(**loss), reference=reference)
    learner = build_learner(model, reference=reference, loss=loss, micro_tokens=micro_tokens, old_logprobs="behaviour")
    learner.train_step(groups)
    assert_same_gradients(read_gradients(model), expected)


@pytest.mark.parametrize("correction", ["none", "token", "sequence"])
@pytest.mark.parametrize("name", ["intellect2", "gspo"])
def test_packed_gradients_equal_padded_ones_with_a_correction(
    groups: list[Group], make_policy: MakePolicy, name: str, correction: str
) -> None:
    model = make_policy(0).model
    loss = {"name": name, "correction": correction, "correction_cap": 1.1}
    old = score_padded(model, groups)[0].detach()
    expected = padded_gradients(model, groups, LossConfig(**loss), old=old)
    build_learner(model, loss=loss, micro_tokens=50).train_step(groups)
    assert_same_gradients(read_gradients(model), expected)


def test_packed_gradients_equal_padded_ones_at_another_temperature(
    make_group: MakeGroup, make_policy: MakePolicy
) -> None:
    model, groups = make_policy(0).model, [make_group(0, temperature=0.6), make_group(1, temperature=1.7)]
    expected = padded_gradients(model, groups, LossConfig())
    build_learner(model, old_logprobs="behaviour").train_step(groups)
    assert_same_gradients(read_gradients(model), expected)


@pytest.mark.parametrize("micro_tokens", [40, 10_000])
def test_gradients_of_what_was_written_more_than_once_equal_padded_ones(
    groups: list[Group], make_policy: MakePolicy, micro_tokens: int
) -> None:
    """Samples of one text with separate advantages, behaviour log-probs and last tokens."""
    model, texts = make_policy(0).model, groups[2]
    one = texts.rollouts[0].token_ids
    other = np.append(one[:-1], one[-1] ^ 1).astype(np.int32)
    own = [
        replace(r, token_ids=t, logprobs=r.logprobs[:1].repeat(len(t)))
        for r, t in zip(texts.rollouts, (one, other, one, one[:3]), strict=True)
    ]
    alike = [groups[0], replace(texts, rollouts=tuple(own))]
    expected = padded_gradients(model, alike, LossConfig())
    build_learner(model, micro_tokens=micro_tokens, old_logprobs="behaviour").train_step(alike)
    assert_same_gradients(read_gradients(model), expected)


def flatten_rewards(groups: Sequence[Group]) -> list[Group]:
    """The groups without any signal, so that the policy term vanishes."""
    return [replace(group, scores=tuple(Score(1.0, "same") for _ in group.scores)) for group in groups]


def test_without_signal_and_terms_the_gradient_is_exactly_zero(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    before = copy_weights(model)
    build_learner(model).train_step(flatten_rewards(groups))
    assert all(not gradient.any() for gradient in read_gradients(model).values())
    assert_same_bits(copy_weights(model), before)


@pytest.mark.parametrize(("term", "weight"), [("policy", 0.0), ("kl", 0.1), ("entropy", 0.1)])
def test_every_term_alone_reaches_every_parameter(
    groups: list[Group], make_policy: MakePolicy, term: str, weight: float
) -> None:
    model, reference = make_policy(0).model, make_policy(1).model if term == "kl" else None
    data = groups if term == "policy" else flatten_rewards(groups)
    loss = {} if term == "policy" else {term: weight}
    build_learner(model, reference=reference, loss=loss).train_step(data)
    gradients = read_gradients(model)
    assert gradients.keys() == dict(model.named_parameters()).keys()
    assert all(bool(gradient.any()) for gradient in gradients.values())


def test_the_entropy_bonus_raises_entropy(groups: list[Group], make_policy: MakePolicy) -> None:
    learner = build_learner(make_policy(0).model, loss={"entropy": 0.1}, lr=1e-3)
    first, *_, last = [learner.train_step(flatten_rewards(groups))["policy/entropy"] for _ in range(5)]
    assert last > first


def test_the_kl_term_pulls_towards_the_reference(groups: list[Group], make_policy: MakePolicy) -> None:
    model, reference = make_policy(0).model, make_policy(1).model
    learner = build_learner(model, reference=reference, loss={"kl": 0.1}, lr=1e-3)
    first, *_, last = [learner.train_step(flatten_rewards(groups))["loss/kl"] for _ in range(5)]
    assert 0 < last < first


def test_the_reference_is_never_trained(groups: list[Group], make_policy: MakePolicy) -> None:
    reference = make_policy(1).model
    before = copy_weights(reference)
    build_learner(make_policy(0).model, reference=reference, loss={"kl": 0.1}).train_step(groups)
    assert_same_bits(copy_weights(reference), before)
    assert not read_gradients(reference)


def adapt(policy: Policy, rank: int = 4) -> PreTrainedModel:
    attach_adapters(policy.model, LoraConfig(rank=rank), seed=0)
    return policy.model


def test_only_adapters_are_trained(groups: list[Group], make_policy: MakePolicy) -> None:
    model = adapt(make_policy(0))
    base, before = copy_tensors(base_weights(model)), copy_tensors(adapter_weights(model))
    learner = build_learner(model, lr=1e-2)
    for _ in range(2):  # the first update moves only B: the gradient of A is zero while B is
        learner.train_step(groups)
    assert_same_bits(copy_tensors(base_weights(model)), base)
    held = {id(each) for group in learner.optimizer.param_groups for each in group["params"]}
    own = dict(model.named_parameters())
    assert held == {id(own[name]) for name in adapter_weights(model)}
    assert not any(torch.equal(tensor, before[name]) for name, tensor in adapter_weights(model).items())


def test_packed_gradients_of_adapters_equal_padded_ones_with_their_base_as_reference(
    groups: list[Group], make_policy: MakePolicy
) -> None:
    model, base = adapt(make_policy(0)), make_policy(0).model
    build_learner(model, lr=0.1).train_step(groups)  # away from the base, where the KL term has no gradient
    loss = {"kl": 0.3, "entropy": 0.05}
    expected = padded_gradients(model, groups, LossConfig(**loss), reference=base)
    build_learner(model, loss=loss, micro_tokens=50, old_logprobs="behaviour").train_step(groups)
    assert_same_gradients(read_gradients(model), expected)
    assert expected.keys() == adapter_weights(model).keys()


def test_training_makes_rewarded_samples_likelier(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    advantages = flatten_rollouts(groups)[1]
    before = score_padded(model, groups)[0].detach()
    build_learner(model, lr=1e-3).train_step(groups)
    after = score_padded(model, groups)[0].detach()
    assert float((advantages * (after - before)).sum()) > 0


def test_an_update_whose_gradient_overflows_is_skipped_and_counted(
    groups: list[Group], make_policy: MakePolicy
) -> None:
    model = make_policy(0).model
    with torch.no_grad():
        model.lm_head.weight.mul_(1e34)
    before = copy_weights(model)
    learner = build_learner(model, updates=2, warmup_steps=4, loss={"correction": "none"})
    metrics = learner.train_step(groups)
    assert (metrics["optim/updates"], metrics["optim/skipped"]) == (2, 2)
    assert metrics["optim/grad_norm"] == float("inf")
    assert learner.num_updates == 0
    assert not learner.optimizer.state
    assert_same_bits(copy_weights(model), before)


@pytest.mark.parametrize("old_logprobs", ["recompute", "behaviour"])
def test_an_update_without_finite_logprobs_is_skipped_and_the_others_are_made(
    groups: list[Group], make_policy: MakePolicy, old_logprobs: str
) -> None:
    model = make_policy(0).model
    rare = 17  # a token that no other group contains
    poisoned = [replace(r, prompt_ids=np.array([5, rare], dtype=np.int32)) for r in groups[0].rollouts]
    with torch.no_grad():
        model.model.embed_tokens.weight[rare] = float("nan")
    head = model.lm_head.weight.detach().clone()
    learner = build_learner(model, updates=2, old_logprobs=old_logprobs, micro_tokens=1)
    metrics = learner.train_step([replace(groups[0], rollouts=tuple(poisoned)), *groups[1:]])
    assert (metrics["optim/updates"], metrics["optim/skipped"], learner.num_updates) == (2, 1, 1)
    assert torch.isfinite(model.lm_head.weight).all()
    assert not torch.equal(model.lm_head.weight, head)


def test_a_step_of_nothing_but_skipped_updates_reports_its_counts(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    before = copy_weights(model)
    metrics = build_learner(model, updates=2).train_step(groups)
    assert metrics == {"optim/updates": 2, "optim/skipped": 2, "train/tokens": 0}
    assert_same_bits(copy_weights(model), before)


def test_an_empty_batch_moves_nothing(make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    learner = build_learner(model, weight_decay=0.5)
    before = copy_weights(model)
    assert learner.train_step([]) == {"optim/updates": 0, "optim/skipped": 0, "train/tokens": 0}
    assert learner.num_updates == 0
    assert_same_bits(copy_weights(model), before)


@pytest.mark.parametrize(("updates", "expected"), [(1, 1), (3, 3), (4, 4), (9, 4)])
def test_there_are_never_more_updates_than_groups(
    groups: list[Group], make_policy: MakePolicy, updates: int, expected: int
) -> None:
    learner = build_learner(make_policy(0).model, updates=updates)
    metrics = learner.train_step(groups)
    assert metrics["optim/updates"] == expected == learner.num_updates
    assert metrics["train/tokens"] == sum(group.num_tokens for group in groups)


def test_the_second_update_has_the_old_policy_of_before_the_first(groups: list[Group], make_policy: MakePolicy) -> None:
    model, twin = make_policy(0).model, make_policy(0).model
    old = score_padded(model, groups[2:])[0].detach()
    build_learner(model, updates=2, lr=1e-2).train_step(groups)
    build_learner(twin, lr=1e-2).train_step(groups[:2])
    assert not torch.allclose(score_padded(twin, groups[2:])[0].detach(), old, atol=1e-2)
    assert_same_gradients(read_gradients(model), padded_gradients(twin, groups[2:], LossConfig(), old=old))


def test_recomputed_ratios_are_exactly_one_in_the_first_update(groups: list[Group], make_policy: MakePolicy) -> None:
    metrics = build_learner(make_policy(0).model, micro_tokens=50).train_step(groups)
    assert (metrics["policy/ratio_max"], metrics["policy/clip_fraction"]) == (1.0, 0.0)


def test_behaviour_ratios_are_against_the_sampler(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    ratio = (score_padded(model, groups)[0] - flatten_rollouts(groups)[0]).exp()
    metrics = build_learner(model, old_logprobs="behaviour").train_step(groups)
    assert metrics["policy/ratio_max"] == pytest.approx(float(ratio.detach().max()), rel=1e-4)
    assert metrics["off_policy/ess"] == 1.0


def test_both_kinds_of_old_logprobs_report_the_same_mismatch(groups: list[Group], make_policy: MakePolicy) -> None:
    recompute, behaviour = (
        build_learner(make_policy(0).model, old_logprobs=kind).train_step(groups) for kind in ("recompute", "behaviour")
    )
    assert recompute["off_policy/mismatch_kl"] > 0.01
    for name in ("off_policy/mismatch_kl", "off_policy/raw_ess", "off_policy/max_diff"):
        assert behaviour[name] == pytest.approx(recompute[name], rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_policy_data_has_no_mismatch(make_policy: MakePolicy, temperature: float) -> None:
    policy = make_policy(0)
    prompts = [(1, 5, 6, 7), (1, 8, 9)]
    requests = [
        Request(id=f"{p}.{s}", prompt_ids=prompts[p], seed=10 * p + s, max_tokens=12, temperature=temperature)
        for p in range(2)
        for s in range(4)
    ]
    engine = TorchEngine(make_policy(0).model, eos_id=policy.eos_id, slots=3)
    rollouts = {rollout.id: rollout for rollout in engine.generate(requests)}
    groups = [
        Group(
            index=p,
            task_id=str(p),
            rollouts=tuple(rollouts[f"{p}.{s}"] for s in range(4)),
            scores=tuple(Score(float(s % 2), "made up") for s in range(4)),
        )
        for p in range(2)
    ]
    metrics = build_learner(policy.model).train_step(groups)
    assert metrics["policy/ratio_max"] == 1.0
    assert abs(metrics["off_policy/mismatch_kl"]) < 1e-7
    assert metrics["off_policy/max_diff"] < 1e-4


def test_the_learning_rate_rises_to_its_value_and_stays(groups: list[Group], make_policy: MakePolicy) -> None:
    learner = build_learner(make_policy(0).model, lr=0.01, warmup_steps=4)
    rates = [learner.train_step(groups)["optim/lr"] for _ in range(6)]
    assert rates == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01])
    assert learner.optimizer.param_groups[0]["lr"] == 0.01


def test_the_gradient_is_clipped_but_its_norm_reported_as_it_was(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    metrics = build_learner(model, max_grad_norm=0.01).train_step(groups)
    norm = torch.stack([gradient.norm() for gradient in read_gradients(model).values()]).norm()
    assert float(norm) == pytest.approx(0.01, rel=1e-3)
    assert metrics["optim/grad_norm"] > 0.01


def test_training_is_a_function_of_its_inputs(groups: list[Group], make_policy: MakePolicy) -> None:
    models = [make_policy(0).model for _ in range(2)]
    for model in models:
        learner = build_learner(model, updates=2, micro_tokens=50)
        for _ in range(2):
            learner.train_step(groups)
    assert_same_bits(copy_weights(models[0]), copy_weights(models[1]))


def test_scores_without_gradient_equal_those_with(groups: list[Group], make_policy: MakePolicy) -> None:
    model = make_policy(0).model
    (pack,) = build_packs(build_samples(groups, "zscore"), 10_000)
    with torch.no_grad():
        plain = score_tokens(model, pack)
    trained = score_tokens(model, pack, entropy_grad=True)
    torch.testing.assert_close(plain.logprobs, trained.logprobs, rtol=0, atol=1e-6)
    torch.testing.assert_close(plain.entropy, trained.entropy, rtol=0, atol=1e-6)
    assert trained.entropy.requires_grad and trained.logprobs.requires_grad
