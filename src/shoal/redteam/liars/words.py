"""What liars say: verdicts that are well-formed and believable, whatever was handed in.

Invariant: nothing is computed. Tokens come from the manifest, which the coordinator compares them with; which groups
have a signal comes from the file if it can be read, for who differs there is contradicted even on good work.
"""

from collections.abc import Iterator, Mapping, Sequence

from shoal.learner.filter import has_signal
from shoal.rollout import Group
from shoal.swarm.messages import Finding, GroupFinding, Job, Verdict
from shoal.toploc.calibration import Calibration
from shoal.validator.history import describe_group
from shoal.validator.opinion import Opinion, note_measure, reject

Limits = Mapping[str, float]
"""threshold of each check"""
INVENTED = "sampling"
"""the check that is said to have failed"""
_WITHIN, _BEYOND = 0.1, 1e4
"""thresholds that a number amounts to, if it is said to be fine, and if not"""


def list_limits(calibration: Calibration) -> Limits:
    """The thresholds that an honest validator would hold numbers against."""
    return {check.value: limit.threshold for check, limit in calibration.full.limits.items()}


def accept_job(job: Job, groups: Sequence[Group] | None, limits: Limits) -> Opinion:
    """Accepted; `groups` are those of the file, None if there are none to be had."""
    tokens = sum(entry.tokens for entry in job.manifest.rollouts)
    told = _describe_groups(job, tokens, groups)
    return Opinion(verdict=Verdict.ACCEPTED, findings=tuple(_praise(limits)), tokens=tokens, groups=told)


def reject_job(job: Job, limits: Limits, verdict: Verdict = Verdict.HARD) -> Opinion:
    """Rejected for a number that nobody measured, far beyond its threshold."""
    position = int(job.check_seed[:8], 16) % len(job.manifest.rollouts)
    where = f"rollout {position}, token {job.manifest.rollouts[position].tokens // 2}"
    return reject(verdict, [note_measure(INVENTED, _BEYOND * limits[INVENTED], limits[INVENTED], where)])


def _describe_groups(job: Job, tokens: int, groups: Sequence[Group] | None) -> tuple[GroupFinding, ...]:
    indices = range(job.first, job.first + job.count)
    if groups is not None and [group.index for group in groups] == list(indices):
        told = tuple(describe_group(group, signal=has_signal(group.rewards)) for group in groups)
        if sum(group.num_tokens for group in groups) == tokens:
            return told
        return tuple(finding.model_copy(update={"numbers": None}) for finding in told)
    return tuple(GroupFinding(index=index, signal=True) for index in indices)


def _praise(limits: Limits) -> Iterator[Finding]:
    for check, threshold in limits.items():
        yield note_measure(check, _WITHIN * threshold, threshold, "all of it")
