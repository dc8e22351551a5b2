"""The behaviour of a canary: cheats in one way, and knows which of its work every honest validator would reject.

Invariants:
- work counts as bad only if the run's own checks reject it by a clear margin, with the trusted weights and the run's
  calibration. A validator that accepts it did not check, or lies. Borderline work is not counted against anyone;
- this is on disk before the work is submitted, so that a killed canary still knows it;
- work that passes the checks is submitted too, as by any worker, and counts as honest.
"""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shoal.group import GroupPlan
from shoal.policy.model import Policy
from shoal.protocol.params import MILLION
from shoal.redteam.canary import CanaryWork
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import check_rollouts
from shoal.toploc.finding import rank_finding
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import LeaseOrder

MARGIN = 2.0
"""required ratio of a measured value to its threshold"""


class PlantedBehaviour(WorkerBehaviour):
    """Another behaviour's work; each submission is checked as a validator would check it."""

    def __init__(
        self, behaviour: WorkerBehaviour, calibration: Calibration, bad: CanaryWork, *, check_ppm: int
    ) -> None:
        """`check_ppm` is the share of a new owner's rollouts that validators check, in parts per million."""
        super().__init__(behaviour.recipe)
        self._behaviour, self._calibration, self._bad, self._check_ppm = behaviour, calibration, bad, check_ppm
        self._trusted: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The cheat's weights; the trusted ones are kept as well."""
        self._trusted = super().open_policy(version, folder)
        return self._behaviour.open_policy(version, folder)

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """The cheat's plans."""
        return self._behaviour.plan(order, tokenizer)

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The cheat's work, after checking whether it is bad."""
        done = self._behaviour.finish(work)
        if self._is_bad(done):
            self._bad.add(work.order.lease)
        return done

    def _is_bad(self, work: FinishedWork) -> bool:
        """Whether every honest validator would reject it, whichever rollouts it samples."""
        assert self._trusted is not None, "no version was opened"
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
        worst = [report.worst for report in reports]
        found = [finding is not None and rank_finding(finding) >= (True, MARGIN) for finding in worst]
        return any(found) if self._check_ppm == MILLION else all(found)
