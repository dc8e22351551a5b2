"""The author of a canary: cheats in one way, and knows which of its work any honest validator would reject.

Invariants:
- work counts as bad only if the run's own checks find it so by a clear margin, with the trusted weights and the run's
  calibration: who accepts it did not look, or lies. Nobody is blamed for what is hard to tell;
- that is on disk before the work is handed in, so that a canary that was killed still knows it;
- what the checks let pass is handed in too, as any worker would, and is counted as honest.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.policy.model import Policy
from shoal.redteam.bad_work import BadWork
from shoal.swarm.params import MILLION
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import Report, check_rollouts
from shoal.toploc.finding import rank_finding
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order

MARGIN = 2.0
"""how many times its threshold a number must be"""


class PlantedAuthor(Author):
    """Another author's work, each piece of it checked as a validator would."""

    def __init__(self, author: Author, calibration: Calibration, bad: BadWork, *, check_ppm: int) -> None:
        """`check_ppm` is the share of a newcomer's rollouts that validators look at, in millionths."""
        super().__init__(author.recipe)
        self._author, self._calibration, self._bad, self._check_ppm = author, calibration, bad, check_ppm
        self._trusted: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The cheat's weights; the trusted ones are kept beside them."""
        self._trusted = super().open_policy(version, folder)
        return self._author.open_policy(version, folder)

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """The cheat's plans."""
        return self._author.plan(order, tokenizer)

    def finish(self, work: Work) -> Work:
        """The cheat's work, once it is known whether it is bad."""
        done = self._author.finish(work)
        if self._is_bad(done):
            self._bad.add(work.order.lease)
        return done

    def _is_bad(self, work: Work) -> bool:
        """Whether every honest validator rejects it, whichever rollouts it draws."""
        assert self._trusted is not None, "work was done with a version"
        plans = super().plan(work.order, self._trusted.tokenizer)
        reports = check_rollouts(
            {work.version: self._trusted.model},
            [request for plan in plans for request in plan.requests],
            [rollout for group in work.groups for rollout in group.rollouts],
            work.proofs,
            self._calibration,
            eos_id=self._trusted.eos_id,
            seeded=self.recipe.seeded,
        )
        found = [_is_plain(report) for report in reports]
        return any(found) if self._check_ppm == MILLION else all(found)


def _is_plain(report: Report) -> bool:
    return report.worst is not None and rank_finding(report.worst) >= (True, MARGIN)
