"""`shoal diloco reduce` and `shoal diloco join`: one run across sites, over HTTP.

    shoal diloco reduce run.toml --start-peers 2
    shoal diloco join http://HOST:8710 run.toml --reducer KEY

What is needed is imported when a command runs, so that help and mistakes come at once.
"""

import argparse
import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.broadcast_flags import Commands
from shoal.errors import AwayError, ConfigError

if TYPE_CHECKING:
    from shoal.diloco.http.service import ReducerConfig, Service
    from shoal.diloco.plan import Plan
    from shoal.diloco.settings import DilocoConfig
    from shoal.diloco.state import OuterState

_INPUTS = "a TOML file with the run's settings, and key=value over it; the same for reducer and sites"


def add_http(parts: Commands) -> None:
    """Add the parsers of these commands."""
    text = "average for peers elsewhere: the reducer of a run, which goes on from its folder when it is started again"
    reduce = parts.add_parser("reduce", help=text, description=text, allow_abbrev=False)
    reduce.add_argument("inputs", nargs="*", metavar="CONFIG key=value", help=_INPUTS)
    reduce.add_argument("--data", type=Path, metavar="DIR", help="folder of the reducer (default: OUT/NAME-reducer)")
    reduce.add_argument("--listen", default="127.0.0.1:8710", metavar="HOST:PORT", help="default: %(default)s")
    reduce.add_argument("--public", action="store_true", help="allow an address that other machines reach")
    count = "peers that must have joined before the first round"
    reduce.add_argument("--start-peers", type=int, default=1, metavar="N", help=f"{count} (default: %(default)s)")
    whom = "public key that may take part; repeat for each (default: whoever does the work of joining)"
    reduce.add_argument("--peer", action="append", default=[], metavar="KEY", help=whom)
    lost = "the folder is lost: take the state that most peers hold (put reducer.key into the new folder first)"
    reduce.add_argument("--rebuild", action="store_true", help=lost)
    reduce.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM file (default: plain HTTP)")
    reduce.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM file")
    reduce.set_defaults(command=run_reduce, goes_on="; the same command goes on from its folder")

    text = "train as one site of a run, with an own copy of the text; inner steps go on while the reducer is away"
    join = parts.add_parser("join", help=text, description=text, allow_abbrev=False)
    join.add_argument("url", metavar="URL", help="address of the reducer, http://HOST:PORT or https://HOST")
    join.add_argument("inputs", nargs="*", metavar="CONFIG key=value", help=_INPUTS)
    join.add_argument("--reducer", metavar="KEY", help="the reducer's public key (default: the one it shows)")
    join.add_argument("--also", action="append", default=[], metavar="URL", help="another address of it; repeatable")
    join.add_argument("--authority", type=Path, metavar="FILE", help="certificates to trust instead of the system's")
    join.add_argument("--delay", type=int, default=0, metavar="N", help="inner steps during a transfer (default: 0)")
    join.set_defaults(command=run_join, goes_on="; the same command goes on from the run's newest state")


def run_reduce(args: argparse.Namespace) -> int:
    """Serve as the reducer until told to stop."""
    from shoal.commands.swarm_call import run_until_stopped
    from shoal.disk import guard_disk

    config, settings = _load_run(args.inputs), _build_settings(args)
    data = args.data or Path(config.out).expanduser() / f"{config.name}-reducer"
    if args.rebuild and not (data / "reducer.key").exists():
        raise ConfigError(f"{data / 'reducer.key'}: peers know the reducer by its key; put it there to rebuild")
    data.mkdir(parents=True, exist_ok=True)
    with guard_disk(data):
        return run_until_stopped(lambda: _serve(config, settings, data, rebuild=args.rebuild))


def run_join(args: argparse.Namespace) -> int:
    """Train as one site."""
    from shoal.diloco.averager import AveragerAwayError
    from shoal.diloco.http.client import ReducerAwayError, fetch_card
    from shoal.diloco.http.messages import TalkError
    from shoal.diloco.http.service import settle_plan
    from shoal.swarm.link import parse_place

    config = _load_run(args.inputs)
    if not 0 <= args.delay < config.rules.interval:
        raise ConfigError(f"--delay: must be from 0 to {config.rules.interval - 1}, less than rules.interval")
    places = [parse_place(url, args.authority) for url in (args.url, *args.also)]
    try:
        reducer, plan = asyncio.run(fetch_card(places[0], args.reducer))
    except TalkError as error:
        raise ConfigError(f"{args.url}: not the reducer that was named, or none ({error})") from None
    except ReducerAwayError as error:
        raise AwayError(f"the reducer does not answer: {error}") from None
    from shoal.diloco.plan import Plan
    from shoal.diloco.site import Way, run_site

    if settle_plan(Plan(config.name, plan.sizes, config.rules, config.data.lanes)) != plan:
        raise ConfigError("the run has another name, data.lanes or rules than these settings; use the reducer's file")
    say = partial(print, file=sys.stderr, flush=True)
    if args.reducer is None:
        say(f"trusting the reducer {reducer} on sight; name it with --reducer to be sure")
    try:
        print(run_site(config, plan, Way(places, reducer, args.delay), say))
    except AveragerAwayError as error:
        raise AwayError(f"the reducer does not answer: {error}") from None
    return 0


async def _serve(config: "DilocoConfig", settings: "ReducerConfig", data: Path, *, rebuild: bool) -> int:
    from shoal.diloco.http.service import open_reducer

    plan, initial = await asyncio.to_thread(_find_start, config, data)
    async with open_reducer(settings, data, plan, initial=None if rebuild else initial) as service:
        print(describe_service(service, data), flush=True)
        await service.run()
    return 0


def _find_start(config: "DilocoConfig", data: Path) -> "tuple[Plan, OuterState | None]":
    """The plan of a run, and its first state if the folder is new."""
    from shoal.diloco.http.service import read_plan

    if (known := read_plan(data)) is not None:
        return known, None
    from shoal.diloco.site import make_start

    return make_start(config)


def describe_service(service: "Service", data: Path) -> str:
    """Where everything is, and how to join."""
    status = json.loads(service.desk.describe())
    phase = "waiting for the peers' state" if service.desk.is_searching else f"state {status['outer'][:16]}"
    lines = [
        f"reducer of run {service.desk.plan.run}: {phase}",
        f"  serving   {service.url}",
        f"  folder    {data}",
        f"  to join   shoal diloco join {service.url} CONFIG --reducer {service.public}",
    ]
    return "\n".join(lines)


def _load_run(inputs: list[str]) -> "DilocoConfig":
    from shoal.commands.diloco import load_inputs

    config = load_inputs(inputs)
    if not config.data.source:
        raise ConfigError("data.source: name a text to train on, e.g. data.source=book.txt")
    return config


def _build_settings(args: argparse.Namespace) -> "ReducerConfig":
    from shoal.commands.serving import parse_address
    from shoal.config import build_config
    from shoal.diloco.http.service import ReducerConfig
    from shoal.keys import check_public
    from shoal.swarm.hosts import is_loopback

    host, port = parse_address(args.listen)
    if not args.public and not is_loopback(host):
        raise ConfigError(f"{host}: reached from other machines; add --public if that is meant")
    if (args.tls_cert is None) != (args.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key: give both or none")
    named = {
        "host": host,
        "port": port,
        "start_peers": args.start_peers,
        "peers": tuple(check_public(text) for text in args.peer),
        "tls_certificate": str(args.tls_cert or ""),
        "tls_key": str(args.tls_key or ""),
    }
    return build_config(ReducerConfig, named, ())
