"""Workers in one shared buffer train as each would alone."""

import numpy as np
import pytest
import torch

from diloco import MAIN, find_figures, find_large
from diloco_arms import Arm, Inner, Site, Size, Start
from diloco_model import SYMBOLS, Shape, Stack, init_rows

SHAPE = Shape(width=16, layers=2, heads=2, hidden=24)
SIZE = Size(warm=0, steps=8, shape=SHAPE)


def make_start() -> Start:
    zeros = torch.zeros(SHAPE.num_params)
    return Start(init_rows(SHAPE, 0), zeros, zeros.clone(), 0)


def draw_chars(num_workers: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(SYMBOLS, (4, 2, 9), generator=generator)[:num_workers]


def test_the_model_of_the_benchmark_has_the_size_it_says() -> None:
    assert Shape().num_params == 111_424


def test_workers_in_one_pass_are_the_same_as_one_by_one() -> None:
    together = Stack(SHAPE, 3)
    inner = Inner(together, make_start())
    alone = [Stack(SHAPE, 1) for _ in range(3)]
    inners = [Inner(stack, make_start()) for stack in alone]
    for step in range(4):
        chars = draw_chars(3, step)
        together.loss(chars).sum().backward()
        inner.step(1e-2)
        for worker, (stack, own) in enumerate(zip(alone, inners, strict=True)):
            stack.loss(chars[worker : worker + 1]).sum().backward()
            own.step(1e-2)
    rows = together.split_rows(together.flat).detach()
    for row, stack in zip(rows, alone, strict=True):
        assert (row - stack.split_rows(stack.flat)[0]).abs().max() < 1e-5
    assert (rows[0] - rows[1]).abs().max() > 1e-3


def test_a_round_leaves_every_worker_with_the_outer_weights_and_counts_its_bytes() -> None:
    for arm in (Arm("x", "diloco", interval=4, codec="int4"), Arm("y", "diloco", interval=4, fragments=2)):
        stack, start = Stack(SHAPE, 4), make_start()
        inner, site = Inner(stack, start), Site(arm, SIZE, stack, start)
        for step in range(1, 5):
            stack.loss(draw_chars(4, step)).sum().backward()
            inner.step(1e-2)
            ended = site.end_step(step)
            assert ended == (step % (4 // arm.fragments) == 0)
        rows = stack.split_rows(stack.flat).detach()
        last = site.bounds[-1]
        assert torch.equal(rows[:, last], site.weights[last].expand(4, -1))
        assert sorted(np.concatenate([part.numpy() for part in site.bounds])) == list(range(SHAPE.num_params))
    assert site.bytes_sent == 4 * SHAPE.num_params


def test_gaps_are_positive_where_diloco_is_worse_and_shares_are_of_the_gain() -> None:
    losses = {"one worker": 1.7, "data parallel": 1.6, "data parallel tuned": 1.5}
    found = {arm.name: [{"loss": losses.get(arm.name, 1.55), "bytes": 800 if arm.kind == "ddp" else 2}] for arm in MAIN}
    figures = find_figures(found)
    assert figures["loss_gap_to_ddp"] == pytest.approx(-0.05)
    assert figures["loss_gap_to_tuned_ddp"] == pytest.approx(0.05)
    assert figures["gain_over_single"] == pytest.approx(0.15) and figures["bytes_ratio_int4"] == 400
    large = find_large(found | {"diloco int4 tuned outer": [{"loss": 1.61}]})
    assert large["large_share_of_ddp"] == pytest.approx(1.5)
    assert large["large_share_of_ddp_tuned_outer"] == pytest.approx(0.9)
