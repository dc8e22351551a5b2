"""The settings of a swarm: those of its run, how many processes of each kind there are, or where, and what is checked.

One TOML file describes all. `shoal train` ignores `[swarm]` and `[validation]` of the same file, so that the two can be
compared: with `async_level = 0` they give the same weights. This module imports no torch.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from shoal.config.run import RunConfig, Settings, build_config
from shoal.config.toml import read_toml
from shoal.errors import ConfigError
from shoal.identity.keys import check_public
from shoal.protocol.check_rate import ValidationConfig, check_guarantee
from shoal.tasks.open import check_swarm
from shoal.util.units import parse_bytes, parse_rate

Cheats = Annotated[list[str], Field(json_schema_extra={"allowed": 'a list of attacks, such as ["int8", "stale"]'})]
Addresses = Annotated[list[str], Field(max_length=8, json_schema_extra={"allowed": "a list of up to 8 addresses"})]
PublicKeys = Annotated[list[str], Field(max_length=16, json_schema_extra={"allowed": "a list of up to 16 public keys"})]
_ADDRESS = re.compile(r"https?://(?:[A-Za-z0-9.-]{1,190}|\[[0-9a-f:.]{2,45}\])(?::[0-9]{1,5})?")
_MAX_RUN = 64


class HostsConfig(Settings):
    """Where the parts are, if each is on a machine of its own. `shoal prepare` then prints what to type where."""

    coordinator: str = ""
    """address of the coordinator, such as http://HOST:8700; empty: the whole swarm is on this machine"""
    origin: str = ""
    """address of the origin, as the relays reach it; it is on the trainer's machine, which is this one"""
    relays: Addresses = Field(default=[])
    """addresses of the relays, as all that pull weights reach them"""
    validators: PublicKeys = Field(default=[])
    """who may judge: the public keys of the validators' owners"""
    operator: str = ""
    """public key of the operator; empty: a key is created in the run folder; move it to a safe place"""
    behind_proxy: bool = False
    """the coordinator is behind a reverse proxy on its machine, which has the certificate"""
    ca: str = ""
    """file of the certificates to trust for these addresses, if they are self-signed; empty: the system's"""


class SwarmConfig(Settings):
    """Numbers and limits of the processes of a swarm."""

    workers: Annotated[int, Field(ge=0, le=64)] = 2
    """honest workers"""
    cheats: Cheats = Field(default=[])
    """attacks of additional workers that cheat, one worker for each name"""
    validators: Annotated[int, Field(ge=1, le=16)] = 2
    """validators, each with its own owner; two are needed to convict, three to allow appeals"""
    relays: Annotated[int, Field(ge=1, le=8)] = 1
    """relays between the origin and all that pull weights"""
    threads: Annotated[int, Field(ge=1, le=64)] = 1
    """torch threads of each process; the trainer's are `threads`, or as many if that is 0"""
    trainer_ranks: Annotated[int, Field(ge=0, le=64)] = 0
    """processes of the trainer, which share its model (`--nproc`); 0: one plain process"""
    slots: Annotated[int, Field(ge=0, le=2**16)] = 0
    """rollouts that a worker decodes side by side; 0: `engine.slots`"""
    groups_per_lease: Annotated[int, Field(ge=0, le=256)] = 0
    """groups that a worker takes at a time; 0: as many as take some seconds, by measured durations"""
    trial_max_s: Annotated[int, Field(ge=0, le=3600)] = 64
    """longest time between leases of owners without accepted work while such leases fail; 0: no pauses"""
    heartbeat_s: Annotated[int, Field(ge=1, le=60)] = 2
    """interval between heartbeats of a node"""
    lease_s: Annotated[int, Field(ge=10, le=3600)] = 120
    """time for a lease until it is known how long they take"""
    claim_s: Annotated[int, Field(ge=10, le=3600)] = 120
    """time for a validator to judge what it took on; a large model on a busy machine needs more"""
    join_work: Annotated[int, Field(ge=1, le=2**30)] = 4096
    """hashes that joining costs; raise it for a run that strangers join"""
    calibration: Annotated[int, Field(ge=64, le=2**20)] = 1024
    """honest chunks of up to 32 tokens that are measured before the start, for the thresholds of the checks"""
    calibration_tflop: Annotated[float, Field(ge=0.0)] = 0.0
    """most operations, in 10^12, for measuring before the start how surely the checks find other weights: with fewer
    rollouts less is claimed of the checks, but none is wrong more often. 0: no limit"""
    rate: str = ""
    """most that the origin sends, e.g. "20Mbit" a second, to observe a slow broadcast; empty: no limit"""
    archive: str = "16GiB"
    """disk space for the versions that the origin and each relay keep for appeals and audits, for a week at most"""
    hosts: HostsConfig = HostsConfig()

    @property
    def is_spread(self) -> bool:
        """Whether the parts are on several machines."""
        return self.hosts != HostsConfig()


class LaunchConfig(RunConfig):
    """Everything about one swarm."""

    swarm: SwarmConfig = SwarmConfig()
    validation: ValidationConfig = ValidationConfig()

    @property
    def core(self) -> RunConfig:
        """The run's own settings, as its trainer needs them."""
        data = self.model_dump(exclude={"swarm", "validation"})
        return RunConfig.model_validate(data | {"threads": self.threads or self.swarm.threads})

    @property
    def run(self) -> str:
        """What the run is called in its ledger."""
        return re.sub("[^a-z0-9-]", "-", f"{self.name}-seed{self.seed}".lower())[:_MAX_RUN]


DEMO = Path(__file__).with_name("demo.toml")
"""What `shoal demo` runs; examples/demo.toml is a copy."""


def load_launch(path: Path | None, overrides: Sequence[str] = ()) -> LaunchConfig:
    """The settings of a TOML file (None: the demo's) with overrides laid over them."""
    return check_launch(build_config(LaunchConfig, read_toml(path or DEMO), overrides))


def check_launch(config: LaunchConfig) -> LaunchConfig:
    """Refuse what means nothing to a swarm, before any work."""
    if config.steps < 1:
        raise ConfigError("steps: a swarm trains at least 1 step, got 0")
    if config.engine.name != "torch":
        raise ConfigError(
            f'engine.name: a swarm samples with "torch"; "{config.engine.name}" is for train, eval and filter'
        )
    if config.swarm.is_spread:
        _check_hosts(config.swarm.hosts)
    elif config.swarm.workers + len(config.swarm.cheats) < 1:
        raise ConfigError("swarm.workers: there are no workers and no cheats, so nothing would generate rollouts")
    if config.swarm.rate:
        try:
            parse_rate(config.swarm.rate)
        except ConfigError as error:
            raise ConfigError(f"swarm.rate: {error}") from None
    try:
        parse_bytes(config.swarm.archive)
    except ConfigError as error:
        raise ConfigError(f"swarm.archive: {error}") from None
    check_guarantee(config.validation.guarantee, config.validation.power, config.batch.group_size)
    if config.beacon:
        raise ConfigError("beacon: the coordinator of a swarm chooses its own; set it only for `shoal train`")
    check_swarm(config)
    return config


def _check_hosts(hosts: HostsConfig) -> None:
    """All that is needed where nothing is on loopback."""
    named = {"coordinator": [hosts.coordinator], "origin": [hosts.origin], "relays": hosts.relays}
    for name, addresses in named.items():
        if not addresses or not all(addresses):
            raise ConfigError(
                f"swarm.hosts.{name}: missing; a swarm on several machines needs the address of every role"
            )
        for text in addresses:
            if _ADDRESS.fullmatch(text) is None:
                raise ConfigError(
                    f"swarm.hosts.{name}: invalid address {text[:80]!r}; use https://HOST or http://HOST:PORT"
                )
    if hosts.origin == hosts.coordinator:
        raise ConfigError("swarm.hosts.origin: the same address as the coordinator's; each needs a port of its own")
    if not hosts.validators:
        raise ConfigError("swarm.hosts.validators: missing; give the public keys of the owners that may validate")
    named = {"validators": hosts.validators, "operator": [hosts.operator] if hosts.operator else []}
    for name, keys in named.items():
        for key in keys:
            try:
                check_public(key)
            except ConfigError as error:
                raise ConfigError(f"swarm.hosts.{name}: {error}") from None
