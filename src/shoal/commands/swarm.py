"""`shoal run`, `prepare`, `report` and `demo`: a whole swarm on this machine, or prepared for several machines."""

import argparse
import logging
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.common import DRY_RUN, FRESH, CliCommand, flag, print_settings
from shoal.errors import ConfigError
from shoal.util.aio import interrupt_on_sigterm
from shoal.util.disk import guard_disk

if TYPE_CHECKING:
    from shoal.launch.process import Part
    from shoal.launch.settings import LaunchConfig

logger = logging.getLogger(__name__)


def run_run(args: argparse.Namespace) -> int:
    """Run a whole swarm on this machine to its report, or resume it."""
    config = _load(args)
    if args.dry_run:
        return print_settings(config)
    from shoal.launch.layout import SwarmPaths

    logger.info(f"run {config.run} in {SwarmPaths.of(config).root}: {_LOADING}")
    with interrupt_on_sigterm(), guard_disk(SwarmPaths.of(config).root):
        from shoal.launch.run import start_swarm

        code, report = start_swarm(config, fresh=args.fresh)
    if report:
        print(report)
    return code


def run_prepare(args: argparse.Namespace) -> int:
    """Prepare a swarm without starting it: v0, its calibration, keys."""
    config = _load(args)
    if args.dry_run:
        return print_settings(config)
    from shoal.launch.layout import SwarmPaths

    layout = SwarmPaths.of(config)
    logger.info(f"run {config.run} in {layout.root}: {_LOADING}")
    from shoal.launch.deploy import describe_hosts
    from shoal.launch.parts import list_parts, list_servers
    from shoal.launch.prepare import log_checks, prepare_swarm
    from shoal.launch.run import describe_finished, hold_swarm, is_finished

    with guard_disk(layout.root), hold_swarm(layout):
        prepared = prepare_swarm(config, layout)
        if is_finished(config, layout.root):
            logger.warning(describe_finished(config))
            if not config.swarm.is_spread:
                logger.info("to serve its ledger and its versions again:")
                _print_commands(list_servers(prepared))
            return 0
        log_checks(prepared)
        if config.swarm.is_spread:
            logger.info(f"run {config.run} is ready in {layout.root}; commands for each machine:")
            print(describe_hosts(prepared))
            return 0
        logger.info(f"run {config.run} is ready in {layout.root}; start all of it with `shoal run`, or one by one:")
        _print_commands(list_parts(prepared))
    return 0


def _print_commands(parts: "Iterable[Part]") -> None:
    for part in parts:
        print(shlex.join(("shoal", *part.arguments)))


def run_report(args: argparse.Namespace) -> int:
    """Write the report of a swarm that is not running."""
    from shoal.launch.layout import SwarmPaths

    layout = SwarmPaths(args.run.resolve())
    if not layout.settings.exists():
        raise ConfigError(f"{args.run}: not the folder of a swarm (no launch/settings.toml in it)")
    logger.info(f"report of {layout.root}: {_LOADING}")
    from shoal.config.run import build_config
    from shoal.config.toml import read_toml
    from shoal.launch.prepare import PreparedSwarm
    from shoal.launch.report import write_report
    from shoal.launch.run import hold_swarm
    from shoal.launch.settings import LaunchConfig

    config = build_config(LaunchConfig, read_toml(layout.settings), ())
    ledger = args.ledger or layout.ledger
    if not ledger.is_file():
        hosts = config.swarm.hosts
        trust = f" --ca {hosts.ca}" if hosts.ca else ""
        copy = f"shoal ledger verify {hosts.coordinator or 'URL'} --copy run.db{trust}"
        raise ConfigError(f"{ledger}: no such file; copy the ledger with `{copy}` and give --ledger run.db")
    with guard_disk(layout.root), hold_swarm(layout):
        print(write_report(PreparedSwarm(config, layout, {}), ledger.resolve()))
    return 0


def _load(args: argparse.Namespace) -> "LaunchConfig":
    from shoal.launch.settings import load_launch
    from shoal.redteam.registry import WORKER_FAMILIES, list_names
    from shoal.tasks.open import check_tasks

    config = check_tasks(load_launch(getattr(args, "config", None), args.inputs))
    for name in config.swarm.cheats:
        if name not in list_names(WORKER_FAMILIES):
            raise ConfigError(f"swarm.cheats: {name[:80]!r} is not a worker attack; see `shoal redteam list`")
    return config


_SETTINGS = "shoal.launch.settings:LaunchConfig"
_LOADING = "loading libraries"
_RESUMES = "; the same command resumes"
_DEMO = "run a small swarm on built-in settings; one worker cheats"
_FILE = "a TOML file as for `shoal train`, with a [swarm] table"
_PREPARE = (
    flag("config", type=Path, metavar="CONFIG", help=_FILE),
    flag("inputs", nargs="*", default=[], metavar="key=value", help="override settings, e.g. swarm.workers=3"),
    DRY_RUN,
)
_OVERRIDE = "override the built-in settings, e.g. steps=8; --dry-run prints them"
_BUILT_IN = flag("inputs", nargs="*", metavar="key=value", help=_OVERRIDE)
_REPORT = (
    flag("run", type=Path, metavar="RUN_DIR", help="folder of the swarm, on the trainer's machine"),
    flag("--ledger", type=Path, metavar="FILE", help="copy of the ledger (default: RUN_DIR/coordinator/ledger.db)"),
)
COMMANDS = (
    CliCommand("run", run_run, (*_PREPARE, FRESH), settings=_SETTINGS, resumes=_RESUMES),
    CliCommand("prepare", run_prepare, _PREPARE, settings=_SETTINGS),
    CliCommand("report", run_report, _REPORT),
    CliCommand("demo", run_run, (_BUILT_IN, DRY_RUN, FRESH), text=_DEMO, settings=_SETTINGS, resumes=_RESUMES),
)
