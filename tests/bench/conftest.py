"""A tiny stage for the benches' own parts. These are scripts and no package: they are loaded from their folder here.

The folder does not stay on the path, for some benches are named like packages (`toploc`, `trl`).
"""

import string
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from stage import Stage

_FOLDER = str(Path(__file__).parents[2] / "bench")
sys.path.insert(0, _FOLDER)
for _name in (
    "altered",
    "attacks",
    "checking",
    "diloco",
    "diloco_arms",
    "diloco_model",
    "forgers",
    "guesses",
    "models",
    "parts",
    "records",
    "separation",
    "sharing",
    "stage",
):
    import_module(_name)
sys.path.remove(_FOLDER)


@pytest.fixture(scope="session")
def stage() -> "Stage":
    """Four groups of four rollouts by a model of random, sharpened weights."""
    import torch

    from models import Subject
    from shoal.config import PolicyConfig, TinyConfig
    from shoal.policy.model import load_policy
    from stage import Stage, draw_requests

    tiny = TinyConfig(arch="llama", layers=2, width=64, heads=2, kv_heads=1, context=256)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=string.ascii_letters, seed=5)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
        policy.model.get_output_embeddings().weight[policy.eos_id] = 0
    subject = Subject("tiny", policy, ((4, 9, 13, 7), (20,), (5, 6), (40, 41, 42)), 80)
    return Stage(subject, draw_requests(subject, "test", 16, 80), slots=16)
