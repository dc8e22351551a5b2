"""Requests to calibrate with.

Prompts come from a task family, from the lines of a text file, or, by default, are 1, 8 or 32 random tokens of the
vocabulary: after a single token a model writes its most typical text, after 32 it is as far from typical as a prompt
can make it. Half of the rollouts are cut at 1 to 31 tokens, because short chunks are noisier and have separate
thresholds.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import ConfigError
from shoal.group import encode_task
from shoal.policy.model import Policy
from shoal.policy.tokenizer import encode_prompt
from shoal.rollout import Request
from shoal.seeds import derive_seed
from shoal.tasks.base import Family
from shoal.tasks.registry import load_family
from shoal.tasks.split import train_task

_LENGTHS = (1, 8, 32)
_SHORT_BITS = 5
"""Short lengths are below 2^5, equally many of each power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSource:
    """Where prompts come from, and how rollouts are sampled."""

    tokens: int
    temperature: float
    seed: int
    task: str = ""
    """task family; empty for none"""
    file: Path | None = None
    """text file with a prompt per line"""
    family: Family | None = None
    """open task family, instead of `task`"""


def draw_requests(policy: Policy, source: PromptSource, name: str) -> Iterator[Request]:
    """Infinite requests, two for each prompt: one of full length and one cut short."""
    rng = random.Random(derive_seed("lengths", source.seed, name))
    for index, prompt in enumerate(_draw_prompts(policy, source, derive_seed("prompts", source.seed, name))):
        size = rng.randrange(_SHORT_BITS)
        request = Request(
            id=f"{index}.0",
            prompt_ids=tuple(prompt),
            seed=derive_seed("calibrate", source.seed, name, index),
            max_tokens=source.tokens,
            temperature=source.temperature,
        )
        yield request
        yield replace(request, id=f"{index}.1", seed=request.seed ^ 1, max_tokens=rng.randrange(1 << size, 2 << size))


def _draw_prompts(policy: Policy, source: PromptSource, seed: int) -> Iterator[list[int]]:
    tokenizer, context = policy.tokenizer, policy.model.config.max_position_embeddings
    room = context - source.tokens
    if room < 1:
        raise ConfigError(f"--tokens: must be below the model's {context} positions, got {source.tokens}")
    rng = random.Random(seed)
    lines = [] if source.file is None else _read_lines(source.file)
    family = source.family or (load_family(source.task, {}) if source.task else None)
    for index in itertools.count():
        if lines:
            prompt = encode_prompt(tokenizer, rng.choice(lines))
        elif family is not None:
            prompt = encode_task(tokenizer, train_task(family, rng.getrandbits(63)))
        else:
            prompt = [rng.randrange(len(tokenizer)) for _ in range(_LENGTHS[index % len(_LENGTHS)])]
        yield prompt[:room]


def _read_lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read ({reason})") from error
    if not lines:
        raise ConfigError(f"{path}: has no prompts, one per line")
    return lines
