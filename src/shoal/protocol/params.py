"""Parameters of a run: its limits and prices, all integers.

They are in the genesis. The operator changes them by a signed event, except the `FIXED` ones, on which finished work
depends.

Groups of a step. New indices are granted only for missing groups: groups with a signal plus groups in progress never
exceed a batch. So when the last one is accepted, the batch is the first `groups_per_batch` groups with a signal, in
order of index, regardless of who was fast; and no accepted group with a signal is discarded. A step whose groups are
all granted trains on those that have a signal, even if there are none.

Steps and versions. Step n trains version n - 1 on batch n and produces version n. With t steps trained the newest
version is t, and steps t + 1 .. t + 1 + k are open. A rollout of step n may be of version v if (n - 1) - v <= k and
v <= t.

The bound never makes work too old: it depends on n and v alone, and n <= t + 1 + k gives n - 1 - k <= t, so the newest
version is allowed for every open step, and a version allowed when a lease is granted is still allowed when it ends.
Invariant: n - 1 - k <= v <= n - 1 for every group of batch n; the right side because step n is cut before v = n exists.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from shoal.config.run import Settings
from shoal.errors import ConfigError
from shoal.protocol import check_rate
from shoal.protocol.messages import MAX_ROLLOUTS, BatchEntry, Digest, Standing
from shoal.util.canonical import encode_canonical

FIXED = frozenset({"steps", "async_level", "groups_per_batch", "max_groups", "group_size", "max_tokens"})
"""Changing breaks: the beacon chain, current leases, the order of batches."""
MILLION = 1_000_000

Count = Annotated[int, Field(ge=1, le=2**31)]
Natural = Annotated[int, Field(ge=0, le=2**31)]
Seconds = Annotated[int, Field(ge=1, le=10**8)]
Share = Annotated[int, Field(ge=0, le=MILLION)]
"""in millionths"""
Part = Annotated[int, Field(ge=1, le=MILLION)]
"""in millionths, above zero"""
Nats = Annotated[int, Field(ge=0, le=10**9)]
"""in millionths"""
MAX_CALIBRATION_BYTES = 4 << 20
MAX_TASKS_BYTES = 64 << 20
"""of the files that a coordinator serves; a larger task set must reach nodes in another way"""
LEAST_CHECKED = 50_000
"""minimum share of replayed rollouts for any owner, in millionths"""


PARAM_GROUPS = {
    "run": ("steps", "async_level", "groups_per_batch", "max_groups", "group_size", "max_tokens", "trainers"),
    "nodes": ("heartbeat_s", "stale_s", "gone_s"),
    "leases": (
        *("groups_per_lease", "lease_min_s", "lease_first_s", "lease_max_s", "lease_factor", "late_s", "reserve_s"),
        "trial_max_s",
        *("backup_after", "max_leases_per_owner", "probation_leases", "max_width", "raise_after"),
        *("owner_share", "share_wait_s"),
    ),
    "submissions": (
        *("upload_s", "max_queue", "max_pending_per_owner", "max_prompt_tokens", "blob_max_bytes", "store_bytes"),
        *("form_keep_s", "duplicate_tokens"),
    ),
    "validation": (
        *("validators", "claim_s", "opinion_s", "max_rounds", "max_claims", "limit_lapses", "second_share"),
        *("reject_share", "check_probation", "check_good", "check_trusted", "guarantee_fraction"),
        *("guarantee_submissions", "guarantee_probability", "check_power", "watch_rate", "watch_submissions"),
        *("evidence_gain", "evidence_spread", "evidence_mixed", "evidence_mixed_spread"),
        *("canary_every_s", "train_s"),
    ),
    "standing": ("good_after", "trusted_after", "limit_after", "limited_s"),
    "credit": (
        *("price", "verdict_price", "stake_submissions", "challenge_s", "hold_submissions", "hold_max_s", "unbond_s"),
        *("slash_share", "redeem_least", "appeal_s", "appeal_every_s", "appeal_fee"),
    ),
}
"""how parameters are shown; on the wire and in the genesis they are one flat table"""
_CREDITS = ("price", "verdict_price", "redeem_least", "appeal_fee")


def name_unit(name: str) -> str:
    """The unit of a parameter; empty for counts."""
    if name.endswith("_s"):
        return "s"
    if name.endswith("_bytes"):
        return "bytes"
    limits = [getattr(rule, "le", None) or getattr(rule, "lt", None) for rule in RunParams.model_fields[name].metadata]
    return "micro-credits" if name in _CREDITS else "millionths" if MILLION in limits else ""


class RunParams(Settings):
    """Limits and prices of a run."""

    steps: Annotated[int, Field(ge=1, le=100_000)] = 10
    async_level: Annotated[int, Field(ge=0, le=64)] = 2
    """k: a step may train only on rollouts of versions at most this much older than the one it trains"""
    groups_per_batch: Annotated[int, Field(ge=1, le=65_536)] = 8
    """groups with a learning signal"""
    max_groups: Annotated[int, Field(ge=0, le=2**31)] = 0
    """most groups of one step; if fewer than wanted have a signal, it trains on those. 0: no bound"""
    group_size: Annotated[int, Field(ge=1, le=MAX_ROLLOUTS)] = 8
    max_tokens: Count = 512
    groups_per_lease: Annotated[int, Field(ge=0, le=MAX_ROLLOUTS)] = 0
    """0: as many as take some seconds, by measured durations"""

    heartbeat_s: Seconds = 10
    stale_s: Seconds = 45
    gone_s: Seconds = 120
    lease_min_s: Seconds = 60
    lease_first_s: Seconds = 600
    """used until durations were measured"""
    lease_max_s: Seconds = 3600
    lease_factor: Annotated[int, Field(ge=1, le=100)] = 3
    """deadline as a multiple of the time in which nine of ten leases are done"""
    late_s: Natural = 5
    """how long after its end an expired lease may still be submitted, if nobody else delivered"""
    reserve_s: Natural = 30
    """how long groups that an owner returned or let expire are offered to that owner alone"""
    trial_max_s: Natural = 64
    """longest time between two leases of owners without a record, while such leases fail; 0: neither that nor pauses
    after rejections, for a red team"""
    backup_after: Share = 500_000
    """share of its time after which a lease gets a backup, if there is nothing else to do"""
    upload_s: Seconds = 120
    """time allowed for an upload, plus 1 s for each 64 KiB of its size"""
    claim_s: Seconds = 120
    train_s: Seconds = 3600
    """time in which the trainer should cut a complete batch and publish a version; later raises an alarm"""
    opinion_s: Seconds = 3600
    """how long to wait for another opinion"""
    max_rounds: Annotated[int, Field(ge=2, le=9)] = 3
    """clear verdicts after which a submission is decided or inconclusive; at most twice as many verdicts of any kind"""
    max_claims: Annotated[int, Field(ge=2, le=100)] = 5
    """claims without a verdict, by more than one owner, after which a submission is inconclusive"""
    limit_lapses: Count = 5
    """consecutive lapsed claims of a validator's owner after which it may not judge for `limited_s`"""
    max_queue: Count = 1024
    """queue length at which no more leases are granted"""
    max_pending_per_owner: Count = 8
    max_leases_per_owner: Count = 64
    probation_leases: Count = 4
    """concurrent leases of all nodes of an owner on probation"""
    max_width: Count = 16
    """concurrent leases of one node"""
    raise_after: Count = 5
    """accepted submissions for each additional concurrent lease"""
    max_prompt_tokens: Count = 4096
    """longest prompt; bounds a file, with `max_tokens` and the groups of its lease"""
    blob_max_bytes: Annotated[int, Field(ge=1, le=2**40)] = 64 * 2**20
    """largest file, whatever its lease can hold"""
    store_bytes: Annotated[int, Field(ge=1, le=2**50)] = 64 * 2**30
    """files that are stored or announced together; a new run has at most what its store can hold"""
    form_keep_s: Seconds = 3600
    """how long a file that was rejected for its form is kept, and the rejection may be appealed; so are other files of
    owners without accepted work while their room is short"""
    duplicate_tokens: Natural = 64
    """rollouts at least this long are compared with all others; 0 to compare none (greedy runs)"""

    price: Natural = 1
    """micro-credits per validated token"""
    verdict_price: Natural = 0
    """micro-credits for each verdict that contributed to the outcome"""
    stake_submissions: Natural = 20
    """accepted submissions, or verdicts, whose pay becomes the owner's bond"""
    challenge_s: Seconds = 86_400
    """minimum time that pay is held, and that files are kept after their last use"""
    hold_submissions: Natural = 20
    """pay is held until the owner has this many more accepted submissions, or `hold_max_s` have passed"""
    hold_max_s: Seconds = 7 * 86_400
    unbond_s: Seconds = 14 * 86_400
    slash_share: Share = MILLION
    """share of the bond that a hard rejection, or accepting a canary's bad work, burns"""
    redeem_least: Count = 1
    """minimum micro-credits per redemption"""
    appeal_s: Seconds = 7 * 86_400
    """how long after a rejection it may be appealed"""
    appeal_every_s: Natural = 3 * 86_400
    """minimum time between two appeals of one owner"""
    appeal_fee: Natural = 0
    """micro-credits, returned if the appeal succeeds"""
    good_after: Count = 20
    """accepted submissions"""
    trusted_after: Count = 500
    limit_after: Count = 3
    """rejections, not outweighed by accepted work, after which leases need a new proof of work; twice as many: a ban"""
    limited_s: Seconds = 3600
    check_probation: Share = MILLION
    """share of a new owner's rollouts that is replayed"""
    check_good: Annotated[int, Field(ge=LEAST_CHECKED, le=MILLION)] = LEAST_CHECKED
    """minimum share for owners in good standing; the guarantee may require more"""
    check_trusted: Annotated[int, Field(ge=LEAST_CHECKED, le=MILLION)] = LEAST_CHECKED
    guarantee_fraction: Part = 100_000
    """an owner that cheats in this share of its submissions, or of the rollouts of each, ..."""
    guarantee_submissions: Annotated[int, Field(ge=1, le=check_rate.MAX_SUBMISSIONS)] = 100
    """... is caught within so many submissions, half as many if its standing is at most good, ..."""
    guarantee_probability: Annotated[int, Field(ge=1, lt=MILLION)] = 990_000
    """... with this probability"""
    check_power: Part = 750_000
    """chance that replaying a cheated rollout detects it"""
    evidence_gain: Nats = 0
    """what a cheated rollout adds to the evidence against its owner when it is replayed, as measured by calibration;
    0 where nothing is carried over, as in float32"""
    evidence_spread: Nats = 0
    """standard deviation of that"""
    evidence_mixed: Nats = 0
    """what any rollout of an owner adds that cheats in the guarantee's fraction of them"""
    evidence_mixed_spread: Nats = 0
    second_share: Share = 50_000
    """share of submissions accepted by one validator that a second validator of another owner judges too"""
    reject_share: Share = MILLION
    """the same for rejected submissions; owners that are limited get `second_share`"""
    owner_share: Part = MILLION
    """share of a batch that one owner may generate while others want work; a million for no bound"""
    share_wait_s: Seconds = 30
    """time after which one owner may generate more than that, if nobody else took the missing groups"""
    watch_rate: Share = 1000
    """chance that an honest owner's work ever looks unusual, in millionths; 0: no owner is watched"""
    watch_submissions: Count = 20
    """accepted submissions for which an owner whose work looked unusual is checked in full"""
    canary_every_s: Natural = 0
    """alarm if no canary was caught for this long; 0 for runs without canaries"""

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
            raise ValueError("heartbeat_s, stale_s and gone_s must be increasing")
        if self.hold_max_s < self.challenge_s or self.unbond_s <= self.challenge_s:
            raise ValueError("hold_max_s must be at least challenge_s, and unbond_s greater than challenge_s")
        if not self.evidence_gain:  # else the launch has checked it for the usual submission, see `weigh_power`
            check_rate.check_guarantee(self.guarantee, self.power, self.group_size)
        return self

    @property
    def most_per_lease(self) -> int:
        """Most groups of one lease."""
        return self.groups_per_lease or max(1, min(self.groups_per_batch, MAX_ROLLOUTS // self.group_size))

    @property
    def guarantee(self) -> check_rate.Guarantee:
        """The run's detection guarantee."""
        return check_rate.Guarantee(
            fraction=self.guarantee_fraction / MILLION,
            submissions=self.guarantee_submissions,
            probability=self.guarantee_probability / MILLION,
        )

    @property
    def power(self) -> float:
        """`check_power` as a probability."""
        return self.check_power / MILLION

    @property
    def evidence(self) -> check_rate.EvidencePower:
        """What carried evidence adds."""
        return check_rate.EvidencePower(
            gain=self.evidence_gain / MILLION,
            spread=self.evidence_spread / MILLION,
            mixed=self.evidence_mixed / MILLION,
            mixed_spread=self.evidence_mixed_spread / MILLION,
            validators=max(1, len(self.validators)),
        )

    def check_share(self, standing: Standing, rollouts: int) -> int:
        """Share of a submission's rollouts to replay, in millionths: what the guarantee requires, or the minimum."""
        if standing is Standing.TRUSTED:
            floor, promise = self.check_trusted, self.guarantee
        elif standing is Standing.GOOD:
            floor, promise = self.check_good, check_rate.hasten(self.guarantee)
        else:
            return self.check_probation
        least = check_rate.count_checked(promise, self.power, rollouts, self.evidence) or rollouts
        return max(floor, least * MILLION // rollouts)


def count_drawn(share: int, rollouts: int) -> int:
    """The number of rollouts in a share given in millionths: rounded up, at least one."""
    return max(1, -(-share * rollouts // MILLION))


def set_check_rate(config: check_rate.ValidationConfig) -> dict[str, int]:
    """The parameters that follow from the validation config."""
    return {
        "guarantee_fraction": round(config.guarantee.fraction * MILLION),
        "guarantee_submissions": config.guarantee.submissions,
        "guarantee_probability": round(config.guarantee.probability * MILLION),
        "check_power": round(config.power * MILLION),
    }


def parse_params(content: Any) -> RunParams:
    """Parse the parameters of an event; ConfigError if they are invalid."""
    try:
        return RunParams.model_validate(
            {**content, **{name: tuple(content[name]) for name in ("trainers", "validators")}}
        )
    except (ValidationError, TypeError, KeyError) as error:
        raise ConfigError(f"invalid run parameters: {error}") from None


def dump_params(params: RunParams) -> dict[str, Any]:
    """Parameters in the form stored in an event."""
    return params.model_dump(mode="json")


def check_change(old: RunParams, new: RunParams) -> None:
    """Reject a change of fixed parameters."""
    changed = sorted(name for name in FIXED if getattr(old, name) != getattr(new, name))
    if changed:
        raise ConfigError(f"these parameters cannot change during a run: {', '.join(changed)}")


def count_missing(params: RunParams, with_signal: int, on_their_way: int, given_out: int) -> int:
    """The number of groups for which new indices should be granted."""
    missing = max(0, params.groups_per_batch - with_signal - on_their_way)
    return min(missing, max(0, params.max_groups - given_out)) if params.max_groups else missing


def is_exhausted(params: RunParams, on_their_way: int, given_out: int) -> bool:
    """Whether all groups that a step may have are settled: then it trains on those available."""
    return 0 < params.max_groups <= given_out and on_their_way == 0


def hash_batch(entries: Sequence[BatchEntry]) -> str:
    """The hash that identifies a batch."""
    assert all(left.index < right.index for left, right in pairwise(entries)), "in order"
    return sha256(encode_canonical([entry.model_dump(mode="json") for entry in entries])).hexdigest()


def open_steps(trained: int, async_level: int, steps: int) -> range:
    """The steps that are open once `trained` steps are trained and version `trained` is published."""
    return range(trained + 1, min(trained + 1 + async_level, steps) + 1)


def oldest_version(step: int, async_level: int) -> int:
    """The oldest version whose rollouts a step may train on."""
    return max(0, step - 1 - async_level)


def is_allowed(step: int, version: int, async_level: int) -> bool:
    """Whether a step may train on rollouts of a version."""
    return oldest_version(step, async_level) <= version <= step - 1
