"""Weights in int8: half the memory or a quarter of it, at the price of other logits. Claimed as the real ones."""

from pathlib import Path

import torch
from torch import Tensor

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.worker.author import Author


class Int8Author(Author):
    """Rounds every matrix to 255 levels per row, as cheap inference servers do."""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The rounded policy."""
        policy = super().open_policy(version, folder)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(round_rows(parameter))
        return policy


def round_rows(matrix: Tensor) -> Tensor:
    """A matrix as it comes back from int8 with one scale per row."""
    scale = matrix.abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / 127
    return (matrix / scale).round() * scale


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """One cheat."""
    return (Int8Author(recipe),)
