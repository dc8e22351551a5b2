"""Nothing is ever certain: for who wants to judge and do nothing, or to have every submission wait for another.

No such verdict is wrong, and none is paid. What finds it is how often others could judge what it could not.
"""

from collections.abc import Sequence
from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.submission.jail import Jail
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Job, Verdict
from shoal.toploc.calibration import Calibration
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion, note_breach, reject


class Abstain(Judge):
    """Reads nothing."""

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        """As an honest validator speaks whose weights are gone."""
        return [abstain_job(job) for job, _ in files]


def abstain_job(job: Job) -> Opinion:
    """Inconclusive, for a reason that nobody else can check."""
    return reject(Verdict.INCONCLUSIVE, [note_breach("weights", f"v{job.version} is gone")])


def make_liar(recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> Judge:
    """It asks nobody."""
    return Abstain(recipe, calibration, jail)
