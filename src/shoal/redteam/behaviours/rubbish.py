"""Rubbish of every form: what an owner without any compute can submit for a lease.

garbage   random bytes                                          form
slow      a file that takes a parser many seconds               form
prompt    well-formed, with other prompts than those leased     consistency
reward    random tokens for the right prompts, all scored 1     consistency
proof     the same, scored right, with random proofs            proof
silent    the lease is kept and never answered
unsent    the file is announced and never sent
returned  the lease is returned at once
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shoal.group import GroupPlan, GroupShape, plan_leased, score_group
from shoal.policy.tokenizer import build_tokenizer
from shoal.protocol.beacon import read_seeds
from shoal.protocol.messages import Lease, Manifest
from shoal.recipe import Recipe
from shoal.redteam.attacks.files import waste_time
from shoal.redteam.behaviours.bad_files import limit_groups
from shoal.rollout import Finish, Group, Request, Rollout, Score, VersionRange
from shoal.submission.limits import PROOF_BYTES, PROOF_TOKENS
from shoal.submission.write import encode_groups, write_file

FILES = ("garbage", "slow", "prompt", "reward", "proof")
"""forms that are submitted"""
SILENCES = ("silent", "unsent", "returned")
"""forms that submit nothing"""
FORMS = (*FILES, *SILENCES)
_GARBAGE_BYTES = 4096
_LOGPROB = -1.0


class RubbishWriter:
    """Writes the rubbish of one run, for a family whose tokenizer follows from its alphabet."""

    def __init__(self, recipe: Recipe, seed: int = 0) -> None:
        self._family = recipe.open_family()
        self._tokenizer = build_tokenizer(self._family.alphabet)
        self._shape = GroupShape(size=recipe.group_size, max_tokens=recipe.max_tokens, temperature=recipe.temperature)
        self._random = np.random.default_rng(seed)

    def write(self, form: str, lease: Lease, path: Path) -> Manifest:
        """Write the file of a lease; its manifest is one that the coordinator accepts."""
        groups = self._make_groups(form, lease)
        proofs = {rollout.id: self._make_proofs(rollout) for group in groups for rollout in group.rollouts}
        data = encode_groups(groups, proofs)
        if form == "garbage":
            data = os.urandom(_GARBAGE_BYTES)
        elif form == "slow":
            data = waste_time(data, limit_groups(groups, self._shape.max_tokens))
        path.parent.mkdir(parents=True, exist_ok=True)
        written = write_file(path, data, groups)
        return Manifest(
            lease=lease.lease,
            fence=lease.fence,
            blob=written.sha256,
            size=written.size,
            version=lease.version,
            rollouts=written.entries,
        )

    def _make_groups(self, form: str, lease: Lease) -> list[Group]:
        seeds = [read_seeds(text) for text in lease.seeds]
        plans = plan_leased(self._family, self._tokenizer, self._shape, step=lease.step, first=lease.first, seeds=seeds)
        return [self._make_group(form, plan, lease.version) for plan in plans]

    def _make_group(self, form: str, plan: GroupPlan, version: int) -> Group:
        rollouts = {request.id: self._make_rollout(form, request, version) for request in plan.requests}
        if form == "proof":
            return score_group(self._family, self._tokenizer, plan, rollouts)
        scores = (Score(1.0, ""),) * len(rollouts)
        return Group(index=plan.index, task_id=plan.task.id, rollouts=tuple(rollouts.values()), scores=scores)

    def _make_rollout(self, form: str, request: Request, version: int) -> Rollout:
        """Tokens up to the limit, none of which ends the rollout."""
        words = [token for token in range(len(self._tokenizer)) if token != self._tokenizer.eos_token_id]
        tokens = self._random.choice(words, request.max_tokens).astype(np.int32)
        prompt: Sequence[int] = request.prompt_ids[::-1] if form == "prompt" else request.prompt_ids
        return Rollout(
            id=request.id,
            prompt_ids=np.array(prompt, dtype=np.int32),
            token_ids=tokens,
            logprobs=np.full(len(tokens), _LOGPROB, dtype=np.float32),
            finish=Finish.LENGTH,
            versions=(VersionRange(version, 0, len(tokens)),),
            temperature=request.temperature,
            seed=request.seed,
        )

    def _make_proofs(self, rollout: Rollout) -> list[bytes]:
        return [self._random.bytes(PROOF_BYTES) for _ in range(-(-rollout.num_tokens // PROOF_TOKENS))]
