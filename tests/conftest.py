"""Settings of the whole suite, and tiny models that tests of several packages share.

Larger fixtures that several packages share are modules of `tests/fixtures`.

Properties are tried on the same examples each time, however busy the machine is.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from shoal.cli import SPIN_COUNT

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shoal.policy.model import Policy
    from shoal.protocol.messages import Lease
    from shoal.recipe import Recipe

os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # as the command does, before anything imports torch
settings.register_profile("shoal", deadline=None, derandomize=True)
settings.load_profile("shoal")

pytest_plugins = [
    "tests.fixtures.api_server",
    "tests.fixtures.async_tests",
    "tests.fixtures.databases",
    "tests.fixtures.tiny_versions",
    "tests.fixtures.toploc_work",
    "tests.fixtures.world",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of whole swarms over the others: side by side their processes would be slow."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    whole = [path for path in files if path.parent.name == "e2e"]
    parts = [path for path in files if path.parent.name != "e2e"]
    places = {path: (number + 0.5) / len(group) for group in (whole, parts) for number, path in enumerate(group)}
    items[:] = [item for path in sorted(files, key=places.__getitem__) for item in files[path]]


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end: the garbage collector does not have to look at them again."""
    gc.collect()
    gc.freeze()


class LogListener(logging.Handler):
    """What the package logs from INFO on; `on_message` may raise, to stop whoever logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []
        self.on_message: Callable[[str], None] = lambda text: None

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
        self.on_message(record.getMessage())


@pytest.fixture
def log() -> Iterator[LogListener]:
    """The log of the package during a test."""
    listener, package = LogListener(), logging.getLogger("shoal")
    before = package.level
    package.addHandler(listener)
    package.setLevel(logging.INFO)
    yield listener
    package.removeHandler(listener)
    package.setLevel(before)


_ALPHABET = "0123456789+-*/=abcdef"
_SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture(scope="session")
def qwen() -> "Policy":
    """A tiny Qwen3, peaked enough that tokens differ in probability. Shared: tests that write to it copy it first."""
    return _make_policy("qwen3", heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def llama() -> "Policy":
    """A tiny Llama with a single key/value head."""
    return _make_policy("llama", heads=2, kv_heads=1)


@pytest.fixture(scope="session")
def wide() -> "Policy":
    """A Qwen3 with heads of 32, the smallest that vLLM computes on a CPU."""
    return _make_policy("qwen3", heads=4, kv_heads=2, width=128)


@pytest.fixture(scope="session")
def make_model() -> Callable[..., "PreTrainedModel"]:
    """Builds a small random causal LM of any architecture that transformers knows."""

    def make(name: str, **changes: Any) -> "PreTrainedModel":
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(name, **{**_SIZES, **changes})
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return _sharpen(AutoModelForCausalLM.from_config(config)).eval()

    return make


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of two versions of a tiny policy that differ, as workers pull them."""
    from copy import deepcopy

    import torch

    from shoal.config.run import PolicyConfig, TinyConfig
    from shoal.policy.model import Policy, load_policy, save_policy
    from shoal.tasks.families.sort import Sort

    folder = tmp_path_factory.mktemp("versions")
    tiny = TinyConfig(layers=2, width=32, heads=2, kv_heads=1, context=64)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=Sort().alphabet, seed=3)
    _sharpen(policy.model)
    found = {}
    for version in range(2):
        own = Policy(deepcopy(policy.model), policy.tokenizer)
        with torch.no_grad():
            for parameter in own.model.parameters():
                parameter.mul_(1.0 + 0.05 * version)
        found[version] = folder / f"v{version}"
        save_policy(own, found[version])
    return found


@pytest.fixture(scope="session")
def recipe(versions: dict[int, Path]) -> "Recipe":
    """Of a run that trains them to sort."""
    from shoal.policy.model import open_policy
    from shoal.recipe import Recipe
    from shoal.toploc.calibration import hash_model

    return Recipe(
        family="sort",
        options={"min_length": 3, "max_length": 4},
        group_size=4,
        max_tokens=8,
        model=hash_model(open_policy(versions[0]).model),
        weights="0" * 64,
        calibration="0" * 64,
    )


@pytest.fixture(scope="session")
def make_lease() -> "Callable[..., Lease]":
    """Leases of that run; `beacon` gives their seeds."""
    from shoal.protocol.beacon import derive_group, show_seeds
    from shoal.protocol.messages import Lease

    def make(name: str = "l1", **changes: object) -> Lease:
        fields: dict[str, object] = {
            "run": "demo",
            "lease": name,
            "node": "ab" * 32,
            "step": 1,
            "first": 0,
            "count": 2,
            "group_size": 4,
            "max_tokens": 8,
            "fence": 1,
            "version": 0,
            "granted_ms": 0,
            "deadline_ms": 60_000,
            "price": 1,
        }
        merged = fields | changes
        if "seeds" in merged:
            return Lease.model_validate(merged)
        beacon, size = str(merged.pop("beacon", "5a" * 32)), int(str(merged["group_size"]))
        first = int(str(merged["first"]))
        indices = range(first, first + int(str(merged["count"])))
        seeds = [show_seeds(derive_group(beacon, index, size)) for index in indices]
        return Lease.model_validate(merged | {"seeds": tuple(seeds)})

    return make


def _make_policy(arch: Any, heads: int, kv_heads: int, width: int = 32) -> "Policy":
    from shoal.config.run import PolicyConfig, TinyConfig
    from shoal.policy.model import load_policy

    tiny = TinyConfig(arch=arch, layers=2, width=width, heads=heads, kv_heads=kv_heads, context=512)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=_ALPHABET, seed=1)
    _sharpen(policy.model).eval()
    return policy


def _sharpen(model: "PreTrainedModel") -> "PreTrainedModel":
    import torch

    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() > 1:
                parameter.mul_(5)
            else:  # norms are all ones and biases all zeros at first, which would hide a mix-up
                generator = torch.Generator().manual_seed(index)
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model
