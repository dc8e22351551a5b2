"""A sleeper: works honestly until it has good standing, when less of its work is checked, then cheats occasionally.

It has the true weights, so it can only cheat after generation, or in what it requests from the engine.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shoal.group import GroupPlan
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.submission.write import Proofs, WrittenSubmission
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour
from shoal.worker.orders import LeaseOrder


class SleeperBehaviour(WorkerBehaviour):
    """Applies another behaviour to a share of its leases once it is awake."""

    def __init__(self, cheat: WorkerBehaviour, share: float, is_awake: Callable[[], bool], *, seed: int = 0) -> None:
        super().__init__(cheat.recipe)
        self._cheat, self._share, self._is_awake = cheat, share, is_awake
        self._random = random.Random(seed)
        self._bad: set[str] = set()

    @property
    def is_honest(self) -> bool:
        return not self._is_awake()

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The true weights, which the cheat may keep too."""
        return self._cheat.open_policy(version, folder)

    def plan(self, order: LeaseOrder, tokenizer: PreTrainedTokenizerBase) -> list[GroupPlan]:
        """Decides whether to cheat on this lease."""
        if self._is_awake() and self._random.random() < self._share:
            self._bad.add(order.lease)
            return self._cheat.plan(order, tokenizer)
        return super().plan(order, tokenizer)

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The cheat's work, or honest work."""
        return self._cheat.finish(work) if work.order.lease in self._bad else work

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
        """Write the file; its name is the lease id."""
        write = self._cheat.write if path.stem in self._bad else super().write
        return write(path, groups, proofs)
