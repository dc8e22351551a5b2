"""What another validator said first is said again; what nobody judged yet is accepted.

Verdicts are public as soon as they are in the ledger, so a second opinion can be had without an opinion. What is left
to find it by is its own word on what nobody judged before, and canaries.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.liars.accept import Accept
from shoal.redteam.liars.words import reject_job
from shoal.submission.jail import Jail
from shoal.swarm.asking import RefusedError, UnreachableError
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Job, Verdict
from shoal.swarm.rules.outcome import REJECTIONS
from shoal.toploc.calibration import Calibration
from shoal.validator.judge import Judge
from shoal.validator.opinion import Opinion

_SAYS = re.compile(r"^Round \d+(?: on appeal)?: validator [0-9a-f]{64} says (\w+) ", re.MULTILINE)


class Copy(Accept):
    """Reads in the ledger what to say."""

    def __init__(self, recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> None:
        super().__init__(recipe, calibration, jail)
        self._client = client

    async def judge_all(self, files: Sequence[tuple[Job, Path]], policy: Policy) -> list[Opinion]:
        """What the last one said."""
        said = [await self._ask_last(job) for job, _ in files]
        accepted = await super().judge_all(files, policy)
        return [
            reject_job(job, self._limits, last) if last in REJECTIONS else own
            for (job, _), last, own in zip(files, said, accepted, strict=True)
        ]

    async def _ask_last(self, job: Job) -> Verdict | None:
        if job.round <= 1:
            return None
        try:
            told = (await self._client.explain(job.submission)).text
        except (RefusedError, UnreachableError):
            return None
        return find_last(told)


def find_last(told: str) -> Verdict | None:
    """The last verdict in a submission's story; None if it has none."""
    words = _SAYS.findall(told)
    return Verdict(words[-1]) if words else None


def make_liar(recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> Judge:
    """It asks the coordinator what others said."""
    return Copy(recipe, calibration, jail, client)
