"""One process of bench/scale.py: a training step on a model that it loads by rows, alone or as a rank of torchrun.

python bench/scale_rank.py JOB.json      the job names the model's folder, the settings and where the result goes
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule

from shoal.config.run import LearnerConfig, PolicyConfig
from shoal.learner.checkpoint import SavingCheckpoint, save_checkpoint
from shoal.learner.learner import Learner
from shoal.learner.parallel import join_ranks, leave_ranks, whole_tensor
from shoal.learner.sharded import open_shards, write_rows
from shoal.policy.model import Policy
from shoal.rollout import Finish, Group, Rollout, Score, VersionRange

GROUPS, SIZE, TOKENS = 6, 4, 40


def make_groups(vocabulary: int) -> list[Group]:
    """Random rollouts with rewards that differ; the same in every process."""
    rng = np.random.default_rng(0)

    def make(index: int, sample: int, prompt: np.ndarray) -> Rollout:
        length = int(rng.integers(2, TOKENS))
        return Rollout(
            id=f"{index}.{sample}",
            prompt_ids=prompt,
            token_ids=rng.integers(3, vocabulary, length, dtype=np.int32),
            logprobs=-rng.random(length, dtype=np.float32) - 1,
            finish=Finish.LENGTH,
            versions=(VersionRange(0, 0, length),),
            temperature=1.0,
            seed=sample,
        )

    prompts = [rng.integers(3, vocabulary, 8, dtype=np.int32) for _ in range(GROUPS)]
    scores = tuple(Score(float(sample % 2), "") for sample in range(SIZE))
    return [
        Group(
            index=index,
            task_id=str(index),
            rollouts=tuple(make(index, s, prompt) for s in range(SIZE)),
            scores=scores,
        )
        for index, prompt in enumerate(prompts)
    ]


def peak_bytes() -> int:
    """The largest amount of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _begin_checkpoint(folder: Path, policy: Policy, learner: Learner) -> SavingCheckpoint | None:
    """Ranks write the optimizer state in the background, one process does not."""
    if learner.ranks.mesh is not None:
        return SavingCheckpoint(folder, 0, policy, learner, {})
    save_checkpoint(folder, 0, policy, learner, {})
    return None


def main(job: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks("cpu")
    config = LearnerConfig(updates=1, warmup_steps=0, max_grad_norm=1e9, **job["learner"])
    groups = make_groups(job["vocabulary"])
    base = peak_bytes()
    policy = open_shards(job["model"], PolicyConfig(device="cpu"), config, ranks)
    if job.get("averaged"):
        for module in policy.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(ranks.size))
    learner = Learner(policy.model, config, max_tokens=TOKENS, ranks=ranks)
    loaded, seconds = peak_bytes(), []
    for _ in range(job["steps"]):
        started = time.perf_counter()
        metrics = learner.train_step(groups)
        seconds.append(time.perf_counter() - started)
    result = {"base": base, "loaded": loaded, "peak": peak_bytes(), "step_s": min(seconds)}
    result |= {"norm": metrics["optim/grad_norm"], "rank": ranks.rank}
    if job.get("gradients"):
        grads = {
            name: whole_tensor(p.grad).clone() for name, p in policy.model.named_parameters() if p.grad is not None
        }
        if ranks.is_first:
            save_file(grads, out / f"{job['name']}.safetensors")
    if job.get("checkpoint"):
        started = time.perf_counter()
        saving = _begin_checkpoint(out / job["name"], policy, learner)
        begun = time.perf_counter()
        if saving is not None:
            saving.finish()
        result |= {"begin_s": begun - started, "finish_s": time.perf_counter() - begun}
        started = time.perf_counter()
        write_rows(policy, out / job["name"] / "published", ranks)
        result |= {"publish_s": time.perf_counter() - started}
    (out / f"{job['name']}-{ranks.rank}.json").write_text(json.dumps(result))
    ranks.barrier()
    leave_ranks(ranks)


if __name__ == "__main__":
    _path = Path(sys.argv[1])
    main(json.loads(_path.read_text()), _path.parent)
