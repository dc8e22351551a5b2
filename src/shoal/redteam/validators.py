"""Validators that lie: well-formed and plausible verdicts, whatever was submitted.

`LIES` lists them, each with its judge; `make_lying_judge` creates the judge that a validator uses.

Invariant: no lie runs the model. Token counts come from the manifest, with which the coordinator compares them. Which
groups have a signal comes from the file if it can be read, because a difference there would be a contradiction even for
good work.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from shoal.errors import UnreachableError
from shoal.learner.filter import has_signal
from shoal.net.retry import RefusedError
from shoal.node.client import NodeClient
from shoal.policy.model import Policy
from shoal.protocol.messages import GroupFinding, Job, Verdict
from shoal.protocol.outcome import REJECTIONS
from shoal.recipe import Recipe
from shoal.redteam.registry import check_lie
from shoal.rollout import Group
from shoal.submission.limits import FormError
from shoal.submission.read import ParserPool, ParserPoolError, SubmissionContents, read_submission
from shoal.toploc.calibration import Calibration
from shoal.validator.consistency import ConsistencyCheck
from shoal.validator.finding import Assessment, describe_group, measurement, rejected, violation
from shoal.validator.judge import Judge
from shoal.validator.proof import ProofCase

Limits = Mapping[str, float]
"""threshold of each check"""
INVENTED_CHECK = "sampling"
"""the check claimed to have failed"""
_PASSING, _FAILING = 0.1, 1e4
"""multiples of a threshold claimed for a passing and for a failing value"""
_VERDICT = re.compile(r"^Round \d+(?: on appeal)?, validator [0-9a-f]{64}: verdict (\w+) ", re.MULTILINE)


class LyingJudge(Judge):
    """A judge that does not do its job."""

    def __init__(
        self, recipe: Recipe, calibration: Calibration, parsers: ParserPool, client: NodeClient | None = None
    ) -> None:
        super().__init__(recipe, calibration, parsers)
        self._client = client
        self._limits = {check.value: limit.threshold for check, limit in calibration.full.limits.items()}
        """the thresholds an honest validator would use"""


class AbstainingJudge(LyingJudge):
    """Leaves every submission to other validators. No such verdict is wrong, and none is paid.

    It is detected by how often others could judge what it could not.
    """

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        """The verdict of an honest validator whose weights are missing."""
        return [abstain_job(job) for job, _ in files]


class AcceptingJudge(LyingJudge):
    """Reads the file it accepts, so that for honest work its values equal those of honest validators."""

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        """Accept everything."""
        return list(await asyncio.gather(*(self._accept(job, path, policy) for job, path in files)))

    async def _accept(self, job: Job, path: Path, policy: Policy) -> Assessment:
        try:
            contents = await read_submission(self._parsers, path, self.limit_file(job, policy))
        except (FormError, ParserPoolError):
            return accept_job(job, None, self._limits)
        return accept_job(job, contents.groups, self._limits)


class CopyingJudge(AcceptingJudge):
    """Repeats the public verdict in the ledger: a second opinion without a check.

    It is detected by its own verdicts on submissions nobody has judged yet, and by canaries.
    """

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        """The last verdict of another validator."""
        verdicts = [await self._find_last(job) for job, _ in files]
        accepted = await super().judge_all(files, policy)
        return [
            reject_job(job, self._limits, last) if last in REJECTIONS else own
            for (job, _), last, own in zip(files, verdicts, accepted, strict=True)
        ]

    async def _find_last(self, job: Job) -> Verdict | None:
        if job.round <= 1:
            return None
        assert self._client is not None, "no client"
        try:
            return find_last((await self._client.explain(job.submission)).text)
        except (RefusedError, UnreachableError):
            return None


class LazyJudge(LyingJudge):
    """Skips the proof check to save compute. It is right about honest work, and about what the cheap stages detect."""

    def _judge_read(
        self, jobs: Sequence[Job], read: Sequence[SubmissionContents | Assessment], policy: Policy
    ) -> list[Assessment]:
        consistency = ConsistencyCheck(self._recipe, policy.tokenizer)
        found = []
        for job, item in zip(jobs, read, strict=True):
            case = item if isinstance(item, Assessment) else self._check_consistency(consistency, job, item)
            if isinstance(case, ProofCase):  # accept the proof; copies are rejected without a proof check
                is_copy, groups = bool(case.violations), case.contents.groups
                case = rejected(Verdict.SOFT, case.violations) if is_copy else accept_job(job, groups, self._limits)
            found.append(case)
        return found


class RejectingJudge(LyingJudge):
    """Reads nothing. The goal is that honest work is unpaid, its owners are banned, and the run stops."""

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Assessment]:
        """Reject everything."""
        return [reject_job(job, self._limits) for job, _ in files]


LIES: dict[str, tuple[str, type[LyingJudge]]] = {
    "abstain": ("everything is inconclusive", AbstainingJudge),
    "accept": ("everything is accepted, with the values stated in the file", AcceptingJudge),
    "copy": ("another validator's verdict is repeated; without one, the work is accepted", CopyingJudge),
    "lazy": ("form and consistency are checked, the proof is not", LazyJudge),
    "reject": ("everything is rejected as fake, with made-up evidence", RejectingJudge),
}
"""text and judge of each lie"""


def make_lying_judge(
    name: str, recipe: Recipe, calibration: Calibration, parsers: ParserPool, client: NodeClient
) -> LyingJudge:
    """The judge for one lie."""
    check_lie(name)
    return LIES[name][1](recipe, calibration, parsers, client)


def abstain_job(job: Job) -> Assessment:
    """Inconclusive, for a reason that others cannot check."""
    return rejected(Verdict.INCONCLUSIVE, [violation("weights", f"v{job.version} is gone")])


def accept_job(job: Job, groups: Sequence[Group] | None, limits: Limits) -> Assessment:
    """Accepted; `groups` are those of the file, None if it cannot be read."""
    tokens = sum(entry.tokens for entry in job.manifest.rollouts)
    found = _describe_groups(job, tokens, groups)
    passing = tuple(measurement(check, _PASSING * limit, limit, "all of it") for check, limit in limits.items())
    return Assessment(verdict=Verdict.ACCEPTED, findings=passing, tokens=tokens, groups=found)


def reject_job(job: Job, limits: Limits, verdict: Verdict = Verdict.HARD) -> Assessment:
    """Rejected for a made-up value far beyond its threshold."""
    position = int(job.check_seed[:8], 16) % len(job.manifest.rollouts)
    where = f"rollout {position}, token {job.manifest.rollouts[position].tokens // 2}"
    limit = limits[INVENTED_CHECK]
    return rejected(verdict, [measurement(INVENTED_CHECK, _FAILING * limit, limit, where)])


def find_last(text: str) -> Verdict | None:
    """The last verdict in the explanation of a submission, if it has one."""
    verdicts = _VERDICT.findall(text)
    return Verdict(verdicts[-1]) if verdicts else None


def _describe_groups(job: Job, tokens: int, groups: Sequence[Group] | None) -> tuple[GroupFinding, ...]:
    indices = range(job.first, job.first + job.count)
    if groups is not None and [group.index for group in groups] == list(indices):
        found = tuple(describe_group(group, signal=has_signal(group.rewards)) for group in groups)
        if sum(group.num_tokens for group in groups) == tokens:
            return found
        return tuple(finding.model_copy(update={"numbers": None}) for finding in found)
    return tuple(GroupFinding(index=index, signal=True) for index in indices)
