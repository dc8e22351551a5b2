"""A rollout is a function of weights, prompt, seed and sampling parameters: bit for bit, whatever runs concurrently."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.engine.torch import TorchEngine
from shoal.policy.model import Policy
from shoal.rollout import Request

Bits = dict[str, tuple[list[int], bytes, bytes]]


@pytest.fixture(scope="module", params=["qwen", "llama"])
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.getfixturevalue(request.param)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def requests(make_requests) -> list[Request]:
    return make_requests(5, limits=(1, 4, 20))


@pytest.fixture(scope="module")
def alone(run, policy: Policy, requests: list[Request]) -> Bits:
    """Every rollout alone: one slot, so that it never has a neighbour."""
    collector = run(policy, requests, slots=1)
    return {request.id: collector.bits(request.id) for request in requests}


@pytest.mark.parametrize("slots", [3, 16, 64])
def test_the_number_of_slots_does_not_matter(
    run, policy: Policy, requests: list[Request], alone: Bits, slots: int
) -> None:
    collector = run(policy, requests, slots=slots)
    assert {request.id: collector.bits(request.id) for request in requests} == alone


@settings(max_examples=3)
@given(data=st.data())
def test_order_and_neighbours_do_not_matter(run, policy: Policy, requests: list[Request], alone: Bits, data) -> None:
    some = data.draw(st.lists(st.sampled_from(requests), min_size=1, unique_by=lambda request: request.id))
    collector = run(policy, some, slots=data.draw(st.integers(1, 24)))
    for request in some:
        assert collector.bits(request.id) == alone[request.id]


def test_arriving_while_others_are_under_way_does_not_matter(
    collect, policy: Policy, requests: list[Request], alone: Bits
) -> None:
    collector = collect()
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=7, sink=collector)
    for start in range(0, len(requests), 5):
        engine.submit(requests[start : start + 5])
        for _ in range(9):
            collector.rollouts |= {rollout.id: rollout for rollout in engine.step()}
    collector.finish(engine)
    assert {request.id: collector.bits(request.id) for request in requests} == alone


def test_the_length_of_neighbours_does_not_matter(run, make_requests, policy: Policy) -> None:
    # Lengths on both sides of every boundary: tiles, chunks of the sum over positions, row counts, the fused kernel.
    requests = make_requests(6, prompts=(3, 250, 31, 380, 60, 270), limits=(2, 12), size=2)
    alone = run(policy, requests, slots=1)
    beside = run(policy, requests[::-1], slots=16)
    for request in requests:
        assert beside.bits(request.id) == alone.bits(request.id)


def test_rows_of_many_blocks_do_not_matter(run, make_requests, policy: Policy) -> None:
    # 65 rows: the last block of decode attention holds a single row.
    requests = make_requests(13, prompts=(5, 40, 12), limits=(3,), size=5)
    few, many = run(policy, requests, slots=9), run(policy, requests, slots=65)
    for request in requests:
        assert few.bits(request.id) == many.bits(request.id)


@pytest.mark.parametrize("threads", [2, 3])
def test_more_threads_make_no_difference_to_that(run, make_requests, policy: Policy, threads: int) -> None:
    requests = make_requests(5, prompts=(3, 64, 130, 9, 270), limits=(1, 5), size=2)
    torch.set_num_threads(threads)
    alone, beside = run(policy, requests, slots=1), run(policy, requests[::-1], slots=7)
    torch.set_num_threads(1)
    for request in requests:
        assert beside.bits(request.id) == alone.bits(request.id)


def test_requests_of_one_prompt_and_seed_are_one_rollout(run, policy: Policy) -> None:
    twins = [Request(id=name, prompt_ids=(5, 6, 7), seed=11, max_tokens=30) for name in "abc"]
    collector = run(policy, twins)
    assert collector.bits("a") == collector.bits("b") == collector.bits("c")
