"""Preparing a swarm: everything that must be there before its first process starts. Doing it again changes nothing.

    v0 (SFT, cached) -> calibration of v0 -> recipe -> keys -> settings of the coordinator -> settings of this run

Invariants:
- the settings are written last: where they are, all the rest is;
- once there is a ledger, the settings it was begun with stay, except for the `FREE` ones; other changes are refused.
  Until then they may change, and what depends on them is made again;
- ports are chosen at each start;
- of a swarm on several machines this one is the trainer's: what it writes for the others contains no secret.
"""

import hashlib
import json
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from shoal.config.run import RunConfig, build_config, dump_config, flatten_config
from shoal.config.toml import dump_toml, read_toml
from shoal.coordinator.economics import describe_check_rate, list_rates, list_warnings
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.launch.layout import SwarmPaths, name_cheats, name_relays, name_validators, name_workers
from shoal.launch.settings import HostsConfig, LaunchConfig
from shoal.node.identity import Identity, load_identity
from shoal.node.session import Role
from shoal.protocol.params import MAX_TASKS_BYTES, RunParams, dump_params
from shoal.protocol.power import Dial, read_power
from shoal.recipe import Recipe, SetTerms, dump_recipe
from shoal.shardcast.format.hashing import hash_root, hash_shards
from shoal.shardcast.format.layout import File, ShardLayout
from shoal.shardcast.origin import SHARD_BYTES
from shoal.shardcast.store.origin_files import scan_source
from shoal.tasks.base import stamp_family
from shoal.tasks.open import open_family, read_set
from shoal.tasks.sets.family import SetFamily
from shoal.train.rundir import RESUMABLE, is_started
from shoal.util.files import hash_file, write_atomic

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
FREE = {
    *RESUMABLE,
    *(f"swarm.{name}" for name in ("workers", "cheats", "relays", "threads", "slots", "join_work", "rate")),
    *(f"swarm.hosts.{name}" for name in HostsConfig.model_fields),
} - {"steps", "eval.every"}
"""Settings that may differ when a run is resumed. `steps` may not: the beacons of a run are a chain of its length.
Validators and operator may differ, because the coordinator compares them with its ledger."""
CALIBRATION_TOKENS = 64
"""length of the rollouts that are measured"""
LEASE_MIN_S, LEASE_MAX_S = 30, 600
STALE_BEATS, GONE_BEATS = 5, 15
"""heartbeats that a node misses until it is called stale, and gone"""


class PreparedSwarm:
    """A swarm that can be started."""

    def __init__(self, config: LaunchConfig, layout: SwarmPaths, ports: dict[str, int]) -> None:
        self.config, self.layout, self.ports = config, layout, ports
        scopes = {"trainer": Role.TRAINER}
        if not config.swarm.is_spread:  # else they make their own keys, where they are
            scopes |= dict.fromkeys(name_validators(config.swarm), Role.VALIDATOR)
            scopes |= dict.fromkeys([*name_workers(config.swarm), *name_cheats(config.swarm)], Role.WORKER)
        self.identities = {name: _load_node(layout.folder(name), config.run, role) for name, role in scopes.items()}

    @property
    def url(self) -> str:
        """Of the coordinator."""
        return self.config.swarm.hosts.coordinator or self.locate("coordinator")

    @property
    def relays(self) -> list[str]:
        """Addresses of the relays."""
        swarm = self.config.swarm
        return swarm.hosts.relays if swarm.is_spread else [self.locate(name) for name in name_relays(swarm)]

    @property
    def validators(self) -> tuple[str, ...]:
        """Public keys of those who may judge."""
        swarm = self.config.swarm
        if swarm.is_spread:
            return tuple(swarm.hosts.validators)
        return tuple(self.identities[name].key.public for name in name_validators(swarm))

    @property
    def operator(self) -> str:
        """The public key of the operator."""
        return self.config.swarm.hosts.operator or Key.load(self.layout.operator_key).public

    def locate(self, name: str) -> str:
        """The address of a part of this machine that serves."""
        return f"http://{HOST}:{self.ports[name]}"

    @property
    def names(self) -> dict[str, str]:
        """What each part is called, by the public keys of its node and its owner."""
        known = {identity.key.public: name for name, identity in self.identities.items()}
        return known | {identity.owner: name for name, identity in self.identities.items()}


def prepare_swarm(config: LaunchConfig, layout: SwarmPaths) -> PreparedSwarm:
    """Make everything ready that is not. The caller holds the lock of the folder."""
    if is_started(layout.root) and not layout.is_begun:
        raise ConfigError(f"{layout.root}: holds a run of `shoal train`; use --fresh, another name or another seed")
    changed = list_changes(config, layout)
    if changed is None or (changed - FREE):
        if changed is not None and layout.is_begun:
            raise ConfigError(_describe_changes(layout, sorted(changed - FREE)))
        layout.settings.unlink(missing_ok=True)
        _write_run_files(config, layout)
    for path in (layout.publisher_key, *([] if config.swarm.hosts.operator else [layout.operator_key])):
        if not path.exists():
            Key.generate().save(path)
    if config.swarm.is_spread:
        prepared = PreparedSwarm(config, layout, {})
        write_bundle(prepared)
    else:
        names = ["coordinator", "origin", *name_relays(config.swarm)]
        prepared = PreparedSwarm(config, layout, choose_ports(layout.ports, names))
        write_atomic(layout.service, dump_toml(build_service(prepared)).encode())
    known = {name: {"node": own.key.public, "owner": own.owner} for name, own in prepared.identities.items()}
    document = json.dumps(known, indent=2).encode() + b"\n"
    if not layout.keys.exists() or layout.keys.read_bytes() != document:
        write_atomic(layout.keys, document)
    # Whatever folder a part is started in.
    core = find_core(config, layout).model_copy(update={"out": str(layout.root.parent)})
    write_atomic(layout.run_settings, dump_config(core).encode())
    write_atomic(layout.settings, dump_config(config).encode())
    return prepared


def list_changes(config: LaunchConfig, layout: SwarmPaths) -> set[str] | None:
    """Keys that differ from the settings of last time; None if those cannot be read."""
    if not layout.settings.exists():
        return None
    try:
        known = build_config(LaunchConfig, read_toml(layout.settings), ())
    except ConfigError as error:
        if layout.is_begun:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{layout.settings}: cannot be read by this version ({reason})") from None
        return None
    old, new = flatten_config(known), flatten_config(config)
    return {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}


def build_params(prepared: PreparedSwarm) -> RunParams:
    """What the run's ledger begins with."""
    config, swarm = prepared.config, prepared.config.swarm
    return RunParams(
        steps=config.steps,
        async_level=config.async_level,
        groups_per_batch=config.batch.groups,
        max_groups=int(config.batch.groups * config.batch.max_oversample),
        group_size=config.batch.group_size,
        max_tokens=config.engine.max_tokens,
        max_prompt_tokens=_read_context(prepared.layout),
        groups_per_lease=swarm.groups_per_lease,
        trial_max_s=swarm.trial_max_s,
        heartbeat_s=swarm.heartbeat_s,
        stale_s=STALE_BEATS * swarm.heartbeat_s,
        gone_s=GONE_BEATS * swarm.heartbeat_s,
        lease_min_s=min(LEASE_MIN_S, swarm.lease_s),
        lease_first_s=swarm.lease_s,
        lease_max_s=max(LEASE_MAX_S, swarm.lease_s),
        claim_s=swarm.claim_s,
        trainers=(prepared.identities["trainer"].key.public,),
        validators=prepared.validators,
        **open_dial(prepared).set_params(),
    )


def open_dial(prepared: PreparedSwarm) -> Dial:
    """The check rate that follows from the guarantee and from the power that calibration measured."""
    config = prepared.config
    return Dial(
        config.validation,
        read_power(prepared.layout.calibration.read_bytes()),
        rollouts=(config.swarm.groups_per_lease or 1) * config.batch.group_size,
        validators=len(prepared.validators),
    )


def _read_context(layout: SwarmPaths) -> int:
    """The longest prompt that the model can read."""
    return int(json.loads((layout.start / "config.json").read_bytes())["max_position_embeddings"])


def build_service(prepared: PreparedSwarm) -> dict[str, Any]:
    """The settings of the coordinator, as tables of its TOML file."""
    config, layout = prepared.config, prepared.layout
    papers, place = _list_papers(config, layout), dict[str, Any]()
    if config.swarm.is_spread:  # started in the folder of its bundle; where to listen is said on its own machine
        place |= {"urls": [prepared.url], **{name: path.name for name, path in papers.items()}}
        place |= {"ca": config.swarm.hosts.ca} if config.swarm.hosts.ca else {}
        place |= {"http": {"behind_proxy": True}} if config.swarm.hosts.behind_proxy else {}
    else:
        place |= {"host": HOST, "port": prepared.ports["coordinator"]}
        place |= {name: str(path) for name, path in papers.items()}
    return {
        "run": config.run,
        "operator": prepared.operator,
        "publisher": Key.load(layout.publisher_key).public,
        "relays": prepared.relays,
        **place,
        "join_work": config.swarm.join_work,
        "params": dump_params(build_params(prepared)),
    }


def write_bundle(prepared: PreparedSwarm) -> None:
    """The folder that goes to the coordinator's machine: its settings, and the papers that it hands out."""
    layout = prepared.layout
    layout.bundle.mkdir(exist_ok=True)
    for path in _list_papers(prepared.config, layout).values():
        write_atomic(layout.bundle / path.name, path.read_bytes())
    write_atomic(layout.bundle / layout.service.name, dump_toml(build_service(prepared)).encode())


def log_checks(prepared: PreparedSwarm) -> None:
    """Log the guarantee; with -v how much is checked and what that costs. Warn of what is not caught, or would pay."""
    params = build_params(prepared)
    guarantee, *rates = describe_check_rate(params)
    logger.info(guarantee)
    for line in rates:
        logger.debug(f"checks: {line}")
    rate = list_rates(params)[-1]
    for is_caught, line in open_dial(prepared).describe(rate.checked):
        logger.log(logging.DEBUG if is_caught else logging.WARNING, f"power: {line}")
    for line in list_warnings(params, join_work=prepared.config.swarm.join_work):
        logger.warning(line)


def _write_run_files(config: LaunchConfig, layout: SwarmPaths) -> None:
    """v0, its calibration, and the recipe that names both."""
    # Imported here because they need torch: a swarm that is resumed starts without it.
    from shoal.launch.first_version import calibrate_start, write_start
    from shoal.toploc.calibration import hash_model
    from shoal.util.process import release_memory

    chunks = config.swarm.calibration
    layout.launch.mkdir(parents=True, exist_ok=True)
    if config.tasks.set:
        read_set(config.tasks).save(layout.tasks)
    core = find_core(config, layout)
    begun = time.monotonic()
    policy = write_start(core, layout.start)
    logger.info(f"v0: {policy.num_parameters:,} parameters, ready after {time.monotonic() - begun:.0f} s")
    begun = time.monotonic()
    logger.info("measuring how much honest results differ, for the thresholds of the checks")
    calibration = calibrate_start(
        policy, core, chunks=chunks, tokens=CALIBRATION_TOKENS, tflop=config.swarm.calibration_tflop
    )
    calibration.save(layout.calibration)
    logger.debug(f"calibration: {chunks} honest chunks measured in {time.monotonic() - begun:.0f} s")
    recipe = Recipe(
        **describe_tasks(core, layout),
        length=core.length,
        group_size=core.batch.group_size,
        filter=core.batch.filter,
        max_tokens=core.engine.max_tokens,
        temperature=core.engine.temperature,
        dtype=core.policy.publish_dtype,
        model=hash_model(policy.model),
        weights=find_root(layout.start),
        calibration=hashlib.sha256(layout.calibration.read_bytes()).hexdigest(),
    )
    write_atomic(layout.recipe, dump_recipe(recipe))
    num_bytes = policy.num_bytes
    del policy
    release_memory(num_bytes)  # this process only waits from here on


def find_root(folder: Path) -> str:
    """The root under which the origin will publish these files: the trainer compares its v0 with it."""
    source = scan_source(folder)
    layout = ShardLayout((File(name, stamp.size) for name, stamp in source.fingerprints.items()), SHARD_BYTES)
    hashes = [hash_shards(source.folder / shard.file, [shard])[0] for shard in layout.shards]
    return hash_root(layout.total, SHARD_BYTES, b"".join(hashes)).hex()


def find_core(config: LaunchConfig, layout: SwarmPaths) -> RunConfig:
    """The run's own settings, with the canonical copy of its task set in the place of where the tasks came from."""
    core = config.core
    if not core.tasks.set:
        return core
    update = {"set": [str(layout.tasks)], "hash": hash_file(layout.tasks)}
    return core.model_copy(update={"tasks": core.tasks.model_copy(update=update)})


def describe_tasks(core: RunConfig, layout: SwarmPaths) -> dict[str, Any]:
    """The tasks as the recipe names them."""
    verifiers = stamp_family(open_family(core.tasks))
    if not core.tasks.set:
        return {"family": core.tasks.name, "options": core.tasks.options, "verifiers": verifiers}
    terms = SetTerms(
        hash=core.tasks.hash,
        size=layout.tasks.stat().st_size,
        filter=core.tasks.filter,
        weights=core.tasks.weights,
        schedule=core.tasks.stages,
    )
    return {"family": SetFamily.name, "options": {}, "set": terms, "verifiers": verifiers}


def _list_papers(config: LaunchConfig, layout: SwarmPaths) -> dict[str, Path]:
    """What the coordinator hands out."""
    papers = {"recipe": layout.recipe, "calibration": layout.calibration}
    is_served = config.tasks.set and layout.tasks.stat().st_size <= MAX_TASKS_BYTES
    return papers | ({"tasks": layout.tasks} if is_served else {})


def _load_node(folder: Path, run: str, role: Role) -> Identity:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return load_identity(folder, run, role.scope)


def _describe_changes(layout: SwarmPaths, keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
    return (
        f"{layout.root}: holds a swarm that was started with another value of {shown} (see {layout.settings.name} in "
        f"{layout.launch.name}/); use the same value to resume, --fresh to start over, or another name or seed"
    )


def choose_ports(path: Path, names: Sequence[str]) -> dict[str, int]:
    """A free port for each name, that of the last start where it is still free; written to `path`."""
    kept = _read_ports(path)
    with ExitStack() as stack:  # all are held until all are chosen, so that no two are the same
        ports = {name: _take_port(stack, kept.get(name, 0)) for name in names}
    if ports != kept:
        write_atomic(path, json.dumps(ports, indent=2).encode() + b"\n")
    return ports


def _take_port(stack: ExitStack, wanted: int) -> int:
    try:
        return _bind(stack, wanted)
    except OSError:  # in use
        return _bind(stack, 0)


def _bind(stack: ExitStack, port: int) -> int:
    server = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last start may linger
    server.bind((HOST, port))
    server.listen(1)  # from here on nobody else can bind it
    return int(server.getsockname()[1])


def _read_ports(path: Path) -> dict[str, int]:
    """Ports of the last start; an invalid file counts as missing."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): port for name, port in found.items() if isinstance(port, int) and 0 < port < 1 << 16}
