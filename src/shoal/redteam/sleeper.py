"""A sleeper: works honestly until it is in good standing, where less of its work is looked at, then cheats a little.

It has the true weights, so it can only do what is done after generating, or in what is asked of the engine.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.submission.write import Proofs, Written
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order


class Sleeper(Author):
    """Another author's cheat on a share of the leases that it takes once it is awake."""

    def __init__(self, cheat: Author, share: float, is_awake: Callable[[], bool], *, seed: int = 0) -> None:
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

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """Whether this lease will be cheated on is decided here."""
        if self._is_awake() and self._random.random() < self._share:
            self._bad.add(order.lease)
            return self._cheat.plan(order, tokenizer)
        return super().plan(order, tokenizer)

    def finish(self, work: Work) -> Work:
        """The cheat's work, or honest work."""
        return self._cheat.finish(work) if work.order.lease in self._bad else work

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
        """The file; its name is the lease."""
        return (
            self._cheat.write(path, groups, proofs) if path.stem in self._bad else super().write(path, groups, proofs)
        )
