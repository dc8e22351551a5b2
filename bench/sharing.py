"""What it saves to compute once what several samples of a group wrote alike: CPU of training steps, with and without.

    python bench/sharing.py [--quick] [--json]      # a minute

The demo's task in one process with one thread. Two learners train on the same batches in turns, from the same warmed-up
weights; the one that shares writes the next batch. Both must end with nearly the same weights, or the figures mean
nothing.

    step_ratio       CPU of a step without sharing over that with it, all steps together
    fed_share        tokens that the model was fed with sharing, of those without
    gap_ppm          between the weights of both in the end, of how far they moved, in millionths
"""

import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor

from common import OUT, ROOT, finish, mean, parse_flags
from shoal.config import RunConfig, load_config
from shoal.engine.torch import TorchEngine
from shoal.learner.learner import Learner
from shoal.learner.sample import build_packs, build_samples
from shoal.policy.model import Policy
from shoal.rollout import Group
from shoal.runtime import tune_process
from shoal.sampler import Sampler
from shoal.tasks.registry import load_family
from shoal.warmup import load_start

CONFIG, STEPS, QUICK_STEPS = "examples/sort.toml", 20, 4
MOST_GAP = 0.05
"""of the distance moved; rounding grows in twenty steps of Adam, a fault would be far larger"""


@dataclass(frozen=True, slots=True)
class Turn:
    """One batch, trained by both."""

    apart_s: float
    shared_s: float
    apart_tokens: int
    shared_tokens: int


class Pair:
    """Two learners that differ in nothing but whether they share."""

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
        """How far both are apart, of how far they are from where they began."""
        apart, shared = (_flatten(self._policies[share]) for share in (False, True))
        return float((apart - shared).norm() / (apart - self._begin).norm())

    def train(self, groups: Sequence[Group], turn: int) -> Turn:
        """One step of both; who is first alternates."""
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
    """All steps, and how far both learners are apart in the end."""
    policy = load_start(config, note=lambda text: None)
    pair = Pair(config, policy)
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=config.engine.slots)
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
    lines = ["| steps | tokens fed, apart | shared | CPU s a step, apart | shared | ratio |", "|---" * 6 + "|"]
    for name, part in ((f"1 to {half}", turns[:half]), (f"{half + 1} to {len(turns)}", turns[half:])):
        apart_s, shared_s = mean([turn.apart_s for turn in part]), mean([turn.shared_s for turn in part])
        tokens = mean([turn.apart_tokens for turn in part]), mean([turn.shared_tokens for turn in part])
        cells = f"{tokens[0]:,.0f} | {tokens[1]:,.0f} | {apart_s:.3f} | {shared_s:.3f} | {apart_s / shared_s:.2f}x"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def _flatten(policy: Policy) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.model.state_dict().values()]).clone()


def main() -> None:
    """Measure, and print."""
    flags = parse_flags(__doc__ or "")
    tune_process(1)
    turns, gap = run_turns(
        load_config(ROOT / CONFIG, [f"out={OUT}", "threads=1"]), QUICK_STEPS if flags.quick else STEPS
    )
    if gap > MOST_GAP:
        raise SystemExit(f"both learners are {gap:.1%} of their way apart: they did not train on the same")
    finish(flags, format_table(turns), list_figures(turns, gap))


if __name__ == "__main__":
    main()
