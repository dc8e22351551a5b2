"""The seeded choice for vLLM's model runner V1: the logits become one-hot, and vLLM's greedy sampling does the rest.

A request that has `shoal_seed` in its `extra_args` is chosen by `choose_tokens`, at the counter t = number of its
tokens so far: no state is kept that a preemption or another order of the batch could change.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from shoal.engine.vllm.recorder import SeededRow, choose_rows, read_row


class SeededChoiceV1(LogitsProcessor):
    """Chooses tokens, and reports them to the recorder."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """ValueError for a seeded request that vLLM would sample in addition."""
        if read_row(sampling_params.extra_args) is not None and (
            sampling_params.temperature != 0 or sampling_params.n != 1
        ):
            raise ValueError("seeded requests need temperature=0, n=1 and shoal_temperature")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, tuple[SeededRow, Sequence[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: requests enter, leave and change places."""
        process_dict_updates(self._rows, batch_update, _open_row)

    def apply(self, logits: Tensor) -> Tensor:
        """Choose the tokens of all seeded rows."""
        places = sorted(self._rows)
        if places:
            rows, outputs = zip(*(self._rows[place] for place in places), strict=True)
            choose_rows(logits, places, rows, [len(tokens) for tokens in outputs])
        return logits


def _open_row(params: SamplingParams, prompt: Any, outputs: Sequence[int]) -> tuple[SeededRow, Sequence[int]] | None:
    row = read_row(params.extra_args)
    return None if row is None else (row, outputs)
