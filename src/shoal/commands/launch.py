"""`shoal prepare`, `shoal run` and `shoal demo`: a whole swarm on this machine, or made ready for several.

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands

if TYPE_CHECKING:
    from shoal.launch.settings import LaunchConfig


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    text = "start a whole swarm on this machine and run it to its report; the same command resumes it"
    _add_command(commands, "run", run_run, text, fresh=True)
    text = "make a swarm ready and start nothing: v0, calibration, recipe, keys, settings of its coordinator"
    _add_command(commands, "prepare", run_prepare, text, fresh=False)
    text = "`shoal run` on built-in settings: two workers, one that cheats, two validators, a few minutes"
    demo = commands.add_parser("demo", help=text, description=text, allow_abbrev=False)
    demo.add_argument("inputs", nargs="*", metavar="key=value", help="settings over the built-in ones, e.g. steps=8")
    _add_flags(demo, fresh=True)
    demo.set_defaults(command=run_demo)


def _add_command(
    commands: Commands, name: str, command: Callable[[argparse.Namespace], int], text: str, *, fresh: bool
) -> None:
    parser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    source = "a TOML file as for `shoal train`, with a table [swarm] beside"
    parser.add_argument("config", type=Path, metavar="CONFIG", help=source)
    parser.add_argument("inputs", nargs="*", metavar="key=value", help="settings over it, e.g. swarm.workers=3")
    _add_flags(parser, fresh=fresh)
    parser.describe_settings = describe_settings
    parser.set_defaults(command=command)


def _add_flags(parser: argparse.ArgumentParser, *, fresh: bool) -> None:
    if fresh:
        parser.add_argument("--fresh", action="store_true", help="move an existing run directory to DIR.old-N first")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved settings, check them and stop")


def describe_settings() -> str:
    """Every setting of a swarm."""
    import shutil

    from shoal.launch.settings import LaunchConfig
    from shoal.schema import describe_settings as describe

    return describe(LaunchConfig, max(100, shutil.get_terminal_size((120, 24)).columns))


def run_run(args: argparse.Namespace) -> int:
    """Run the swarm of a file."""
    return _run(args, args.config)


def run_demo(args: argparse.Namespace) -> int:
    """Run the built-in swarm."""
    return _run(args, None)


def run_prepare(args: argparse.Namespace) -> int:
    """Make the swarm of a file ready."""
    config = _load(args, args.config)
    if args.dry_run:
        return _print_settings(config)
    from shoal.disk import guard_disk
    from shoal.launch.deploy import describe_stations
    from shoal.launch.layout import Layout
    from shoal.launch.prepare import prepare_swarm, tell_dial
    from shoal.launch.roster import list_parts
    from shoal.launch.run import hold_swarm

    layout = Layout.of(config)
    with guard_disk(layout.root), hold_swarm(layout):
        prepared = prepare_swarm(config, layout, _note)
        tell_dial(prepared, _note)
        if config.swarm.is_spread:
            _note(f"run {config.run} is ready in {layout.root}; what to type on which machine:")
            print(describe_stations(prepared))
            return 0
        _note(f"run {config.run} is ready in {layout.root}; `shoal run` starts all of it, or each by itself:")
        for part in list_parts(prepared):
            print(shlex.join(("shoal", *part.arguments)))
    return 0


def _run(args: argparse.Namespace, path: Path | None) -> int:
    config = _load(args, path)
    if args.dry_run:
        return _print_settings(config)
    from shoal.disk import guard_disk
    from shoal.launch.layout import Layout
    from shoal.launch.run import start_swarm

    with guard_disk(Layout.of(config).root):
        return start_swarm(config, _note, fresh=args.fresh)


def _load(args: argparse.Namespace, path: Path | None) -> "LaunchConfig":
    from shoal.launch.settings import load_launch
    from shoal.tasks.source import check_tasks

    config = load_launch(path, args.inputs)
    check_tasks(config)
    return config


def _print_settings(config: "LaunchConfig") -> int:
    from shoal.config import dump_config

    print(dump_config(config), end="")
    return 0


def _note(text: str) -> None:
    from shoal.disk import spare_words

    with spare_words():
        print(text, flush=True)
