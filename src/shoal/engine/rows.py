"""Row counts at which a matrix product gives each row the same bits whatever the other rows are.

BLAS libraries pick another kernel, which sums in another order, when a product has few rows, and may split the sum among
threads. Above some number of rows they do not. `find_row_floor` measures that number for a model's shapes on this
machine; the engine pads to it. So batch invariance is measured where it is used, not assumed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

_STEP = 16
_FLOORS = (16, 32, 64, 128, 256)
_PROBES = (16, 32, 48, 64, 96, 112, 128, 176, 208, 256, 320)


def pad_rows(rows: int, floor: int) -> int:
    """The row count to compute for `rows` rows."""
    return max(floor, -(-rows // _STEP) * _STEP)


@torch.inference_mode()
def find_row_floor(model: PreTrainedModel) -> int:
    """The smallest row count of `_FLOORS` from which on every product of the model is stable, or the largest if none is."""
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Linear)}
    return max((_shape_floor(rows, cols, model.dtype) for rows, cols in shapes), default=_STEP)


def _shape_floor(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    inputs = torch.randn(max(_PROBES), in_features, generator=generator).to(dtype)
    whole = F.linear(inputs, weight)
    unstable = [rows for rows in _PROBES if not torch.equal(F.linear(inputs[:rows], weight), whole[:rows])]
    return next((floor for floor in _FLOORS if not unstable or floor > max(unstable)), _FLOORS[-1])


def pad_flat(flat: Tensor, floor: int) -> Tensor:
    """A flat run of ids or positions, padded with zeros to the row count to compute."""
    return F.pad(flat, (0, pad_rows(len(flat), floor) - len(flat)))
