"""Supervised fine-tuning on a family's demonstrations, so that RL starts from a policy that sometimes succeeds.

    <out>/sft/<hash>/
      policy/     Hugging Face folder of the result, and sft.json: held-out losses, hash of the weights
      partial/    the last checkpoint of an unfinished SFT
      .lock

The hash covers everything that decides the weights, settings and the folder behind `policy.path`: runs that differ only
in RL settings share it. An interrupted SFT resumes from its last checkpoint, bit for bit.

One process computes an SFT at a time (flock on `.lock`, released by the kernel when the process ends); another process
that needs the same one logs that it waits, and then finds it cached.
"""

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import torch

from shoal.config.run import LearnerConfig, RunConfig, SftConfig, config_hash
from shoal.errors import ConfigError
from shoal.group import encode_task
from shoal.learner.checkpoint import load_optimizer, save_optimizer
from shoal.learner.parallel import (
    ONE,
    Ranks,
    clip_gradients,
    deal_packs,
    measure_norm,
    score_model,
)
from shoal.learner.sharded import load_shards, open_shards, shared_dir, write_rows
from shoal.policy.decoder import LayerOptions, set_layer_options
from shoal.policy.model import Policy
from shoal.policy.packing import Pack, Sample, build_packs
from shoal.policy.tokenizer import encode_completion
from shoal.policy.weights import hash_weights
from shoal.rollout import Finish, Rollout
from shoal.seeds import derive_seed
from shoal.tasks.base import Family, Task
from shoal.tasks.open import SFT_SEED, draw_demonstrated, open_tasks, read_set
from shoal.tasks.split import train_task
from shoal.util.disk import guard_disk
from shoal.util.files import (
    hash_dir,
    is_same_file,
    open_lock,
    read_accounts,
    remove_dir,
    sweep_leftovers,
    try_lock,
    write_owner,
)
from shoal.util.process import tune_process, use_threads

logger = logging.getLogger(__name__)

_PACK_TOKENS = 4096
_GRAD_NORM = 1.0
_FLOOR = 0.1
"""The cosine schedule ends at this share of the peak learning rate."""
_POLICY_KEYS = ("policy.path", "policy.tiny", "policy.dtype", "policy.device")
_KEYS = ("seed", "threads", *_POLICY_KEYS, "tasks", "length.mode", "length.targets", "length.template", "sft")
"""Settings that decide the weights; `threads` is one, because it changes the order of summation and so the bits.
`policy.lora` is none: adapters are trained after SFT, which trains all weights."""
_DONE = "sft.json"
_REPORT_S = 3.0
_PATIENCE_S, _POLL_S = 86_400.0, 0.2
"""How long to wait for another process that computes the same SFT, and how often to check."""


def fix_threads(config: RunConfig) -> RunConfig:
    """The settings with 0 threads, all cores, replaced by their number here: bits depend on it. Ranks divide them."""
    threads = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return config if config.threads else config.model_copy(update={"threads": threads})


def run_sft(config: RunConfig, ranks: Ranks = ONE) -> Path:
    """Folder of the fine-tuned policy, computed unless it is cached; all ranks call this."""
    if not config.sft.steps:
        raise ConfigError("sft.steps: must be at least 1 for SFT, got 0")
    config = fix_threads(config)
    tune_process(ranks.divide_threads(config.threads))
    folder = Path(config.out).expanduser() / "sft" / _name_folder(config)
    result = folder / "policy"
    with use_threads(ranks.divide_threads(config.sft.threads or config.threads)), guard_disk(folder):
        if ranks.decide(ranks.is_first and _is_cached(result)):
            _log(ranks, f"SFT: cached in {result}")
            return result
        with _lock_folder(folder) if ranks.is_first else nullcontext():
            # Another process may have computed it while this one waited.
            if not ranks.decide(ranks.is_first and _is_cached(result)):
                _FineTuning(config, folder, ranks).run()
    return result


def load_start(config: RunConfig, ranks: Ranks = ONE, *, adapters: int | None = None) -> Policy:
    """v0: the policy that the settings name, fine-tuned if `sft.steps` is set; sharded if there are ranks.

    `adapters` is the seed of new adapters; None: without.
    """
    if config.sft.steps:
        return open_shards(run_sft(config, ranks), config.policy, config.learner, ranks, adapters=adapters)
    alphabet = "" if config.policy.path else open_tasks(config).alphabet
    return load_shards(config.policy, config.learner, ranks, alphabet=alphabet, seed=config.seed, adapters=adapters)


def _log(ranks: Ranks, text: str) -> None:
    if ranks.is_first:
        logger.info(text)


def _name_folder(config: RunConfig) -> str:
    """Hash of what decides the weights: the settings, and the files they name, by content."""
    if config.tasks.set:
        found = config.tasks.hash or read_set(config.tasks).hash
        # SFT has no rewards, so a run with another reward function shares it.
        tasks = config.tasks.model_copy(update={"set": [found], "hash": found, "reward": "", "code_hash": ""})
        config = config.model_copy(update={"tasks": tasks})
    name = config_hash(config, *_KEYS)
    if config.policy.path and Path(config.policy.path).is_dir():
        name = hashlib.sha256(f"{name} {hash_dir(Path(config.policy.path))}".encode()).hexdigest()
    return name[:16]


class _FineTuning:
    """State of one fine-tuning: policy, optimizer, step."""

    def __init__(self, config: RunConfig, folder: Path, ranks: Ranks = ONE) -> None:
        self._config, self._ranks = config, ranks
        self._result, self._partial = folder / "policy", folder / "partial"
        self._family = open_tasks(config, config.sft.options)
        self._losses: dict[int, float] = {}
        self._step = 0
        self._policy = self._open_policy()
        # Recomputed layers have the same bits, so this is not among the settings that name the result; compiled ones
        # have not.
        set_layer_options(self._policy.model, LayerOptions(recompute=config.learner.gradient_checkpointing))
        self._heldout = self._pack_heldout()
        self._optimizer = torch.optim.AdamW(
            self._policy.model.parameters(), lr=config.sft.lr, betas=(0.9, 0.98), weight_decay=0.01
        )
        if self._partial.exists():
            self._resume()

    def run(self) -> None:
        """Train to the last step and publish the folder."""
        steps, reported_s = self._config.sft.steps, time.monotonic()
        _log(self._ranks, f"SFT: {steps} steps of {self._config.sft.batch} demonstrations")
        while self._step < steps:
            self._train_step()
            if self._step % self._config.sft.eval_every == 0 or self._step == steps:
                self._losses[self._step] = self._heldout_loss()
                _log(self._ranks, f"SFT: step {self._step}/{steps}, held-out loss {self._losses[self._step]:.4f}")
                self._save_partial()
                reported_s = time.monotonic()
            elif time.monotonic() - reported_s > _REPORT_S:
                _log(self._ranks, f"SFT: step {self._step}/{steps}")
                reported_s = time.monotonic()
        with shared_dir(self._result, self._ranks) as target:
            write_rows(self._policy, target, self._ranks)
            if self._ranks.is_first:
                done = {"heldout_loss": self._losses, "weights_sha256": hash_weights(target)}
                (target / _DONE).write_text(json.dumps(done) + "\n")
        if self._ranks.is_first:
            remove_dir(self._partial)

    def _open_policy(self) -> Policy:
        config, learner = self._config, LearnerConfig(offload=self._config.learner.offload)
        if self._partial.exists():
            return open_shards(self._partial, config.policy, learner, self._ranks)
        return load_shards(config.policy, learner, self._ranks, alphabet=self._family.alphabet, seed=config.seed)

    def _resume(self) -> None:
        progress = json.loads((self._partial / "progress.json").read_text())
        self._step = int(progress["step"])
        self._losses = {int(step): loss for step, loss in progress["heldout_loss"].items()}
        path = self._partial / "optimizer.safetensors"
        load_optimizer(self._policy.model, self._optimizer, path, self._ranks)
        _log(self._ranks, f"SFT: resuming from step {self._step}")

    def _save_partial(self) -> None:
        progress = {"step": self._step, "heldout_loss": self._losses}
        with shared_dir(self._partial, self._ranks) as target:
            write_rows(self._policy, target, self._ranks)
            save_optimizer(self._policy.model, self._optimizer, target / "optimizer.safetensors", self._ranks)
            if self._ranks.is_first:
                (target / "progress.json").write_text(json.dumps(progress) + "\n")

    def _train_step(self) -> None:
        settings = self._config.sft
        seeds = [derive_seed(SFT_SEED, self._config.seed, self._step, index) for index in range(settings.batch)]
        samples = [self._demonstrate(train_task(self._family, seed), index) for index, seed in enumerate(seeds)]
        total = sum(sample.rollout.num_tokens for sample in samples)
        self._optimizer.zero_grad(set_to_none=True)
        packs = self._build_packs(samples)
        shares = deal_packs([len(pack.token_ids) for pack in packs], self._ranks)
        for share in shares:
            loss = -score_model(self._policy.model, packs[share.index]).logprobs.sum() / total
            (loss if share.counts else 0.0 * loss).backward()
        parameters = list(self._policy.model.parameters())
        norm = measure_norm(parameters, self._ranks)
        clip_gradients(parameters, norm, _GRAD_NORM)
        if not bool(torch.isfinite(norm)):
            raise ConfigError(f"sft.lr: non-finite gradient in step {self._step + 1}; lower the learning rate")
        for group in self._optimizer.param_groups:
            group["lr"] = schedule_rate(settings, self._step)
        self._optimizer.step()
        self._step += 1

    def _pack_heldout(self) -> list[Pack]:
        tasks = draw_demonstrated(self._family, self._config)
        return self._build_packs([self._demonstrate(task, index) for index, task in enumerate(tasks)])

    def _build_packs(self, samples: Sequence[Sample]) -> list[Pack]:
        device = self._policy.model.device if self._ranks.mesh is None else self._ranks.device
        return [pack.to(device) for pack in build_packs(samples, _PACK_TOKENS)]

    @torch.no_grad()
    def _heldout_loss(self) -> float:
        """Mean over all tokens; every rank scores all of them, because there are few."""
        scores = [score_model(self._policy.model, pack).logprobs for pack in self._heldout]
        return -float(torch.cat(scores).mean())

    def _demonstrate(self, task: Task, index: int) -> Sample:
        rollout = demonstrate_task(self._family, self._policy, task)
        need, limit = len(rollout.prompt_ids) + rollout.num_tokens, self._policy.model.config.max_position_embeddings
        if need > limit:
            where = "tasks.filter.max_chars" if self._config.tasks.set else "tasks.options"
            more = "" if self._config.policy.path else " (policy.tiny.context)"
            text = f"task {task.id} and its solution need {need} tokens, and the model has {limit} positions{more}"
            raise ConfigError(f"{where}: {text}")
        return Sample(index, rollout, 0.0)


def demonstrate_task(family: Family, policy: Policy, task: Task) -> Rollout:
    """A demonstration in the form of a rollout, for the learner's packing."""
    tokens = np.array(encode_completion(policy.tokenizer, family.demonstrate(task)), dtype=np.int32)
    return Rollout(
        id=task.id,
        prompt_ids=np.array(encode_task(policy.tokenizer, task), dtype=np.int32),
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish=Finish.STOP,
        versions=(),
        temperature=1.0,
        seed=0,
    )


def schedule_rate(settings: SftConfig, step: int) -> float:
    """Learning rate of a 0-based step: linear warm-up, then cosine to a tenth."""
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    done = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.lr * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def _is_cached(result: Path) -> bool:
    """Whether there is a result whose weights match their hash; a damaged one is computed again."""
    try:
        done = json.loads((result / _DONE).read_text())
        return bool(done["weights_sha256"] == hash_weights(result))
    except (FileNotFoundError, ValueError, KeyError, TypeError, ConfigError):
        return False


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; a folder in which nothing came to be is removed."""
    lock_path = folder / ".lock"
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_lock(lock_path)
        _wait_for_lock(lock, folder)
        if is_same_file(lock, lock_path):  # else the process that held it has removed the folder
            break
        os.close(lock)
    try:
        write_owner(lock)
        sweep_leftovers(folder)
        yield
    finally:
        with suppress(OSError):  # it only tidies up
            if [entry.name for entry in folder.iterdir()] == [lock_path.name]:
                lock_path.unlink()
                folder.rmdir()
        os.close(lock)


def _wait_for_lock(lock: int, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    reported = False
    while not try_lock(lock):
        owner = read_accounts(lock)
        if time.monotonic() > deadline:
            raise ConfigError(f"{folder}: process {owner} is computing this SFT and did not finish within a day")
        if not reported:
            logger.info(f"SFT: waiting for process {owner}, which computes it in {folder}")
            reported = True
        time.sleep(_POLL_S)
