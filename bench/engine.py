"""shoal's engine compared with transformers' generate: same model and prompts, alternating in one process.

    python bench/engine.py [--quick] [--json]

Figures are ratios transformers / shoal, medians over rounds, above 1 where shoal is faster:
    ratio_mixed    256 prompts of 4 to 24 tokens, completions with an end token, at most 256 tokens
    ratio_equal    256 prompts of 12 tokens, 32 tokens each, no end token
    ratio_grouped  16 prompts x 16 rollouts, as in training
"""

import random
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import PreTrainedModel

from common import finish, parse_flags
from shoal.config.run import EngineConfig, PolicyConfig, TinyConfig
from shoal.engine import open_engine
from shoal.policy.model import load_policy
from shoal.rollout import Request
from shoal.util.process import tune_process

Prompts = list[tuple[int, ...]]
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    tune_process(0)
    rounds = 3 if flags.quick else 9
    width, layers = 128, 3
    random.seed(0)
    mixed = [_draw_prompt(random.randint(4, 24)) for _ in range(256)]
    equal = [_draw_prompt(12) for _ in range(256)]
    grouped = [prompt for prompt in equal[:16] for _ in range(16)]
    jobs = {"mixed": (mixed, 256, True), "equal": (equal, 32, False), "grouped": (grouped, 32, False)}
    figures: dict[str, float] = {}
    rows = ["| job | transformers s | shoal s | shoal tokens/s | ratio |", "|---|---|---|---|---|"]
    for name, (prompts, limit, ends) in jobs.items():
        peer, own, tokens = compare(width, layers, prompts, limit, ends, rounds)
        figures[f"ratio_{name}"] = peer / own
        rows.append(f"| {name} | {peer:.3f} | {own:.3f} | {tokens / own:,.0f} | {peer / own:.2f} |")
    finish(flags, "\n".join(rows), figures)


def compare(width: int, layers: int, prompts: Prompts, limit: int, ends: bool, rounds: int) -> tuple[float, float, int]:
    """Median seconds of both, and the number of tokens that shoal generated."""
    config = PolicyConfig(tiny=TinyConfig(width=width, layers=layers))
    policy = load_policy(config, alphabet=ALPHABET, seed=0)
    eos_id = policy.eos_id if ends else -1
    policy.model.generation_config.eos_token_id = policy.eos_id if ends else None
    engine = open_engine(
        EngineConfig(slots=len(prompts)), load_policy(config, alphabet=ALPHABET, seed=0).model, eos_id=eos_id
    )
    tokens = 0

    def run_engine() -> None:
        nonlocal tokens
        requests = [Request(id=str(i), prompt_ids=p, seed=i, max_tokens=limit) for i, p in enumerate(prompts)]
        tokens = sum(rollout.num_tokens for rollout in engine.generate(requests))

    def run_peer() -> None:
        _generate(policy.model, prompts, limit)

    times: dict[str, list[float]] = {"peer": [], "own": []}
    for turn in range(rounds + 1):
        for name, job in (("peer", run_peer), ("own", run_engine)):
            seconds = _measure(job)
            if turn:  # the first turn warms up
                times[name].append(seconds)
    return median(times["peer"]), median(times["own"]), tokens


@torch.inference_mode()
def _generate(model: PreTrainedModel, prompts: Prompts, limit: int) -> None:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=limit, do_sample=True, top_k=0, top_p=1.0, temperature=1.0
    )


def _measure(job: Callable[[], None]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def _draw_prompt(length: int) -> tuple[int, ...]:
    return tuple(random.randint(3, 38) for _ in range(length))


if __name__ == "__main__":
    main()
