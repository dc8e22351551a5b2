"""Row counts at which a matrix product gives each row the same bits whatever the other rows are.

BLAS libraries pick another kernel, which sums in another order, when a product has few rows, and may split the sum
among threads. Above some number of rows they do not. `measure_rows` finds that number for a model's shapes on this
machine, and the engine pads to it. So batch invariance is measured where it is used, not assumed. Where no smaller
number will do it is the largest: then all products have one shape, and there is nothing left to depend on.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.policy.decoder import Layer

_STEP = 16
_MOST = 256


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts that may be mixed: multiples of 16 from `floor` to `most`."""

    floor: int
    most: int

    def pad_flat(self, flat: Tensor) -> Tensor:
        """A flat run of ids or positions, padded with zeros to the row count to compute."""
        return F.pad(flat, (0, max(self.floor, _round_up(len(flat))) - len(flat)))


@torch.inference_mode()
def measure_rows(model: PreTrainedModel, layers: list[Layer] | None, slots: int) -> RowCounts:
    """The row counts up to `slots`, or to 256 if that is more, at which every product of the model is stable."""
    if layers is None:
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    else:
        weights = [weight for layer in layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        weights.append(model.get_output_embeddings().weight)
    most = max(_MOST, _round_up(slots))
    threads = torch.get_num_threads()
    shapes = {(weight.shape[0], weight.shape[1]) for weight in weights}
    floor = max((_find_floor(shape, model.dtype, most, threads) for shape in shapes), default=_STEP)
    return RowCounts(floor, most)


@cache
def _find_floor(shape: tuple[int, int], dtype: torch.dtype, most: int, threads: int) -> int:
    """The smallest stable row count for a weight's shape; `threads` is what torch uses, and part of the question."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(dtype)
    inputs = torch.randn(most, shape[1], generator=generator).to(dtype)
    whole = F.linear(inputs, weight)
    for rows in range(most - _STEP, 0, -_STEP):
        if not torch.equal(F.linear(inputs[:rows], weight), whole[:rows]):
            return rows + _STEP
    return _STEP


def _round_up(rows: int) -> int:
    return -(-rows // _STEP) * _STEP
