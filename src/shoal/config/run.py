"""Typed settings: one nested model per part, defaults are the demo.

A run is described by one TOML file, over which environment variables (`SHOAL_LEARNER__LR=1e-4`) and then overrides
(`learner.lr=1e-4`) are laid. An unknown key, a wrong type
or a value out of range is a `ConfigError` that names the key and what is allowed. This module imports no torch.
"""

import difflib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from shoal.config.help import accepts_text, explain_errors, list_settings
from shoal.config.tasks import FilterConfig as FilterConfig
from shoal.config.tasks import LengthConfig as LengthConfig
from shoal.config.tasks import Option as Option
from shoal.config.tasks import Settings as Settings
from shoal.config.tasks import TasksConfig as TasksConfig
from shoal.config.toml import VARIABLE_PREFIX, dump_toml, is_utf8, parse_value, read_toml
from shoal.errors import ConfigError

Count = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Rate = Annotated[float, Field(gt=0.0, le=1.0)]
LossName = Literal["intellect2", "grpo", "dr_grpo", "dapo", "gspo", "cispo"]
Model = TypeVar("Model", bound=Settings)


Device = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|(cuda|mps|xpu)(:[0-9]{1,2})?)$",
        json_schema_extra={"allowed": "auto, cpu, cuda, cuda:1, mps or xpu"},
    ),
]


class TinyConfig(Settings):
    """A model from scratch; `width` is the dial for its size."""

    arch: Literal["llama", "qwen3"] = "qwen3"
    """architecture, as transformers names it"""
    layers: Annotated[int, Field(ge=1, le=256)] = 3
    """decoder layers"""
    width: Annotated[int, Field(ge=16, le=4096, multiple_of=16)] = 128
    """hidden size"""
    heads: Count = 4
    """attention heads"""
    kv_heads: Count = 2
    """key/value heads"""
    context: Annotated[int, Field(ge=1, le=2**20)] = 512
    """longest sequence in tokens"""

    @model_validator(mode="after")
    def _heads_divide(self) -> "TinyConfig":
        if self.width % self.heads:
            raise ValueError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


SHARD_BYTES = 1 << 30
"""Large enough that a small model is one file, small enough that the publishing of a large one begins long before its
last byte is written."""


class LoraConfig(Settings):
    """Low-rank adapters: the base model stays fixed, and only two thin matrices per linear layer are trained."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """rank of the adapters; 0: none, all weights are trained"""
    alpha: Annotated[float, Field(ge=0.0, le=65536.0)] = 0.0
    """the adapters' product is scaled by alpha / rank; 0: twice the rank"""
    targets: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.]{1,128}$")]],
        Field(max_length=64, json_schema_extra={"allowed": 'a list of module names, such as ["q_proj", "v_proj"]'}),
    ] = Field(default=[])
    """linear layers with adapters, by the end of their names; empty: all except the output head"""

    @property
    def used_alpha(self) -> float:
        """Alpha, or what stands for 0."""
        return self.alpha or 2.0 * self.rank


class PolicyConfig(Settings):
    """Which model is trained."""

    path: str = ""
    """folder or hub id of a Hugging Face causal LM; empty: a tiny model from scratch"""
    tiny: TinyConfig = TinyConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """type of the weights in training; bfloat16 only where they are fixed, under adapters (`lora`)"""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """type in which versions are published, sampled from and checked; training and checkpoints stay in `dtype`"""
    shard_bytes: Annotated[int, Field(ge=1 << 10)] = SHARD_BYTES
    """largest file of a version's weights in bytes; above it they are several files with an index"""
    device: Device = "auto"
    """where the model computes; auto: the accelerator that torch finds, else the CPU"""
    lora: LoraConfig = LoraConfig()


class SftConfig(Settings):
    """Supervised fine-tuning before RL, on the demonstrations of a family or the `metadata.solution` of a set."""

    steps: Annotated[int, Field(ge=0)] = 0
    """optimizer steps; 0 skips SFT"""
    batch: Count = 64
    """demonstrations per optimizer step"""
    lr: Rate = 1e-3
    """peak learning rate"""
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """steps of linear learning-rate increase, followed by a cosine decay to a tenth"""
    options: dict[str, Option] = Field(default={})
    """task options that differ from `tasks.options` during SFT, e.g. easier instances"""
    heldout: Count = 256
    """held-out demonstrations for the loss"""
    eval_every: Count = 100
    """steps between held-out losses and checkpoints"""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """torch threads of SFT, which a swarm computes before it starts its processes; 0: those of the run"""


MAX_SLOTS = 2**16
"""rows of an engine"""


class EngineConfig(Settings):
    """How rollouts are generated."""

    name: Literal["torch", "vllm"] = "torch"
    """engine; vllm needs the package of that name (docs/vllm.md)"""
    options: dict[str, Option] = Field(default={})
    """further arguments of vLLM, such as { tensor_parallel_size = 2 }"""
    slots: Annotated[int, Field(ge=1, le=MAX_SLOTS)] = 256
    """rollouts decoded side by side"""
    max_tokens: Count = 64
    """longest completion"""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """sampling temperature of training rollouts"""


class LossConfig(Settings):
    """The policy-gradient loss and its terms."""

    name: LossName = "intellect2"
    """loss function (module in shoal/learner/losses)"""
    eps_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """clip range below 1"""
    eps_high: Annotated[float, Field(gt=0.0)] = 0.2
    """clip range above 1"""
    delta: Annotated[float, Field(gt=1.0)] = 4.0
    """two-sided bound on the ratio where the advantage is negative (intellect2)"""
    kl: Annotated[float, Field(ge=0.0)] = 0.0
    """weight of the k3 KL to the frozen starting policy"""
    entropy: Annotated[float, Field(ge=0.0)] = 0.0
    """weight of the entropy bonus"""
    correction: Literal["none", "token", "sequence"] = "token"
    """off-policy correction against behaviour log-probs: truncated token weights, or a mask on whole sequences"""
    correction_cap: Annotated[float, Field(ge=1.0)] = 2.0
    """token: largest weight; sequence: ratios outside [1/cap, cap] (geometric mean per token) are masked"""

    @model_validator(mode="after")
    def _delta_above_clip(self) -> "LossConfig":
        if self.name == "intellect2" and self.delta <= 1 + self.eps_high:
            raise ValueError(f"delta {self.delta} must exceed 1 + eps_high = {1 + self.eps_high}")
        return self


def _spell_centred(value: object) -> object:
    return "centred" if value == "centered" else value


class LearnerConfig(Settings):
    """How a batch becomes an update."""

    loss: LossConfig = LossConfig()
    advantage: Annotated[Literal["zscore", "centred"], BeforeValidator(_spell_centred)] = "zscore"
    """(r - mean) / (std + 1e-6) with ddof 1, or r - mean"""
    old_logprobs: Literal["recompute", "behaviour"] = "recompute"
    """denominator of the ratio: recomputed by the learner before its first update, or as the sampler recorded them"""
    updates: Count = 2
    """optimizer steps per training step; the batch is split among them by groups"""
    lr: Rate = 1e-4
    """learning rate after its warm-up"""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """optimizer steps of linear learning-rate increase"""
    beta1: Decay = 0.9
    """AdamW: decay of the gradient's running mean"""
    beta2: Decay = 0.99
    """AdamW: decay of the squared gradient's running mean"""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW: weight decay"""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 0.1
    """gradient-norm clip"""
    micro_tokens: Count = 8192
    """most tokens in one packed micro-batch"""
    share: bool = True
    """compute identical completions of a group only once; gradients are the same up to rounding"""
    precision: Literal["float32", "bfloat16"] = "float32"
    """type of the forward and backward computation; weights, gradients, optimizer state and losses are float32"""
    offload: bool = False
    """keep weights, gradients and optimizer state in the host's memory (with `--nproc` or torchrun)"""
    gradient_checkpointing: bool = False
    """keep only each layer's input for the backward pass, which computes the layer again: less memory, more time"""
    compile: bool = False
    """compile the layers by torch.compile; on CPUs it needs a C++ compiler"""
    attention: Literal["auto", "packed", "flex"] = "auto"
    """kernel of the attention; auto: torch's flex attention on CUDA, packed elsewhere"""


class BatchConfig(Settings):
    """What one training step consumes."""

    groups: Count = 32
    """tasks per step"""
    group_size: Annotated[int, Field(ge=2)] = 16
    """rollouts per task"""
    filter: bool = True
    """train only groups with a learning signal on task reward, and continue sampling until the batch is full"""
    max_oversample: Annotated[float, Field(ge=1.0, le=1000.0)] = 4.0
    """most groups sampled per step, as a multiple of `groups`; then the step trains what it has"""
    statistics: bool = True
    """keep attempts, solved attempts and last step of each task in tasks.jsonl"""
    curriculum: bool = False
    """skip tasks solved too rarely or too often so far (`shoal train` only)"""
    curriculum_min: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """lowest share of solved attempts with which a task is drawn again"""
    curriculum_max: Annotated[float, Field(ge=0.0, le=1.0)] = 0.95
    """highest share"""

    @model_validator(mode="after")
    def _is_range(self) -> "BatchConfig":
        if self.curriculum_min > self.curriculum_max:
            raise ValueError(f"curriculum_min {self.curriculum_min} must be at most curriculum_max")
        if self.curriculum and not self.statistics:
            raise ValueError("curriculum goes by statistics; leave them true")
        return self


class EvalConfig(Settings):
    """Held-out evaluation."""

    tasks: Count = 256
    """held-out tasks"""
    samples: Count = 4
    """sampled completions per task, in addition to one greedy completion"""
    k: Count = 4
    """k of pass@k; at most `samples`"""
    every: Annotated[int, Field(ge=0)] = 10
    """training steps between evaluations; 0: only at the start and the end"""

    @model_validator(mode="after")
    def _k_within_samples(self) -> "EvalConfig":
        if self.k > self.samples:
            raise ValueError(f"k {self.k} must be at most samples {self.samples}")
        return self


class CheckpointConfig(Settings):
    """When training state is written."""

    every: Count = 10
    """training steps between checkpoints; the last step is always one"""
    keep: Count = 2
    """newest checkpoints kept"""


class TrackConfig(Settings):
    """Where metrics go in addition to metrics.jsonl."""

    name: Literal["none", "wandb", "trackio", "tensorboard"] = "none"
    """tracker; each needs its own package"""
    project: str = "shoal"
    """project name at the tracker"""


NAME_RULE = "1 to 64 letters, digits, dots, dashes or underscores, the first a letter or digit"
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", json_schema_extra={"allowed": NAME_RULE})]
FolderName = Annotated[
    str, Field(pattern=r"^[^\x00-\x1f]+$", json_schema_extra={"allowed": "a folder, without control characters"})
]


Secret = Annotated[
    str,
    Field(pattern=r"^([0-9a-f]{64})?$", json_schema_extra={"allowed": "nothing, or 64 of the characters 0-9 and a-f"}),
]


class RunConfig(Settings):
    """Everything about one run."""

    name: RunName = "sort"
    """run name; with `seed` it names the run directory"""
    out: FolderName = "runs"
    """folder of run directories"""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """the one seed that all others derive from"""
    steps: Annotated[int, Field(ge=0)] = 60
    """training steps"""
    beacon: Secret = ""
    """beacon secret of a swarm, to reproduce its tasks and rollouts; empty: derived from `seed`"""
    async_level: Annotated[int, Field(ge=0, le=64)] = 0
    """k: a rollout may be k versions older than the one it trains (simulated by `shoal train`); 0: synchronous"""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """torch threads; 0: all cores"""
    rollouts: bool = True
    """write every trained rollout to Parquet"""
    policy: PolicyConfig = PolicyConfig()
    tasks: TasksConfig = TasksConfig()
    length: LengthConfig = LengthConfig()
    sft: SftConfig = SftConfig()
    engine: EngineConfig = EngineConfig()
    batch: BatchConfig = BatchConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    track: TrackConfig = TrackConfig()


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """The settings of a TOML file (None: the defaults) with `a.b.c=value` overrides laid over it; the last one wins."""
    data = {} if path is None else read_toml(path)
    for table in ("swarm", "validation"):  # who takes part when `shoal run` makes a swarm of it (shoal.launch.settings)
        data.pop(table, None)
    return build_config(RunConfig, data, overrides)


def build_config(model: type[Model], data: dict[str, Any], overrides: Sequence[str]) -> Model:
    """Settings from the tables of a file, which are changed, with overrides laid over them."""
    for override in overrides:
        lay_override(model, data, override)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise ConfigError(explain_errors(model, error)) from None


def read_environment(model: type[BaseModel]) -> list[str]:
    """Overrides that the environment has: `SHOAL_LEARNER__LR=1e-4` is `learner.lr=1e-4`."""
    names = {name_variable(setting.key): setting.key for setting in list_settings(model)}
    return [f"{key}={os.environ[name]}" for name, key in names.items() if name in os.environ]


def find_unknown_variables(model: type[BaseModel]) -> dict[str, str]:
    """Variables that are nearly those of a setting, each with the one that was probably meant."""
    known = [name_variable(setting.key) for setting in list_settings(model)]
    own = [name for name in os.environ if name.startswith(VARIABLE_PREFIX) and name not in known]
    near = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.85) for name in own}
    return {name: found[0] for name, found in near.items() if found}


def name_variable(key: str) -> str:
    """The environment variable of a setting."""
    return VARIABLE_PREFIX + key.replace(".", "__").upper()


def lay_override(
    model: type[BaseModel], data: dict[str, Any], override: str, *, example: str = "learner.lr=1e-4"
) -> None:
    """Put the value of `a.b.c=value` where it belongs in the tables of a file."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{override}: expected key=value, for example {example}")
    if not is_utf8(override):
        raise ConfigError(f"{key}: key and value must be UTF-8 text")
    value = parse_value(text)
    if accepts_text(model, parts) and not isinstance(value, str):
        value = text.strip()  # `name=5` names the run 5: a shell has no other way to write it
    *tables, last = parts
    for part in tables:
        # A value where a table belongs is replaced here and then refused by the models, which know what to say.
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    data[last] = value


def dump_config(config: Settings) -> str:
    """TOML text that loads to an equal configuration."""
    return dump_toml(config.model_dump())


def flatten_config(config: Settings) -> dict[str, Option]:
    """Every value by its dotted key."""
    return dict(_walk_values(config.model_dump(), ""))


def config_hash(config: Settings, *parts: str) -> str:
    """SHA-256 of the values, in hex; with `parts` only of these dotted keys or tables (`"seed", "policy.tiny"`)."""
    data = config.model_dump()
    kept = {part: reduce(getitem, part.split("."), data) for part in parts} if parts else data
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _walk_values(table: dict[str, Any], prefix: str) -> Iterator[tuple[str, Option]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _walk_values(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
