"""The command `shoal`.

Exit codes: 0 done, 1 the disk refused or the answer is no, 2 a mistake in flags, settings or files (each one sentence
on stderr), 130 interrupted.
Nothing here imports torch before a command needs it, so help and errors come at once.
"""

import argparse
import io
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import __version__
from shoal.commands.broadcast_flags import add_commands as add_broadcast
from shoal.commands.canary import add_commands as add_canary
from shoal.commands.convert import add_convert
from shoal.commands.diloco import add_commands as add_diloco
from shoal.commands.filter import add_filter
from shoal.commands.launch import add_commands as add_launch
from shoal.commands.ledger_flags import add_commands as add_ledger
from shoal.commands.redteam import add_commands as add_redteam
from shoal.commands.roles import add_commands as add_roles
from shoal.commands.swarm_flags import add_commands as add_swarm
from shoal.commands.verify_flags import add_commands as add_verify
from shoal.commands.work import add_commands as add_work
from shoal.disk import is_full
from shoal.errors import EXIT_MISTAKE, AwayError, ConfigError, DiskError

if TYPE_CHECKING:
    from shoal.config import RunConfig

EXIT_DISK = 1
EXIT_STALE = 1
"""A calibration that no longer holds."""
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
"""What a shell reports for a command whose reader went away."""

_EXAMPLES = """examples:
  shoal demo
  shoal run examples/demo.toml swarm.workers=3
  shoal train examples/sort.toml
  shoal train examples/sort.toml seed=1 learner.loss.name=grpo
  shoal train examples/sort.toml --dry-run
  shoal eval runs/sort-seed0
  shoal tasks sort
  shoal calibrate runs/sort-seed0 --task sort
  shoal coordinator --run demo params.steps=10
  shoal join http://127.0.0.1:8700 --owner owner.key
  shoal status http://127.0.0.1:8700 --watch
  shoal canary plant http://127.0.0.1:8700 --key operator.key
  shoal diloco train data.source=book.txt steps=400

`shoal train --help` and `shoal coordinator --help` list every setting.
"""


SPIN_COUNT = "5000"
"""How long a waiting OpenMP thread spins before it sleeps. By default it spins for milliseconds, which on a machine
with anything else to do makes every operator wait for the other's time slice: 128 us become more than 9,000."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read by the library when torch is imported, so set before
    _spare_signs()
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()  # a reader that went away shows here, where it is handled
    except ConfigError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except (AwayError, DiskError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_DISK
    except KeyboardInterrupt as interrupt:
        print(f"\nshoal: interrupted{interrupt}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return EXIT_PIPE
    except OSError as error:
        if not is_full(error):
            raise
        print(f"shoal: what was to be printed cannot be written ({error.strerror})", file=sys.stderr)
        _close_stdout()
        return EXIT_DISK


def _close_stdout() -> None:
    """The interpreter flushes stdout once more at its end; give it something to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _spare_signs() -> None:
    """Let a sign that a terminal or a log has no code for cost the sign, and not the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Parser(argparse.ArgumentParser):
    """A parser whose help may end with the table of all settings, made only when help is asked for."""

    describe_settings: Callable[[], str] | None = None

    def format_help(self) -> str:
        text = super().format_help()
        return text if self.describe_settings is None else f"{text}\nsettings:\n{self.describe_settings()}"


def _run_command(argv: Sequence[str] | None) -> int:
    parser = _build_parser()
    # argparse ends the positionals at the first flag and so refuses `a.toml --dry-run x=1`; what it leaves over is
    # taken up here.
    args, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or not hasattr(args, "inputs")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_MISTAKE
    if rest:
        args.inputs = [*args.inputs, *rest]
    try:
        return int(args.command(args))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(args.goes_on) from None  # told by `main`, with what holds for this command


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="shoal",
        description="Reinforcement learning of language models on machines nobody has to trust.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    parser.set_defaults(command=None, goes_on="")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")

    train = _add_command(commands, "train", _run_train, "train a policy; the same command resumes an unfinished run")
    train.describe_settings = _describe_settings
    train.add_argument("--fresh", action="store_true", help="move an existing run directory to DIR.old-N first")
    _add_command(commands, "warmup", _run_warmup, "supervised warm-up only, on the task family's demonstrations")
    evaluate = _add_command(commands, "eval", _run_eval, "evaluate a run, or the starting policy, on held-out tasks")
    evaluate.add_argument("--run", type=Path, metavar="DIR", help="run directory (default: that of CONFIG)")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON (default: not written)")
    evaluate.add_argument("--markdown", type=Path, metavar="FILE", help="write them as a table (default: not written)")
    text = "run directories, folders or hub ids: a table of all of them on --tasks (default: one model)"
    evaluate.add_argument("--models", nargs="+", metavar="M", help=text)
    text = "families by name, or task sets as FORMAT:PLACE: the columns of the table"
    evaluate.add_argument("--tasks", nargs="+", metavar="TASKS", help=text)

    _add_calibrate(commands)
    add_convert(commands)
    add_filter(commands)
    add_launch(commands)
    add_roles(commands)
    add_work(commands)
    add_redteam(commands)
    add_diloco(commands)
    add_broadcast(commands)
    add_swarm(commands)
    add_verify(commands)
    add_canary(commands)
    add_ledger(commands)

    tasks = commands.add_parser("tasks", help="list the task families, or describe one", allow_abbrev=False)
    tasks.add_argument("name", nargs="?", metavar="NAME", help="family to describe (default: list all)")
    tasks.set_defaults(command=_run_tasks)
    return parser


def _describe_settings() -> str:
    from shoal.config import RunConfig
    from shoal.schema import describe_settings

    return describe_settings(RunConfig, max(100, shutil.get_terminal_size((120, 24)).columns))


def _add_command(
    commands: "argparse._SubParsersAction[_Parser]", name: str, command: Callable[[argparse.Namespace], int], text: str
) -> _Parser:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    source = "CONFIG is a TOML file or a run directory" if name == "eval" else "CONFIG is a TOML file"
    parser.add_argument(
        "inputs",
        nargs="*",
        metavar="CONFIG key=value",
        help=f"{source} (default: the built-in settings); key=value sets one setting over it, e.g. learner.lr=1e-4",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings, check them and stop")
    parser.set_defaults(command=command)
    if name in ("train", "warmup"):
        parser.set_defaults(goes_on="; a run or warm-up goes on from its last checkpoint")
    return parser


def _add_calibrate(commands: "argparse._SubParsersAction[_Parser]") -> None:
    text = "measure how honest rollouts of a model look to its verifier, and pick the thresholds of its checks"
    parser = commands.add_parser("calibrate", help=text, description=text, allow_abbrev=False)
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or hub id of a policy, or a run directory")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="as the verifier loads it (%(default)s)")
    add("--backend", choices=("torch",), default="torch", help="engine of verifier and workers (%(default)s)")
    add("--samples", type=int, default=4096, metavar="N", help="honest chunks of 32 tokens to measure (%(default)s)")
    add("--rate", type=float, default=1e-9, metavar="R", help="false alarms per rollout, all checks (%(default)s)")
    add("--confidence", type=float, default=0.95, metavar="C", help="that they are no more frequent (%(default)s)")
    add("--tokens", type=int, default=128, metavar="N", help="length of the rollouts (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="lowest that will be used (%(default)s)")
    add("--threads", type=int, default=2, metavar="N", help="thread count to compare with 1 (%(default)s)")
    add("--mixed", action="store_true", help="let workers use the other of the two dtypes as well")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--task", default="", metavar="NAME", help="prompts of a task family (default: random tokens)")
    prompts.add_argument("--prompts", type=Path, metavar="FILE", help="prompts from a text file, one per line")
    add("--seed", type=int, default=0, metavar="N", help="seed of prompts and rollouts (%(default)s)")
    add("--out", type=Path, default=Path("calibration.json"), metavar="FILE", help="file to write (%(default)s)")
    add("--check", type=Path, metavar="FILE", help="write nothing; see whether this file holds for the present weights")
    parser.set_defaults(command=_run_calibrate)


def _run_train(args: argparse.Namespace) -> int:
    config = _load_inputs(*_split_inputs(args.inputs))
    if args.dry_run:
        # --fresh would move the old directory aside, which a dry run must not do
        return _print_settings(config, store=not args.fresh)
    from shoal.train import run_training

    return run_training(config, fresh=args.fresh)


def _run_warmup(args: argparse.Namespace) -> int:
    config = _load_inputs(*_split_inputs(args.inputs))
    if args.dry_run:
        return _print_settings(config, store=False)
    from shoal.warmup import run_warmup

    print(run_warmup(config))
    return 0


def _run_eval(args: argparse.Namespace) -> int:
    target, overrides = _split_inputs(args.inputs)
    target = args.run if target is None else target
    run_dir = args.run
    if target is not None and target.is_dir():
        run_dir = run_dir or target
        target = target / "config.toml"
    config = _load_inputs(target, overrides)
    if args.dry_run:
        return _print_settings(config, store=False)
    if args.models or args.tasks:
        return _run_table(config, args)
    from shoal.eval import run_eval

    return run_eval(config, _find_run(config, run_dir), json_path=args.json, markdown_path=args.markdown)


def _run_table(config: "RunConfig", args: argparse.Namespace) -> int:
    if not (args.models and args.tasks):
        raise ConfigError("--models, --tasks: a table needs both, its rows and its columns")
    from shoal.evaltable import run_table

    table = run_table(config, args.models, args.tasks, json_path=args.json, markdown_path=args.markdown)
    print(table.to_markdown(), end="")
    return 0


def _run_calibrate(args: argparse.Namespace) -> int:
    from shoal.files import check_output

    check_output(args.out)
    from shoal.toploc.calibrate import Plan, format_table, run_calibration, run_recheck
    from shoal.toploc.prompts import Source

    source = Source(tokens=args.tokens, temperature=args.temperature, seed=args.seed, task=args.task, file=args.prompts)
    plan = Plan(
        source=source,
        samples=args.samples,
        rate=args.rate,
        confidence=args.confidence,
        threads=args.threads,
        mixed=args.mixed,
    )
    note = partial(print, file=sys.stderr, flush=True)
    if args.check is not None:
        complaints = run_recheck(args.model, args.dtype, plan, args.check, note)
        print("\n".join(complaints) or f"{args.check} holds for these weights")
        return EXIT_STALE if complaints else 0
    calibration = run_calibration(args.model, args.dtype, plan, note)
    calibration.save(args.out)
    print(format_table(calibration), end="")
    print(f"written to {args.out}")
    return 0


def _run_tasks(args: argparse.Namespace) -> int:
    from shoal.tasks.registry import describe_family, list_families

    if args.name is None:
        for name in list_families():
            print(f"{name:<12} {describe_family(name).summary.splitlines()[0]}")
        return 0
    card = describe_family(args.name)
    print(f"{card.name}: {card.summary}\n\noptions (as tasks.options.NAME=VALUE):")
    for option in card.options:
        print(f"  {option.name:<14} {option.doc} (allowed: {option.allowed}; default: {option.default})")
    print(f"\nexample prompt:\n  {card.task.prompt}\nand a correct completion:\n  {card.demonstration}")
    return 0


def _split_inputs(inputs: list[str]) -> tuple[Path | None, list[str]]:
    """The configuration's path, which is the first input unless that is an override, and the overrides."""
    if inputs and "=" not in inputs[0]:
        return Path(inputs[0]), inputs[1:]
    return None, inputs


def _load_inputs(path: Path | None, overrides: list[str]) -> "RunConfig":
    from shoal.config import load_config

    return load_config(path, overrides)


def _find_run(config: "RunConfig", run_dir: Path | None) -> Path | None:
    """The run directory to evaluate; None: there is none, so the starting policy is meant."""
    from shoal.rundir import is_started, run_path

    if run_dir is None:
        path = run_path(config)
        return path if is_started(path) else None
    if not run_dir.is_dir():
        raise ConfigError(f"{run_dir}: no such run directory")
    return run_dir


def _print_settings(config: "RunConfig", *, store: bool) -> int:
    """A dry run: everything that can be checked without a model is checked; `store` writes config.toml for the run."""
    from shoal.config import dump_config
    from shoal.rundir import store_config
    from shoal.tasks.source import check_tasks

    check_tasks(config)
    print(dump_config(config), end="")
    if store:
        print(f"shoal: settings are in {store_config(config)}", file=sys.stderr)
    return 0
