"""Supervised warm-up on a family's demonstrations, so that RL starts from a policy that sometimes succeeds.

The result is cached under `<out>/warmup/<hash>`, the hash being of the settings that decide it: runs that differ in RL
settings alone start from the same weights. An interrupted warm-up goes on from its last checkpoint, bit for bit.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from shoal.config import RunConfig, WarmupConfig, config_hash
from shoal.files import atomic_dir, remove_dir, write_atomic
from shoal.learner.checkpoint import load_optimizer, save_optimizer
from shoal.learner.logprobs import score_tokens
from shoal.learner.sample import Sample, build_packs
from shoal.policy.model import Policy, load_policy, open_policy, save_policy
from shoal.policy.tokenizer import encode_completion, encode_prompt
from shoal.rollout import Finish, Rollout
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task
from shoal.tasks.registry import load_family
from shoal.tasks.split import heldout_tasks, train_task

Note = Callable[[str], None]
_PACK_TOKENS = 4096
_GRAD_NORM = 1.0
_FLOOR = 0.1
"""The cosine ends at this share of the peak learning rate."""
_KEYS = ("seed", "threads", "policy", "tasks", "warmup")


def run_warmup(config: RunConfig, note: Note = print) -> Path:
    """Folder of the warmed-up policy, computed unless it is cached. `note` hears how it goes."""
    folder = Path(config.out) / "warmup" / config_hash(config, *_KEYS)[:16]
    if (folder / "warmup.json").exists():
        note(f"warm-up: cached in {folder}")
        return folder
    _Warmup(config, folder, note).run()
    return folder


def load_start(config: RunConfig, note: Note = print) -> Policy:
    """v0: the policy that the settings name, warmed up if they say so."""
    if config.warmup.steps:
        return open_policy(run_warmup(config, note), dtype=getattr(torch, config.policy.dtype))
    family = load_family(config.tasks.name, config.tasks.options)
    return load_policy(config.policy, alphabet=family.alphabet, seed=config.seed)


class _Warmup:
    """State of one warm-up: policy, optimizer, step."""

    def __init__(self, config: RunConfig, folder: Path, note: Note) -> None:
        self._config, self._folder, self._note = config, folder, note
        self._partial = folder.with_name(folder.name + ".partial")
        self._family = load_family(config.tasks.name, {**config.tasks.options, **config.warmup.options})
        self._losses: dict[int, float] = {}
        self._step = 0
        self._policy = self._open_policy()
        self._optimizer = torch.optim.AdamW(
            self._policy.model.parameters(), lr=config.warmup.lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        if self._partial.exists():
            self._resume()

    def run(self) -> None:
        """Train to the last step and publish the folder."""
        steps = self._config.warmup.steps
        while self._step < steps:
            self._train_step()
            if self._step % self._config.warmup.eval_every == 0 or self._step == steps:
                self._losses[self._step] = self._heldout_loss()
                self._note(f"warm-up: step {self._step}/{steps}, held-out loss {self._losses[self._step]:.4f}")
                self._save_partial()
        with atomic_dir(self._folder) as target:
            save_policy(self._policy, target)
            (target / "warmup.json").write_text(json.dumps({"heldout_loss": self._losses}) + "\n")
        remove_dir(self._partial)

    def _open_policy(self) -> Policy:
        if self._partial.exists():
            return open_policy(self._partial, dtype=getattr(torch, self._config.policy.dtype))
        return load_policy(self._config.policy, alphabet=self._family.alphabet, seed=self._config.seed)

    def _resume(self) -> None:
        progress = json.loads((self._partial / "progress.json").read_text())
        self._step = int(progress["step"])
        self._losses = {int(step): loss for step, loss in progress["heldout_loss"].items()}
        load_optimizer(self._policy.model, self._optimizer, self._partial / "optimizer.safetensors")
        self._note(f"warm-up: goes on from step {self._step}")

    def _save_partial(self) -> None:
        progress = {"step": self._step, "heldout_loss": self._losses}
        with atomic_dir(self._partial) as target:
            save_policy(self._policy, target)
            save_optimizer(self._policy.model, self._optimizer, target / "optimizer.safetensors")
            write_atomic(target / "progress.json", json.dumps(progress).encode())

    def _train_step(self) -> None:
        settings = self._config.warmup
        seeds = [derive_seed("warmup", self._config.seed, self._step, index) for index in range(settings.batch)]
        samples = [self._demonstrate(train_task(self._family, seed), index) for index, seed in enumerate(seeds)]
        total = sum(sample.rollout.num_tokens for sample in samples)
        self._optimizer.zero_grad(set_to_none=True)
        for pack in build_packs(samples, _PACK_TOKENS):
            loss = -score_tokens(self._policy.model, pack).logprobs.sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._policy.model.parameters(), _GRAD_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = schedule_rate(settings, self._step)
        self._optimizer.step()
        self._step += 1

    @torch.no_grad()
    def _heldout_loss(self) -> float:
        tasks = heldout_tasks(self._family, self._config.warmup.heldout, derive_seed("warmup", self._config.seed))
        samples = [self._demonstrate(task, index) for index, task in enumerate(tasks)]
        scores = [score_tokens(self._policy.model, pack).logprobs for pack in build_packs(samples, _PACK_TOKENS)]
        return -float(torch.cat(scores).mean())

    def _demonstrate(self, task: Task, index: int) -> Sample:
        return Sample(index, demonstrate_task(self._family, self._policy, task), 0.0)


def demonstrate_task(family: Family, policy: Policy, task: Task) -> Rollout:
    """A demonstration as if a policy had written it, for the learner's packing."""
    tokens = np.array(encode_completion(policy.tokenizer, family.demonstrate(task)), dtype=np.int32)
    return Rollout(
        id=task.id,
        prompt_ids=np.array(encode_prompt(policy.tokenizer, task.prompt), dtype=np.int32),
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish=Finish.STOP,
        versions=(),
        temperature=1.0,
        seed=0,
    )


def schedule_rate(settings: WarmupConfig, step: int) -> float:
    """Learning rate of a 0-based step: linear ramp, then cosine to a tenth."""
    if step < settings.ramp:
        return settings.lr * (step + 1) / settings.ramp
    done = (step - settings.ramp) / max(1, settings.steps - settings.ramp)
    return settings.lr * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))
