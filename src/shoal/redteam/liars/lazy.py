"""Form and meaning are looked at, the proof never is: for who wants to be paid for verdicts and to compute nothing.

It is right about all honest work, and about bad work that the cheap stages find: only work that is faked well shows it.
"""

from collections.abc import Sequence

from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.liars.words import accept_job, list_limits
from shoal.submission.claims import Contents
from shoal.submission.jail import Jail
from shoal.swarm.client import NodeClient
from shoal.swarm.messages import Job, Verdict
from shoal.toploc.calibration import Calibration
from shoal.validator.judge import Judge
from shoal.validator.meaning import Meaning
from shoal.validator.opinion import Opinion, reject
from shoal.validator.proof import Case


class Lazy(Judge):
    """A validator without its third stage."""

    def _judge_read(self, jobs: Sequence[Job], read: Sequence[Contents | Opinion], policy: Policy) -> list[Opinion]:
        meaning = Meaning(self._recipe, policy.tokenizer)
        told = [
            found if isinstance(found, Opinion) else self._find_meaning(meaning, job, found)
            for job, found in zip(jobs, read, strict=True)
        ]
        return [self._believe(item) if isinstance(item, Case) else item for item in told]

    def _believe(self, case: Case) -> Opinion:
        """What would have to be proved is taken for proved; a copy, which is there to be seen, is one."""
        if case.breaches:
            return reject(Verdict.SOFT, case.breaches)
        return accept_job(case.job, case.contents.groups, list_limits(self._calibration))


def make_liar(recipe: Recipe, calibration: Calibration, jail: Jail, client: NodeClient) -> Judge:
    """It asks nobody."""
    return Lazy(recipe, calibration, jail)
