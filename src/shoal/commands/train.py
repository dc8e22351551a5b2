"""Commands for one machine: `train`, `sft`, `eval`, `rollouts`, `calibrate`, `convert`, `filter`, `tasks`."""

import argparse
import logging
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, flag
from shoal.errors import ConfigError
from shoal.util.files import check_output

if TYPE_CHECKING:
    from shoal.config.run import RunConfig
    from shoal.train.offline_filter import FilterProgress

logger = logging.getLogger(__name__)

EXIT_STALE = 1
"""the calibration no longer holds"""
_PROGRESS_S = 5.0
"""interval of progress lines if there is no terminal"""
_COLUMN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _add_eval(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="run directory (default: that of CONFIG)")
    add("--json", type=Path, metavar="FILE", help="write the figures as JSON (default: not written)")
    add("--markdown", type=Path, metavar="FILE", help="write the figures as a table (default: not written)")
    text = "run directories, checkpoints, folders or hub ids to compare in a table (default: one model)"
    add("--models", nargs="+", metavar="M", help=text)
    text = "columns of the table: task families, or task sets as FORMAT:PLACE (default: the tasks of CONFIG)"
    add("--tasks", nargs="+", metavar="TASKS", help=text)


def _add_calibrate(parser: CommandParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id of a policy, or a run directory")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype in the verifier (%(default)s)")
    common.DEVICE(parser)
    add("--backend", choices=("torch",), default="torch", help="engine of verifier and workers (%(default)s)")
    add("--samples", type=int, default=4096, metavar="N", help="honest chunks of 32 tokens to measure (%(default)s)")
    add("--rate", type=float, default=1e-9, metavar="R", help="false positives per rollout, all checks (%(default)s)")
    add("--confidence", type=float, default=0.95, metavar="C", help="confidence in that rate (%(default)s)")
    add("--tokens", type=int, default=128, metavar="N", help="length of the rollouts (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="lowest temperature the run will use (%(default)s)")
    add("--threads", type=int, default=2, metavar="N", help="thread count to compare with 1 (%(default)s)")
    add("--mixed", action="store_true", help="allow workers to use the other of the two dtypes too")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--task", default="", metavar="NAME", help="prompts of a task family (default: random tokens)")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="prompts from a text file, one per line")
    add("--attacks", type=int, default=256, metavar="N", help="rollouts of each attack, to measure power (%(default)s)")
    text = "longest answer of the run, for which power is measured (default: --tokens)"
    add("--answer-tokens", type=int, default=0, metavar="N", help=text)
    text = "learning rate of the run: how far a previous version is from the present one (%(default)s)"
    add("--step", type=float, default=1e-5, metavar="LR", help=text)
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and rollouts (%(default)s)")
    add("--out", type=Path, default=Path("calibration.json"), metavar="FILE", help="file to write (%(default)s)")
    add("--check", type=Path, metavar="FILE", help="write nothing; check whether FILE holds for the current weights")


def _add_filter(parser: CommandParser) -> None:
    add = parser.add_argument
    add("tasks", nargs="+", metavar="TASKS", help="files, folders or FORMAT:PLACE, see docs/tasks.md")
    add("--model", required=True, metavar="M", help="folder or hub id of a policy, or a run directory")
    add("--name", default="", metavar="NAME", help="name of the model in the set (default: the last part of M)")
    add("--k", type=int, default=8, metavar="K", help="attempts per task (%(default)s)")
    add("--min", type=float, default=0.125, metavar="R", help="lowest pass rate to keep (%(default)s)")
    add("--max", type=float, default=0.5, metavar="R", help="highest pass rate to keep (%(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="maximum tokens per attempt (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="sampling temperature (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights (%(default)s)")
    common.DEVICE(parser)
    add("--slots", type=int, default=256, metavar="N", help="maximum number of concurrent attempts (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the attempts (%(default)s)")
    add("--out", type=Path, default=Path("tasks.jsonl"), metavar="FILE", help="task set to write (%(default)s)")


def run_train(args: argparse.Namespace) -> int:
    """Train a policy on one machine, or resume the run."""
    config = common.load_inputs(args.inputs)
    if args.dry_run:
        return _check_settings(config, resumes=not args.fresh)
    from shoal.train.rundir import run_path

    common.log_loading(f"run {run_path(config)}")
    from shoal.train.loop import run_training
    from shoal.train.resume import run_as_rank

    return run_as_rank(config.policy.device, lambda ranks: run_training(config, fresh=args.fresh, ranks=ranks))


def run_sft(args: argparse.Namespace) -> int:
    """Run supervised fine-tuning only, on the tasks' demonstrations."""
    config = common.load_inputs(args.inputs)
    if args.dry_run:
        return _check_settings(config, resumes=False)
    common.log_loading(f"SFT of {config.name}")
    from shoal.learner.parallel import Ranks
    from shoal.tasks.open import check_tasks
    from shoal.train.resume import run_as_rank
    from shoal.train.sft import run_sft as fine_tune

    def work(ranks: Ranks) -> int:
        fitted = check_tasks(config)
        ranks.announce("sft", config=fitted.model_dump_json())
        print(fine_tune(fitted, ranks))
        return 0

    return run_as_rank(config.policy.device, work)


def run_eval(args: argparse.Namespace) -> int:
    """Evaluate a run, or the initial policy, on held-out tasks."""
    if not (args.inputs or args.run or args.models):
        raise ConfigError("name a run directory or a CONFIG.toml to evaluate, e.g. `shoal eval runs/latest`")
    run_dir, config = common.load_run(args.inputs, args.run)
    if args.dry_run:
        return _check_settings(config, resumes=False)
    if args.tasks and not args.models:
        raise ConfigError("--tasks: name the models of the table with --models")
    common.log_loading(f"evaluation of {config.name}")
    if args.models:
        return _run_table(config, args)
    from shoal.train.eval import run_eval as evaluate

    return evaluate(config, _find_run(config, run_dir), json_path=args.json, markdown_path=args.markdown)


def _run_table(config: "RunConfig", args: argparse.Namespace) -> int:
    from shoal.train.eval import run_table

    table = run_table(config, args.models, args.tasks or (), json_path=args.json, markdown_path=args.markdown)
    print(table.to_markdown(), end="")
    return 0


def _find_run(config: "RunConfig", run_dir: Path | None) -> Path | None:
    """The run directory to evaluate, or None for the initial policy if the run has not started."""
    from shoal.train.rundir import is_started, run_path

    if run_dir is None:
        path = run_path(config)
        return path if is_started(path) else None
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory")
    return run_dir


def _check_settings(config: "RunConfig", *, resumes: bool) -> int:
    """Dry run: check everything that needs no model, and write nothing. `resumes`: also check an existing run."""
    from shoal.tasks.open import check_tasks, pin_tasks
    from shoal.train.rundir import check_config

    config = check_tasks(pin_tasks(config))
    if config.policy.path and not Path(config.policy.path).is_dir():
        logger.warning(f"policy.path: there is no folder {config.policy.path!r}; a dry run does not ask the hub for it")
    elif config.policy.path:
        policy = config.policy.model_copy(update={"path": str(Path(config.policy.path).resolve())})
        config = config.model_copy(update={"policy": policy})
    if resumes:
        check_config(config)
    return common.print_settings(config)


def run_calibrate(args: argparse.Namespace) -> int:
    """Measure honest rollouts of a model and set its check thresholds."""
    check_output(args.out)
    common.log_loading(f"calibration of {args.model}")
    from shoal.calibrate.calibrate import CalibrationPlan, format_table, run_calibration, run_recheck
    from shoal.calibrate.power import format_power
    from shoal.calibrate.prompts import PromptSource

    source = PromptSource(file=args.prompts, **common.pick_flags(args, "tokens", "temperature", "seed", "task"))
    own = common.pick_flags(
        args, "samples", "rate", "confidence", "threads", "mixed", "device", "attacks", "step", "answer_tokens"
    )
    plan = CalibrationPlan(source=source, **own)
    if args.check is not None:
        complaints = run_recheck(args.model, args.dtype, plan, args.check)
        print("\n".join(complaints) or f"{args.check} holds for these weights")
        return EXIT_STALE if complaints else 0
    calibration = run_calibration(args.model, args.dtype, plan)
    calibration.save(args.out)
    print(format_table(calibration) + format_power(calibration), end="")
    print(f"written to {args.out}")
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Convert a GGUF file (extra `smollm`) or a trained version to a float32 policy folder."""
    common.log_loading(args.source)
    from shoal.learner.checkpoint import find_newest
    from shoal.policy.convert import convert_model
    from shoal.util.disk import guard_disk

    newest = find_newest(Path(args.source) / "checkpoints")
    with guard_disk(args.folder):
        policy = convert_model(args.source if newest is None else str(newest / "policy"), args.folder)
    chat = "with a chat template" if policy.tokenizer.chat_template else "without a chat template"
    print(f"{args.folder}: {policy.num_parameters:,} parameters, {len(policy.tokenizer):,} tokens, {chat}")
    return 0


def run_filter(args: argparse.Namespace) -> int:
    """Measure a model's pass rate on each task of a set, or resume."""
    _check_filter(args)
    check_output(args.out)
    common.log_loading(f"pass rates of {args.model}")
    from shoal.train import offline_filter
    from shoal.util.process import tune_process

    tune_process(args.threads)
    sampling = ("max_tokens", "temperature", "dtype", "device", "seed", "slots")
    own = common.pick_flags(args, "model", "out", "name", "k", *sampling)
    plan = offline_filter.FilterPlan(places=tuple(args.tasks), low=args.min, high=args.max, **own)
    if _COLUMN.fullmatch(plan.column) is None:
        raise ConfigError(f"--name: invalid name {plan.column!r}; use 1 to 64 letters, digits, dots, dashes, _")
    report = offline_filter.run_filter(plan, _ProgressLine().show)
    print(report.to_text(), end="")
    rated = f"tasks.filter.model={plan.column} tasks.filter.min={args.min} tasks.filter.max={args.max}"
    print(f"written to {args.out}; to train on the kept tasks: tasks.set={args.out} {rated}")
    return 0


class _ProgressLine:
    """Progress: one line that is rewritten on a terminal, otherwise a new line every few seconds."""

    def __init__(self) -> None:
        self._shown_s = 0.0

    def show(self, progress: "FilterProgress") -> None:
        figures = f"pass rate {progress.rate:.3f}  {progress.tokens_per_s:.0f} tokens/s"
        text = f"{progress.done}/{progress.total} tasks  {figures}"
        is_last = progress.done == progress.total
        if sys.stderr.isatty():
            print(f"\r{text}\x1b[K", end="\n" if is_last else "", file=sys.stderr, flush=True)
        elif is_last or time.monotonic() - self._shown_s >= _PROGRESS_S:
            self._shown_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def _check_filter(args: argparse.Namespace) -> None:
    for name, least in (("k", 1), ("max_tokens", 1), ("slots", 1), ("threads", 0), ("seed", 0)):
        common.check_least(f"--{name.replace('_', '-')}", getattr(args, name), least)
    if not 0.0 <= args.min <= args.max <= 1.0:
        raise ConfigError(f"--min, --max: must be rates with 0 <= min <= max <= 1, got {args.min} and {args.max}")
    if not 0.0 < args.temperature <= 10.0:
        raise ConfigError(f"--temperature: must be above 0 and at most 10, got {args.temperature}")


def run_tasks(args: argparse.Namespace) -> int:
    """List the task families, or describe one."""
    from shoal.tasks.registry import describe_family, list_families

    if args.name is None:
        for name in list_families():
            print(f"{name:<12} {describe_family(name).summary.splitlines()[0]}")
        return 0
    card = describe_family(args.name)
    print(f"{card.name}: {card.summary}\n\noptions (as tasks.options.NAME=VALUE):")
    for option in card.options:
        print(f"  {option.name:<14} {option.doc} (allowed: {option.allowed}; default: {option.default})")
    print(f"\nexample prompt:\n  {card.task.prompt}\ncorrect completion:\n  {card.demonstration}")
    return 0


def run_rollouts(args: argparse.Namespace) -> int:
    """Show the rollouts a run was trained on, with their rewards."""
    from shoal.train.rollout_files import list_steps, show_groups

    steps = list_steps(args.run / "rollouts")
    if not steps:
        raise ConfigError(f"{args.run}: no rollouts found; give a run directory, e.g. runs/latest")
    step = max(steps) if args.step is None else args.step
    if step not in steps:
        raise ConfigError(f"--step: no rollouts of step {step}; available: {min(steps)} to {max(steps)}")
    text = show_groups(steps[step], groups=args.group, num_groups=args.groups, num_rollouts=args.samples)
    if not text:
        raise ConfigError(f"--group: none of {', '.join(map(str, args.group))} was trained in step {step}")
    print(f"step {step} of {args.run}\n\n{text}")
    return 0


_RESUMES = "; the same command resumes from the last checkpoint"
_INPUTS = (common.name_inputs(), common.DRY_RUN)
_SUBJECT = (common.name_inputs("CONFIG is a TOML file or a run directory"), common.DRY_RUN)
_SETTINGS = "shoal.config.run:RunConfig"
_SOURCE = flag(
    "source",
    metavar="SOURCE",
    help="a run directory, or the folder of a version, whose adapter is merged; a GGUF file; or smollm2 for "
    "SmolLM2-135M-Instruct from PyPI",
)
_FOLDER = flag("folder", type=Path, metavar="OUT", help="folder to write; must not exist")
_FAMILY = flag("name", nargs="?", metavar="NAME", help="family to describe (default: list all)")
_ROLLOUTS = (
    flag("run", type=Path, metavar="RUN", help="run directory, e.g. runs/latest"),
    flag("--step", type=int, metavar="N", help="training step (default: the last)"),
    flag("--group", type=int, nargs="+", default=(), metavar="I", help="groups by index (default: the first ones)"),
    flag("--groups", type=int, default=3, metavar="N", help="how many groups (%(default)s)"),
    flag("--samples", type=int, default=8, metavar="N", help="rollouts of each group (%(default)s)"),
)
COMMANDS = (
    CliCommand("train", run_train, (*_INPUTS, common.FRESH, common.NPROC), settings=_SETTINGS, resumes=_RESUMES),
    CliCommand("sft", run_sft, (*_INPUTS, common.NPROC), settings=_SETTINGS, resumes=_RESUMES),
    CliCommand("eval", run_eval, (*_SUBJECT, _add_eval)),
    CliCommand("rollouts", run_rollouts, _ROLLOUTS),
    CliCommand("calibrate", run_calibrate, (_add_calibrate,)),
    CliCommand("convert", run_convert, (_SOURCE, _FOLDER)),
    CliCommand("filter", run_filter, (_add_filter,), resumes="; the same command resumes it"),
    CliCommand("tasks", run_tasks, (_FAMILY,)),
)
