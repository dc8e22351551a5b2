"""What holds for all of a run: its limits and prices, all of them integers.

They stand in the genesis. The operator changes them by a signed event, but for the `FIXED` ones, on which the work that
was done already depends.
"""

from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from shoal.config import Settings
from shoal.errors import ConfigError
from shoal.swarm.messages import MAX_ROLLOUTS, Digest, Standing
from shoal.swarm.rules.dial import (
    MAX_SUBMISSIONS,
    Guarantee,
    ValidationConfig,
    check_guarantee,
    count_checked,
    hasten,
)

FIXED = frozenset({"steps", "async_level", "groups_per_batch", "max_groups", "group_size", "max_tokens"})
"""Changing breaks: the beacon chain, leases that are out, the order of batches."""
MILLION = 1_000_000

Count = Annotated[int, Field(ge=1, le=2**31)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Seconds = Annotated[int, Field(ge=1, le=10**8)]
Share = Annotated[int, Field(ge=0, le=MILLION)]
"""in millionths"""
Part = Annotated[int, Field(ge=1, le=MILLION)]
"""in millionths, and not nothing"""
LEAST_CHECKED = 50_000
"""share of rollouts below which no owner's record brings it, in millionths"""


class RunParams(Settings):
    """Limits and prices of a run."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = 10
    async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """k: a step may train only on rollouts of versions at most this much older than the one it trains"""
    groups_per_batch: Annotated[int, Field(ge=1, le=65_536)] = 8
    """groups with a learning signal"""
    max_groups: Annotated[int, Field(ge=0, le=2**31)] = 0
    """most groups of one step; if fewer than wanted have a signal then, it trains on those. 0: no bound"""
    group_size: Annotated[int, Field(ge=1, le=MAX_ROLLOUTS)] = 8
    max_tokens: Count = 512
    groups_per_lease: Annotated[int, Field(ge=1, le=MAX_ROLLOUTS)] = 1

    heartbeat_s: Seconds = 10
    stale_s: Seconds = 45
    gone_s: Seconds = 120
    lease_min_s: Seconds = 60
    lease_first_s: Seconds = 600
    """until durations were measured"""
    lease_max_s: Seconds = 3600
    lease_factor: Annotated[int, Field(ge=1, le=100)] = 3
    """deadline in medians of what leases took"""
    late_s: Natural = 5
    """how long after its end an expired lease may still be submitted, if nobody else delivered"""
    reserve_s: Natural = 30
    """how long what an owner returned or let expire is offered to it alone"""
    backup_after: Share = 500_000
    """share of its time after which a lease gets a backup, if nothing else is to do"""
    upload_s: Seconds = 120
    """an upload has this long, and its size at `UPLOAD_BYTES_S`"""
    claim_s: Seconds = 120
    train_s: Seconds = 3600
    """within which the trainer should cut a batch that is complete, and publish a version; later is an alarm"""
    opinion_s: Seconds = 3600
    """how long another opinion is waited for"""
    max_rounds: Annotated[int, Field(ge=2, le=9)] = 3
    """verdicts that say something after which a submission is decided, or inconclusive; twice as many of any kind"""
    max_claims: Annotated[int, Field(ge=2, le=100)] = 5
    """claims without a verdict, of more than one owner, after which a submission is inconclusive"""
    limit_lapses: Count = 5
    """claims in a row that a validator's owner let lapse, after which it may not judge for `limited_s`"""
    max_queue: Count = 1024
    """submissions in the queue beyond which no leases are granted"""
    max_pending_per_owner: Count = 8
    max_leases_per_owner: Count = 64
    probation_leases: Count = 4
    """at once, of all nodes of an owner on probation"""
    max_width: Count = 16
    """leases at once of one node"""
    raise_after: Count = 5
    """accepted submissions for one more lease at once"""
    blob_max_bytes: Annotated[int, Field(ge=1, le=2**40)] = 64 * 2**20
    duplicate_tokens: Natural = 64
    """rollouts at least this long are compared with all others; 0 for greedy runs: none are"""

    price: Natural = 1
    """micro-credits per validated token"""
    verdict_price: Natural = 0
    """micro-credits for each verdict that helped to decide"""
    stake_submissions: Natural = 20
    """accepted submissions, or verdicts, whose pay is kept as an owner's bond"""
    challenge_s: Seconds = 86_400
    """how long pay is held at least, and files after the last who needs them"""
    hold_submissions: Natural = 20
    """pay is held until the owner had this many more submissions accepted, or `hold_max_s` have passed"""
    hold_max_s: Seconds = 7 * 86_400
    unbond_s: Seconds = 14 * 86_400
    slash_share: Share = MILLION
    """of the bond that a hard verdict, or having accepted the bad work of a canary, burns"""
    redeem_least: Count = 1
    """micro-credits that can be redeemed at once"""
    appeal_s: Seconds = 7 * 86_400
    """how long after a rejection it may be appealed"""
    appeal_every_s: Natural = 3 * 86_400
    """between two appeals of one owner"""
    appeal_fee: Natural = 0
    """micro-credits, returned if the owner was right"""
    good_after: Count = 20
    """accepted submissions"""
    trusted_after: Count = 500
    limit_after: Count = 3
    """soft rejections in a row"""
    limited_s: Seconds = 3600
    check_probation: Share = MILLION
    """share of a new owner's rollouts that is replayed"""
    check_good: Annotated[int, Field(ge=LEAST_CHECKED, le=MILLION)] = LEAST_CHECKED
    """the same of owners in good standing, at least; the guarantee may ask for more"""
    check_trusted: Annotated[int, Field(ge=LEAST_CHECKED, le=MILLION)] = LEAST_CHECKED
    guarantee_fraction: Part = 100_000
    """an owner that cheats in this share of its submissions, or of the rollouts of each, ..."""
    guarantee_submissions: Annotated[int, Field(ge=1, le=MAX_SUBMISSIONS)] = 100
    """... is caught within so many submissions, half as many if its standing is not more than good, ..."""
    guarantee_probability: Annotated[int, Field(ge=1, lt=MILLION)] = 990_000
    """... with this probability"""
    check_power: Part = 750_000
    """chance that a cheated rollout is found when it is replayed"""
    second_share: Share = 50_000
    """of submissions that one validator accepted, how many a second one of another owner judges too"""
    reject_share: Share = MILLION
    """the same of those that one rejected; `second_share` holds for owners that are limited"""
    owner_share: Part = MILLION
    """of a batch, what one owner may write while others want work; a million for no bound"""
    share_wait_s: Seconds = 30
    """after which one owner may write more than that, if nobody else took what is missing"""
    watch_rate: Share = 1000
    """chance that an honest owner's work ever looks odd, in millionths; 0: no owner is watched"""
    watch_submissions: Count = 20
    """accepted submissions for which an owner that looked odd is checked in full"""
    canary_every_s: Natural = 0
    """alarm if no canary was caught for so long; 0 for runs without"""

    trainers: Annotated[tuple[Digest, ...], Field(max_length=64)] = ()
    """nodes or owners that may cut batches and publish versions"""
    validators: Annotated[tuple[Digest, ...], Field(max_length=256)] = ()
    """nodes or owners that may judge"""

    @model_validator(mode="after")
    def _fits_together(self) -> "RunParams":
        if self.groups_per_lease * self.group_size > MAX_ROLLOUTS:
            raise ValueError(f"groups_per_lease times group_size must be at most {MAX_ROLLOUTS}")
        if self.price * self.max_tokens * MAX_ROLLOUTS >= 2**53:
            raise ValueError("price times max_tokens is more than can be paid at once")
        if 0 < self.max_groups < self.groups_per_batch:
            raise ValueError("max_groups must be 0 or at least groups_per_batch")
        if not self.lease_min_s <= self.lease_first_s <= self.lease_max_s:
            raise ValueError("lease_min_s, lease_first_s and lease_max_s must be in this order")
        if not self.heartbeat_s < self.stale_s < self.gone_s:
            raise ValueError("heartbeat_s, stale_s and gone_s must grow")
        if self.hold_max_s < self.challenge_s or self.unbond_s <= self.challenge_s:
            raise ValueError("hold_max_s must be at least challenge_s, and unbond_s more")
        check_guarantee(self.guarantee, self.power, self.group_size)
        return self

    @property
    def guarantee(self) -> Guarantee:
        """What the run promises about cheats."""
        return Guarantee(
            fraction=self.guarantee_fraction / MILLION,
            submissions=self.guarantee_submissions,
            probability=self.guarantee_probability / MILLION,
        )

    @property
    def power(self) -> float:
        """`check_power` as a chance."""
        return self.check_power / MILLION

    def check_share(self, standing: Standing, rollouts: int) -> int:
        """Share of a submission's rollouts that is replayed, in millionths: what the guarantee takes, or the floor."""
        if standing is Standing.TRUSTED:
            floor, promise = self.check_trusted, self.guarantee
        elif standing is Standing.GOOD:
            floor, promise = self.check_good, hasten(self.guarantee)
        else:
            return self.check_probation
        least = count_checked(promise, self.power, rollouts) or rollouts
        return max(floor, least * MILLION // rollouts)


def count_drawn(share: int, rollouts: int) -> int:
    """How many rollouts a share in millionths is: rounded up, and at least one."""
    return max(1, -(-share * rollouts // MILLION))


def turn_dial(config: ValidationConfig) -> dict[str, int]:
    """The parameters that a dial sets."""
    return {
        "guarantee_fraction": round(config.guarantee.fraction * MILLION),
        "guarantee_submissions": config.guarantee.submissions,
        "guarantee_probability": round(config.guarantee.probability * MILLION),
        "check_power": round(config.power * MILLION),
    }


def parse_params(content: Any) -> RunParams:
    """Parameters as they stand in an event; ConfigError for what are none."""
    try:
        return RunParams.model_validate(
            {**content, **{name: tuple(content[name]) for name in ("trainers", "validators")}}
        )
    except (ValidationError, TypeError, KeyError) as error:
        raise ConfigError(f"not the parameters of a run: {error}") from None


def dump_params(params: RunParams) -> dict[str, Any]:
    """Parameters as they stand in an event."""
    return params.model_dump(mode="json")


def check_change(old: RunParams, new: RunParams) -> None:
    """Refuse a change of what is fixed."""
    changed = sorted(name for name in FIXED if getattr(old, name) != getattr(new, name))
    if changed:
        raise ConfigError(f"fixed for the whole run: {', '.join(changed)}")
