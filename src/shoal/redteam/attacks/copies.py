"""Submitting work that was done before: another node's, or the attacker's own for a different lease."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shoal.group import score_group
from shoal.recipe import Recipe
from shoal.redteam.behaviours.bad_files import load_table, save_table
from shoal.redteam.behaviours.forged_work import CopyingBehaviour, LeakingBehaviour, list_rollouts
from shoal.redteam.registry import Expected, attack
from shoal.rollout import Group, Rollout, VersionRange
from shoal.submission.write import Proofs, WrittenSubmission, encode_groups, write_file
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour


@attack("copy_all", expect=Expected.HARD, text="all rollouts are copied from another node's submission")
def copy_all(recipe: Recipe) -> tuple[WorkerBehaviour, ...]:
    """The copier, and the worker whose work it copies."""
    source = LeakingBehaviour(recipe)
    return CopyingBehaviour(recipe, source), source


@attack("copy_one", expect=Expected.HARD, text="one rollout is copied from another node's submission")
def copy_one(recipe: Recipe) -> tuple[WorkerBehaviour, ...]:
    """The copier, and the worker whose work it copies."""
    source = LeakingBehaviour(recipe)
    return CopyingBehaviour(recipe, source, most=1), source


class EncodingCopyBehaviour(CopyingBehaviour):
    """Submits leaked tokens, log-probs and proofs under its own rollout ids. Honest until something has leaked."""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The leaked rollouts under its own ids."""
        leaked = self._source.leaked
        if leaked is None:
            return work
        pairs = list(zip(list_rollouts(work), list_rollouts(leaked), strict=False))
        copied = {own.id: _rename(own, other) for own, other in pairs}
        proofs = {own.id: leaked.proofs[other.id] for own, other in pairs}
        rollouts = {own.id: own for own in list_rollouts(work)} | copied
        plans = self.plan(work.order, self.policy.tokenizer)
        groups = tuple(score_group(self.family, self.policy.tokenizer, plan, rollouts) for plan in plans)
        return replace(work, groups=groups, proofs={**work.proofs, **proofs})

    def write(self, path: Path, groups: Sequence[Group], proofs: Proofs) -> WrittenSubmission:
        """The same rows without compression and with a different page type, so that the file hash is unique."""
        table = load_table(encode_groups(groups, proofs))
        return write_file(path, save_table(table, compression="none", data_page_version="2.0"), groups)


def _rename(own: Rollout, other: Rollout) -> Rollout:
    """Another node's completion, presented as the result of our request."""
    versions = (VersionRange(own.version, 0, other.num_tokens),)
    return replace(own, token_ids=other.token_ids, logprobs=other.logprobs, finish=other.finish, versions=versions)


@attack("copy_encoded", expect=Expected.HARD, text="all rollouts are copied unread and encoded as a different file")
def copy_encoded(recipe: Recipe) -> tuple[WorkerBehaviour, ...]:
    """The copier, and the worker whose work it copies."""
    source = LeakingBehaviour(recipe)
    return EncodingCopyBehaviour(recipe, source), source


@attack("own_old", expect=Expected.HARD, text="the attacker's own earlier work is submitted again")
class OldWorkBehaviour(CopyingBehaviour):
    """Does the first lease honestly, and submits the same work for every later lease."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe, LeakingBehaviour(recipe))

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The first work, proven again."""
        return self._source.finish(work) if self.is_honest else super().finish(work)
