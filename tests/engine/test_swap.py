"""Swapping weights during generation: nothing of the old ones is reused, and a rollout records versions."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal.engine.torch import TorchEngine
from shoal.policy.model import Policy
from shoal.rollout import Request, VersionRange

NEVER = -1
REQUESTS = [
    Request(
        id=str(n), prompt_ids=(5, 9, 7, 3 + n // 2), seed=n, max_tokens=20 + 9 * n, temperature=0.0 if n == 2 else 1.0
    )
    for n in range(6)
]
Weights = dict[str, Tensor]


@pytest.fixture
def start(qwen: Policy) -> Policy:
    """A copy that the engine may write to."""
    return Policy(model=deepcopy(qwen.model), tokenizer=qwen.tokenizer)


@pytest.fixture
def weights(qwen: Policy) -> list[Weights]:
    """Versions 0, 1 and 2: the policy's own weights, and two that are far from them."""

    def change(tensor: Tensor, version: int) -> Tensor:
        return tensor + 0.3 * version * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(version))

    return [{name: change(tensor, v) for name, tensor in qwen.model.state_dict().items()} for v in range(3)]


def as_policy(policy: Policy, weights: Weights) -> Policy:
    model = deepcopy(policy.model)
    model.load_state_dict(weights)
    return Policy(model=model, tokenizer=policy.tokenizer)


def run_swaps(collect, start: Policy, swaps: list[tuple[int, int, Weights]], slots: int = 4):
    """All requests, with `version, weights` swapped in after the given number of steps each."""
    collector = collect()
    engine = TorchEngine(start.model, eos_id=NEVER, slots=slots, sink=collector)
    engine.submit(REQUESTS)
    for steps, version, weights in swaps:
        for _ in range(steps):
            collector.rollouts |= {rollout.id: rollout for rollout in engine.step()}
        engine.swap_weights(version, weights)
    return collector.finish(engine)


def test_versions_say_which_weights_wrote_which_token(collect, start: Policy, weights: list[Weights]) -> None:
    rollouts = run_swaps(collect, start, [(7, 1, weights[1]), (15, 2, weights[2])]).rollouts
    assert rollouts["0"].versions == (VersionRange(0, 0, 7), VersionRange(1, 7, 20))
    assert rollouts["3"].versions == (VersionRange(0, 0, 7), VersionRange(1, 7, 22), VersionRange(2, 22, 47))
    assert rollouts["3"].version == 0
    # The fifth started when the first had ended, under version 1.
    assert rollouts["4"].versions == (VersionRange(1, 0, 2), VersionRange(2, 2, 56))
    assert rollouts["5"].version == 2


def test_swaps_without_a_token_between_leave_no_range(collect, start: Policy, weights: list[Weights]) -> None:
    rollouts = run_swaps(collect, start, [(0, 1, weights[1]), (0, 2, weights[2])]).rollouts
    assert rollouts["1"].versions == (VersionRange(2, 0, 29),)


def test_before_the_swap_the_old_weights_speak_and_after_it_the_new(
    collect, start: Policy, weights: list[Weights]
) -> None:
    collector = run_swaps(collect, start, [(9, 1, weights[1])])
    models = [as_policy(start, weights[version]).model for version in (0, 1)]
    for request in REQUESTS:
        rollout = collector.rollouts[request.id]
        whole = torch.tensor([*request.prompt_ids, *rollout.token_ids.tolist()])
        rows = slice(len(request.prompt_ids) - 1, len(whole) - 1)
        for span in rollout.versions:
            with torch.no_grad():
                output = models[span.version](input_ids=whole[None], output_hidden_states=True)
            hidden, logits = output.hidden_states[-1][0, rows], output.logits[0, rows]
            expected = torch.log_softmax(logits, -1).gather(1, whole[len(request.prompt_ids) :, None])[:, 0]
            cut = slice(span.start, span.end)
            got = torch.from_numpy(rollout.logprobs)
            torch.testing.assert_close(got[cut], expected[cut], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(collector.hidden(request.id)[cut], hidden[cut], atol=1e-4, rtol=1e-4)


def test_the_continuation_is_that_of_a_fresh_engine(run, collect, start: Policy, weights: list[Weights]) -> None:
    greedy = run_swaps(collect, start, [(9, 1, weights[1])]).rollouts["2"]
    written = tuple(greedy.token_ids[:9].tolist())
    again = replace(REQUESTS[2], prompt_ids=REQUESTS[2].prompt_ids + written, max_tokens=REQUESTS[2].max_tokens - 9)
    fresh = run(as_policy(start, weights[1]), [again], eos_id=NEVER).rollouts["2"]
    assert fresh.token_ids.tolist() == greedy.token_ids[9:].tolist()
    assert fresh.logprobs.tobytes() == greedy.logprobs[9:].tobytes()


@pytest.mark.parametrize("steps", [1, 31, 32, 33])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_the_sink_loses_no_row_to_a_swap(
    collect, start: Policy, weights: list[Weights], steps: int, slots: int
) -> None:
    collector = run_swaps(collect, start, [(steps, 1, weights[1]), (3, 2, weights[2])], slots)
    for request in REQUESTS:
        length = request.max_tokens
        sizes = [(at, len(chunk)) for at, chunk in collector.chunks[request.id]]
        assert sizes == [(at, min(32, length - at)) for at in range(0, length, 32)]
        hidden, rollout = collector.hidden(request.id), collector.rollouts[request.id]
        for span in rollout.versions:  # the head of its version, on the state, gives the log-prob of the token
            logits = hidden[span.start : span.end] @ weights[span.version]["lm_head.weight"].T
            tokens = torch.from_numpy(rollout.token_ids[span.start : span.end]).long()
            expected = torch.log_softmax(logits, -1).gather(1, tokens[:, None])[:, 0]
            got = torch.from_numpy(rollout.logprobs[span.start : span.end])
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_weights_that_are_not_numbers_leave_no_trace(collect, start: Policy, weights: list[Weights]) -> None:
    expected = run_swaps(collect, as_policy(start, weights[0]), [(9, 2, weights[2])])
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in weights[0].items()}
    collector = collect()
    engine = TorchEngine(start.model, eos_id=NEVER, slots=4, sink=collector)
    engine.submit(REQUESTS)
    for _ in range(9):
        engine.step()
    engine.swap_weights(1, broken)
    with pytest.raises(FloatingPointError, match="not finite"):
        engine.step()
    engine.swap_weights(2, weights[2])
    collector.finish(engine)
    for request in REQUESTS:
        assert collector.bits(request.id) == expected.bits(request.id)
        assert collector.rollouts[request.id].versions == expected.rollouts[request.id].versions


@pytest.mark.parametrize("fault", ["missing", "extra", "shape"])
def test_weights_that_do_not_fit_are_refused_whole(
    run, collect, start: Policy, weights: list[Weights], fault: str
) -> None:
    expected = run(start, REQUESTS, eos_id=NEVER, slots=4)
    odd = dict(weights[1])
    if fault == "missing":
        del odd["model.norm.weight"]
    elif fault == "extra":
        odd["model.more.weight"] = torch.zeros(2)
    else:
        odd["lm_head.weight"] = odd["lm_head.weight"][:-1]
    collector = collect()
    engine = TorchEngine(start.model, eos_id=NEVER, slots=4, sink=collector)
    engine.submit(REQUESTS)
    for _ in range(5):
        engine.step()
    with pytest.raises(ValueError, match=r"version 1 do not fit: .*'(model.norm|model.more|lm_head).weight'"):
        engine.swap_weights(1, odd)
    assert engine.version == 0
    collector.finish(engine)
    for request in REQUESTS:
        assert collector.bits(request.id) == expected.bits(request.id)


def test_tied_weights_are_swapped_as_they_are_saved(run, collect, make_model, qwen: Policy, tmp_path: Path) -> None:
    tied, other = (make_model("qwen3", tie_word_embeddings=True, head_dim=8, num_key_value_heads=2) for _ in range(2))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    other.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in saved
    collector = run_swaps(collect, Policy(model=tied, tokenizer=qwen.tokenizer), [(0, 1, saved)])
    expected = run(Policy(model=other, tokenizer=qwen.tokenizer), REQUESTS, eos_id=NEVER, slots=4)
    for request in REQUESTS:
        assert collector.bits(request.id) == expected.bits(request.id)
    del saved["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"2 names differ, first 'lm_head\.weight'"):
        TorchEngine(tied, eos_id=NEVER, slots=1).swap_weights(2, saved)


def test_a_model_that_runs_its_own_forward_is_swapped_too(run, collect, make_model, qwen: Policy) -> None:
    start = Policy(model=make_model("gpt_neox"), tokenizer=qwen.tokenizer)
    halved = {name: tensor * 0.5 for name, tensor in start.model.state_dict().items()}
    other = as_policy(start, halved)
    collector = run_swaps(collect, start, [(0, 1, halved)])
    expected = run(other, REQUESTS, eos_id=NEVER, slots=4)
    for request in REQUESTS:
        assert collector.bits(request.id) == expected.bits(request.id)
