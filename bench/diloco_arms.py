"""Training runs of `bench/diloco.py`: one worker, data parallelism, DiLoCo, all from one warm start.

DiLoCo uses the package's own codecs, mean and outer step (`close_round`), with error feedback both ways. Only the
workers are simulated, concurrently in one process. Loss is in nats per character on files that were not trained on.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco_model import Corpus, Shape, Stack, init_rows, load_corpus
from shoal.diloco.codecs import encode_feedback, find_codec
from shoal.diloco.outer import DilocoPlan, OuterRule, Rules, UpdateGuard, pseudo_gradient
from shoal.diloco.reduce import FinishedRound, close_round
from shoal.diloco.round import Update
from shoal.diloco.state import OuterState, start_state
from shoal.seeds import derive_seed

BATCH, LENGTH = 8, 64
DECAY, CLIP_NORM, FLOOR, RISE = 0.1, 1.0, 0.1, 100


@dataclass(frozen=True)
class Size:
    """Lengths of all phases."""

    warm: int = 600
    steps: int = 1400
    held_out: int = 2048
    shape: Shape = field(default_factory=Shape)

    @property
    def tag(self) -> str:
        """Name of this size in file names."""
        return f"{self.shape.num_params}-{self.warm}-{self.steps}-{self.held_out}"


@dataclass(frozen=True)
class Arm:
    """One way of training."""

    name: str
    kind: str
    """single, ddp or diloco"""
    lr: float = 3e-3
    beta2: float = 0.95
    workers: int = 4
    interval: int = 50
    codec: str = "fp32"
    eta: float = 0.7
    mu: float = 0.9
    rule: str = "nesterov"
    ramp: int = 0
    fade: int = 0
    fragments: int = 1
    delay: int = 0
    """inner steps between the end of a round's steps and the arrival of the new weights"""
    alpha: float = 1.0
    shards: str = "random"
    """random, or apart: every worker reads a contiguous part of the corpus"""
    cold: bool = False
    """start from random weights, without the warm start"""
    guard: str = "mean"
    evil: float = 0.0
    """the last worker multiplies its update by this; 0: it is honest"""


@dataclass
class Start:
    """Starting point of all arms: weights and AdamW moments of one worker."""

    weights: Tensor
    first: Tensor
    second: Tensor
    step: int


class Inner:
    """AdamW of all workers at once."""

    def __init__(self, stack: Stack, start: Start) -> None:
        self.stack, self.step_count = stack, start.step
        self.first, self.second = torch.zeros_like(stack.flat), torch.zeros_like(stack.flat)
        stack.fill_rows(stack.flat, start.weights)
        stack.fill_rows(self.first, start.first)
        stack.fill_rows(self.second, start.second)

    @torch.no_grad()
    def step(self, rate: float, beta1: float = 0.9, beta2: float = 0.95) -> None:
        """One step on the current gradients, each worker's clipped to norm 1."""
        stack, grad = self.stack, self.stack.grad
        self.step_count += 1
        parts = [grad[part].view(stack.num_workers, -1) for part in stack.slices]
        norms = torch.stack([part.square().sum(1) for part in parts]).sum(0).sqrt()
        scales = (CLIP_NORM / (norms + 1e-6)).clamp(max=1.0)[:, None]
        for part in parts:
            part.mul_(scales)
        self.first.lerp_(grad, 1 - beta1)
        self.second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        stack.flat[: stack.num_decayed].mul_(1 - rate * DECAY)
        scale = (self.second / (1 - beta2**self.step_count)).sqrt_().add_(1e-8)
        stack.flat.addcdiv_(self.first, scale, value=-rate / (1 - beta1**self.step_count))
        grad.zero_()


class Site:
    """The outer half of DiLoCo for all workers of a stack."""

    def __init__(self, arm: Arm, size: Size, stack: Stack, start: Start) -> None:
        self.arm, self.stack = arm, stack
        self.bounds = _cut_fragments(size.shape, arm.fragments)
        rule = OuterRule.model_validate({"name": arm.rule, "lr": arm.eta, "momentum": arm.mu, "ramp": arm.ramp})
        if arm.fade:
            rounds = size.steps // arm.interval
            rule = OuterRule.model_validate(rule.model_dump() | {"fade": arm.fade, "rounds": rounds})
        guard = UpdateGuard.model_validate({"mode": arm.guard})
        rules = Rules.model_validate(
            {"interval": arm.interval, "codec": arm.codec, "outer": rule, "guard": guard, "dynamic": False}
        )
        parts = tuple(start.weights.numpy()[part] for part in self.bounds)
        self.plan = DilocoPlan("bench", tuple(part.size for part in parts), rules)
        self.state: OuterState = start_state(parts)
        self.residuals: dict[tuple[int, int], np.ndarray | None] = {}
        self.bytes_sent = 0
        self._arrived: dict[int, tuple[int, int, Tensor]] = {}

    def end_step(self, step: int) -> bool:
        """Do the rounds that are due after `step` inner steps; returns whether there was one."""
        for due, index, rows in list(self._arrived.values()):
            if due == step:
                self._apply(index, rows)
        due = [i for i in range(len(self.bounds)) if self.plan.find_step(self.state.fragments[i].round, i) == step]
        for index in due:
            rows = self._run_round(index)
            if self.arm.delay:
                self._arrived[index] = (step + self.arm.delay, index, rows)
            else:
                self._apply(index, rows)
        return bool(due)

    def _apply(self, index: int, arrived: Tensor) -> None:
        """Set new outer weights, plus a share of the inner progress since."""
        self._arrived.pop(index, None)
        rows = self.stack.split_rows(self.stack.flat).detach()
        bounds, theta = self.bounds[index], torch.from_numpy(np.array(self.state.fragments[index].theta))
        rows[:, bounds] = theta + self.arm.alpha * (rows - arrived)[:, bounds]
        self.stack.fill_rows(self.stack.flat, rows)

    def _run_round(self, index: int) -> Tensor:
        rows = self.stack.split_rows(self.stack.flat).detach()
        bounds, theta = self.bounds[index], self.state.fragments[index].theta
        key, codec = self.plan.name_round(self.state, index), find_codec(self.arm.codec)
        updates = []
        for worker, row in enumerate(rows):
            delta = pseudo_gradient(theta, row[bounds].numpy())
            if self.arm.evil and worker == len(rows) - 1:
                delta = delta * np.float32(self.arm.evil)
            payload, kept = encode_feedback(codec, delta, self.residuals.get((worker, index)))
            self.residuals[worker, index] = kept
            updates.append(Update(key, f"w{worker}", 1, self.arm.interval, payload, codec.name))
        self.bytes_sent += len(updates[0].payload)
        closed = close_round(self.plan, self.state, key, updates, residual=self.residuals.get((-1, index)))
        assert isinstance(closed, FinishedRound), "honest updates were not averaged"
        self.residuals[-1, index] = closed.aggregate.residual
        self.state = closed.state
        return rows

    @property
    def weights(self) -> Tensor:
        """The outer weights of the whole model."""
        whole = torch.empty(self.stack.shape.num_params)
        for bounds, part in zip(self.bounds, self.state.fragments, strict=True):
            whole[bounds] = torch.from_numpy(np.array(part.theta))
        return whole


def train_arm(arm: Arm, size: Size, seed: int, folder: Path) -> dict[str, Any]:
    """Final loss, curve, bytes and seconds of one arm; read from the folder if it was trained before."""
    path = folder / f"{arm.name.replace(' ', '_').replace('/', '-')}-{size.tag}-seed{seed}.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if Arm(**found["arm"]) == arm:
            return found
    folder.mkdir(parents=True, exist_ok=True)
    began = time.process_time()
    found = _train(arm, size, seed, folder) | {"arm": asdict(arm), "seed": seed}
    found["cpu_s"] = round(time.process_time() - began, 1)
    path.write_text(json.dumps(found) + "\n")
    return found


def _train(arm: Arm, size: Size, seed: int, folder: Path) -> dict[str, Any]:
    start = _fresh_start(size) if arm.cold else warm_up(size, folder)
    stack = Stack(size.shape, arm.workers if arm.kind == "diloco" else 1)
    inner = Inner(stack, start)
    site = Site(arm, size, stack, start) if arm.kind == "diloco" else None
    curve: list[tuple[int, float]] = []
    every = max(size.steps // 28, 1)
    begun = 0 if arm.cold else size.warm
    for step, chars in enumerate(_draw_batches(arm, seed, size.steps), 1):
        stack.loss(chars).sum().backward()  # type: ignore[no-untyped-call]
        inner.step(find_rate(begun + step - 1, arm.lr, begun + size.steps), beta2=arm.beta2)
        if site is not None and site.end_step(step) and arm.fragments == 1 and step % every == 0:
            curve.append((step, evaluate(size, site.weights, size.held_out // 8)))
        elif site is None and step % every == 0:
            curve.append((step, evaluate(size, stack.split_rows(stack.flat)[0], size.held_out // 8)))
    weights = stack.split_rows(stack.flat)[0] if site is None else site.weights
    sent = {"single": 0, "ddp": 4 * size.shape.num_params * size.steps}.get(arm.kind, site.bytes_sent if site else 0)
    syncs = {"single": 0, "ddp": size.steps}.get(arm.kind, size.steps // arm.interval * arm.fragments)
    return {"loss": evaluate(size, weights, size.held_out), "curve": curve, "bytes": sent, "syncs": syncs}


def warm_up(size: Size, folder: Path) -> Start:
    """The shared warm start: one worker, ordinary training; read from the folder if it exists."""
    path = folder / f"warm-{size.tag}.npy"
    if not path.exists():
        with path.with_suffix(".part").open("wb") as file:
            np.save(file, torch.stack(_warm_up(size)).numpy())
        path.with_suffix(".part").rename(path)
    return Start(*torch.from_numpy(np.load(path)), step=size.warm)


def _warm_up(size: Size) -> list[Tensor]:
    """Weights and AdamW moments after the warm start."""
    start = _fresh_start(size)
    stack = Stack(size.shape, 1)
    inner = Inner(stack, start)
    arm = Arm("warm", "single")
    for step, chars in enumerate(_draw_batches(arm, 1000, size.warm)):
        stack.loss(chars).sum().backward()  # type: ignore[no-untyped-call]
        inner.step(find_rate(step, arm.lr, size.warm + size.steps))
    return [stack.split_rows(part).detach()[0].clone() for part in (stack.flat, inner.first, inner.second)]


def find_rate(step: int, peak: float, total: int) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < RISE:
        return peak * (step + 1) / RISE
    done = (step - RISE) / (total - RISE)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def evaluate(size: Size, weights: Tensor, count: int) -> float:
    """Mean loss of one worker's weights on `count` held-out windows."""
    stack = Stack(size.shape, 1)
    stack.fill_rows(stack.flat, weights)
    windows = _held_out()[:count]
    losses = [float(stack.loss(part[None])) * len(part) for part in windows.split(256)]
    return sum(losses) / len(windows)


@cache
def _corpus() -> Corpus:
    return load_corpus()


@cache
def _held_out() -> Tensor:
    chars = _corpus().held_out
    rows = chars[: len(chars) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))]


def _fresh_start(size: Size) -> Start:
    zeros = torch.zeros(size.shape.num_params)
    return Start(init_rows(size.shape, 0), zeros, zeros.clone(), 0)


def _draw_batches(arm: Arm, seed: int, count: int) -> Iterator[Tensor]:
    """(K, B, T + 1) characters per step: a worker's stream depends only on the seed and its index."""
    num_streams = 1 if arm.kind == "single" else arm.workers
    chars, window = _corpus().train, torch.arange(LENGTH + 1)
    streams = [torch.Generator().manual_seed(derive_seed("bench", seed, w) >> 1) for w in range(num_streams)]
    part = len(chars) // num_streams if arm.shards == "apart" else 0
    size = part or len(chars)
    for _ in range(count):
        starts = [
            worker * part + torch.randint(size - LENGTH - 1, (BATCH,), generator=stream)
            for worker, stream in enumerate(streams)
        ]
        rows = torch.stack([chars[start[:, None] + window] for start in starts])
        yield rows if arm.kind == "diloco" else rows.view(1, -1, LENGTH + 1)


def _cut_fragments(shape: Shape, num_fragments: int) -> list[Tensor]:
    """Indices of every fragment in a worker's row: layers in turn; tensors outside layers come first or last."""
    owners: list[list[Tensor]] = [[] for _ in range(num_fragments)]
    start = 0
    for name, dims in shape.tensors:
        stop = start + math.prod(dims)
        layer = name.split(".")[0]
        owner = int(layer) % num_fragments if layer.isdigit() else (0 if name == "embed" else num_fragments - 1)
        owners[owner].append(torch.arange(start, stop))
        start = stop
    return [torch.cat(parts) for parts in owners]
