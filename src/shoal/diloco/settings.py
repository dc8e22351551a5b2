"""Settings of `shoal diloco`: model, data, number of peers, and how they average.

This module imports no torch.
"""

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from shoal.config.run import Count, Decay, PolicyConfig, Rate, Settings, TinyConfig
from shoal.diloco.outer import RAMP_ROUNDS, OuterRule, Rules

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,63}$")]


class DataConfig(Settings):
    """The training data."""

    source: str = ""
    """file or folder of text, .jsonl or .parquet, or hf:NAME[:SPLIT] of Hugging Face datasets"""
    field: str = "text"
    """field or column that holds the text of a .jsonl line, a .parquet row or a dataset row"""
    length: Annotated[int, Field(ge=2, le=2**20)] = 64
    """tokens per sequence"""
    batch: Count = 8
    """sequences per inner step of one peer"""
    held_out: Annotated[int, Field(ge=1, le=4096)] = 64
    """evaluation sequences, spread over the text and never trained on"""
    lanes: Annotated[int, Field(ge=1, le=65536)] = 64
    """parts of the data that are reassigned when peers come and go; also the maximum number of peers that read"""


class InnerConfig(Settings):
    """The optimizer of every peer: AdamW with a schedule on the step that all peers share."""

    lr: Rate = 3e-3
    """maximum learning rate"""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """steps of linear warm-up"""
    floor: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    """final learning rate of the cosine, as a fraction of `lr`"""
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """of all parameters"""
    clip_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """maximum gradient norm; 0: no limit"""

    def rate_at(self, step: int, total: int) -> float:
        """Learning rate at a step."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, total - self.warmup_steps))
        return self.lr * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done)))


class SmallTiny(TinyConfig):
    """A model from scratch that a laptop trains in a minute."""

    arch: Literal["llama", "qwen3"] = "llama"
    """architecture, as named in transformers"""
    layers: Annotated[int, Field(ge=1, le=256)] = 2
    """decoder layers"""
    width: Annotated[int, Field(ge=16, le=4096, multiple_of=16)] = 64
    """hidden size"""
    heads: Count = 2
    """attention heads"""


class SmallPolicy(PolicyConfig):
    """The model to train."""

    tiny: SmallTiny = SmallTiny()


class RampedRule(OuterRule):
    """The rule of the outer step in a run from random weights."""

    ramp: Annotated[int, Field(ge=0)] = RAMP_ROUNDS
    """rounds over which mu rises from 0, in equal steps; 0: none"""


class ShortRules(Rules):
    """The agreed settings of a short, reproducible run."""

    interval: Count = 20
    """H: inner steps between two rounds of a fragment"""
    dynamic: bool = False
    """whether slow peers take fewer inner steps, by measured speed; results then depend on timing"""
    outer: RampedRule = RampedRule()


class DilocoConfig(Settings):
    """Settings of one run."""

    name: Name = "diloco"
    """name of the run; its folder is named after it and the seed"""
    out: str = "runs"
    """folder for run folders"""
    seed: Annotated[int, Field(ge=0)] = 0
    engine: Literal["local"] = "local"
    """averaging engine; local: all peers run in this process"""
    peers: Annotated[int, Field(ge=1, le=64)] = 4
    """peers of the local engine"""
    steps: Count = 200
    """inner steps of each peer"""
    fragments: Count = 1
    """parts of the model that are averaged in turn"""
    save_every: Count = 1
    """rounds between checkpoints"""
    keep: Count = 2
    """checkpoints kept"""
    threads: Annotated[int, Field(ge=0)] = 1
    """torch threads; 0: torch's default. A different number changes the order of summation"""
    policy: SmallPolicy = SmallPolicy()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    rules: ShortRules = ShortRules()

    @property
    def num_rounds(self) -> int:
        """Rounds of each fragment."""
        return self.steps // self.rules.interval

    @model_validator(mode="after")
    def _parts_fit(self) -> "DilocoConfig":
        if self.steps % self.rules.interval:
            raise ValueError(f"steps {self.steps} must be a multiple of rules.interval {self.rules.interval}")
        if self.fragments > self.rules.interval:
            raise ValueError(f"fragments {self.fragments} must not exceed rules.interval {self.rules.interval}")
        if self.peers > self.data.lanes:
            raise ValueError(f"peers {self.peers} must not exceed data.lanes {self.data.lanes}")
        if self.policy.lora.rank:
            raise ValueError("policy.lora.rank must be 0: DiLoCo trains all weights")
        if self.policy.path == "" and self.data.length > self.policy.tiny.context:
            raise ValueError(f"data.length {self.data.length} exceeds policy.tiny.context {self.policy.tiny.context}")
        return self
