"""A plan: what each role of a run needs and how long a step takes, put together, with a sentence for what cannot work.

Symbols: k async level; T the trainer's time for a step, b of a broadcast, v the delay of a verdict, G of generating the
tokens of a step with all machines, l of the longest rollout, which the last of a batch may be.

    period   max(T, G, checking, (T + b + max(G, l) + v) / (k + 1))   time between versions; k = 0: one after the other
    slack    k T - b - v       most time from the arrival of a version to the last rollout if the trainer never waits
    window   min(T, slack)     time in which the tokens of a step must be generated for that, if l <= slack
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.errors import ConfigError
from shoal.plan.broadcast import Links, PlannedBroadcast, plan_broadcasts
from shoal.plan.devices import Machines
from shoal.plan.memory import MemoryPlan, count_trained, plan_memory
from shoal.plan.settings import Assumptions, PlanSettings
from shoal.plan.shapes import ModelShape
from shoal.plan.speed import (
    Generation,
    StepTime,
    count_forward,
    count_models,
    time_generation,
    time_step,
    time_validation,
    usable_bytes,
)
from shoal.util.units import format_bytes

MICRO = 1e6
_HOUR = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The machines of a run, and what connects them."""

    trainer: Machines
    workers: tuple[Machines, ...]
    validators: Machines
    links: Links


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Machines of one kind that generate."""

    machines: Machines
    generation: Generation
    needed: int | None
    """machines of this kind alone that keep the trainer busy; None: no number does"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The times of a step, in seconds."""

    train_s: float
    broadcast_s: float
    generate_s: float
    """with all workers; infinite without any that can"""
    longest_s: float
    """of the longest rollout on the slowest kind of worker"""
    check_s: float
    """with all validators"""
    verdict_s: float
    """from the end of a rollout to its verdict"""
    slack_s: float
    period_s: float

    @property
    def window_s(self) -> float:
        return min(self.train_s, self.slack_s)

    @property
    def idle(self) -> float:
        """Share of the time that the trainer waits."""
        return 1.0 - self.train_s / self.period_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that a plan says."""

    shape: ModelShape
    settings: PlanSettings
    assumed: Assumptions
    fleet: Fleet
    trained_parameters: int
    memory: MemoryPlan
    step: StepTime
    workers: tuple[WorkerPlan, ...]
    broadcasts: tuple[PlannedBroadcast, ...]
    schedule: Schedule
    flops_ratio: float
    """FLOPs of generation over those of training"""
    sampled_tokens: float
    credit: float
    """per step, for accepted tokens"""
    cost_usd: float | None
    """per step; None without the price of every device"""
    warnings: tuple[str, ...]


def make_plan(
    shape: ModelShape, settings: PlanSettings, fleet: Fleet, assumed: Assumptions, prices: Mapping[str, float]
) -> Plan:
    """Put the parts of a plan together."""
    step = time_step(shape, settings, fleet.trainer, assumed)
    memory = plan_memory(shape, settings, fleet.trainer.devices, is_cpu=fleet.trainer.device.is_cpu)
    pulling = sum(machines.number for machines in (*fleet.workers, fleet.validators))
    broadcasts = plan_broadcasts(shape, settings, fleet.links, pulling)
    generations = [time_generation(shape, settings, machines, assumed) for machines in fleet.workers]
    sampled = settings.sampled_rollouts * settings.completion_tokens
    check_s = time_validation(shape, settings, fleet.validators, assumed)
    schedule = _schedule(settings, fleet, step, broadcasts[-1], generations, check_s, assumed)
    workers = tuple(
        WorkerPlan(machines, found, _count_needed(found, sampled, schedule))
        for machines, found in zip(fleet.workers, generations, strict=True)
    )
    plan = Plan(
        shape=shape,
        settings=settings,
        assumed=assumed,
        fleet=fleet,
        trained_parameters=count_trained(shape, settings.trainer),
        memory=memory,
        step=step,
        workers=workers,
        broadcasts=broadcasts,
        schedule=schedule,
        flops_ratio=count_forward(shape, settings, settings.sampled_rollouts) / step.flops,
        sampled_tokens=sampled,
        credit=settings.price * sampled / MICRO,
        cost_usd=_count_cost(fleet, prices, schedule.period_s),
        warnings=(),
    )
    return replace(plan, warnings=tuple(list_warnings(plan)))


def _schedule(
    settings: PlanSettings,
    fleet: Fleet,
    step: StepTime,
    broadcast: PlannedBroadcast,
    generations: Sequence[Generation],
    check_s: float,
    assumed: Assumptions,
) -> Schedule:
    rate = sum(machines.number * found.tokens_per_s for machines, found in zip(fleet.workers, generations, strict=True))
    sampled = settings.sampled_rollouts * settings.completion_tokens
    longest = max((found.longest_s for found in generations), default=0.0)
    generate_s = sampled / rate if rate else math.inf
    verdict_s = assumed.upload_s + check_s * settings.submission_rollouts / settings.sampled_rollouts
    check_s /= fleet.validators.number
    train_s, level = step.seconds, settings.async_level
    around = (train_s + broadcast.seconds + max(generate_s, longest) + verdict_s) / (level + 1)
    return Schedule(
        train_s=train_s,
        broadcast_s=broadcast.seconds,
        generate_s=generate_s,
        longest_s=longest,
        check_s=check_s,
        verdict_s=verdict_s,
        slack_s=level * train_s - broadcast.seconds - verdict_s,
        period_s=max(train_s, generate_s, check_s, around),
    )


def _count_needed(found: Generation, sampled: float, times: Schedule) -> int | None:
    if not found.rollouts or times.slack_s < found.longest_s or times.window_s <= 0.0:
        return None
    return math.ceil(sampled / (found.tokens_per_s * times.window_s))


def _count_cost(fleet: Fleet, prices: Mapping[str, float], period_s: float) -> float | None:
    """US dollars per step for all devices, which are rented whether they wait or not."""
    counts = [(kind.device.name, kind.num_devices) for kind in (fleet.trainer, *fleet.workers, fleet.validators)]
    if unknown := sorted(prices.keys() - {name for name, _ in counts}):
        names = ", ".join(sorted({name for name, _ in counts}))
        raise ConfigError(f"--price: {unknown[0][:40]!r} is not a device of this plan; it has {names}")
    if any(name not in prices for name, _ in counts) or not math.isfinite(period_s):
        return None
    return sum(prices[name] * number for name, number in counts) * period_s / _HOUR


def list_warnings(plan: Plan) -> list[str]:
    """What will not fit or not keep up, a sentence each."""
    return [*_warn_memory(plan), *_warn_workers(plan), *_warn_schedule(plan)]


def _warn_memory(plan: Plan) -> list[str]:
    shape, settings, trainer = plan.shape, plan.settings, plan.fleet.trainer
    found = []
    room = usable_bytes(trainer.device, plan.assumed) / (trainer.devices if trainer.device.is_cpu else 1)
    if plan.memory.bytes > room:
        found.append(
            f"the trainer does not fit: {format_bytes(plan.memory.bytes)} per rank of {format_bytes(room)} usable on "
            f"{trainer.device.name}; the largest item is {max(plan.memory.items, key=lambda item: item.bytes).name}"
        )
    if settings.prompt_tokens + settings.max_tokens > shape.context:
        found.append(
            f"prompt and completion take up to {settings.prompt_tokens + settings.max_tokens} tokens, the model's "
            f"context is {shape.context}"
        )
    if not shape.is_lean:
        found.append(
            "the memory of activations is that of shoal's own forward pass; this architecture runs transformers' own, "
            "which may keep more"
        )
    types = {settings.trainer.compute, settings.trainer.publish}
    for kind in (trainer, *plan.fleet.workers, plan.fleet.validators):
        if "bfloat16" in types and not kind.device.has_bf16:
            found.append(f"{kind.device.name} has no bfloat16; its figure is for float16, which shoal does not use")
    return list(dict.fromkeys(found))


def _warn_workers(plan: Plan) -> list[str]:
    found = []
    for worker in plan.workers:
        room = worker.machines.devices * usable_bytes(worker.machines.device, plan.assumed)
        if worker.generation.weights_bytes > room:
            text = f"the version takes {format_bytes(worker.generation.weights_bytes)}, {format_bytes(room)} are usable"
            found.append(f"workers with {worker.machines.name} cannot take part: {text}")
        elif not worker.generation.rollouts:
            text = f"beside the weights there is no room for one rollout of {plan.settings.max_tokens} tokens"
            found.append(f"workers with {worker.machines.name} cannot take part: {text}")
    validators = plan.fleet.validators
    room = validators.devices * usable_bytes(validators.device, plan.assumed)
    models = count_models(plan.settings)
    needed = models * plan.broadcasts[0].bytes
    if needed > room:
        rivals = f" ({models - 1} of them rivals)" if models > 1 else ""
        found.append(
            f"validators with {validators.name} do not fit: {models} models{rivals} take {format_bytes(needed)}, "
            f"{format_bytes(room)} are usable"
        )
    return found


def _warn_schedule(plan: Plan) -> list[str]:
    times, level = plan.schedule, plan.settings.async_level
    if not level:
        return ["async_level is 0: training, broadcast and generation take turns, so the trainer waits for the others"]
    found = []
    if times.slack_s < times.longest_s or times.window_s <= 0.0:
        found.append(
            f"at async level {level} no number of workers keeps the trainer busy: broadcast and verdict leave "
            f"{max(0.0, times.slack_s):.0f} s, the longest rollout takes {times.longest_s:.0f} s"
        )
    if times.check_s > times.train_s:
        found.append(
            f"{plan.fleet.validators.number} validators need {times.check_s:.0f} s per step, longer than a step of the "
            "trainer"
        )
    if math.isinf(times.generate_s):
        found.append("no worker can generate: the trainer waits forever")
    elif times.generate_s > times.train_s:
        found.append(
            f"the workers generate {100 * times.train_s / times.generate_s:.0f} % of what the trainer can consume: it "
            f"waits {100 * times.idle:.0f} % of the time"
        )
    return found
