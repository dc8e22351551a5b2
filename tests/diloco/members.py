"""Small runs of several peers in threads, for the tests of this folder."""

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from shoal.diloco.fragments import FragmentMap, map_model
from shoal.diloco.local import LocalGroup
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.peer import Peer, PeerOptions, RoundReport
from shoal.diloco.state import OuterState, start_state

WIDTH = 12


class Net(nn.Module):
    """A few layers, named as in decoder models."""

    def __init__(self, seed: int = 0, layers: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 1, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def build_group(rules: Rules, num_fragments: int = 1) -> LocalGroup:
    fragments = map_model(Net(), num_fragments)
    thetas = tuple(fragments.read(index) for index in range(num_fragments))
    return LocalGroup(DilocoPlan("test", fragments.sizes, rules), start_state(thetas))


def build_peer(
    group: LocalGroup, name: str, *, lr: float = 0.01, options: PeerOptions | None = None
) -> tuple[Peer, Net]:
    model = Net(seed=99)  # different from the run's weights, which it must be given
    fragments: FragmentMap = map_model(model, len(group.plan.sizes))
    inner = torch.optim.AdamW(model.parameters(), lr=lr)
    peer = Peer(name, group.plan, fragments, inner, group.join(name), options=options or PeerOptions(wait_s=20.0))
    return peer, model


def draw_batch(name: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
    x = torch.randn(8, WIDTH, generator=generator)
    return x, x.sin().sum(1, keepdim=True)


def train_peer(peer: Peer, model: Net, num_steps: int, each: Callable[[int], None] | None = None) -> list[RoundReport]:
    reports = []
    for step in range(num_steps):
        x, y = draw_batch(peer.name, step)
        (model(x) - y).square().mean().backward()
        report = peer.step(tokens=8)
        reports += [report] if report else []
        if each:
            each(step)
    return reports


def train_members(group: LocalGroup, names: str, num_steps: int, **flags: object) -> dict[str, list[RoundReport]]:
    """Run one peer per name, each in its own thread; returns their reports."""
    members = [build_peer(group, name, **flags) for name in names]  # type: ignore[arg-type]
    found: dict[str, list[RoundReport]] = {}

    def work(peer: Peer, model: Net) -> None:
        found[peer.name] = train_peer(peer, model, num_steps)

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == len(names), "a peer did not come to its end"
    return found


def measure_loss(state: OuterState) -> float:
    model = Net()
    fragments = map_model(model, len(state.fragments))
    for part in state.fragments:
        fragments.write(part.index, np.array(part.theta))
    x, y = draw_batch("held out", 12345)
    return float((model(x) - y).square().mean().detach())
