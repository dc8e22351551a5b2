"""What copiers have in common: work that leaks from one author to another, and is handed in for another lease.

Nobody can read what others hand in, so the worst case is that the other gives it away. What a copier saves is writing:
it reads the tokens once, to state the log-probs and proofs that they have after its own prompt. The seeds of its lease
would have drawn other tokens, and that is all that is wrong with them.

At the same place, group for group, there is nothing to find and nothing to gain: whoever computes a group gets the same
rollouts, and a group is paid once.
"""

from collections.abc import Sequence

from shoal.group import Plan
from shoal.recipe import Recipe
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts, list_tokens
from shoal.rollout import Rollout
from shoal.submission.write import Proofs
from shoal.worker.author import Author, Work


class Leak:
    """The newest work that was let out; authors in threads of their own may share it."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def add(self, work: Work) -> None:
        """Let this out."""
        self._work = work

    @property
    def is_dry(self) -> bool:
        return self._work is None

    @property
    def rollouts(self) -> Sequence[Rollout]:
        return [] if self._work is None else list_rollouts(self._work)

    @property
    def proofs(self) -> Proofs:
        """By the ids that the rollouts had."""
        return {} if self._work is None else self._work.proofs


class Supplier(Author):
    """Works honestly, and lets others have it."""

    def __init__(self, recipe: Recipe, leak: Leak) -> None:
        super().__init__(recipe)
        self._leak = leak

    def finish(self, work: Work) -> Work:
        """The same, let out."""
        self._leak.add(work)
        return work


class Copier(RetellingAuthor):
    """Hands in what leaked as its own, up to `most` rollouts of each lease. As long as nothing did, it is honest."""

    def __init__(self, recipe: Recipe, leak: Leak, *, most: int | None = None) -> None:
        super().__init__(recipe)
        self._leak, self._most = leak, most

    @property
    def is_honest(self) -> bool:
        return self._leak.is_dry

    def finish(self, work: Work) -> Work:
        """The others' tokens, proven anew."""
        return work if self._leak.is_dry else super().finish(work)

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """The others' tokens in the place of the first of its own; none of them twice, which would be noticed."""
        own = list_tokens(list_rollouts(work))
        copied = self._leak.rollouts[: self._most]
        return own | {name: other.token_ids for name, other in zip(own, copied, strict=False)}
