"""A plan as text for people, and as named figures for programs."""

import math
from typing import Any

from shoal.plan.plan import Plan
from shoal.plan.speed import Generation
from shoal.util.units import count_things, format_bytes


def describe_plan(plan: Plan) -> str:
    """The plan in sections; what cannot work comes last, where it is seen."""
    sections = {
        "model": _describe_model(plan),
        "trainer": _describe_trainer(plan),
        "step": _describe_step(plan),
        "workers": _describe_workers(plan),
        "versions": _describe_versions(plan),
        "schedule": _describe_schedule(plan),
    }
    lines = []
    for name, rows in sections.items():
        lines.append(name)
        lines += [f"  {label:<26} {text}" for label, text in rows]
    lines += ["warnings"] if plan.warnings else ["no warnings"]
    return "\n".join([*lines, *(f"  - {text}" for text in plan.warnings)])


Rows = list[tuple[str, str]]


def _describe_model(plan: Plan) -> Rows:
    shape, options = plan.shape, plan.settings.trainer
    sizes = f"{shape.layers} layers of width {shape.width}, vocabulary {shape.vocabulary}"
    kinds = f"weights and optimizer {options.master}, products {options.compute}"
    choices = {
        "checkpointing": options.checkpointing,
        "offload": options.offload,
        "flex attention": options.flex_attention,
    }
    named = [name for name, chosen in choices.items() if chosen]
    return [
        ("parameters", f"{_count(shape.parameters)}, trained {_count(plan.trained_parameters)} ({sizes})"),
        ("types", ", ".join([kinds, f"published {options.publish}", *named])),
    ]


def _describe_trainer(plan: Plan) -> Rows:
    device = plan.fleet.trainer.device
    rows = [(item.name, format_bytes(item.bytes)) for item in plan.memory.items]
    rows.append(
        (
            "total per rank",
            f"{format_bytes(plan.memory.bytes)} of {device.memory_gb:.4g} GB, largest at: {plan.memory.moment}",
        )
    )
    if plan.memory.host_bytes:
        rows.append(("in host memory per rank", format_bytes(plan.memory.host_bytes)))
    return [("devices", f"{plan.fleet.trainer.devices} x {device.name}"), *rows]


def _describe_step(plan: Plan) -> Rows:
    step, settings = plan.step, plan.settings
    lengths = f"{settings.prompt_tokens} + {settings.completion_tokens} tokens"
    return [
        ("rollouts", f"{settings.trained_rollouts} of {lengths}: {_count(step.tokens)} tokens trained"),
        ("compute", f"{step.flops:.3g} FLOPs, {_show(step.compute_s)}"),
        ("traffic between ranks", f"{_show(step.traffic_s)}, overlapped"),
        ("optimizer", _show(step.optimizer_s)),
        ("time of a step", _show(step.seconds)),
    ]


def _describe_workers(plan: Plan) -> Rows:
    rows = []
    for worker in plan.workers:
        found, number = worker.generation, worker.machines.number
        needed = "no number is enough" if worker.needed is None else f"{worker.needed} feed the trainer"
        rows.append((f"{number} x {worker.machines.name}", f"{_describe_rate(found)}; {needed}"))
    rows.append(("FLOPs per FLOP of training", f"{plan.flops_ratio:.2f}"))
    return rows


def _describe_rate(found: Generation) -> str:
    if not found.rollouts:
        return "cannot take part"
    times = f"{_show(found.rollout_s)}, the longest {_show(found.longest_s)}"
    return f"{found.tokens_per_s:.0f} tokens/s each, {found.rollouts} rollouts at a time, each {times}"


def _describe_versions(plan: Plan) -> Rows:
    sent = [(way.kind, f"{format_bytes(way.bytes)}, {_show(way.seconds)} to all machines") for way in plan.broadcasts]
    validators = plan.fleet.validators
    share = f"{100 * plan.settings.checked_share:.3g} % of rollouts replayed"
    checked = (
        f"{count_things(validators.number, 'validator')} ({validators.name})",
        f"{share}, {_show(plan.schedule.check_s)} per step",
    )
    return [*sent, checked]


def _describe_schedule(plan: Plan) -> Rows:
    times = plan.schedule
    cost = "unknown: no worker can generate"
    if plan.cost_usd is not None:
        cost = f"${plan.cost_usd:.4g}"
    elif math.isfinite(times.period_s):
        cost = "give --price NAME=USD_PER_HOUR for every device"
    return [
        ("window for generation", _show(times.window_s)),
        ("generation of a batch", _show(times.generate_s)),
        ("time between versions", f"{_show(times.period_s)}, the trainer waits {100 * times.idle:.0f} %"),
        ("credit per step", f"{plan.credit:.4g} for {_count(plan.sampled_tokens)} generated tokens"),
        ("cost per step", cost),
    ]


def _count(number: float) -> str:
    for factor, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M")):
        if number >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.0f}"


def _show(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds <= 0.0:
        return "none"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200.0 else f"{seconds / 3600:.3g} h"


def export_plan(plan: Plan) -> dict[str, Any]:
    """The figures of a plan by name; bytes, seconds, and null for what never ends or is unknown."""
    times = plan.schedule
    return {
        "parameters": plan.shape.parameters,
        "trained_parameters": plan.trained_parameters,
        "memory_bytes": {item.name: round(item.bytes) for item in plan.memory.items},
        "memory_total_bytes": round(plan.memory.bytes),
        "memory_moment": plan.memory.moment,
        "host_bytes": round(plan.memory.host_bytes),
        "trained_tokens": round(plan.step.tokens),
        "training_flops": plan.step.flops,
        "compute_s": plan.step.compute_s,
        "traffic_s": plan.step.traffic_s,
        "optimizer_s": plan.step.optimizer_s,
        "train_s": times.train_s,
        "workers": [_export_worker(plan, index) for index in range(len(plan.workers))],
        "flops_ratio": plan.flops_ratio,
        "versions": {way.kind: {"bytes": round(way.bytes), "broadcast_s": way.seconds} for way in plan.broadcasts},
        "checked_share": plan.settings.checked_share,
        "check_s": times.check_s,
        "window_s": times.window_s,
        "slack_s": times.slack_s,
        "generate_s": _finite(times.generate_s),
        "period_s": _finite(times.period_s),
        "trainer_idle": times.idle,
        "sampled_tokens": round(plan.sampled_tokens),
        "credit": plan.credit,
        "cost_usd": plan.cost_usd,
        "warnings": list(plan.warnings),
    }


def _export_worker(plan: Plan, index: int) -> dict[str, Any]:
    worker = plan.workers[index]
    return {
        "name": worker.machines.name,
        "number": worker.machines.number,
        "rollouts": worker.generation.rollouts,
        "tokens_per_s": worker.generation.tokens_per_s,
        "rollout_s": worker.generation.rollout_s,
        "longest_s": worker.generation.longest_s,
        "needed": worker.needed,
    }


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
