"""Row counts at which a product gives each row the same bits, whatever the other rows are and wherever the row is.

BLAS libraries change the order of summation when a product has few rows, for the last rows of some counts, or when
threads divide the work differently. `measure_rows` finds, for a model's shapes on this machine, the counts that agree
with each other, and the engine pads to one of them. So batch invariance is measured where it is used, not assumed. If
no two counts agree, one is left: all products then have one shape.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.policy.decoder import Layer

_STEP = 16
_MOST = 256
"""The largest count is at least this, so that engines with fewer slots agree with each other."""
_SEARCH = 8
"""Larger counts to try, in steps, if the first treats its rows unevenly."""
_WIDE = (512, 768, 1024)
"""Counts for prompts: a pass over many rows costs less per row. Used if they agree with the others."""


@dataclass(frozen=True, slots=True)
class RowCounts:
    """The row counts that may be mixed, in ascending order."""

    counts: tuple[int, ...]

    @property
    def most(self) -> int:
        return self.counts[-1]

    def pad_flat(self, flat: Tensor) -> Tensor:
        """A flat run of ids or positions, padded with zeros to the row count to compute."""
        rows = len(flat)
        target = _round_up(rows) if rows > self.most else self.counts[bisect_left(self.counts, rows)]
        return F.pad(flat, (0, target - rows))


@torch.inference_mode()
def measure_rows(model: PreTrainedModel, layers: list[Layer] | None, slots: int) -> RowCounts:
    """The row counts at which every product of the model agrees; the largest is at least `slots`."""
    if layers is None:
        weights = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    else:
        weights = [weight for layer in layers for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        weights.append(model.get_output_embeddings().weight)
    setup = (model.dtype, str(model.device), torch.get_num_threads())
    shapes = {(weight.shape[0], weight.shape[1]) for weight in weights}
    first = max(_MOST, _round_up(slots))
    tops = range(first, first + _SEARCH * _STEP, _STEP)
    top = next((top for top in tops if all(_is_even(shape, setup, top) for shape in shapes)), first)
    agreeing = [_find_agreeing(shape, setup, top) for shape in shapes]
    counts = sorted(frozenset(range(_STEP, top + 1, _STEP)).intersection(*agreeing))
    wide = [rows for rows in _WIDE if rows > top and all(_is_wide(shape, setup, rows, top) for shape in shapes)]
    return RowCounts((*counts, *wide))


Setup = tuple[torch.dtype, str, int]
"""What the bits of a product depend on besides its shape: type, device and number of threads."""


@cache
def _is_even(shape: tuple[int, int], setup: Setup, rows: int) -> bool:
    """Whether rows keep their bits when they are permuted."""
    weight, inputs = _draw_product(shape, setup, rows)
    whole = F.linear(inputs, weight)
    return all(torch.equal(F.linear(inputs.roll(by, 0), weight), whole.roll(by, 0)) for by in (1, 8))


@cache
def _find_agreeing(shape: tuple[int, int], setup: Setup, top: int) -> frozenset[int]:
    """The row counts whose rows have the same bits as among `top` rows."""
    weight, inputs = _draw_product(shape, setup, top)
    whole = F.linear(inputs, weight)
    counts = range(_STEP, top + 1, _STEP)
    return frozenset(rows for rows in counts if torch.equal(F.linear(inputs[:rows], weight), whole[:rows]))


@cache
def _is_wide(shape: tuple[int, int], setup: Setup, rows: int, top: int) -> bool:
    """Whether every row among `rows` has the same bits as among `top`."""
    weight, inputs = _draw_product(shape, setup, rows)
    whole = F.linear(inputs, weight)
    spans = [slice(end - top, end) for end in (*range(top, rows, top), rows)]
    return all(torch.equal(F.linear(inputs[span], weight), whole[span]) for span in spans)


def _draw_product(shape: tuple[int, int], setup: Setup, rows: int) -> tuple[Tensor, Tensor]:
    dtype, device, _ = setup
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(device, dtype)
    return weight, torch.randn(rows, shape[1], generator=generator).to(device, dtype)


def _round_up(rows: int) -> int:
    return -(-rows // _STEP) * _STEP
