"""DiLoCo with H = 1, inner SGD, outer lr 1 and no momentum is data parallelism."""

import numpy as np
import pytest
import torch
from tests.diloco.members import Net, build_group, draw_batch, train_members

from shoal.diloco.codecs import CODECS, find_codec
from shoal.diloco.outer import DilocoPlan, OuterRule, Rules, UpdateGuard, pseudo_gradient
from shoal.diloco.reduce import FinishedRound, close_round
from shoal.diloco.round import Update
from shoal.diloco.state import OuterState, start_state

NAMES = "abcd"
PLAIN = Rules(
    interval=1,
    codec="fp32",
    dynamic=False,
    outer=OuterRule(lr=1.0, momentum=0.0),
    guard=UpdateGuard(mode="mean", clip=1e9),
)


def average_ends(state: OuterState, ends: list[np.ndarray], rules: Rules = PLAIN) -> OuterState:
    """One round of peers that reached these weights."""
    plan = DilocoPlan("test", state.sizes, rules)
    key, theta, codec = plan.name_round(state, 0), state.fragments[0].theta, find_codec(rules.codec)
    updates = [
        Update(key, name, 1, 1, codec.encode(pseudo_gradient(theta, end)), codec.name)
        for name, end in zip(NAMES, ends, strict=True)
    ]
    closed = close_round(plan, state, key, updates)
    assert isinstance(closed, FinishedRound) and closed.outcome.peers == tuple(NAMES)
    return closed.state


def test_it_is_data_parallel_bit_for_bit_where_fp32_is_exact() -> None:
    """A regression on small integers with dyadic rates, where no operation rounds: fp64 gives the same numbers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-3, 4, (2, 4, 4, 6), generator=generator).float()  # steps, peers, rows, features
    y = torch.randint(-3, 4, (2, 4, 4), generator=generator).float()
    rate, weights = 2.0**-5, torch.randint(-4, 5, (6,), generator=generator).double()
    state = start_state((weights.numpy(),))
    for xs, ys in zip(x, y, strict=True):
        theta = torch.from_numpy(np.array(state.fragments[0].theta))
        gradients = [a.T @ (a @ theta - b) / 4 for a, b in zip(xs, ys, strict=True)]
        state = average_ends(state, [(theta - rate * gradient).numpy() for gradient in gradients])
        whole = xs.reshape(16, 6).double()
        weights = weights - rate * (whole.T @ (whole @ weights - ys.reshape(16).double()) / 16)
        assert (state.fragments[0].theta.astype(np.float64) == weights.numpy()).all()


def test_it_is_data_parallel_within_rounding_on_a_network() -> None:
    """start - (start - lr g) rounds once in fp32, which is the only difference between the two."""
    group = build_group(PLAIN)
    rate, num_steps = 0.05, 20
    reference = Net()
    for step in range(num_steps):
        x, y = (torch.cat(parts) for parts in zip(*(draw_batch(name, step) for name in NAMES), strict=True))
        reference.zero_grad()
        (reference(x) - y).square().mean().backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.sub_(rate * parameter.grad)
    state = group.state
    model = Net()
    flat = list(model.parameters())
    for step in range(num_steps):
        ends = []
        for name in NAMES:
            torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(state.fragments[0].theta)), flat)
            model.zero_grad()
            x, y = draw_batch(name, step)
            (model(x) - y).square().mean().backward()
            ends.append(torch.cat([(p - rate * p.grad).reshape(-1) for p in flat]).detach().numpy())
        state = average_ends(state, ends)
    wanted = torch.nn.utils.parameters_to_vector(reference.parameters()).detach().numpy()
    assert np.abs(state.fragments[0].theta - wanted).max() < 2e-6


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_peer_has_one_hash_after_each_round(codec: str) -> None:
    group = build_group(Rules.model_validate({"interval": 4, "codec": codec, "dynamic": False}))
    reports = train_members(group, NAMES, 12)
    hashes = [[report.state for report in reports[name]] for name in NAMES]
    assert all(mine == hashes[0] for mine in hashes) and len(set(hashes[0])) == 3
    assert hashes[0][-1] == group.state.fragments[0].hash
    assert all(report.peers == tuple(NAMES) and not report.note for name in NAMES for report in reports[name])


def test_the_same_run_twice_ends_in_the_same_bits() -> None:
    hashes = []
    for _ in range(2):
        group = build_group(Rules(interval=5, dynamic=False))
        train_members(group, NAMES, 15)
        hashes.append(group.state.hash)
    assert hashes[0] == hashes[1]
