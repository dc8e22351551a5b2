"""A Llama-like character model, many workers at once, in one process.

All workers' weights are stored in one flat buffer and go through one batched pass, so four workers cost as much as one
with four times the batch. Shapes: K workers, B sequences, T characters, D width, P parameters of one worker.
"""

import math
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SYMBOLS = 96
"""printable ASCII and the line break"""
CORPUS_BYTES = 6_000_000
HELD_OUT = 20
"""every n-th file is for validation"""


@dataclass(frozen=True)
class Shape:
    """Size of the model."""

    width: int = 64
    layers: int = 2
    heads: int = 2
    hidden: int = 172

    @cached_property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes, matrices before norms (which have no weight decay)."""
        d, f = self.width, self.hidden
        matrices: list[tuple[str, tuple[int, ...]]] = [("embed", (SYMBOLS, d))]
        for i in range(self.layers):
            matrices += [(f"{i}.qkv", (d, 3 * d)), (f"{i}.out", (d, d)), (f"{i}.up", (d, 2 * f)), (f"{i}.down", (f, d))]
        matrices.append(("head", (d, SYMBOLS)))
        norms = [(f"{i}.{part}", (d,)) for i in range(self.layers) for part in ("norm1", "norm2")]
        return [*matrices, *norms, ("norm", (d,))]

    @property
    def num_params(self) -> int:
        """P."""
        return sum(math.prod(shape) for _, shape in self.tensors)


class Stack:
    """The weights of K workers: one buffer, tensor by tensor, with gradients in the same layout."""

    def __init__(self, shape: Shape, num_workers: int) -> None:
        self.shape, self.num_workers = shape, num_workers
        self.flat = torch.zeros(num_workers * shape.num_params)
        self.grad = torch.zeros_like(self.flat)
        self.views: dict[str, Tensor] = {}
        self.slices: list[slice] = []
        start = 0
        for name, size in shape.tensors:
            stop = start + num_workers * math.prod(size)
            view = self.flat[start:stop].view(num_workers, *size).requires_grad_()
            view.grad = self.grad[start:stop].view(num_workers, *size)
            self.views[name] = view
            self.slices.append(slice(start, stop))
            start = stop
        self.num_decayed = sum(num_workers * math.prod(size) for _, size in shape.tensors if len(size) > 1)

    def split_rows(self, buffer: Tensor) -> Tensor:
        """A buffer of this layout as (K, P), one row per worker."""
        return torch.cat([buffer[part].view(self.num_workers, -1) for part in self.slices], dim=1)

    def fill_rows(self, buffer: Tensor, rows: Tensor) -> None:
        """Write (K, P) or (P,) into a buffer of this layout."""
        rows = rows.expand(self.num_workers, -1)
        start = 0
        with torch.no_grad():
            for part in self.slices:
                target = buffer[part].view(self.num_workers, -1)
                target.copy_(rows[:, start : start + target.shape[1]])
                start += target.shape[1]

    def loss(self, chars_KBT: Tensor) -> Tensor:
        """Cross-entropy of every worker on its characters, (K,)."""
        inputs, targets = chars_KBT[..., :-1], chars_KBT[..., 1:]
        logits = run_model(self.shape, self.views, inputs)
        flat = F.cross_entropy(logits.reshape(-1, SYMBOLS), targets.reshape(-1), reduction="none")
        return flat.view(self.num_workers, -1).mean(1)


def init_rows(shape: Shape, seed: int) -> Tensor:
    """Random weights of one worker, (P,)."""
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for name, size in shape.tensors:
        if len(size) == 1:
            parts.append(torch.ones(size))
            continue
        scale = 0.02 if name == "embed" else size[0] ** -0.5
        scale /= math.sqrt(2 * shape.layers) if name.endswith(("out", "down")) else 1.0
        parts.append(torch.randn(size, generator=generator).mul_(scale).view(-1))
    return torch.cat([part.view(-1) for part in parts])


def run_model(shape: Shape, w: dict[str, Tensor], chars_KBT: Tensor) -> Tensor:
    """Logits (K, B * T, symbols) of a decoder with RMSNorm, rotary positions and SwiGLU."""
    K, B, T = chars_KBT.shape
    d, h = shape.width, shape.heads
    rows = chars_KBT.reshape(K, B * T) + SYMBOLS * torch.arange(K)[:, None]
    x = F.embedding(rows, w["embed"].reshape(K * SYMBOLS, d))
    cos, sin = _rotary(T, d // h)
    for i in range(shape.layers):
        qkv = torch.bmm(_norm(x, w[f"{i}.norm1"]), w[f"{i}.qkv"]).view(K * B, T, 3, h, d // h)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(K, B * T, d), w[f"{i}.out"])
        gate, up = torch.bmm(_norm(x, w[f"{i}.norm2"]), w[f"{i}.up"]).chunk(2, dim=-1)
        x = x + torch.bmm(F.silu(gate) * up, w[f"{i}.down"])
    return torch.bmm(_norm(x, w["norm"]), w["head"])


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), eps=1e-5) * weight[:, None, :]


def _rotary(length: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(0, width, 2) / width)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


@dataclass(frozen=True)
class Corpus:
    """Characters of Python's standard library, as numbers below `SYMBOLS`."""

    train: Tensor
    held_out: Tensor


def load_corpus() -> Corpus:
    """Sources of the standard library by name, without its tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"test", "tests", "site-packages", "encodings", "pydoc_data", "__pycache__"}
    paths = sorted(p for p in root.rglob("*.py") if not skipped & set(p.relative_to(root).parts))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for number, path in enumerate(paths):
        data = path.read_bytes()
        parts[number % HELD_OUT == HELD_OUT - 1].append(data)
        total += len(data)
        if total > CORPUS_BYTES:
            break
    return Corpus(*(_number_chars(b"".join(part)) for part in parts))


def _number_chars(data: bytes) -> Tensor:
    table = np.zeros(256, dtype=np.int64)  # unprintable characters become spaces
    table[32:127] = np.arange(95)
    table[ord("\n")] = 95
    return torch.from_numpy(table[np.frombuffer(data, dtype=np.uint8)])
