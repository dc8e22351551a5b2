"""`shoal plan`: memory, time, traffic and cost of a run before anything is rented."""

import argparse
import json
import logging

from shoal.commands.common import JSON, CliCommand, CommandParser, check_least, flag, split_inputs
from shoal.errors import ConfigError

logger = logging.getLogger(__name__)


def _add_plan(parser: CommandParser) -> None:
    add = parser.add_argument
    add("--gpus", default="1xcpu", metavar="NxNAME", help="devices of the trainer, e.g. 8xH100 (%(default)s)")
    text = "machines that generate, e.g. 20x4090,10x4x3090: 20 with one device and 10 with four (%(default)s)"
    add("--workers", default="1xcpu", metavar="NxNAME,...", help=text)
    add(
        "--validators", metavar="NxNAME", help="machines that validate (default: swarm.validators of the first workers)"
    )
    add("--relays", type=int, metavar="N", help="relays between origin and machines (default: swarm.relays)")
    add("--uplink-gbps", type=float, default=10.0, metavar="G", help="Gbit/s of the origin (%(default)s)")
    add("--relay-gbps", type=float, default=10.0, metavar="G", help="Gbit/s of each relay (%(default)s)")
    add("--worker-gbps", type=float, default=1.0, metavar="G", help="Gbit/s of each machine that pulls (%(default)s)")
    add("--prompt-tokens", type=int, default=256, metavar="N", help="mean length of prompts (%(default)s)")
    text = "mean length of completions (default: engine.max_tokens)"
    add("--completion-tokens", type=int, metavar="N", help=text)
    text = "share of the sampled groups that has a learning signal and is trained (%(default)s)"
    add("--kept", type=float, default=1.0, metavar="R", help=text)
    text = "US dollars per device and hour, for the cost of a step; may be repeated"
    add("--price", action="append", default=[], metavar="NAME=USD", help=text)
    text = "change an assumption, e.g. train_utilisation=0.35 (docs/plan.md lists them); may be repeated"
    add("--assume", action="append", default=[], metavar="NAME=VALUE", help=text)


def run_plan(args: argparse.Namespace) -> int:
    """Estimate memory, time, traffic and cost of a run, and warn what will not fit."""
    from shoal.config.run import build_config
    from shoal.config.toml import read_toml
    from shoal.launch.settings import DEMO, LaunchConfig

    path, overrides = split_inputs(args.inputs)
    config = build_config(LaunchConfig, read_toml(path or DEMO), overrides)
    _check_flags(args)
    from shoal.plan.devices import Machines, parse_machines, parse_prices, parse_trainer
    from shoal.plan.settings import change_assumptions, read_settings

    assumed, prices = change_assumptions(args.assume), parse_prices(args.price)
    lengths = {"prompt_tokens": args.prompt_tokens, "completion_tokens": args.completion_tokens, "kept": args.kept}
    trainer = parse_trainer(args.gpus)
    settings = read_settings(config, **lengths, on_cpu=trainer.device.is_cpu)
    workers = parse_machines("--workers", args.workers)
    validators = Machines(workers[0].device, config.swarm.validators, workers[0].devices)
    if args.validators is not None:
        validators = parse_machines("--validators", args.validators)[0]
    relays = config.swarm.relays if args.relays is None else args.relays

    logger.info("loading libraries")
    from shoal.plan.broadcast import Links
    from shoal.plan.plan import Fleet, make_plan
    from shoal.plan.report import describe_plan, export_plan
    from shoal.plan.shapes import read_shape

    links = Links(relays, args.uplink_gbps, args.relay_gbps, args.worker_gbps)
    fleet = Fleet(trainer=trainer, workers=workers, validators=validators, links=links)
    plan = make_plan(read_shape(config), settings, fleet, assumed, prices)
    print(json.dumps(export_plan(plan)) if args.json else describe_plan(plan))
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    if args.relays is not None:
        check_least("--relays", args.relays, 0)
    for name in ("uplink_gbps", "relay_gbps", "worker_gbps"):
        if not 0.0 < getattr(args, name) < 1e6:
            raise ConfigError(f"--{name.replace('_', '-')}: must be above 0")
    if args.validators is not None and "," in args.validators:
        raise ConfigError("--validators: one kind of machine, such as 2xH100")


_INPUTS = flag(
    "inputs",
    nargs="*",
    metavar="CONFIG key=value",
    help="a TOML file as for `shoal run` (default: the demo), and overrides",
)
COMMANDS = (CliCommand("plan", run_plan, (_INPUTS, _add_plan, JSON), settings="shoal.launch.settings:LaunchConfig"),)
