"""`shoal diloco`: training across sites that average once in a while.

    shoal diloco train      all peers in this process, on a text
    shoal diloco reduce     average for peers elsewhere (see `diloco_http`)
    shoal diloco join       train as one of them

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands
from shoal.commands.diloco_http import add_http
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.diloco.settings import DilocoConfig


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    text = "train one model on several sites that average once in a while (DiLoCo)"
    diloco = commands.add_parser("diloco", help=text, description=text, allow_abbrev=False)
    parts = diloco.add_subparsers(metavar="COMMAND", title="commands", required=True)
    _add_train(parts)
    add_http(parts)


def _add_train(parts: Commands) -> None:
    text = "train with all peers in this process; the same command resumes an unfinished run"
    train = parts.add_parser("train", help=text, description=text, allow_abbrev=False)
    source = "a TOML file (default: the built-in settings)"
    example = "key=value sets one setting over it, e.g. data.source=book.txt"
    train.add_argument("inputs", nargs="*", metavar="CONFIG key=value", help=f"{source}; {example}")
    train.add_argument("--dry-run", action="store_true", help="print the resolved settings, check them and stop")
    train.describe_settings = describe_settings
    train.set_defaults(command=run_train, goes_on="; a run goes on from its last checkpoint")


def describe_settings() -> str:
    """Every setting of a run."""
    import shutil

    from shoal.diloco.settings import DilocoConfig
    from shoal.schema import describe_settings as describe

    return describe(DilocoConfig, max(100, shutil.get_terminal_size((120, 24)).columns))


def load_inputs(inputs: list[str]) -> "DilocoConfig":
    """The settings that a command's arguments name: a file first, unless there is none, then overrides."""
    from shoal.config import build_config
    from shoal.diloco.settings import DilocoConfig
    from shoal.toml import read_toml

    has_file = bool(inputs) and "=" not in inputs[0]
    data = read_toml(Path(inputs[0])) if has_file else {}
    return build_config(DilocoConfig, data, inputs[1:] if has_file else inputs)


def run_train(args: argparse.Namespace) -> int:
    """Train with the local engine."""
    config = load_inputs(args.inputs)
    if not config.data.source:
        raise ConfigError("data.source: name a text to train on, e.g. data.source=book.txt")
    if args.dry_run:
        from shoal.config import dump_config

        print(dump_config(config), end="")
        return 0
    from shoal.diloco.train import run_local

    print(run_local(config, partial(print, file=sys.stderr, flush=True)))
    return 0
