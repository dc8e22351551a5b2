"""`shoal filter`: how hard each task of a set is for a model, and which ones are worth training on."""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.filter import Progress

PAUSE_S = 5.0
"""between two lines where there is no terminal"""
_COLUMN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_filter(commands: Commands) -> None:
    """Add the parser of this command."""
    text = "measure how often a model solves each task of a set, and write its pass rates; the same command resumes it"
    parser = commands.add_parser("filter", help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("tasks", nargs="+", metavar="TASKS", help="files, folders or FORMAT:PLACE, see docs/tasks.md")
    add("--model", required=True, metavar="M", help="folder or hub id of a policy, or a run directory")
    add("--name", default="", metavar="NAME", help="of the model in the set (default: the last part of M)")
    add("--k", type=int, default=8, metavar="K", help="attempts at each task (%(default)s)")
    add("--min", type=float, default=0.125, metavar="R", help="lowest pass rate to keep (%(default)s)")
    add("--max", type=float, default=0.5, metavar="R", help="highest pass rate to keep (%(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="longest attempt (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="of sampling (%(default)s)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights (%(default)s)")
    add("--slots", type=int, default=256, metavar="N", help="attempts written side by side (%(default)s)")
    add("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)")
    add("--seed", type=int, default=0, metavar="N", help="of the attempts (%(default)s)")
    add("--out", type=Path, default=Path("tasks.jsonl"), metavar="FILE", help="set to write (%(default)s)")
    parser.set_defaults(command=run_command, goes_on="; the same command goes on where it stopped")


def run_command(args: argparse.Namespace) -> int:
    """Measure, and print the report."""
    _check_flags(args)
    from shoal.files import check_output

    check_output(args.out)
    from shoal.filter import FilterPlan, run_filter
    from shoal.runtime import tune_process

    tune_process(args.threads)
    plan = FilterPlan(
        places=tuple(args.tasks),
        model=args.model,
        out=args.out,
        name=args.name,
        k=args.k,
        low=args.min,
        high=args.max,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        dtype=args.dtype,
        seed=args.seed,
        slots=args.slots,
    )
    if _COLUMN.fullmatch(plan.column) is None:
        raise ConfigError(f"--name: {plan.column!r} is no name of a model: 1 to 64 letters, digits, dots, dashes")
    report = run_filter(plan, _ProgressLine().tell)
    print(report.to_text(), end="")
    print(f"written to {args.out}; to train on what is kept, name it in tasks.set and the bounds in tasks.filter")
    return 0


class _ProgressLine:
    """One line that is rewritten on a terminal, and a line now and then anywhere else."""

    def __init__(self) -> None:
        self._told_s = 0.0

    def tell(self, progress: "Progress") -> None:
        figures = f"pass rate {progress.rate:.3f}  {progress.tokens_per_s:.0f} tokens/s"
        text = f"{progress.done}/{progress.total} tasks  {figures}"
        is_last = progress.done == progress.total
        if sys.stderr.isatty():
            print(f"\r{text}\x1b[K", end="\n" if is_last else "", file=sys.stderr, flush=True)
        elif is_last or time.monotonic() - self._told_s >= PAUSE_S:
            self._told_s = time.monotonic()
            print(text, file=sys.stderr, flush=True)


def _check_flags(args: argparse.Namespace) -> None:
    for name, least in (("k", 1), ("max_tokens", 1), ("slots", 1), ("threads", 0), ("seed", 0)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {least}, got {getattr(args, name)}")
    if not 0.0 <= args.min <= args.max <= 1.0:
        raise ConfigError(f"--min, --max: must be rates with 0 <= min <= max <= 1, got {args.min} and {args.max}")
    if not 0.0 < args.temperature <= 10.0:
        raise ConfigError(f"--temperature: must be above 0 and at most 10, got {args.temperature}")
