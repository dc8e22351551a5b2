"""The seeded choice for vLLM's model runner V2, its default where Triton is: the same through another interface.

Not run inside vLLM yet, because that runner needs a GPU; its interface is tested with rows of our own.
"""

from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from shoal.engine.vllm.recorder import SeededRow, choose_rows, read_row


class SeededChoiceV2(LogitsProcessor):
    """Chooses tokens, and reports them to the recorder."""

    def __init__(self, vllm_config: VllmConfig, req_states: Any) -> None:
        self._states, self._slots = req_states, dict[int, SeededRow]()

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Whether a request that gets this slot is seeded."""
        row = read_row(sampling_params.extra_args)
        self._slots.pop(req_idx, None)
        if row is not None:
            self._slots[req_idx] = row
        return row is not None

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Choose the tokens of all seeded rows."""
        slots = ctx.expanded_idx_mapping.tolist()
        places = [place for place, slot in enumerate(slots) if slot in self._slots]
        if places:
            where = torch.tensor(places, device=logits.device)
            lengths = self._states.prompt_len.gpu[ctx.expanded_idx_mapping[where].long()]
            counts = (ctx.pos[where] + 1 - lengths).clamp_(min=0).tolist()
            choose_rows(logits, places, [self._slots[slots[place]] for place in places], counts)
        return logits
