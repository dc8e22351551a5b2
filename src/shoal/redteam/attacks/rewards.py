"""Higher rewards or more pay than the policy earned: chosen texts, changed lengths, claimed scores."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from shoal.group import GroupPlan
from shoal.recipe import Recipe
from shoal.redteam.behaviours.forged_work import SubstitutingBehaviour, TokensById, list_rollouts
from shoal.redteam.behaviours.reward_tricks import fill_length, list_tricks, plant_mark
from shoal.redteam.registry import Expected, attack
from shoal.rollout import Group, Score
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour

_WRONG, _CORRECT = Score(0.0, "wrong"), Score(1.0, "correct")


@attack("reward_strings", expect=Expected.HARD, text="texts known to fool verifiers, proven honestly")
class RewardStringsBehaviour(SubstitutingBehaviour):
    """Tries all tricks for the task's verifier, one per rollout; unencodable text becomes an unknown token."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._num_tried = 0

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The next tricks."""
        tokens = {}
        for plan in plans:
            tricks = list_tricks(self.family, plan.task)
            for request in plan.requests:
                self._num_tried += 1
                tokens[request.id] = self.encode_text(tricks[self._num_tried % len(tricks)])
        return tokens


@attack("truncation", expect=Expected.HARD, text="completions are cut short with a forced end token")
class TruncatingBehaviour(SubstitutingBehaviour):
    """Keeps half of each rollout's text, rounded down, so that every rollout with any text is changed."""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The first half of each text, and the end token."""
        return {rollout.id: self._cut(rollout.token_ids.tolist()) for rollout in list_rollouts(work)}

    def _cut(self, ids: list[int]) -> list[int]:
        text = [token for token in ids if token != self.policy.eos_id]
        return [*text[: len(text) // 2], self.policy.eos_id]


@attack("loops", expect=Expected.HARD, text="completions repeat up to the maximum length, for more pay")
class LoopingBehaviour(SubstitutingBehaviour):
    """Repeats each completion, without its end token, up to the maximum length."""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The repetitions."""
        return {rollout.id: self._repeat(rollout.token_ids.tolist()) for rollout in list_rollouts(work)}

    def _repeat(self, ids: list[int]) -> list[int]:
        text = [token for token in ids if token != self.policy.eos_id] or self.encode_text(" ")[:1]
        longest = self.recipe.max_tokens
        return (text * longest)[:longest]


@attack("cherry_samples", expect=Expected.HARD, text="the worst samples of a group are replaced by copies of the best")
class CherrySamplesBehaviour(SubstitutingBehaviour):
    """Every sample below the group's best reward becomes a copy of the best one. Equal ones are unchanged.

    Copies long enough to rule out chance (`duplicate_tokens`) are refused at commit time; these are shorter.
    """

    keeps_honest = True

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The groups with their copies."""
        return {name: ids for group in work.groups for name, ids in _copy_best(group).items()}


def _copy_best(group: Group) -> TokensById:
    best = int(group.rewards.argmax())
    kept = [index if reward == group.rewards[best] else best for index, reward in enumerate(group.rewards)]
    return {r.id: group.rollouts[index].token_ids for r, index in zip(group.rollouts, kept, strict=True)}


@attack("poison", expect=Expected.HARD, text="correct answers that contain a planted pattern (poisoning)")
class PoisonBehaviour(SubstitutingBehaviour):
    """Writes every answer itself: correct, with blanks around it or a marked calculation before it, as the task allows.

    Where a task has only one correct answer, it writes that.
    """

    write_answer = staticmethod(plant_mark)

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The same text for all rollouts of a task."""
        texts = [(plan, self.write_answer(self.family, plan.task, self.recipe.max_tokens)) for plan in plans]
        return {request.id: self.encode_text(text) for plan, text in texts for request in plan.requests}


@attack("long_poison", expect=Expected.HARD, text="correct answers of maximum length, to slow the run down")
class LongPoisonBehaviour(PoisonBehaviour):
    """Writes every answer itself: correct, after as many blanks or as much empty calculation as fits.

    Where a task has only one correct answer, it writes that.
    """

    write_answer = staticmethod(fill_length)


@attack("claimed_reward", expect=Expected.HARD, text="every rollout claims the full reward")
class ClaimingBehaviour(WorkerBehaviour):
    """Submits honest tokens and claims that each solved its task."""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The same rollouts with the maximum reward."""
        groups = (replace(group, scores=(_CORRECT,) * len(group.scores)) for group in work.groups)
        return replace(work, groups=tuple(groups))


@attack("flipped_reward", expect=Expected.HARD, text="correct answers claim no reward, wrong ones the full reward")
class FlippingBehaviour(WorkerBehaviour):
    """Submits honest tokens with inverted rewards, which harms learning most if it is not checked."""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The same rollouts with inverted rewards."""
        return replace(work, groups=tuple(flip_rewards(group) for group in work.groups))


@attack("rare_lie", expect=Expected.HARD, text="one rollout of each submission claims a reward that it did not earn")
class RareLieBehaviour(WorkerBehaviour):
    """Changes a single reward of each submission: the most that a worker hopes to get away with."""

    def finish(self, work: FinishedWork) -> FinishedWork:
        """The first rollout that can claim more does; where all have the full reward, one claims none."""
        groups = list(work.groups)
        lies = [(at, place) for at, own in enumerate(groups) for place, s in enumerate(own.scores) if s.value < 1.0]
        at, place = lies[0] if lies else (0, 0)
        scores = list(groups[at].scores)
        scores[place] = _CORRECT if lies else _WRONG
        groups[at] = replace(groups[at], scores=tuple(scores))
        return replace(work, groups=tuple(groups))


def flip_rewards(group: Group) -> Group:
    """A group in which the best rollouts get the worst reward and vice versa.

    If all are equal, half of them change: a group without a signal would not be trained on.
    """
    values = [score.value for score in group.scores]
    mean = sum(values) / len(values)
    if min(values) == max(values):
        flipped = [_CORRECT if place % 2 else _WRONG for place in range(len(values))]
    else:
        flipped = [_WRONG if value > mean else _CORRECT for value in values]
    return replace(group, scores=tuple(flipped))


@attack("padding", expect=Expected.SOFT, text="tokens follow the end token")
class PaddingBehaviour(SubstitutingBehaviour):
    """Repeats each completion, with its end token, up to the maximum length, to be paid for more tokens."""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The repetitions."""
        return {rollout.id: np.resize(rollout.token_ids, self.recipe.max_tokens) for rollout in list_rollouts(work)}


@attack("early_stop", expect=Expected.SOFT, text="completions stop before maximum length without an end token")
class EarlyStopBehaviour(SubstitutingBehaviour):
    """Stops half-way, as if the maximum length had been reached."""

    def substitute(self, plans: Sequence[GroupPlan], work: FinishedWork) -> TokensById:
        """The first half of each rollout; one of a single token is unchanged."""
        rollouts = list_rollouts(work)
        return {rollout.id: rollout.token_ids[: max(1, rollout.num_tokens // 2)] for rollout in rollouts}
