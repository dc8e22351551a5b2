"""`shoal trainer`, `shoal evaluator` and `shoal origin`: the trusted core of a swarm, beside its coordinator.

What a command needs is imported when it runs, so that help and mistakes come at once.
"""

import argparse
import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands
from shoal.commands.serving import Ending, build_limits, check_least, open_tickets, parse_address, run_loop
from shoal.disk import spare_words
from shoal.errors import EXIT_UNWANTED
from shoal.units import parse_bytes

if TYPE_CHECKING:
    from shoal.config import RunConfig
    from shoal.eval import EvalResult


def add_commands(commands: Commands) -> None:
    """Add the parsers of these commands."""
    _add_trainer(commands)
    _add_evaluator(commands)
    _add_origin(commands)


def _add_parser(commands: Commands, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
    return parser


def _add_trainer(commands: Commands) -> None:
    text = "train a swarm's policy on the batches of its coordinator; the same command resumes it"
    parser = _add_parser(commands, "trainer", text)
    add = parser.add_argument
    _add_inputs(parser, "CONFIG is a TOML file")
    add("--coordinator", required=True, metavar="URL", help="its address, or the file of the run's descriptor")
    add("--origin", type=Path, required=True, metavar="DIR", help="folder that `shoal origin` serves on this machine")
    add("--folder", type=Path, metavar="DIR", help="the node's keys and receipts (default: `node` in the run's folder)")
    add("--owner", type=Path, metavar="FILE", help="the owner's key (default: one is made in the node's folder)")
    add("--ca", type=Path, metavar="FILE", help="certificates to trust (default: the system's)")
    add("--fresh", action="store_true", help="move an existing run directory to DIR.old-N first")
    parser.set_defaults(command=run_trainer)


def _add_evaluator(commands: Commands) -> None:
    text = "evaluate versions on held-out tasks as a trainer writes them, until the last one is"
    parser = _add_parser(commands, "evaluator", text)
    _add_inputs(parser, "CONFIG is a TOML file or a run directory")
    parser.set_defaults(command=run_evaluator)


def _add_origin(commands: Commands) -> None:
    text = "serve a run's versions to relays, and take new ones from the trainer of this machine"
    parser = _add_parser(commands, "origin", text)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="folder of its own for what is served")
    add("--run", required=True, metavar="NAME", help="name of the run")
    add("--key", type=Path, required=True, metavar="FILE", help="the publisher's key, see `shoal keygen`")
    add("--listen", default="127.0.0.1:8600", metavar="HOST:PORT", help="where to serve (%(default)s); port 0: any")
    add("--keep", type=int, default=5, metavar="N", help="versions to keep (%(default)s)")
    add("--shard-size", default="8MiB", metavar="BYTES", help="size of the pieces (%(default)s)")
    add("--anchor-every", type=int, default=8, metavar="N", help="versions between two full ones (%(default)s)")
    add("--rate", metavar="RATE", help="most that is sent, e.g. 200Mbit or 25MB a second (default: no limit)")
    add("--peer-rate", metavar="RATE", help="most that is sent to one address (default: no limit)")
    add("--tickets", action="store_true", help="serve only who shows a ticket signed by the publisher or a signer")
    add("--signer", action="append", default=[], metavar="HEX", help="public key whose tickets are good; repeatable")
    add("--behind-proxy", action="store_true", help="this machine's own address stands for others' and is not trusted")
    parser.set_defaults(command=run_origin)


def _add_inputs(parser: argparse.ArgumentParser, source: str) -> None:
    text = f"{source} (default: the built-in settings); key=value sets one setting over it, e.g. learner.lr=1e-4"
    parser.add_argument("inputs", nargs="*", metavar="CONFIG key=value", help=text)


def run_trainer(args: argparse.Namespace) -> int:
    """Train until the last step or a signal."""
    config = _load_inputs(args.inputs)
    from shoal.node.session import SessionError
    from shoal.swarm.asking import RefusedError
    from shoal.trainer.errors import TrainerError
    from shoal.trainer.run import TrainerPlace, start_trainer

    place = TrainerPlace(
        coordinator=args.coordinator, origin=args.origin, folder=args.folder, owner=args.owner, authority=args.ca
    )
    try:
        return start_trainer(config, place, fresh=args.fresh, note=_note)
    except (SessionError, TrainerError, RefusedError) as error:
        print(f"shoal: {error}", file=sys.stderr)
        return EXIT_UNWANTED


def run_evaluator(args: argparse.Namespace) -> int:
    """Evaluate until the last version or a signal."""
    run, config = _find_run(args.inputs)
    from shoal.node.room import outlast_disk
    from shoal.node.waits import RoleWaits
    from shoal.trainer.evaluator import run_evaluator as evaluate

    def report(version: int, result: "EvalResult") -> None:
        with spare_words():
            print(f"v{version}  pass@1 {result.pass_1}  greedy {result.greedy}", flush=True)

    def work() -> "Coroutine[None, None, int]":
        return evaluate(config, run, note=_note, report=report)

    return asyncio.run(outlast_disk(work, run, RoleWaits("evaluator", note=_note)))


def run_origin(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    check_least("--keep", args.keep, 1)
    check_least("--anchor-every", args.anchor_every, 1)
    from shoal.node.room import outlast_disk
    from shoal.node.waits import RoleWaits

    return run_loop(outlast_disk(lambda: _serve(args), args.data, RoleWaits("origin", note=_note)), Ending(0))


async def _serve(args: argparse.Namespace) -> int:
    from shoal.keys import Key
    from shoal.node.spans import SpanLog
    from shoal.trainer.origin import run_origin as serve

    key = Key.load(args.key)
    host, port = parse_address(args.listen)
    args.data.mkdir(parents=True, exist_ok=True)
    spans, tickets = SpanLog(args.data / "spans.jsonl", "origin"), open_tickets(args, key.public)
    try:
        await serve(
            args.data,
            run=args.run,
            key=key,
            host=host,
            port=port,
            keep=args.keep,
            shard_size=parse_bytes(args.shard_size),
            anchor_every=args.anchor_every,
            limits=build_limits(args),
            tickets=tickets,
            spans=spans,
            note=_note,
        )
    finally:
        spans.close()
        if tickets is not None:
            tickets.close()
    return 0


def _load_inputs(inputs: list[str]) -> "RunConfig":
    """The settings of the file that comes first, if one does, with the others laid over it."""
    from shoal.config import load_config

    if inputs and "=" not in inputs[0]:
        return load_config(Path(inputs[0]), inputs[1:])
    return load_config(None, inputs)


def _find_run(inputs: list[str]) -> "tuple[Path, RunConfig]":
    """The run directory of the settings, or the one that is named, with its own."""
    from shoal.rundir import run_path

    if inputs and Path(inputs[0]).is_dir():
        return Path(inputs[0]), _load_inputs([str(Path(inputs[0]) / "config.toml"), *inputs[1:]])
    config = _load_inputs(inputs)
    return run_path(config), config


def _note(text: str) -> None:
    with spare_words():
        print(text, file=sys.stderr, flush=True)
