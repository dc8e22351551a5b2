"""Limits and timeouts of a reducer."""

from typing import Annotated

from pydantic import Field, StringConstraints

from shoal.config.run import Settings
from shoal.diloco.http.messages import MAX_PEERS
from shoal.identity.authenticator import AuthLimits
from shoal.net.limits import HttpLimits

PublicKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_AUTH = AuthLimits(address_rate=2000.0, node_rate=1000.0, owner_rate=1000.0)
"""a payload is sent in chunks, one request each"""
_HTTP = HttpLimits(max_connections=1024, per_peer_connections=32, min_rate=16 * 1024, grace_seconds=2.0)

Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


class ReducerTimeouts(Settings):
    """When a round closes without all members."""

    grace_s: Seconds = 2.0
    """minimum wait after a quorum has delivered"""
    grace_share: Annotated[float, Field(ge=0.0, le=10.0)] = 0.2
    """as a share of the median round time, if that is longer"""
    reset_s: Annotated[float, Field(ge=0.0, le=60.0)] = 0.5
    """time for a peer to come back after its connection broke"""
    presence_s: Seconds = 15.0
    """a peer that was silent for this long is not waited for"""
    longest_s: Seconds = 600.0
    """maximum duration after the first delivery, whatever the quorum"""
    max_misses: Annotated[int, Field(ge=1, le=1000)] = 2
    """missed rounds in a row after which a peer is not waited for until it delivers again"""


class ReducerLimits(Settings):
    """Limits of one reducer."""

    max_peers: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 64
    keep_outcomes: Annotated[int, Field(ge=1, le=1024)] = 8
    """rounds of each fragment whose outcome can still be fetched"""
    snapshot_every: Annotated[int, Field(ge=1, le=1024)] = 8
    """rounds between two snapshots of the whole state; in between the outcomes are on disk"""
    join_work: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 14
    """hashes needed to join while the reducer is idle"""
    record_rounds: Annotated[int, Field(ge=1, le=1024)] = 16
    """accepted rounds that make up a peer's record"""
    record_factor: Annotated[float, Field(ge=1.0, le=100.0)] = 2.0
    """how far above its record, or above the others' claims, a peer's token weight may be"""
    max_open_peers: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 16
    """peers that are not named, if there may be any"""
    open_work: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 22
    """hashes needed to join without being named; more while many join"""


class ReducerConfig(Settings):
    """All settings of one reducer except the plan."""

    host: str = "127.0.0.1"
    """address to listen on; this machine only by default"""
    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8710
    """0: any free port"""
    start_peers: Annotated[int, Field(ge=1, le=128)] = 1
    """peers that must have joined before the first round"""
    peers: Annotated[tuple[PublicKey, ...], Field(max_length=128)] = ()
    """the named peers, one key for each owner that takes part; rounds wait for them, and they decide the mean"""
    open_share: Annotated[float, Field(ge=0.0, le=0.5)] = 0.0
    """weight of all other peers together, as a share of the weight of the named ones; 0: no other peer may join"""
    tls_certificate: str = ""
    """PEM file; empty: plain HTTP, for this machine or behind a proxy"""
    tls_key: str = ""
    """PEM file"""
    patience: ReducerTimeouts = ReducerTimeouts()
    limits: ReducerLimits = ReducerLimits()
    http: HttpLimits = _HTTP
    auth: AuthLimits = _AUTH
