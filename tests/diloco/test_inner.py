"""The loss of a peer: equal to the mean cross-entropy, without the logits of all tokens at once."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from shoal.diloco.inner import measure_loss
from shoal.learner import logprobs

CHUNK_ROWS = 33
"""more than the width, so that weights do not count as logits"""


class _LargestLogits(TorchDispatchMode):
    """The most rows of a tensor whose rows are as long as the vocabulary."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.rows = words, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.ndim > 1 and out.shape[-1] == self.words:
            self.rows = max(self.rows, out.numel() // self.words)
        return out


def test_logits_of_many_tokens_are_computed_in_chunks(
    make_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama")
    words = model.config.vocab_size
    rows = np.random.default_rng(0).integers(0, words, (3, 41))

    def differentiate() -> tuple[float, list[Tensor], int]:
        with _LargestLogits(words) as largest:
            loss = measure_loss(model, rows)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        return loss.item(), list(gradients), largest.rows

    plain, expected, all_rows = differentiate()
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", 4 * words * CHUNK_ROWS)
    loss, found, most = differentiate()
    assert loss == pytest.approx(plain, rel=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
    assert (all_rows, most) == (3 * 40, CHUNK_ROWS)
