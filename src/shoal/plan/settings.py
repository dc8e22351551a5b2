"""What a plan is computed from: the settings of a run that matter, and the assumptions about programs and networks.

`read_settings` is the only place that reads a run's settings; everything else in this package takes `PlanSettings`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from shoal.errors import ConfigError
from shoal.launch.settings import LaunchConfig
from shoal.protocol.messages import Standing
from shoal.protocol.params import RunParams, count_drawn, set_check_rate

Dtype = Literal["float32", "bfloat16"]
ITEMSIZE: dict[str, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Low-rank adapters on the named linear modules of every layer."""

    rank: int
    targets: tuple[str, ...] = ()
    """ends of their names; empty: all"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """How the trainer stores and computes."""

    master: Dtype = "float32"
    """type of the weights that the optimizer updates, and of their gradients"""
    compute: Dtype = "float32"
    """type of products and activations"""
    offload: bool = False
    """weights' shards, gradients and optimizer state are in host memory"""
    checkpointing: bool = False
    """layers are computed again in the backward pass; only their inputs are kept"""
    flex_attention: bool = False
    """attention without stored scores and masks (policy/flex.py); else rectangles and strips (policy/attention.py)"""
    lora: LoraSettings | None = None
    """adapters, which are float32"""
    publish: Dtype = "float32"
    """type of a published version"""

    @property
    def trained_bytes(self) -> int:
        """Size of a trained value; AdamW's two moments and the gradient have the same."""
        return 4 if self.lora is not None else ITEMSIZE[self.master]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """The settings of a run that decide memory, time and traffic."""

    trainer: TrainerOptions
    groups: int
    group_size: int
    updates: int
    micro_tokens: int
    prompt_tokens: int
    """mean length of a prompt"""
    completion_tokens: int
    """mean length of a completion"""
    max_tokens: int
    """longest completion"""
    kept: float
    """share of the sampled groups that is trained; the others have no learning signal"""
    slots: int
    """most rollouts that a worker decodes side by side"""
    async_level: int
    lr: float
    has_reference: bool
    recomputes_old: bool
    checked_share: float
    """share of submitted rollouts that a validator replays"""
    submission_rollouts: int
    """rollouts of one submission"""
    price: int
    """micro-credits per accepted token"""

    @property
    def trained_rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def sampled_rollouts(self) -> float:
        return self.trained_rollouts / self.kept


def read_settings(
    config: LaunchConfig,
    *,
    prompt_tokens: int,
    completion_tokens: int | None = None,
    kept: float = 1.0,
    on_cpu: bool = False,
) -> PlanSettings:
    """The part of a run's settings that a plan needs, with mean lengths, which no setting holds.

    `on_cpu`: the trainer has no GPU, which decides its attention.
    """
    completion = config.engine.max_tokens if completion_tokens is None else completion_tokens
    if not 1 <= completion <= config.engine.max_tokens:
        raise ConfigError(f"--completion-tokens: must be 1 to engine.max_tokens = {config.engine.max_tokens}")
    if not 1 <= prompt_tokens <= 2**24:
        raise ConfigError("--prompt-tokens: must be 1 or more")
    if not 0.0 < kept <= 1.0:
        raise ConfigError("--kept: must be above 0 and at most 1")
    learner = config.learner
    return PlanSettings(
        trainer=_read_trainer(config, on_cpu=on_cpu),
        groups=config.batch.groups,
        group_size=config.batch.group_size,
        updates=min(learner.updates, config.batch.groups),
        micro_tokens=learner.micro_tokens,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion,
        max_tokens=config.engine.max_tokens,
        kept=kept,
        slots=config.swarm.slots or config.engine.slots,
        async_level=config.async_level,
        lr=learner.lr,
        has_reference=learner.loss.kl > 0,
        recomputes_old=learner.old_logprobs == "recompute",
        checked_share=_find_share(config),
        submission_rollouts=config.batch.group_size * (config.swarm.groups_per_lease or 1),
        price=RunParams.model_fields["price"].default,
    )


def _read_trainer(config: LaunchConfig, *, on_cpu: bool) -> TrainerOptions:
    """How the trainer stores and computes."""
    policy, learner = config.policy, config.learner
    return TrainerOptions(
        master=policy.dtype,
        compute="bfloat16" if learner.precision == "bfloat16" else policy.dtype,
        offload=learner.offload,
        checkpointing=learner.gradient_checkpointing,
        flex_attention=learner.attention == "flex" or (learner.attention == "auto" and not on_cpu),
        lora=LoraSettings(policy.lora.rank, tuple(policy.lora.targets)) if policy.lora.rank else None,
        publish=policy.publish_dtype,
    )


def _find_share(config: LaunchConfig) -> float:
    """Share of rollouts that is replayed of owners in good standing."""
    params = RunParams.model_validate(set_check_rate(config.validation))
    rollouts = config.batch.group_size * (config.swarm.groups_per_lease or 1)
    return count_drawn(params.check_share(Standing.GOOD, rollouts), rollouts) / rollouts


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is not in a data sheet or setting; `--assume NAME=VALUE` changes one."""

    train_utilisation: float = 0.4
    """share of a GPU's peak that training reaches"""
    prefill_utilisation: float = 0.5
    """share of a GPU's peak that a forward pass over known tokens reaches"""
    decode_bandwidth: float = 0.6
    """share of a device's memory bandwidth that decoding reaches"""
    parallel_efficiency: float = 0.8
    """of decoding on several devices that share a model"""
    cpu_utilisation: float = 0.5
    """share of a CPU's measured matrix product rate that training and forward passes reach"""
    usable_memory: float = 0.92
    """share of a GPU's memory that tensors can take; the rest is fragmentation"""
    runtime_gb: float = 1.5
    """per GPU for the CUDA context, libraries and communication buffers"""
    node_devices: float = 8.0
    """devices of one machine of the trainer"""
    node_link_gbps: float = 50.0
    """GB/s per device between machines of the trainer: one 400 Gbit/s adapter each"""
    upload_s: float = 5.0
    """seconds until a finished submission is uploaded and claimed"""


def change_assumptions(texts: Sequence[str]) -> Assumptions:
    """Parse `--assume train_utilisation=0.35` flags."""
    known = {field.name for field in fields(Assumptions)}
    values = {}
    for text in texts:
        name, equals, number = text.partition("=")
        if not equals or name not in known:
            raise ConfigError(
                f"--assume: unknown {name[:40]!r}; write NAME=VALUE with one of {', '.join(sorted(known))}"
            )
        try:
            values[name] = float(number)
        except ValueError:
            values[name] = -1.0
        if not 0.0 < values[name] < 1e6:
            raise ConfigError(f"--assume: {name} must be a number above 0, got {number[:40]!r}")
    return replace(Assumptions(), **values)
