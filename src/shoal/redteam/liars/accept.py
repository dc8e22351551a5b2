"""Everything is accepted: for who is paid by cheats, or by the verdict."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.liars.words import accept_job, list_limits
from shoal.submission.bounds import FormError
from shoal.submission.jail import Jail, JailError
from shoal.submission.read import read_submission
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Job
from shoal.toploc.calibration import Calibration
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion


class Accept(Judge):
    """Reads what it accepts, so that its numbers are those of honest validators where the work is honest."""

    def __init__(self, recipe: Recipe, calibration: Calibration, jail: Jail) -> None:
        super().__init__(recipe, calibration, jail)
        self._limits = list_limits(calibration)

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        """All of them are fine."""
        return list(await asyncio.gather(*(self._accept(job, path, policy) for job, path in files)))

    async def _accept(self, job: Job, path: Path, policy: Policy) -> Opinion:
        try:
            contents = await read_submission(self._jail, path, self.bound_file(job, policy))
        except (FormError, JailError):
            return accept_job(job, None, self._limits)
        return accept_job(job, contents.groups, self._limits)


def make_liar(recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> Judge:
    """It asks nobody."""
    return Accept(recipe, calibration, jail)
