"""A model's parameters as flat fp32 vectors, one per fragment, that are averaged in turn.

Fragments consist of whole layers, strided: of F fragments, number f holds layers f, f + F, f + 2F ..., so that each has
early and late ones (Streaming DiLoCo, Douillard et al., arXiv 2501.18512). Parameters before the layers belong to the
first fragment, those after them to the last. Together the fragments hold every trainable parameter once.
"""

import re
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.learner.parallel import ONE, Ranks, clip_gradients, first_row, measure_norm, own_rows, whole_tensor

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


class FragmentMap:
    """Maps each element of a fragment's vector to its place in the model.

    The model may be sharded over ranks: then each method is one call that all ranks make, and rank 0 has the vectors.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], num_fragments: int = 1, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        named = [(name, tensor) for name, tensor in parameters if tensor.requires_grad]
        if any(tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16) for _, tensor in named):
            raise ConfigError("DiLoCo supports only float32, bfloat16 and float16 parameters")
        self.parts = _deal_layers(named, num_fragments)
        empty = [index for index, part in enumerate(self.parts) if not part]
        if empty:
            raise ConfigError(f"fragments={num_fragments}: the model has fewer layers than that")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements per fragment."""
        return tuple(sum(tensor.numel() for _, tensor in part) for part in self.parts)

    def read(self, fragment: int) -> np.ndarray:
        """A copy of a fragment's weights; empty on ranks other than the first."""
        self.ranks.announce("read", fragment=fragment)
        whole = (whole_tensor(tensor.detach()) for _, tensor in self.parts[fragment])
        flat = [tensor.to("cpu", torch.float32).reshape(-1) for tensor in whole if self.ranks.is_first]
        return torch.cat(flat).numpy() if flat else np.empty(0, dtype=np.float32)

    def read_all(self) -> tuple[np.ndarray, ...]:
        """Copies of all fragments' weights."""
        return tuple(self.read(index) for index in range(len(self.parts)))

    @torch.no_grad()
    def write(self, fragment: int, values: np.ndarray) -> None:
        """Set a fragment's weights."""
        vector = np.array(values, dtype=np.float32)
        self.ranks.announce("write", fragment=fragment, payload=vector.tobytes() if self.ranks.size > 1 else b"")
        source, start = torch.from_numpy(vector), 0
        for _, tensor in self.parts[fragment]:
            rows, first = own_rows(tensor), first_row(tensor)
            whole = source[start : start + tensor.numel()].view(tensor.shape)
            rows.copy_(whole[first : first + len(rows)] if tensor.dim() else whole)
            start += tensor.numel()
        assert start == values.size, "the vector must have the fragment's size"

    def clip_gradients(self, most: float) -> None:
        """Scale all gradients so that their norm is at most `most`."""
        self.ranks.announce("clip", most=most)
        parameters = [tensor for part in self.parts for _, tensor in part]
        if self.ranks.mesh is None:
            torch.nn.utils.clip_grad_norm_(parameters, most)
        else:
            clip_gradients(parameters, measure_norm(parameters, self.ranks), most)


def map_model(model: nn.Module, num_fragments: int = 1, ranks: Ranks = ONE) -> FragmentMap:
    """The fragments of a model's trainable parameters; tied ones count once."""
    return FragmentMap(model.named_parameters(), num_fragments, ranks)


def _deal_layers(named: list[tuple[str, Tensor]], num_fragments: int) -> list[list[tuple[str, Tensor]]]:
    parts: list[list[tuple[str, Tensor]]] = [[] for _ in range(num_fragments)]
    seen_layer = False
    for name, tensor in named:
        match = _LAYER.search(name)
        if match:
            seen_layer = True
            parts[int(match[1]) % num_fragments].append((name, tensor))
        else:
            parts[-1 if seen_layer else 0].append((name, tensor))
    return parts
