"""The model of a peer with its inner optimizer, in one process or in several ranks (learner/parallel.py).

Rank 0 is the peer: it reads the data, talks to the averager and holds the outer state. Each method here, and each of
the model's `FragmentMap`, is one call that all ranks make: rank 0 announces it, and the others make it in
`follow_inner`, which is all that they do.

Invariants:
- every rank takes its rows of a batch with the denominator of the whole batch, so gradients are those of one process;
- a fragment is gathered only for its round, on the host; rank 0 holds the outer weights and their momentum.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig
from shoal.diloco.fragments import FragmentMap, map_model
from shoal.diloco.settings import DilocoConfig, InnerConfig
from shoal.learner.checkpoint import load_optimizer, save_optimizer
from shoal.learner.logprobs import is_chunked, score_states
from shoal.learner.parallel import ONE, Ranks
from shoal.learner.sharded import load_shards, write_rows
from shoal.policy.model import Policy
from shoal.util.process import tune_process

_TOKEN = "<i4"
_LOSS = "measure_tokens"
"""the forward pass as a method of a sharded model, around which FSDP2 gathers embedding, norm and head"""


class InnerModel:
    """A model, its fragments and its inner optimizer."""

    def __init__(self, policy: Policy, config: DilocoConfig, ranks: Ranks = ONE) -> None:
        self.policy, self.ranks = policy, ranks
        self.model: PreTrainedModel = policy.model
        if ranks.mesh is not None:
            setattr(self.model, _LOSS, MethodType(_measure_tokens, self.model))
            register_fsdp_forward_method(self.model, _LOSS)
        self.fragments: FragmentMap = map_model(self.model, config.fragments, ranks)
        self.optimizer = _InnerOptimizer(self.model, config.inner, ranks)

    def backward(self, rows: np.ndarray) -> float:
        """Add the gradients of the mean loss on these rows; returns the loss."""
        sharded, size = self.ranks.mesh is not None, self.ranks.size
        self.ranks.announce("backward", width=rows.shape[1], payload=rows.astype(_TOKEN).tobytes() if sharded else b"")
        own = rows[self.ranks.rank :: size]
        share = len(own) / len(rows)
        # A rank without a row takes one with weight 0: all ranks must make the same collective calls.
        loss = measure_loss(self.model, own if len(own) else rows[:1]) * (share if sharded else 1.0)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(self.ranks.sum(loss.detach()))

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer's state; ranks write a folder without the suffix."""
        self.ranks.announce("save", path=str(path))
        save_optimizer(self.model, self.optimizer, path, self.ranks)

    def load_optimizer(self, path: Path) -> None:
        """Read the optimizer's state, written by any number of ranks."""
        self.ranks.announce("load", path=str(path))
        load_optimizer(self.model, self.optimizer, path, self.ranks)

    def write_policy(self, folder: Path) -> None:
        """Write the Hugging Face folder."""
        self.ranks.announce("policy", path=str(folder))
        write_rows(self.policy, folder, self.ranks)


class _InnerOptimizer(torch.optim.AdamW):
    """The inner optimizer; one parameter group, as checkpoints expect. A step is one call of all ranks."""

    def __init__(self, model: nn.Module, inner: InnerConfig, ranks: Ranks) -> None:
        self._ranks = ranks
        betas = (inner.beta1, inner.beta2)
        super().__init__(model.parameters(), lr=inner.lr, betas=betas, weight_decay=inner.weight_decay)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        # If the peer has cleared its state, every rank clears its own.
        self._ranks.announce("step", lr=float(self.param_groups[0]["lr"]), is_new=int(not self.state))
        return super().step(closure)

    def follow_step(self, lr: float, is_new: int) -> None:
        """The same step on another rank."""
        if is_new:
            self.state.clear()
        self.param_groups[0]["lr"] = lr
        super().step()
        self.zero_grad(set_to_none=True)


def open_inner(config: DilocoConfig, alphabet: str, ranks: Ranks = ONE) -> InnerModel:
    """The model before the first step; a tiny one is built for the characters in `alphabet`."""
    ranks.announce("open", config=config.model_dump_json(), payload=alphabet.encode())
    tune_process(ranks.divide_threads(config.threads))
    policy = load_shards(config.policy, LearnerConfig(), ranks, alphabet=alphabet, seed=config.seed)
    return InnerModel(policy, config, ranks)


def follow_inner(ranks: Ranks) -> None:
    """Make the calls that rank 0 announces until it closes."""
    inner: InnerModel | None = None
    while True:
        name, values, payload = ranks.hear()
        if name == "close":
            return
        if name == "open":
            inner = open_inner(DilocoConfig.model_validate_json(values["config"]), payload.decode(), ranks)
            continue
        assert inner is not None, "a model is opened first"
        _follow(inner, name, values, payload)


def _follow(inner: InnerModel, name: str, values: dict[str, Any], payload: bytes) -> None:
    match name:
        case "backward":
            inner.backward(np.frombuffer(payload, _TOKEN).reshape(-1, values["width"]))
        case "clip":
            inner.fragments.clip_gradients(values["most"])
        case "step":
            inner.optimizer.follow_step(values["lr"], values["is_new"])
        case "read":
            inner.fragments.read(values["fragment"])
        case "write":
            inner.fragments.write(values["fragment"], np.frombuffer(payload, np.float32))
        case "save":
            inner.save_optimizer(Path(values["path"]))
        case "load":
            inner.load_optimizer(Path(values["path"]))
        case "policy":
            inner.write_policy(Path(values["path"]))
        case _:
            raise AssertionError(f"unknown call {name!r}")


def measure_loss(model: PreTrainedModel, rows: np.ndarray) -> Tensor:
    """Mean cross-entropy over all tokens except the first of each row."""
    tokens = torch.from_numpy(rows.astype(np.int64)).to(next(model.parameters()).device)
    measure: Callable[[Tensor], Tensor] = getattr(model, _LOSS, partial(_measure_tokens, model))
    return measure(tokens)


def _measure_tokens(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """A forward pass that never holds the logits of more than a chunk of tokens."""
    hidden = model.base_model(tokens[:, :-1]).last_hidden_state.flatten(0, 1)
    head, targets = model.get_output_embeddings(), tokens[:, 1:].flatten()
    if is_chunked(hidden, head):
        return -score_states(hidden, head, targets, None).logprobs.mean()
    return F.cross_entropy(head(hidden).float(), targets)
