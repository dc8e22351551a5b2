"""Everything is rejected as faked: for who wants honest work unpaid, its authors banned and the run to stand still."""

from collections.abc import Sequence
from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.liars.words import list_limits, reject_job
from shoal.submission.jail import Jail
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Job
from shoal.toploc.calibration import Calibration
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion


class Reject(Judge):
    """Reads nothing."""

    def __init__(self, recipe: Recipe, calibration: Calibration, jail: Jail) -> None:
        super().__init__(recipe, calibration, jail)
        self._limits = list_limits(calibration)

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        """None of them was sampled as it says."""
        return [reject_job(job, self._limits) for job, _ in files]


def make_liar(recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> Judge:
    """It asks nobody."""
    return Reject(recipe, calibration, jail)
