"""Copied work without any work: tokens, log-probs and proofs as they leaked, in a file that looks like no other."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.files import write_atomic
from shoal.group import score_group
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.copying import Leak, Supplier
from shoal.redteam.files import load_table, save_table
from shoal.redteam.forge import list_rollouts
from shoal.rollout import Group, Rollout, VersionRange
from shoal.submission.write import Proofs, Written, encode_groups
from shoal.worker.author import Author, Work


class EncodingCopier(Author):
    """Hands in what leaked, rewritten to fit its lease. As long as nothing did, it is honest."""

    def __init__(self, recipe: Recipe, leak: Leak) -> None:
        super().__init__(recipe)
        self._leak = leak
        self._policy: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The true policy, of which only the tokenizer is needed."""
        self._policy = super().open_policy(version, folder)
        return self._policy

    @property
    def is_honest(self) -> bool:
        return self._leak.is_dry

    def finish(self, work: Work) -> Work:
        """The others' rollouts under its own names."""
        assert self._policy is not None, "work was done with a version"
        pairs = list(zip(list_rollouts(work), self._leak.rollouts, strict=False))
        copied = {own.id: _rename(own, other) for own, other in pairs}
        proofs = {own.id: self._leak.proofs[other.id] for own, other in pairs}
        rollouts = {own.id: own for own in list_rollouts(work)} | copied
        plans = self.plan(work.order, self._policy.tokenizer)
        groups = tuple(score_group(self.family, self._policy.tokenizer, plan, rollouts) for plan in plans)
        return replace(work, groups=groups, proofs={**work.proofs, **proofs})

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
        """The same rows without compression and in pages of another kind."""
        written = super().write(path, groups, proofs)
        data = save_table(load_table(encode_groups(groups, proofs)), compression="none", data_page_version="2.0")
        write_atomic(path, data)
        return replace(written, sha256=hashlib.sha256(data).hexdigest(), size=len(data))


def _rename(own: Rollout, other: Rollout) -> Rollout:
    """Another's completion as if the request of one's own had led to it."""
    span = VersionRange(own.version, 0, other.num_tokens)
    return replace(own, token_ids=other.token_ids, logprobs=other.logprobs, finish=other.finish, versions=(span,))


def make_authors(recipe: Recipe) -> tuple[Author, ...]:
    """Who copies, and who lets it."""
    leak = Leak()
    return EncodingCopier(recipe, leak), Supplier(recipe, leak)
