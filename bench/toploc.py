"""shoal's proofs compared with the published package `toploc`, alternating in one process, and their cost in a run.

    python bench/toploc.py [--quick] [--json]

All figures are CPU time on one thread. Ratios are peer / shoal, medians over rounds, above 1 where shoal is faster:
    build_ratio_896, build_ratio_5120      building proofs of 256 chunks of 32 tokens, hidden size 896 and 5120
    verify_ratio_896, verify_ratio_5120    verifying them
With the torch engine:
    build_share                share of generation time spent on proofs: the demo's model (width 128, 3 layers),
                               256 rollouts of 64 tokens
    build_share_large          the same: width 576, 30 layers, 16 rollouts of 32 tokens
    verify_cost_ratio          generating / verifying (prefill, log-probs, sampling distances, proofs) per token: the
                               demo's model, 64 concurrent rollouts of 512 tokens
    verify_cost_ratio_single   the same, 4 rollouts generated one after the other

The published package must be built from source: see tests/toploc/test_reference.py.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from common import NO_PEER, finish, parse_flags
from shoal.config.run import EngineConfig, PolicyConfig, TinyConfig
from shoal.engine import open_engine
from shoal.engine.base import Engine
from shoal.policy.model import Policy, load_policy
from shoal.rollout import Request, Rollout
from shoal.toploc.build import ProofBuilder, build_proofs
from shoal.toploc.replay import replay_rollouts
from shoal.toploc.verify import verify_batch, verify_proofs
from shoal.util.process import tune_process

CHUNKS = 256
SMALL = TinyConfig(context=640)
LARGE = TinyConfig(width=576, layers=30, heads=9, kv_heads=3)
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"

Proven = tuple[Rollout, list[bytes]]


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    peer = _import_peer()
    tune_process(1)
    rounds = 3 if flags.quick else 9
    figures: dict[str, float] = {}
    rows = ["| hidden size | job | toploc us | shoal us | ratio |", "|---|---|---|---|---|"]
    for width in (896, 5120):
        for job, (theirs, ours) in compare_proofs(peer, width, rounds).items():
            figures[f"{job}_ratio_{width}"] = theirs / ours
            rows.append(f"| {width} | {job} | {theirs:.0f} | {ours:.0f} | {theirs / ours:.1f} |")
    figures["build_share"] = measure_share(SMALL, rollouts=256, tokens=64, rounds=rounds)
    figures["build_share_large"] = measure_share(LARGE, rollouts=16, tokens=32, rounds=1)
    figures["verify_cost_ratio"] = measure_cost(rollouts=64, slots=64, rounds=1 if flags.quick else 3)
    figures["verify_cost_ratio_single"] = measure_cost(rollouts=4, slots=1, rounds=1 if flags.quick else 3)
    finish(flags, "\n".join(rows), figures)


def compare_proofs(peer: Any, width: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Median CPU-microseconds per chunk of the package and of shoal, by job."""
    hidden = torch.randn(32 * CHUNKS, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    proofs = build_proofs(hidden)
    sizes = {"decode_batching_size": 32, "topk": 128, "skip_prefill": True}
    jobs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "build": (lambda: peer.build_proofs_bytes(hidden, **sizes), lambda: build_proofs(hidden)),
        "verify": (lambda: peer.verify_proofs_bytes(hidden, proofs, **sizes), lambda: verify_proofs(hidden, proofs)),
    }
    times: dict[str, list[list[float]]] = {job: [] for job in jobs}
    for turn in range(rounds + 1):
        for job, pair in jobs.items():
            seconds = [_measure(side)[1] for side in pair]
            torch.set_num_threads(1)  # the package sets it to all cores
            if turn:  # the first turn warms up
                times[job].append(seconds)
    scale = 1e6 / CHUNKS
    return {
        job: (scale * median(p for p, _ in turns), scale * median(o for _, o in turns)) for job, turns in times.items()
    }


def measure_share(config: TinyConfig, *, rollouts: int, tokens: int, rounds: int) -> float:
    """Median share of generation time spent inside the proof builder."""
    policy = load_policy(PolicyConfig(tiny=config), alphabet=ALPHABET, seed=0)
    sink = _TimedSink()
    engine = open_engine(EngineConfig(slots=rollouts), policy.model, eos_id=-1, sink=sink)
    shares = []
    for count in (min(8, rollouts), *[rollouts] * rounds):  # a few to warm up
        sink.seconds = 0.0
        _, seconds = _measure(_generate, engine, sink, _draw_requests(count, tokens))
        shares.append(sink.seconds / seconds)
    return median(shares[1:])


def measure_cost(*, rollouts: int, slots: int, rounds: int) -> float:
    """Median CPU time of generating rollouts of 512 tokens with proofs, relative to that of verifying them."""
    policy = load_policy(PolicyConfig(tiny=SMALL), alphabet=ALPHABET, seed=0)
    builder = ProofBuilder()
    engine = open_engine(EngineConfig(slots=slots), policy.model, eos_id=-1, sink=builder)
    ratios = []
    for count in (1, *[rollouts] * rounds):  # one to warm up
        proven, generation = _measure(_generate, engine, builder, _draw_requests(count, 512))
        _, verification = _measure(_verify, policy, proven)
        ratios.append(generation / verification)
    return median(ratios[1:])


class _TimedSink:
    """A proof builder that measures its own CPU time."""

    def __init__(self) -> None:
        self._builder = ProofBuilder()
        self.seconds = 0.0

    def __call__(self, rollout_id: str, start: int, hidden: Tensor) -> None:
        self.seconds += _measure(self._builder, rollout_id, start, hidden)[1]

    def take_many(self, rollout_ids: Sequence[str]) -> list[list[bytes]]:
        proofs, seconds = _measure(self._builder.take_many, rollout_ids)
        self.seconds += seconds
        return proofs


def _generate(engine: Engine, builder: ProofBuilder | _TimedSink, requests: Sequence[Request]) -> list[Proven]:
    rollouts = list(engine.generate(requests))
    return list(zip(rollouts, builder.take_many([rollout.id for rollout in rollouts]), strict=True))


def _verify(policy: Policy, proven: Sequence[Proven]) -> None:
    replays = replay_rollouts(policy.model, [rollout for rollout, _ in proven], eos_id=policy.eos_id)
    results = verify_batch([replay.hidden for replay in replays], [proofs for _, proofs in proven])
    assert all(result.fault is None and result.exp_mismatches <= 38 for chunks in results for result in chunks)


def _draw_requests(count: int, tokens: int) -> list[Request]:
    rng = random.Random(0)
    prompts = [tuple(rng.randint(3, 38) for _ in range(12)) for _ in range(count)]
    return [Request(id=str(i), prompt_ids=p, seed=i, max_tokens=tokens) for i, p in enumerate(prompts)]


def _measure(job: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Result of a job, and its CPU time in seconds."""
    started = time.process_time()
    result = job(*arguments)
    return result, time.process_time() - started


def _import_peer() -> Any:
    # this file has the package's name, and scripts find their own folder first
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]
    try:
        import toploc
    except ImportError as error:
        install = "pip install --no-build-isolation --no-deps --no-binary toploc toploc==0.1.6"
        print(
            f"the published package toploc cannot be imported ({error}); to build it from source: "
            f"pip install setuptools wheel ninja && {install}",
            file=sys.stderr,
        )
        raise SystemExit(NO_PEER) from None
    return toploc


if __name__ == "__main__":
    main()
