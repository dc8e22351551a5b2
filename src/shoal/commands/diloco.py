"""`shoal diloco`: train on several sites that average their weights periodically.

    shoal diloco train      all peers in this process, on a text
    shoal diloco key        print the key of a site, which the reducer must know
    shoal diloco reduce     run the reducer, which averages for remote peers
    shoal diloco join       train as one of the peers

One run across sites, over HTTP:

    shoal diloco key run.toml                                          on each site
    shoal diloco reduce run.toml --peer KEY1 --peer KEY2 --start-peers 2
    shoal diloco join http://HOST:8710 run.toml --reducer KEY
"""

import argparse
import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, flag
from shoal.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from shoal.diloco.http.service import ReducerService
    from shoal.diloco.http.settings import ReducerConfig
    from shoal.diloco.outer import DilocoPlan
    from shoal.diloco.settings import DilocoConfig
    from shoal.diloco.state import OuterState

logger = logging.getLogger(__name__)


def _add_reduce(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder of the reducer (default: OUT/NAME-reducer)")
    add("--listen", default="127.0.0.1:8710", metavar="HOST:PORT", help="address to listen on (default: %(default)s)")
    add("--public", action="store_true", help="allow an address that other machines can reach")
    count = "peers that must have joined before the first round"
    add("--start-peers", type=int, default=1, metavar="N", help=f"{count} (default: %(default)s)")
    whom = "public key of a peer, as `shoal diloco key` prints it on its site; repeatable"
    add("--peer", action="append", default=[], metavar="KEY", help=whom)
    others = "let others join too, with at most this share of the named peers' weight together (default: none)"
    add("--open-share", type=float, default=0.0, metavar="SHARE", help=others)
    lost = "the folder was lost: recover the state that most peers hold (copy reducer.key into the new folder first)"
    add("--rebuild", action="store_true", help=lost)
    add("--tls-cert", default="", metavar="FILE", help="certificate, PEM (default: plain HTTP)")
    add("--tls-key", default="", metavar="FILE", help="private key of the certificate, PEM")


def _add_join(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--reducer", metavar="KEY", help="the reducer's public key (default: trust the key it presents)")
    add("--also", action="append", default=[], metavar="URL", help="another address of the reducer; repeatable")
    add("--delay", type=int, default=0, metavar="N", help="inner steps during a transfer (default: 0)")


def run_train(args: argparse.Namespace) -> int:
    """Train with all peers in this process, or resume the run."""
    config = _load_settings(args.inputs)
    if args.dry_run:
        return common.print_settings(config)
    common.log_loading(f"DiLoCo run {config.name}")
    from shoal.diloco.train import run_local

    print(run_local(config))
    return 0


def run_key(args: argparse.Namespace) -> int:
    """Print the public key of this site, and create the key if there is none."""
    from shoal.diloco.site import open_site_key

    print(open_site_key(_load_settings(args.inputs)).public)
    return 0


def run_reduce(args: argparse.Namespace) -> int:
    """Run the reducer, which averages for remote peers, or resume it."""
    from shoal.util.disk import guard_disk

    config, settings = _load_settings(args.inputs), _build_settings(args)
    data = args.data or Path(config.out).expanduser() / f"{config.name}-reducer"
    if args.rebuild and not (data / "reducer.key").exists():
        raise ConfigError(f"{data / 'reducer.key'}: missing; peers identify the reducer by this key")
    data.mkdir(parents=True, exist_ok=True)
    common.log_loading(f"reducer of {config.name}")
    with guard_disk(data):
        return common.run_until_stopped(_serve(config, settings, data, rebuild=args.rebuild))


def run_join(args: argparse.Namespace) -> int:
    """Train as one site of a run; continues while the reducer is away."""
    from shoal.diloco.http.client import ReducerUnavailableError, fetch_card
    from shoal.diloco.http.messages import MessageError
    from shoal.diloco.http.service import settle_plan
    from shoal.diloco.round import AveragerUnavailableError
    from shoal.net.client import parse_endpoint
    from shoal.net.retry import RefusedError

    config = _load_settings(args.inputs)
    if os.environ.get("RANK", "0") != "0":
        return _follow_site(config)
    if not 0 <= args.delay < config.rules.interval:
        raise ConfigError(f"--delay: must be from 0 to {config.rules.interval - 1}, less than rules.interval")
    places = [parse_endpoint(url, args.ca) for url in (args.url, *args.also)]
    common.log_loading(f"site of {config.name}, reducer {args.url}")
    try:
        reducer, plan = asyncio.run(fetch_card(places[0], args.reducer))
    except MessageError as error:
        raise ConfigError(f"{args.url}: not a reducer, or not the one in --reducer ({error})") from None
    except ReducerUnavailableError as error:
        raise UnavailableError(f"the reducer does not answer: {error}") from None
    from shoal.diloco.outer import DilocoPlan
    from shoal.diloco.site import ReducerAccess, run_site
    from shoal.learner.parallel import Ranks
    from shoal.train.resume import run_as_rank

    if settle_plan(DilocoPlan(config.name, plan.sizes, config.rules, config.data.lanes)) != plan:
        raise ConfigError("name, data.lanes or rules differ from those of the run; use the reducer's settings file")
    if args.reducer is None:
        logger.warning("trusting the reducer's key %s on first use; pass --reducer to pin it", reducer)

    def train(ranks: Ranks) -> int:
        print(run_site(config, plan, ReducerAccess(places, reducer, args.delay), ranks))
        return 0

    try:
        return run_as_rank(config.policy.device, train)
    except AveragerUnavailableError as error:
        did = "refuses this site" if isinstance(error.__cause__, RefusedError) else "does not answer"
        raise UnavailableError(f"the reducer {did}: {error}") from None


def _follow_site(config: "DilocoConfig") -> int:
    """A rank other than the first: it only computes."""
    from shoal.diloco.inner import follow_inner
    from shoal.train.resume import run_as_rank

    return run_as_rank(config.policy.device, lambda _: 0, follow_inner)


async def _serve(config: "DilocoConfig", settings: "ReducerConfig", data: Path, *, rebuild: bool) -> int:
    from shoal.diloco.http.service import open_reducer

    plan, initial = await asyncio.to_thread(_find_start, config, data)
    async with open_reducer(settings, data, plan, initial=None if rebuild else initial) as service:
        print(describe_service(service, data), flush=True)
        await service.run()
    return 0


def _find_start(config: "DilocoConfig", data: Path) -> "tuple[DilocoPlan, OuterState | None]":
    """The run's plan, and its initial state if the folder is new."""
    from shoal.diloco.http.service import read_plan

    if (known := read_plan(data)) is not None:
        return known, None
    from shoal.diloco.site import make_start

    return make_start(config)


def describe_service(service: "ReducerService", data: Path) -> str:
    """Describe the state, the address, the folder and how to join."""
    context = service.context
    phase = "waiting for the peers' state" if context.is_recovering else f"state {context.reducer.state.hash[:16]}"
    lines = [
        f"reducer of run {context.plan.run}: {phase}",
        f"  serving   {service.url}",
        f"  folder    {data}",
        f"  to join   shoal diloco join {service.url} CONFIG --reducer {service.public}",
    ]
    return "\n".join(lines)


def _load_settings(inputs: list[str]) -> "DilocoConfig":
    from shoal.config.run import build_config
    from shoal.config.toml import read_toml
    from shoal.diloco.settings import DilocoConfig

    path, overrides = common.split_inputs(inputs)
    config = build_config(DilocoConfig, {} if path is None else read_toml(path), overrides)
    if not config.data.source:
        raise ConfigError("data.source: missing; set the text to train on, e.g. data.source=book.txt")
    return config


def _build_settings(args: argparse.Namespace) -> "ReducerConfig":
    from shoal.config.run import build_config
    from shoal.diloco.http.settings import ReducerConfig
    from shoal.identity.keys import check_public
    from shoal.net.sockets import is_loopback

    host, port = common.parse_address(args.listen)
    if not args.public and not is_loopback(host):
        raise ConfigError(f"{host}: reachable from other machines; add --public if that is intended")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError("--tls-cert and --tls-key: give both or neither")
    named = {
        "host": host,
        "port": port,
        "start_peers": args.start_peers,
        "peers": tuple(check_public(text) for text in args.peer),
        "open_share": args.open_share,
        "tls_certificate": args.tls_cert,
        "tls_key": args.tls_key,
    }
    return build_config(ReducerConfig, named, ())


_SHARED = "a TOML file with the run's settings, and key=value overrides; the same for the reducer and all sites"
_INPUTS = flag("inputs", nargs="*", metavar="CONFIG key=value", help=_SHARED)
_URL = flag("url", metavar="URL", help="address of the reducer, http://HOST:PORT or https://HOST")
_JOINED = "; the same command resumes from the run's newest state"
_ACTIONS = (
    CliCommand(
        "train",
        run_train,
        (common.name_inputs(example="data.source=book.txt"), common.DRY_RUN),
        settings="shoal.diloco.settings:DilocoConfig",
        resumes="; the same command resumes from the last checkpoint",
    ),
    CliCommand("key", run_key, (_INPUTS,)),
    CliCommand("reduce", run_reduce, (_INPUTS, _add_reduce), resumes="; the same command resumes from its folder"),
    CliCommand("join", run_join, (_URL, _INPUTS, _add_join, common.AUTHORITY, common.NPROC), resumes=_JOINED),
)
_ABOUT = "train one model on several sites that average periodically (DiLoCo)"
COMMANDS = (CliCommand("diloco", text=_ABOUT, actions=_ACTIONS),)
