"""Savings from computing the common prefixes of a group's samples once: CPU time of training steps, with and without.

    python bench/sharing.py [--quick] [--json]      # a minute

The demo's task in one process with one thread. Two learners train alternately on the same batches, from the same
fine-tuned weights; the sharing one samples the next batch. Both must end with nearly the same weights, otherwise the
figures are meaningless.

    step_ratio       CPU time of a step without sharing over that with it, all steps together
    fed_share        tokens fed to the model with sharing, as a share of those without
    gap_ppm          final distance between the weights of both, relative to how far they moved, in parts per million
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from common import OUT, ROOT, finish, mean, parse_flags
from shoal.config.run import RunConfig, load_config
from shoal.engine import open_engine
from shoal.learner.advantage import build_samples
from shoal.learner.learner import Learner
from shoal.policy.model import Policy
from shoal.policy.packing import build_packs
from shoal.rollout import Group
from shoal.tasks.registry import load_family
from shoal.train.sampler import Sampler
from shoal.train.sft import load_start
from shoal.util.process import tune_process

CONFIG, STEPS, QUICK_STEPS = "examples/sort.toml", 20, 4
MOST_GAP = 0.05
"""relative to the distance moved; rounding grows over twenty steps of Adam, a bug would cause far more"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch, trained on by both."""

    apart_s: float
    shared_s: float
    apart_tokens: int
    shared_tokens: int


class Pair:
    """Two learners that differ only in whether they share."""

    def __init__(self, config: RunConfig, policy: Policy) -> None:
        self._config, self._begin = config, _flatten(policy)
        self._policies = {share: deepcopy(policy) for share in (False, True)}
        self._learners = {
            share: Learner(
                own.model,
                config.learner.model_copy(update={"share": share}),
                max_tokens=config.engine.max_tokens,
            )
            for share, own in self._policies.items()
        }

    @property
    def weights(self) -> dict[str, Tensor]:
        return self._policies[True].model.state_dict()

    @property
    def gap(self) -> float:
        """Distance between both, relative to their distance from the start."""
        apart, shared = (_flatten(self._policies[share]) for share in (False, True))
        return float((apart - shared).norm() / (apart - self._begin).norm())

    def train(self, groups: Sequence[Group], turn: int) -> Turn:
        """One step of both; the order alternates."""
        spent = {}
        for share in (False, True) if turn % 2 else (True, False):
            begun = time.process_time()
            self._learners[share].train_step(groups)
            spent[share] = time.process_time() - begun
        return Turn(spent[False], spent[True], self._count(groups, False), self._count(groups, True))

    def _count(self, groups: Sequence[Group], share: bool) -> int:
        settings = self._config.learner
        packs = build_packs(build_samples(groups, settings.advantage), settings.micro_tokens, share=share)
        return sum(len(pack.token_ids) for pack in packs)


def run_turns(config: RunConfig, steps: int) -> tuple[list[Turn], float]:
    """All steps, and the final distance of the learners."""
    policy = load_start(config)
    pair = Pair(config, policy)
    engine = open_engine(config.engine, policy.model, eos_id=policy.eos_id)
    sampler = Sampler(engine, load_family(config.tasks.name, config.tasks.options), policy.tokenizer, config)
    turns = []
    for step in range(1, steps + 1):
        turns.append(pair.train(sampler.draw_batch(step).batch.groups, step))
        engine.swap_weights(step, pair.weights)
    return turns, pair.gap


def list_figures(turns: Sequence[Turn], gap: float) -> dict[str, float]:
    """Named figures."""
    return {
        "step_ratio": sum(turn.apart_s for turn in turns) / sum(turn.shared_s for turn in turns),
        "fed_share": sum(turn.shared_tokens for turn in turns) / sum(turn.apart_tokens for turn in turns),
        "gap_ppm": 1e6 * gap,
    }


def format_table(turns: Sequence[Turn]) -> str:
    """The first half of the steps, and the second."""
    half = len(turns) // 2
    lines = ["| steps | tokens fed, apart | shared | CPU s per step, apart | shared | ratio |", "|---" * 6 + "|"]
    for name, part in ((f"1 to {half}", turns[:half]), (f"{half + 1} to {len(turns)}", turns[half:])):
        apart_s, shared_s = mean([turn.apart_s for turn in part]), mean([turn.shared_s for turn in part])
        tokens = mean([turn.apart_tokens for turn in part]), mean([turn.shared_tokens for turn in part])
        cells = f"{tokens[0]:,.0f} | {tokens[1]:,.0f} | {apart_s:.3f} | {shared_s:.3f} | {apart_s / shared_s:.2f}x"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _flatten(policy: Policy) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.model.state_dict().values()]).clone()


def main() -> None:
    """Measure and print."""
    flags = parse_flags(__doc__ or "")
    tune_process(1)
    turns, gap = run_turns(
        load_config(ROOT / CONFIG, [f"out={OUT}", "threads=1"]), QUICK_STEPS if flags.quick else STEPS
    )
    if gap > MOST_GAP:
        raise SystemExit(f"the learners differ by {gap:.1%} of the distance moved: they did not train on the same data")
    finish(flags, format_table(turns), list_figures(turns, gap))


if __name__ == "__main__":
    main()
