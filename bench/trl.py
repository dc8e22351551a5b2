"""shoal compared with TRL's GRPOTrainer: same start, tasks, batch, loss and updates, alternating step by step.

    python bench/trl.py [--quick] [--json]

Two processes, each with all cores during its turn: one step of TRL, one of shoal, one of TRL, ... A step is sampling,
scoring and one optimizer update. Figures are ratios TRL / shoal, above 1 where shoal is faster:
    step_ratio_equal    median seconds per step, 512 rollouts of 16 tokens
    step_ratio_mixed    the same, 256 rollouts of 8 to 256 tokens
    time_to_pass_ratio  mean seconds of steps, over the seeds, until the held-out pass rate reaches the last target
Only the demo's task has a target. The number of steps it takes varies between seeds, so means of six are compared.
"""

import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from common import OUT, finish, mean, parse_flags
from shoal.config.run import RunConfig, load_config

TARGETS = (0.3, 0.4, 0.5)
LEARN_SEEDS = range(6)
EVAL_EVERY = 4
DEADLINE_S = 900
"""Longest wait for one side: its SFT, or one step."""


@dataclass(frozen=True)
class Job:
    """One comparison. `overrides` are settings of the run; both sides take theirs from the same configuration."""

    overrides: tuple[str, ...]
    steps: int
    learns: bool = False
    """whether to continue to the last target, with evaluations on the way"""
    trl_micro: int = 512
    """rollouts per forward pass of TRL; the size at which it was fastest here"""
    seed: int = 0


@dataclass
class Side:
    """Measurements of one side."""

    seconds: list[float] = field(default_factory=list)
    passes: list[tuple[float, float]] = field(default_factory=list)
    """(seconds so far, held-out pass rate)"""

    def time_to(self, target: float) -> float:
        """Seconds until the target is reached, interpolated linearly between evaluations."""
        before, low = 0.0, 0.0
        for seconds, rate in self.passes:
            if rate >= target:
                return before + (seconds - before) * (target - low) / (rate - low)
            before, low = seconds, rate
        return float("inf")


COMMON = (
    "batch.filter=false",
    "learner.updates=1",
    "learner.loss.correction=none",
    "learner.warmup_steps=0",
    "rollouts=false",
)
EQUAL = (
    *COMMON,
    *("policy.tiny.layers=3", "tasks.name=reverse", "tasks.options.min_length=12", "tasks.options.max_length=12"),
    *("sft.steps=30", "sft.options={}", "engine.max_tokens=16"),
    *("batch.groups=32", "batch.group_size=16", "learner.micro_tokens=4096", "engine.slots=512"),
)
MIXED = (
    *COMMON,
    *("tasks.name=reverse", "tasks.options.min_length=8", "tasks.options.max_length=250", "tasks.options.letters=4"),
    *("sft.steps=40", "sft.batch=16", "sft.options={}", "policy.tiny.context=640", "engine.max_tokens=256"),
    *("batch.groups=16", "batch.group_size=16", "engine.slots=256", "learner.micro_tokens=4096"),
)
LEARN = (*COMMON, "eval.tasks=256", "eval.samples=2", "eval.k=2")


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    repeats = 4 if flags.quick else 12
    equal = compare(Job(EQUAL, repeats))
    mixed = compare(Job(MIXED, 2 if flags.quick else 6, trl_micro=128))
    seeds = LEARN_SEEDS[:1] if flags.quick else LEARN_SEEDS
    learn = [compare(Job(LEARN, 120, learns=True, seed=seed)) for seed in seeds]
    figures = {
        "step_ratio_equal": ratio_of(*equal),
        "step_ratio_mixed": ratio_of(*mixed),
        "time_to_pass_ratio": pass_ratio(learn, TARGETS[-1]),
    }
    figures |= {f"time_to_pass_{target:g}": pass_ratio(learn, target) for target in TARGETS}
    finish(flags, format_table(equal, mixed, learn), figures)


def pass_ratio(learn: list[tuple[Side, Side]], target: float) -> float:
    trl, shoal = (mean([sides[which].time_to(target) for sides in learn]) for which in (0, 1))
    return trl / shoal


def ratio_of(trl: Side, shoal: Side) -> float:
    return median(trl.seconds) / median(shoal.seconds)


def format_table(equal: tuple[Side, Side], mixed: tuple[Side, Side], learn: list[tuple[Side, Side]]) -> str:
    rows = ["| job | TRL | shoal | ratio |", "|---|---|---|---|"]
    for name, (trl, shoal) in (("equal lengths, s per step", equal), ("mixed lengths, s per step", mixed)):
        values = f"{median(trl.seconds):.3f} | {median(shoal.seconds):.3f} | {ratio_of(trl, shoal):.2f}"
        rows.append(f"| {name} | {values} |")
    for target in TARGETS:
        trl_s, shoal_s = ([sides[which].time_to(target) for sides in learn] for which in (0, 1))
        values = f"{_each(trl_s)} | {_each(shoal_s)} | {pass_ratio(learn, target):.2f}"
        rows.append(f"| s to pass@1 {target}, each seed | {values} |")
    return "\n".join(rows)


def _each(values: list[float]) -> str:
    return " / ".join(f"{value:.1f}" for value in values)


def compare(job: Job) -> tuple[Side, Side]:
    """Step both sides in turn; the first step of each is a warm-up and not counted, unless the job learns."""
    config = load_config(
        Path(__file__).parent.parent / "examples/sort.toml", [*job.overrides, f"seed={job.seed}", f"out={OUT}"]
    )
    context = multiprocessing.get_context("spawn")
    sides, pipes, workers = (Side(), Side()), [], []
    for target in (_run_trl, _run_shoal):
        ours, theirs = context.Pipe()
        worker = context.Process(target=target, args=(config, job, theirs), daemon=True)
        worker.start()
        theirs.close()  # so that the death of a side ends the wait
        assert _receive(ours) == "ready"
        pipes.append(ours)
        workers.append(worker)
    for step in range(job.steps + 1):
        for side, pipe in zip(sides, pipes, strict=True):
            _take_step(side, pipe, job, step)
        print(f"step {step}: TRL {sides[0].seconds[-1:]} s, shoal {sides[1].seconds[-1:]} s", file=sys.stderr)
        if job.learns and all(side.time_to(TARGETS[-1]) < float("inf") for side in sides):
            break
    for pipe, worker in zip(pipes, workers, strict=True):
        pipe.send("stop")
        worker.join(timeout=60)
        worker.terminate()
    return sides


def _take_step(side: Side, pipe: Connection, job: Job, step: int) -> None:
    pipe.send("eval" if job.learns and step % EVAL_EVERY == 0 else "go")
    seconds, rate = _receive(pipe)
    if job.learns or step > 0:
        side.seconds.append(seconds)
    if rate is not None:
        side.passes.append((sum(side.seconds), rate))


def _receive(pipe: Connection) -> Any:
    """The next message of a side."""
    if not pipe.poll(DEADLINE_S):
        raise SystemExit(f"timed out after {DEADLINE_S} s waiting for one side")
    return pipe.recv()


def _prepare(config: RunConfig) -> tuple[Any, Any, Any]:
    """Family, starting policy and an evaluation of given weights."""
    from copy import deepcopy

    from shoal.engine import open_engine
    from shoal.tasks.registry import load_family
    from shoal.train.eval import evaluate
    from shoal.train.sft import load_start

    family = load_family(config.tasks.name, config.tasks.options)
    policy = load_start(config)
    engine = open_engine(config.engine, deepcopy(policy.model), eos_id=policy.eos_id)

    def measure(weights: dict[str, Any]) -> float:
        engine.swap_weights(0, weights)
        return evaluate(engine, family, policy, config).pass_1.value

    return family, policy, measure


def _run_shoal(config: RunConfig, job: Job, pipe: Connection) -> None:
    from copy import deepcopy

    from shoal.engine import open_engine
    from shoal.learner.learner import Learner
    from shoal.train.sampler import Sampler
    from shoal.util.process import tune_process

    tune_process(0)
    family, policy, measure = _prepare(config)
    learner = Learner(policy.model, config.learner, max_tokens=config.engine.max_tokens)
    engine = open_engine(config.engine, deepcopy(policy.model), eos_id=policy.eos_id)
    sampler = Sampler(engine, family, policy.tokenizer, config)
    pipe.send("ready")
    step = 0
    while (order := pipe.recv()) != "stop":
        step += 1
        started = time.perf_counter()
        engine.swap_weights(step - 1, policy.model.state_dict())
        learner.train_step(sampler.draw_batch(step).batch.groups)
        seconds = time.perf_counter() - started
        pipe.send((seconds, measure(policy.model.state_dict()) if order == "eval" else None))


def _run_trl(config: RunConfig, job: Job, pipe: Connection) -> None:
    # this file has the package's name, and scripts find their own folder first
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    from datasets import Dataset
    from transformers import TrainerCallback

    from trl import GRPOTrainer

    family, policy, measure = _prepare(config)
    tasks = _plan_tasks(config, job, family, policy)

    def score(prompts: list[str], completions: list[str], row: list[int], **_: Any) -> list[float]:
        return [family.score(tasks[index], text).value for index, text in zip(row, completions, strict=True)]

    class Turn(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.order = pipe.recv()
            if self.order == "stop":
                raise SystemExit
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seconds = time.perf_counter() - self.started
            pipe.send((seconds, measure(model.state_dict()) if self.order == "eval" else None))

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=policy.model,
            processing_class=policy.tokenizer,
            reward_funcs=score,
            args=_trl_settings(config, job, folder),
            train_dataset=Dataset.from_dict({"prompt": [t.prompt for t in tasks], "row": list(range(len(tasks)))}),
            callbacks=[Turn()],
        )
        pipe.send("ready")
        trainer.train()


def _plan_tasks(config: RunConfig, job: Job, family: Any, policy: Any) -> list[Any]:
    """The tasks that shoal will draw, in the same order."""
    from shoal.group import GroupShape, plan_group
    from shoal.seeds import derive_seed

    shape = GroupShape(size=config.batch.group_size, max_tokens=config.engine.max_tokens, temperature=1.0)
    beacons = [derive_seed("beacon", config.seed, step) for step in range(1, job.steps + 2)]
    return [
        plan_group(family, policy.tokenizer, shape, step=step, beacon=beacon, index=index).task
        for step, beacon in enumerate(beacons, 1)
        for index in range(config.batch.groups)
    ]


def _trl_settings(config: RunConfig, job: Job, folder: str) -> Any:
    from trl import GRPOConfig

    settings, rollouts = config.learner, config.batch.groups * config.batch.group_size
    micro = min(job.trl_micro, rollouts)
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=rollouts // micro,
        num_generations=config.batch.group_size,
        max_completion_length=config.engine.max_tokens,
        temperature=config.engine.temperature,
        learning_rate=settings.lr,
        lr_scheduler_type="constant",
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        beta=0.0,
        loss_type="dapo",
        epsilon=settings.loss.eps_low,
        delta=settings.loss.delta,
        scale_rewards="group" if settings.advantage == "zscore" else "none",
        shuffle_dataset=False,
        max_steps=job.steps + 2,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=config.seed,
        bf16=False,
        gradient_checkpointing=False,
    )


if __name__ == "__main__":
    main()
