"""Time of training, generation and checking, from FLOPs and bytes.

Symbols as in `memory.py`, and: B rollouts of a step of prompt p and completion c tokens, g of them per prompt; X a
device's peak FLOP/s, Y its memory bandwidth; u the share that a program reaches (`Assumptions`).

    tokens       B (p / g + c)            a prompt is computed once per group
    forward      2 P_active tokens + 4 L H D pairs,   pairs = B (p c + c^2 / 2) + (B / g) p^2 / 2
    training     forward x (3, with adapters 2; +1 with checkpointing; +(updates - 1) / updates to recompute old
                 log-probs; +1 for the reference): 6 P tokens without options
    step         max(training / (n X u), traffic / link) + optimizer
    traffic      b P (n - 1) / n for each pass of a pack that gathers parameters, and 4 P' (n - 1) / n for each exchange
                 of gradients: one per update, or one per pack
    optimizer    bytes of weights, gradients and state, read and written / (n Y u)
    decoding     one token of S rollouts takes max((b P_active + S kv (p + c / 2)) / (Y u), 2 P_active S / (X u))
    S            min(slots, (memory - weights) / (kv (p + c / 2)))
    checking     checked share of forward over all sampled tokens, and once more per rival
"""

from dataclasses import dataclass

from shoal.plan.devices import GIGA, TERA, Device, Machines
from shoal.plan.memory import count_trained, shape_packs
from shoal.plan.settings import ITEMSIZE, Assumptions, PlanSettings
from shoal.plan.shapes import ModelShape
from shoal.toploc.rivals import Rival


@dataclass(frozen=True, slots=True)
class StepTime:
    """The trainer's time for a step."""

    tokens: float
    """tokens that are trained, prompts once per group"""
    flops: float
    """of the whole trainer"""
    compute_s: float
    traffic_s: float
    """parameters and gradients between ranks; hidden behind computing as far as it is shorter"""
    optimizer_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.traffic_s) + self.optimizer_s


@dataclass(frozen=True, slots=True)
class Generation:
    """Decoding on one machine."""

    weights_bytes: float
    rollouts: int
    """decoded side by side; 0: the weights or one rollout do not fit"""
    tokens_per_s: float
    rollout_s: float
    """seconds that a rollout of mean length takes"""
    longest_s: float
    """of the longest completion that the settings allow: the last of a batch may be one"""


def time_step(shape: ModelShape, settings: PlanSettings, trainer: Machines, assumed: Assumptions) -> StepTime:
    """The time that the trainer takes for one step."""
    device, ranks, options = trainer.device, trainer.devices, settings.trainer
    forward = count_forward(shape, settings, settings.trained_rollouts)
    backward = 1.0 if options.lora else 2.0
    scored = (settings.updates - 1) / settings.updates if settings.recomputes_old else 0.0
    passes = 1.0 + backward + options.checkpointing + scored + settings.has_reference
    reached = device.tflops * TERA * (assumed.cpu_utilisation if device.is_cpu else assumed.train_utilisation)
    trained = count_trained(shape, options)
    item = ITEMSIZE[options.compute]
    gathers = 2.0 + scored + settings.has_reference
    share = (ranks - 1) / ranks
    packs = shape_packs(settings, ranks).per_step
    traffic = share * packs * (gathers * item * shape.parameters + 4 * trained)
    state = 7 * options.trained_bytes
    rate = (_link(trainer, assumed) if options.offload else device.gbps * assumed.decode_bandwidth) * GIGA
    return StepTime(
        tokens=count_tokens(settings, settings.trained_rollouts),
        flops=forward * passes,
        compute_s=forward * passes / (ranks * reached),
        traffic_s=traffic / (_link(trainer, assumed) * GIGA),
        optimizer_s=settings.updates * state * trained / ranks / rate,
    )


def count_tokens(settings: PlanSettings, rollouts: float) -> float:
    """Tokens of so many rollouts, prompts once per group."""
    return rollouts * (settings.prompt_tokens / settings.group_size + settings.completion_tokens)


def count_forward(shape: ModelShape, settings: PlanSettings, rollouts: float) -> float:
    """FLOPs of one forward pass over so many rollouts."""
    prompt, completion = settings.prompt_tokens, settings.completion_tokens
    pairs = rollouts * (prompt * completion + completion**2 / 2 + prompt**2 / 2 / settings.group_size)
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2 * shape.active_parameters * count_tokens(settings, rollouts) + attention


def _link(trainer: Machines, assumed: Assumptions) -> float:
    """GB/s of one rank to the others."""
    if trainer.devices <= assumed.node_devices:
        return trainer.device.link_gbps
    return min(trainer.device.link_gbps, assumed.node_link_gbps)


def usable_bytes(device: Device, assumed: Assumptions) -> float:
    """Memory of a device for tensors; all of a CPU's."""
    if device.is_cpu:
        return device.memory_bytes
    return device.memory_bytes * assumed.usable_memory - assumed.runtime_gb * GIGA


def time_generation(shape: ModelShape, settings: PlanSettings, machines: Machines, assumed: Assumptions) -> Generation:
    """Tokens per second of one machine, and of how many rollouts side by side."""
    device, number, item = machines.device, machines.devices, ITEMSIZE[settings.trainer.publish]
    weights = float(item * shape.parameters)
    context = settings.prompt_tokens + settings.completion_tokens / 2
    kv_bytes = shape.count_kv_bytes(item) * context
    room = number * usable_bytes(device, assumed) - weights
    rollouts = int(min(settings.slots, room // kv_bytes))
    if rollouts < 1 or room < shape.count_kv_bytes(item) * (settings.prompt_tokens + settings.max_tokens):
        return Generation(weights, 0, 0.0, 0.0, 0.0)
    scale = number * (assumed.parallel_efficiency if number > 1 else 1.0)
    compute = device.tflops * TERA * scale * _prefill_share(device, assumed)
    read = item * shape.active_parameters + rollouts * kv_bytes
    token_s = max(
        read / (device.gbps * GIGA * assumed.decode_bandwidth * scale),
        2 * shape.active_parameters * rollouts / compute,
    )
    prefill_s = 2 * shape.active_parameters * settings.prompt_tokens / settings.group_size / compute
    mean, longest = settings.completion_tokens, settings.max_tokens
    tokens_per_s = mean / (mean * token_s / rollouts + prefill_s)
    return Generation(weights, rollouts, tokens_per_s, mean * token_s, longest * token_s)


def _prefill_share(device: Device, assumed: Assumptions) -> float:
    return assumed.cpu_utilisation if device.is_cpu else assumed.prefill_utilisation


def count_models(settings: PlanSettings) -> int:
    """Models that a validator replays with: the stated version, and in bfloat16 its rivals."""
    return 1 + (len(Rival) if settings.trainer.publish == "bfloat16" else 0)


def time_validation(shape: ModelShape, settings: PlanSettings, machines: Machines, assumed: Assumptions) -> float:
    """Seconds that one validator takes to check the rollouts of a step."""
    device = machines.device
    rate = device.tflops * TERA * machines.devices * _prefill_share(device, assumed)
    forward = count_forward(shape, settings, settings.sampled_rollouts)
    return settings.checked_share * forward * count_models(settings) / rate
