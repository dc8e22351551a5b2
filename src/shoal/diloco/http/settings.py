"""What a reducer allows, and how long it waits for whom."""

from typing import Annotated

from pydantic import Field

from shoal.config import Settings
from shoal.diloco.http.messages import MAX_PEERS

Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]


class Patience(Settings):
    """When a round closes without somebody."""

    grace_s: Seconds = 2.0
    """after a quorum has delivered, at least"""
    grace_share: Annotated[float, Field(ge=0.0, le=10.0)] = 0.2
    """of the median round, if that is more"""
    reset_s: Annotated[float, Field(ge=0.0, le=60.0)] = 0.5
    """for a peer whose connection broke to come back"""
    presence_s: Seconds = 15.0
    """a peer that was silent for so long is not waited for"""
    longest_s: Seconds = 600.0
    """after the first delivery, whatever the quorum"""
    max_misses: Annotated[int, Field(ge=1, le=1000)] = 2
    """rounds missed in a row after which a peer is not waited for until it delivers again"""


class ReducerLimits(Settings):
    """How much one reducer takes on."""

    max_peers: Annotated[int, Field(ge=1, le=MAX_PEERS)] = 64
    keep_outcomes: Annotated[int, Field(ge=1, le=1024)] = 8
    """rounds of each fragment whose outcome can still be fetched"""
    snapshot_every: Annotated[int, Field(ge=1, le=1024)] = 8
    """rounds between two writings of the whole state; in between the outcomes are on disk"""
    join_work: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 14
    """hashes that joining costs at rest"""
    record_rounds: Annotated[int, Field(ge=1, le=1024)] = 16
    """accepted rounds that make a peer's record"""
    record_factor: Annotated[float, Field(ge=1.0, le=100.0)] = 2.0
    """how far above its record, or above the others', a peer's token weight may be"""
