"""Replaying untrusted rollouts: the same numbers as the engine's, and nothing invalid reaches the model."""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.engine.torch import TorchEngine
from shoal.policy.altered import map_linears, round_groups
from shoal.policy.attention import LONG
from shoal.policy.model import Policy
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import token_uniforms
from shoal.toploc import replay as module
from shoal.toploc.replay import RolloutError, admit_rollout, join_replays, replay_batches, replay_rollouts

REQUEST = Request(id="r", prompt_ids=(5, 9, 7), seed=3, max_tokens=70)


@pytest.fixture(scope="module")
def generated(qwen: Policy) -> tuple[list[Request], list[Rollout], dict[str, Tensor]]:
    """Rollouts of mixed lengths and temperatures, in groups that share prompts, with the engine's states."""
    requests = [
        Request(id=f"{g}.{i}", prompt_ids=tuple(range(3, 4 + 5 * g)), seed=10 * g + i, max_tokens=n, temperature=t)
        for g in range(3)
        for i, (n, t) in enumerate([(1, 1.0), (40, 1.0), (70, 0.7), (33, 0.0)])
    ]
    states: dict[str, list[Tensor]] = {}

    def keep(rollout_id: str, start: int, hidden: Tensor) -> None:
        states.setdefault(rollout_id, []).append(hidden.clone())

    engine = TorchEngine(qwen.model, eos_id=qwen.eos_id, slots=16, sink=keep)
    rollouts = sorted(engine.generate(requests), key=lambda rollout: rollout.id)
    return requests, rollouts, {name: torch.cat(chunks) for name, chunks in states.items()}


def test_a_replay_finds_what_the_engine_found(qwen: Policy, generated) -> None:
    _, rollouts, states = generated
    replays = replay_rollouts(qwen.model, rollouts, eos_id=qwen.eos_id)
    for rollout, replay in zip(rollouts, replays, strict=True):
        torch.testing.assert_close(replay.hidden, states[rollout.id], atol=1e-5, rtol=1e-4)
        np.testing.assert_allclose(replay.logprobs, rollout.logprobs, atol=1e-5)
        assert replay.distances.max() < 1e-6
        if rollout.token_ids[-1] == qwen.eos_id:
            assert (
                replay.eos_probs[-1] == pytest.approx(np.exp(replay.logprobs[-1]), rel=1e-5) or rollout.temperature == 0
            )


@pytest.mark.parametrize(("name", "held_bytes"), [("qwen3", 1 << 30), ("qwen3", 0), ("gemma", 0)])
def test_changed_weights_replay_as_a_changed_copy_of_the_model(
    qwen: Policy,
    generated,
    make_model: Callable[..., PreTrainedModel],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    held_bytes: int,
) -> None:
    """gemma is a model that runs its own forward; one above the bound is changed layer by layer."""
    monkeypatch.setattr(module, "HELD_BYTES", held_bytes)
    rollouts = generated[1]
    model = (
        qwen.model
        if name == "qwen3"
        else make_model(name, vocab_size=qwen.model.config.vocab_size, num_key_value_heads=1, head_dim=8)
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (found,) = replay_batches(model, [rollouts], eos_id=qwen.eos_id, change=round_groups)
    wanted = replay_rollouts(map_linears(model, round_groups).eval(), rollouts, eos_id=qwen.eos_id)
    plain = replay_rollouts(model, rollouts, eos_id=qwen.eos_id)
    assert all(torch.equal(own.hidden, other.hidden) for own, other in zip(found, wanted, strict=True))
    assert not any(torch.equal(own.hidden, other.hidden) for own, other in zip(found, plain, strict=True))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_end_token_has_its_probability_at_every_place(qwen: Policy, generated) -> None:
    _, rollouts, _ = generated
    rollout = next(r for r in rollouts if r.temperature == 1.0 and r.num_tokens > 3)
    (replay,) = replay_rollouts(qwen.model, [rollout], eos_id=qwen.eos_id)
    whole = torch.from_numpy(np.concatenate((rollout.prompt_ids, rollout.token_ids))).long()
    with torch.no_grad():
        logits = qwen.model(input_ids=whole[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
    np.testing.assert_allclose(replay.eos_probs, logits.softmax(-1)[:, qwen.eos_id], rtol=1e-4)


@pytest.mark.parametrize(("pack_tokens", "elements"), [(1, 2**23), (60, 100), (4096, 1)])
def test_packs_and_slices_do_not_matter(
    qwen: Policy, generated, monkeypatch: pytest.MonkeyPatch, pack_tokens: int, elements: int
) -> None:
    _, rollouts, _ = generated
    whole = replay_rollouts(qwen.model, rollouts, eos_id=qwen.eos_id, shape=True)
    monkeypatch.setattr(module, "SLICE_ELEMENTS", elements)
    cut = replay_rollouts(qwen.model, rollouts, eos_id=qwen.eos_id, shape=True, pack_tokens=pack_tokens)
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, atol=1e-5, rtol=1e-4)
        for field in ("logprobs", "distances", "eos_probs", "tilts", "masses"):
            np.testing.assert_allclose(getattr(one, field), getattr(other, field), atol=1e-5)


def test_rollouts_of_one_text_replay_as_alone_each_with_its_own_uniforms(qwen: Policy, generated) -> None:
    _, rollouts, _ = generated
    first = next(r for r in rollouts if r.temperature == 1.0 and r.num_tokens > 33)
    token_ids = np.append(first.token_ids[:-1], first.token_ids[-1] ^ 1).astype(np.int32)
    copies = [first, replace(first, id="b", seed=99), replace(first, id="c", token_ids=token_ids)]
    together = replay_rollouts(qwen.model, copies, eos_id=qwen.eos_id, shape=True)
    for rollout, replay in zip(copies, together, strict=True):
        (alone,) = replay_rollouts(qwen.model, [rollout], eos_id=qwen.eos_id, shape=True)
        torch.testing.assert_close(replay.hidden, alone.hidden, atol=1e-5, rtol=1e-4)
        for field in ("logprobs", "distances", "eos_probs", "tilts", "masses"):
            np.testing.assert_allclose(getattr(replay, field), getattr(alone, field), atol=1e-5)
    assert together[0].distances.max() < 1e-6 < together[1].distances.max()
    assert together[2].logprobs[-1] != together[0].logprobs[-1]


def test_long_rollouts_that_share_a_prompt_replay_as_alone(qwen: Policy) -> None:
    """Longer than a strip of attention, after a prompt that is adjacent only to the first of them."""
    rng = np.random.default_rng(0)
    vocabulary = qwen.model.config.vocab_size
    rollouts = [
        Rollout(
            id=str(length),
            prompt_ids=np.arange(3, 12, dtype=np.int32),
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            logprobs=np.zeros(length, dtype=np.float32),
            finish=Finish.LENGTH,
            versions=(VersionRange(0, 0, length),),
            temperature=1.0,
            seed=2**64 - length,
        )
        for length in (LONG, LONG + 1, LONG + 70)
    ]
    for rollout, replay in zip(rollouts, replay_rollouts(qwen.model, rollouts, eos_id=1), strict=True):
        whole = torch.from_numpy(np.concatenate((rollout.prompt_ids, rollout.token_ids))).long()
        with torch.no_grad():
            logits = qwen.model(input_ids=whole[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, whole[len(rollout.prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(replay.logprobs, own, atol=1e-5)
        (alone,) = replay_rollouts(qwen.model, [rollout], eos_id=1)
        np.testing.assert_allclose(replay.distances, alone.distances, atol=1e-6)


def test_every_token_is_compared_with_the_uniform_of_its_place(generated) -> None:
    """Uniforms of a pack's rollouts are drawn together, and are those of each."""
    _, rollouts, _ = generated
    alone = [token_uniforms(rollout.seed, 0, rollout.num_tokens) for rollout in rollouts]
    assert np.array_equal(module._draw_uniforms(rollouts), np.concatenate(alone))


def test_logits_are_computed_in_bounded_slices(qwen: Policy, generated, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rollouts, _ = generated
    rows: list[int] = []
    real = module.compute_logits

    def record(model: object, hidden: Tensor) -> Tensor:
        rows.append(len(hidden))
        return real(model, hidden)

    monkeypatch.setattr(module, "compute_logits", record)
    monkeypatch.setattr(module, "SLICE_ELEMENTS", 10 * qwen.model.config.vocab_size)
    replay_rollouts(qwen.model, rollouts, eos_id=qwen.eos_id)
    assert max(rows) == 10 and sum(rows) == sum(rollout.num_tokens for rollout in rollouts)


def test_nothing_to_replay_is_nothing(qwen: Policy) -> None:
    assert replay_rollouts(qwen.model, [], eos_id=1) == []


def test_broken_weights_are_ours_to_notice(qwen: Policy, generated) -> None:
    broken = copy.deepcopy(qwen.model)
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="nothing can be checked"):
        replay_rollouts(broken, generated[1], eos_id=1)


def test_replays_under_several_versions_are_joined_by_their_ranges(
    qwen: Policy, llama: Policy, honest: Rollout
) -> None:
    spans = (VersionRange(4, 0, 20), VersionRange(7, 20, 70))
    old = replay_rollouts(qwen.model, [honest], eos_id=1, shape=True)[0]
    new = replay_rollouts(llama.model, [honest], eos_id=1, shape=True)[0]
    joined = join_replays(spans, {4: old, 7: new})
    assert torch.equal(joined.hidden, torch.cat((old.hidden[:20], new.hidden[20:])))
    for field in ("logprobs", "distances", "eos_probs", "tilts", "masses"):
        parts = (getattr(old, field)[:20], getattr(new, field)[20:])
        np.testing.assert_array_equal(getattr(joined, field), np.concatenate(parts))


@pytest.fixture(scope="module")
def honest(qwen: Policy) -> Rollout:
    engine = TorchEngine(qwen.model, eos_id=-1, slots=4)
    return next(iter(engine.generate([REQUEST])))


def test_an_honest_rollout_is_admitted_with_arrays_of_our_own(qwen: Policy, honest: Rollout) -> None:
    wide = replace(honest, token_ids=honest.token_ids.astype(np.int64), logprobs=honest.logprobs.astype(np.float64))
    admitted = admit_rollout(wide, REQUEST, qwen.model)
    assert admitted.token_ids.dtype == np.int32 and admitted.logprobs.dtype == np.float32
    same = replace(honest, token_ids=honest.token_ids.copy(), logprobs=honest.logprobs.copy())
    again = admit_rollout(same, REQUEST, qwen.model)
    for given, own in ((wide, admitted), (same, again)):
        given.token_ids[0], given.logprobs[0] = 10**9, 5.0  # the peer changes its arrays afterwards
        np.testing.assert_array_equal(own.token_ids, honest.token_ids)
        np.testing.assert_array_equal(own.logprobs, honest.logprobs)


Change = Callable[[Rollout], dict[str, object]]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda r: {"id": "s"}, "id"),
        (lambda r: {"seed": 4}, "seed"),
        (lambda r: {"temperature": 0.9}, "temperature"),
        (lambda r: {"prompt_ids": np.array([5, 9])}, "prompt_ids"),
        (lambda r: {"prompt_ids": np.array([], dtype=np.int32)}, "prompt_ids"),
        (lambda r: {"token_ids": np.where(r.token_ids == r.token_ids[3], -1, r.token_ids)}, "token_ids"),
        (lambda r: {"token_ids": np.where(r.token_ids == r.token_ids[3], 24, r.token_ids)}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids.astype(np.uint64) + np.uint64(2**63)}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids.astype(np.float32)}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids.astype(object)}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids.tolist()}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids[:, None]}, "token_ids"),
        (lambda r: {"token_ids": r.token_ids[:0], "logprobs": r.logprobs[:0]}, "token_ids"),
        (lambda r: {"token_ids": np.tile(r.token_ids, 2), "logprobs": np.tile(r.logprobs, 2)}, "token_ids"),
        (lambda r: {"logprobs": r.logprobs.tolist()}, "logprobs"),
        (lambda r: {"logprobs": np.tile(r.logprobs[:, None], 2)}, "logprobs"),
        (lambda r: {"logprobs": r.logprobs.astype(object)}, "logprobs"),
        (lambda r: {"versions": ()}, "versions"),
        (lambda r: {"versions": (VersionRange(0, 0, 69),)}, "versions"),
        (lambda r: {"versions": (VersionRange(0, 0, 40), VersionRange(1, 41, 70))}, "versions"),
        (lambda r: {"versions": (VersionRange(0, 0, 90), VersionRange(1, 90, 70))}, "versions"),
    ],
)
def test_what_is_odd_is_refused_before_the_model_sees_it(
    qwen: Policy, honest: Rollout, change: Change, field: str
) -> None:
    with pytest.raises(RolloutError) as caught:
        admit_rollout(replace(honest, **change(honest)), REQUEST, qwen.model)
    assert caught.value.field == field and str(caught.value).startswith(field)


def test_a_rollout_beyond_the_models_positions_is_refused(qwen: Policy, honest: Rollout) -> None:
    prompt = tuple(5 for _ in range(500))
    long = replace(honest, prompt_ids=np.array(prompt))
    with pytest.raises(RolloutError, match="more than the model's 512 positions"):
        admit_rollout(long, replace(REQUEST, prompt_ids=prompt), qwen.model)


def test_log_probs_that_overflow_are_left_to_their_check(qwen: Policy, honest: Rollout) -> None:
    huge = replace(honest, logprobs=honest.logprobs.astype(np.float64) * 1e300)
    assert np.isinf(admit_rollout(huge, REQUEST, qwen.model).logprobs).any()
