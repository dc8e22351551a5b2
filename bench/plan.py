"""Compare `shoal plan` with real training steps on the CPU: memory, and the times that follow from measured rates.

    python bench/plan.py [--quick] [--json]      # five minutes; two cases with --quick

Every case runs in a process of its own, in one thread: two training steps of a model from scratch, then generation.

    plan_memory_error     largest |predicted / measured - 1| of the growth of resident memory at its peak
    plan_memory_kept      the same growth with glibc's default, which keeps freed blocks, over the prediction; median
    plan_step_ratio       measured / predicted time of a training step; median
    plan_decode_ratio     measured / predicted time of generated tokens; median
"""

from dataclasses import replace
from statistics import median

from common import finish, parse_flags
from plan_step import Case, Measured, measure
from shoal.plan.devices import CPU, Device, Machines
from shoal.plan.memory import MemoryPlan, plan_memory
from shoal.plan.settings import Assumptions, PlanSettings, read_settings
from shoal.plan.shapes import measure_shape
from shoal.plan.speed import time_generation, time_step
from shoal.util.units import format_bytes

SAVING = "learner.gradient_checkpointing=true"
CASES = (
    Case(name="base"),
    Case(name="vocabulary 8192", vocabulary=8192),
    Case(name="vocabulary 49152: logits in chunks", vocabulary=49152),
    Case(name="completions of 1001: strips", completion=1001, groups=1),
    Case(name="the same, checkpointing", completion=1001, groups=1, settings=(SAVING,)),
    Case(name="llama, width 512, 8 layers", arch="llama", width=512, feed_forward=1408, layers=8, heads=8, kv_heads=8),
    Case(
        name="the same, checkpointing",
        arch="llama",
        width=512,
        feed_forward=1408,
        layers=8,
        heads=8,
        kv_heads=8,
        settings=(SAVING,),
    ),
    Case(name="weights in bfloat16", settings=("policy.dtype=bfloat16",)),
    Case(name="products in bfloat16", settings=("learner.precision=bfloat16",)),
    Case(name="packs of 512", settings=("learner.micro_tokens=512",)),
    Case(name="wide feed-forward, vocabulary 64", feed_forward=2816, vocabulary=64),
    Case(name="two updates", groups=4, settings=("learner.updates=2",)),
    Case(name="few tokens, 35 M weights", width=512, feed_forward=1408, layers=6, vocabulary=16384, completion=9),
)
QUICK = CASES[:1] + CASES[-1:]
_GENERATED = 64


def read_case(case: Case) -> PlanSettings:
    """The settings of a case as the plan sees them."""
    return read_settings(case.config, prompt_tokens=case.prompt, completion_tokens=case.completion, on_cpu=True)


def predict(case: Case) -> MemoryPlan:
    """The memory that the plan expects."""
    return plan_memory(measure_shape(case.architecture), read_case(case), 1, is_cpu=True)


def predict_times(case: Case, measured: Measured) -> tuple[float, float]:
    """Seconds of a step, and tokens per second of generation, with the rates of the same process."""
    shape, settings = measure_shape(case.architecture), replace(read_case(case), slots=_GENERATED)
    cpu = Machines(Device(CPU, 1e3, measured.tflops, measured.gbps, measured.gbps))
    step = time_step(shape, settings, cpu, Assumptions())
    return step.seconds, time_generation(shape, settings, cpu, Assumptions()).tokens_per_s


def main() -> None:
    flags = parse_flags(__doc__ or "")
    rows = [
        "| case | predicted | measured | error | blocks kept | step s | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    errors, kept, steps, decodes = [], [], [], []
    for case in QUICK if flags.quick else CASES:
        memory, real, default = predict(case), measure(case), measure(case, keep_blocks=True)
        step_s, tokens_per_s = predict_times(case, default)
        errors.append(memory.bytes / real.peak_bytes - 1)
        kept.append(default.peak_bytes / memory.bytes)
        steps.append(default.step_s / step_s)
        decodes.append(tokens_per_s / default.tokens_per_s)
        sizes = f"{format_bytes(memory.bytes)} | {format_bytes(real.peak_bytes)} | {100 * errors[-1]:+.1f} %"
        times = f"{step_s:.2f} / {default.step_s:.2f} | {tokens_per_s:.0f} / {default.tokens_per_s:.0f}"
        rows.append(f"| {case.name} | {sizes} | {format_bytes(default.peak_bytes)} | {times} |")
    figures = {
        "plan_memory_error": max(abs(error) for error in errors),
        "plan_memory_kept": median(kept),
        "plan_step_ratio": median(steps),
        "plan_decode_ratio": median(decodes),
    }
    finish(flags, "\n".join(rows), figures)


if __name__ == "__main__":
    main()
