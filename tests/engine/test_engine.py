"""The torch engine: what it returns, what it passes to the sink, its limits."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.engine.base import CHUNK
from shoal.engine.sampling import choose_tokens
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.learner.logprobs import score_tokens
from shoal.policy.model import Policy
from shoal.policy.packing import Sample, build_packs
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.seeds import token_uniforms

NEVER = -1
"""an end token that no model writes"""
ONE = Request(id="one", prompt_ids=(5, 9, 7), seed=3, max_tokens=8)


@torch.no_grad()
def prefill(policy: Policy, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Hidden states and logits from which each token was chosen, by transformers' own forward."""
    whole = torch.from_numpy(np.concatenate((rollout.prompt_ids, rollout.token_ids))).long()
    output = policy.model(input_ids=whole[None], output_hidden_states=True)
    rows = slice(len(rollout.prompt_ids) - 1, len(whole) - 1)
    return output.hidden_states[-1][0, rows], output.logits[0, rows]


@pytest.fixture(params=["qwen", "llama", "gpt_neox"])
def policy(request: pytest.FixtureRequest, make_model, qwen: Policy) -> Policy:
    """Two models of the lean loop, and one that runs its own forward."""
    if request.param == "gpt_neox":
        return Policy(model=make_model("gpt_neox"), tokenizer=qwen.tokenizer)
    return request.getfixturevalue(request.param)


def test_decoding_equals_prefill(run, make_requests, policy: Policy) -> None:
    collector = run(policy, make_requests(4))
    for rollout in collector.rollouts.values():
        hidden, logits = prefill(policy, rollout)
        scaled = logits / (rollout.temperature or 1.0)
        tokens = torch.from_numpy(rollout.token_ids).long()
        expected = torch.log_softmax(scaled, -1).gather(1, tokens[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(rollout.logprobs), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(collector.hidden(rollout.id), hidden, atol=1e-5, rtol=1e-4)


def test_the_learner_finds_the_log_probs_that_the_engine_recorded(run, make_requests, policy: Policy) -> None:
    rollouts = [r for r in run(policy, make_requests(4)).rollouts.values() if r.temperature]
    samples = [Sample(int(rollout.id.split(".")[0]), rollout, 0.0) for rollout in rollouts]
    for pack in build_packs(samples, 200):
        with torch.no_grad():
            scores = score_tokens(policy.model, pack)
        torch.testing.assert_close(scores.logprobs, pack.behaviour, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 130])
def test_tokens_follow_from_the_seed(run, qwen: Policy, length: int) -> None:
    seeds = [0, 1, 2**53 + 1, 2**64 - 1]
    requests = [replace(ONE, id=str(seed), seed=seed, max_tokens=length) for seed in seeds]
    for rollout in run(qwen, requests, eos_id=NEVER).rollouts.values():
        _, logits = prefill(qwen, rollout)
        uniforms = torch.from_numpy(token_uniforms(rollout.seed, 0, length))
        assert choose_tokens(logits, torch.ones(length), uniforms)[0].tolist() == rollout.token_ids.tolist()


def test_greedy_is_what_transformers_generates(run, policy: Policy) -> None:
    prompts = [(5,), (7, 8, 9), tuple(range(3, 20))]
    requests = [
        Request(id=str(index), prompt_ids=prompt, seed=0, max_tokens=25, temperature=0.0)
        for index, prompt in enumerate(prompts)
    ]
    rollouts = run(policy, requests).rollouts
    for index, prompt in enumerate(prompts):
        whole = policy.model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=25,
            do_sample=False,
            eos_token_id=policy.eos_id,
            pad_token_id=0,
        )
        assert rollouts[str(index)].token_ids.tolist() == whole[0, len(prompt) :].tolist()


def test_a_rollout_says_what_it_was_asked_and_how_it_was_made(run, qwen: Policy) -> None:
    rollout = run(qwen, [replace(ONE, temperature=0.7)], eos_id=NEVER).rollouts["one"]
    assert rollout.prompt_ids.tolist() == [5, 9, 7] and rollout.prompt_ids.dtype == np.int32
    assert rollout.token_ids.dtype == np.int32 and rollout.logprobs.dtype == np.float32
    assert (rollout.temperature, rollout.seed, rollout.finish) == (0.7, 3, Finish.LENGTH)
    assert rollout.versions == (VersionRange(0, 0, 8),) and rollout.version == 0


def test_a_rollout_ends_with_the_end_token_and_holds_it(run, qwen: Policy) -> None:
    longest = run(qwen, [replace(ONE, max_tokens=60)], eos_id=NEVER).rollouts["one"].token_ids.tolist()
    for eos_id in set(longest):
        rollout = run(qwen, [replace(ONE, max_tokens=60)], eos_id=eos_id).rollouts["one"]
        assert rollout.token_ids.tolist() == longest[: longest.index(eos_id) + 1]
        assert rollout.finish is Finish.STOP


def test_an_end_token_at_the_limit_is_a_stop(run, qwen: Policy) -> None:
    tokens = run(qwen, [ONE], eos_id=NEVER).rollouts["one"].token_ids.tolist()
    limit = tokens.index(tokens[-1]) + 1
    rollout = run(qwen, [replace(ONE, max_tokens=limit)], eos_id=tokens[-1]).rollouts["one"]
    assert (rollout.num_tokens, rollout.finish) == (limit, Finish.STOP)


def test_the_first_token_may_be_the_end(run, qwen: Policy) -> None:
    first = int(run(qwen, [ONE], eos_id=NEVER).rollouts["one"].token_ids[0])
    collector = run(qwen, [ONE], eos_id=first)
    assert collector.rollouts["one"].token_ids.tolist() == [first]
    assert collector.rollouts["one"].finish is Finish.STOP
    assert [(start, len(chunk)) for start, chunk in collector.chunks["one"]] == [(0, 1)]


def test_one_token_in_and_one_token_out(run, qwen: Policy) -> None:
    rollout = run(qwen, [Request(id="a", prompt_ids=(4,), seed=1, max_tokens=1)], eos_id=NEVER).rollouts["a"]
    assert rollout.num_tokens == 1 and rollout.finish is Finish.LENGTH


def test_more_requests_than_slots_all_come_out_once(qwen: Policy, make_requests) -> None:
    requests = make_requests(7)
    engine = TorchEngine(qwen.model, eos_id=qwen.eos_id, slots=4)
    ids = [rollout.id for rollout in engine.generate(requests)]
    assert sorted(ids) == sorted(request.id for request in requests)
    assert not engine.busy


def test_no_requests_give_no_rollouts(qwen: Policy) -> None:
    engine = TorchEngine(qwen.model, eos_id=qwen.eos_id, slots=4)
    assert list(engine.generate([])) == [] and engine.step() == [] and not engine.busy


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_the_sink_gets_whole_chunks_in_order(run, qwen: Policy, slots: int) -> None:
    lengths = [33, 1, 64, 31, 32, 65, 2]
    requests = [replace(ONE, id=str(n), seed=n, max_tokens=n) for n in lengths]
    collector = run(qwen, requests, slots=slots, eos_id=NEVER)
    for length in lengths:
        sizes = [(start, len(chunk)) for start, chunk in collector.chunks[str(length)]]
        assert sizes == [(start, min(CHUNK, length - start)) for start in range(0, length, CHUNK)]
        hidden, _ = prefill(qwen, collector.rollouts[str(length)])
        torch.testing.assert_close(collector.hidden(str(length)), hidden, atol=1e-5, rtol=1e-4)


def test_a_growing_cache_changes_nothing(run, collect, qwen: Policy) -> None:
    short = [replace(ONE, id=f"s{n}", seed=n, max_tokens=40) for n in range(3)]
    long = replace(ONE, id="long", prompt_ids=tuple(range(3, 23)) * 10, max_tokens=150)
    expected = run(qwen, [*short, long], eos_id=NEVER, slots=1)
    collector = collect()
    engine = TorchEngine(qwen.model, eos_id=NEVER, slots=4, sink=collector)
    engine.submit(short)
    for _ in range(20):
        engine.step()
    engine.submit([long])
    collector.finish(engine)
    for request in (*short, long):
        assert collector.bits(request.id) == expected.bits(request.id)


def test_a_request_may_fill_the_context_and_not_more(qwen: Policy) -> None:
    context = qwen.model.config.max_position_embeddings
    engine = TorchEngine(qwen.model, eos_id=NEVER, slots=2)
    full = Request(id="full", prompt_ids=(5,) * (context - 3), seed=0, max_tokens=3)
    assert next(iter(engine.generate([full]))).num_tokens == 3
    with pytest.raises(ConfigError, match="509 tokens plus 4 generated tokens exceeds the model's 512"):
        engine.submit([ONE, replace(full, max_tokens=4)])
    assert not engine.busy, "a refused call queues none of its requests"


def test_a_prompt_needs_a_token(qwen: Policy) -> None:
    with pytest.raises(ConfigError, match="needs at least one token"):
        TorchEngine(qwen.model, eos_id=NEVER, slots=1).submit([replace(ONE, prompt_ids=())])


def test_two_requests_of_one_id_are_a_bug(qwen: Policy) -> None:
    engine = TorchEngine(qwen.model, eos_id=NEVER, slots=1)
    with pytest.raises(AssertionError, match="ids of active requests are unique"):
        engine.submit([ONE, replace(ONE, seed=4)])
    engine.submit([ONE])
    with pytest.raises(AssertionError, match="ids of active requests are unique"):
        engine.submit([ONE])
    while engine.busy:
        engine.step()
    assert len(list(engine.generate([ONE]))) == 1, "an id is free again once its rollout is out"


def test_generate_needs_an_idle_engine(qwen: Policy) -> None:
    engine = TorchEngine(qwen.model, eos_id=NEVER, slots=1)
    engine.submit([ONE])
    with pytest.raises(AssertionError, match="idle"):
        next(iter(engine.generate([replace(ONE, id="two")])))


@pytest.mark.parametrize("num_steps", [0, 3, 35])
@pytest.mark.parametrize("swapped", [False, True])
def test_what_is_cancelled_is_gone_and_the_others_are_as_they_were(
    run, collect, make_requests, qwen: Policy, num_steps: int, swapped: bool
) -> None:
    requests = make_requests(6, limits=(40,))
    alone = run(qwen, requests)
    collector = collect()
    engine = TorchEngine(deepcopy(qwen.model), eos_id=qwen.eos_id, slots=7, sink=collector)
    engine.submit(requests)
    for _ in range(num_steps):
        collector.rollouts |= {rollout.id: rollout for rollout in engine.step()}
    if swapped:
        engine.swap_weights(1, qwen.model.state_dict())
    finished, gone = set(collector.rollouts), {request.id for request in requests[::2]}
    engine.cancel([*gone, "nobody"])
    collector.finish(engine)
    kept = {request.id for request in requests[1::2]}
    assert set(collector.rollouts) == kept | finished
    for name in kept:
        assert collector.bits(name)[0] == alone.bits(name)[0]
        assert swapped or collector.bits(name) == alone.bits(name)
    engine.submit(requests[:1])
    collector.chunks.pop(requests[0].id, None)
    assert collector.finish(engine).bits(requests[0].id)[0] == alone.bits(requests[0].id)[0], "its id is free again"
