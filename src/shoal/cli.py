"""The command `shoal`: its parser, its help, and what each error means for the exit code.

Exit codes: 0 done, 1 the disk refused or the answer is no, 2 a mistake in flags, settings or files (each one sentence
on stderr), 130 interrupted.
Nothing here imports torch before a command needs it, so help and errors come at once.
"""

import argparse
import difflib
import io
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module

from shoal import __version__
from shoal.commands.common import (
    CliCommand,
    CommandParser,
    add_command,
    add_environment,
    add_logging,
    describe_command,
    flag,
)
from shoal.errors import EXIT_MISTAKE, ConfigError, DiskError, UnavailableError
from shoal.util.aio import EXIT_INTERRUPTED
from shoal.util.disk import is_full
from shoal.util.logs import choose_level, log_to_stderr

EXIT_DISK = 1
EXIT_PIPE = 141
"""What a shell reports for a command whose reader went away."""
SPIN_COUNT = "5000"
"""How long a waiting OpenMP thread spins before it sleeps. By default it spins for milliseconds, which on a machine
with anything else to do makes every operator wait for the other's time slice: 128 us become more than 9,000."""

_MODULES = (
    *("train", "swarm", "plan", "roles", "redteam", "diloco", "weights", "coordinator"),
    *("node", "query", "owner", "admin", "verify", "canary", "ledger"),
)
"""of `shoal.commands`"""
HEADINGS = {
    "one machine": ("train", "sft", "eval", "rollouts", "filter", "tasks", "convert", "calibrate"),
    "swarm": ("plan", "demo", "run", "prepare", "report"),
    "roles": ("coordinator", "trainer", "evaluator", "origin", "relay", "validator", "worker"),
    "inspect": ("status", "leaderboard", "explain", "verify", "ledger"),
    "administer": ("keygen", "node", "owner", "admin", "canary"),
    "other": ("weights", "diloco", "redteam", "completion", "help"),
}
"""how the help groups the commands"""
_DESCRIPTION = "Reinforcement learning of language models on untrusted machines."
_START = """start here:
  shoal demo                 a swarm on this machine learns, and catches a cheat
  shoal train CONFIG.toml    train on this machine
  shoal worker URL           lend this machine to a run
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # read by the library when torch is imported, so set before
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for what the terminal or log cannot encode
    try:
        try:
            return _run_command(argv)
        finally:
            sys.stdout.flush()  # a reader that went away shows here, where it is handled
    except ConfigError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_MISTAKE
    except (UnavailableError, DiskError) as error:
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
        print(f"shoal: cannot write the output ({error.strerror})", file=sys.stderr)
        _close_stdout()
        return EXIT_DISK


class _MainParser(CommandParser):
    """The parser of all commands, whose help fits one screen."""

    def format_help(self) -> str:
        rows = "".join(f"  {heading:<12} {'  '.join(names)}\n" for heading, names in HEADINGS.items())
        return (
            f"usage: shoal COMMAND ...\n\n{_DESCRIPTION}\n\n{_START}\ncommands:\n{rows}\n"
            "`shoal help` describes each command in a line, `shoal COMMAND --help` in full.\n"
            "All take -v, -q, --log-level and --log-json; --version prints the version.\n"
        )


def build_parser() -> CommandParser:
    """The parser of all commands."""
    parser = _MainParser(prog="shoal", description=_DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"shoal {__version__}")
    add_logging(parser)
    parser.set_defaults(command=None, options=())
    subparsers = parser.add_subparsers(metavar="COMMAND", title="commands", parser_class=CommandParser)
    for command in list_commands():
        add_command(subparsers, command)
    return parser


def list_commands() -> list[CliCommand]:
    """All commands, as their modules declare them."""
    declared = [command for name in _MODULES for command in import_module(f"shoal.commands.{name}").COMMANDS]
    return [*declared, *COMMANDS]


def run_help(args: argparse.Namespace) -> int:
    """Describe every command in one line, one command in full, or a group of its settings (`help train learner`)."""
    known = {command.name: command for command in list_commands()}
    if args.words:
        depth = _find_depth(known, args.words)
        build_parser().parse_args([*args.words[:depth], "--help", *args.words[depth:]])
    for heading, names in HEADINGS.items():
        print(f"{heading}:")
        for name in names:
            command = known[name]
            actions = f" ({', '.join(action.name for action in command.actions)})" if command.actions else ""
            print(f"  {name:<12} {describe_command(command)}{actions}")
    return 0


def _find_depth(known: dict[str, CliCommand], words: list[str]) -> int:
    """How many words name the command whose group of settings the next word is; all without such a command."""
    for depth, word in enumerate(words, 1):
        if word not in known:
            break
        if known[word].settings:
            return depth
        known = {action.name: action for action in known[word].actions}
    return len(words)


def run_completion(args: argparse.Namespace) -> int:
    """Print a completion script for a shell."""
    import shtab

    print(shtab.complete(build_parser(), shell=args.shell))
    return 0


COMMANDS = (
    CliCommand("help", run_help, (flag("words", nargs="*", metavar="COMMAND", help="command to describe (all)"),)),
    CliCommand("completion", run_completion, (flag("shell", choices=("bash", "zsh", "tcsh"), help="your shell"),)),
)


def _run_command(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    # argparse ends the positionals at the first flag and so refuses `a.toml --dry-run x=1`; what it leaves over is
    # taken up here.
    args, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if text.startswith("-") or not hasattr(args, "inputs")]
    if unknown:
        parser.error(_explain_unknown(unknown, args, list(sys.argv[1:] if argv is None else argv)))
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_MISTAKE
    if rest:
        args.inputs = [*args.inputs, *rest]
    if args.settings:
        args.inputs = add_environment(args.inputs, args.settings)
    if getattr(args, "nproc", 0) and "RANK" not in os.environ:
        return _run_ranks(args, list(sys.argv[1:] if argv is None else argv))
    level = choose_level(args.log_level, verbose=args.verbose, quiet=args.quiet)
    try:
        with log_to_stderr(args.role, level, as_json=args.log_json):
            return int(args.command(args))
    except KeyboardInterrupt:
        without = ", without --fresh" if args.resumes and getattr(args, "fresh", False) else ""
        raise KeyboardInterrupt(args.resumes + without) from None  # printed by `main`, with what holds for this command


def _run_ranks(args: argparse.Namespace, argv: list[str]) -> int:
    """Start the same command once per rank; in a rank, `--nproc` says nothing new."""
    from shoal.launch.ranks import MAX_RANKS, run_ranks

    if not 1 <= args.nproc <= MAX_RANKS:
        raise ConfigError(f"--nproc: must be from 1 to {MAX_RANKS}, got {args.nproc}")
    return run_ranks(main, argv, args.nproc)


def _explain_unknown(words: list[str], args: argparse.Namespace, argv: list[str]) -> str:
    """What to write instead of arguments that no flag takes: `--learning_rate 1e-4` is how other programs do it."""
    flags = [word for word in words if word.startswith("--")]
    if not flags:
        return f"unrecognized arguments: {' '.join(words)}"
    hints = []
    for word in flags:
        if near := difflib.get_close_matches(word, args.options, n=1, cutoff=0.8):
            hints.append(f"did you mean {near[0]}?")
        elif hasattr(args, "inputs"):
            hints.append(_name_setting(word, args, argv))
    kind = "flags" if len(flags) > 1 else "flag"
    return f"unknown {kind} {' '.join(flags)}" + (f"; {', '.join(hints)}" if hints else "")


def _name_setting(word: str, args: argparse.Namespace, argv: list[str]) -> str:
    """What to write instead of a flag: the setting that it would be here, under whatever name."""
    from shoal.config.help import find_keys, find_note

    name, _, value = word.removeprefix("--").partition("=")
    after = argv[argv.index(word) + 1 :] if word in argv else []
    if not value and after and not after[0].startswith("-"):
        value = after[0]
    if name == "config" and value:
        return f"write {value} without --config"
    model = pkgutil.resolve_name(args.settings or "shoal.config.run:RunConfig")
    name = name.replace("-", "_")
    keys, note = find_keys(model, name), find_note(name)
    if not keys:
        return f"{name}: {note}" if note else f"no setting has a name like {name[:40]!r}"
    written = " or ".join(f"{key}={value or 'VALUE'}" for key in keys)
    return f"write {written}" + (f" ({note})" if note else "")


def _close_stdout() -> None:
    """The interpreter flushes stdout once more at its end; give it something to flush to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
