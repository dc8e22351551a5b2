"""One real training step, and some generation, in a process of its own, for `bench/plan.py` to compare with.

    python bench/plan_step.py CASE            # a `Case` as JSON
    python bench/plan_step.py peaks CASE...   # the memory alone, of each

Prints one line of JSON per case: how much the process's resident memory grew at its peak, and durations. Memory is
counted from after the imports and a step of a model of ten thousand weights, which starts thread pools and loads what
is loaded late. `measure` makes glibc return freed blocks at once: by default it keeps them, and the peak then depends
on the order of allocations as much as on what is in use.
"""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from shoal.config.run import build_config
from shoal.engine import open_engine
from shoal.launch.settings import LaunchConfig
from shoal.learner.learner import Learner
from shoal.plan.devices import measure_cpu
from shoal.rollout import Finish, Group, Request, Rollout, Score, VersionRange

_RETURN_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
_GENERATED = 64
"""rollouts that are generated for the rate"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model by its sizes, the settings of its run, and the lengths of its rollouts."""

    name: str
    arch: str = "qwen3"
    layers: int = 4
    width: int = 256
    feed_forward: int = 704
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 512
    prompt: int = 32
    completion: int = 97
    groups: int = 2
    settings: tuple[str, ...] = ()

    @property
    def architecture(self) -> PretrainedConfig:
        return AutoConfig.for_model(
            self.arch,
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.feed_forward,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.width // self.heads,
            max_position_embeddings=4096,
            tie_word_embeddings=False,
            pad_token_id=None,
        )

    @property
    def config(self) -> LaunchConfig:
        fixed = (f"batch.groups={self.groups}", "batch.group_size=8", "learner.updates=1", "learner.micro_tokens=4096")
        return build_config(LaunchConfig, {}, [*fixed, f"engine.max_tokens={self.completion}", *self.settings])


@dataclass(frozen=True, slots=True)
class Measured:
    """What one process used."""

    peak_bytes: int
    step_s: float
    tokens_per_s: float
    """of generation, with as many rollouts side by side as were asked for"""
    tflops: float
    gbps: float


def measure(case: Case, *, keep_blocks: bool = False) -> Measured:
    """Run a case in a process of its own, in one thread."""
    (line,) = _run_program([], [case], keep_blocks=keep_blocks)
    return Measured(**json.loads(line))


def measure_peaks(cases: Sequence[Case]) -> list[int]:
    """The memory alone, of several cases one after the other in one process."""
    return [int(line) for line in _run_program(["peaks"], cases)]


def _run_program(words: Sequence[str], cases: Sequence[Case], *, keep_blocks: bool = False) -> list[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if keep_blocks else _RETURN_BLOCKS)
    command = [sys.executable, __file__, *words, *(json.dumps(asdict(case)) for case in cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{', '.join(case.name for case in cases)}: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-len(cases) :]


def run_case(case: Case) -> Measured:
    """Two training steps, so that the optimizer has its state, and then generation."""
    torch.set_num_threads(1)
    cpu = measure_cpu()
    peak, step_s = _run_steps(case)
    return Measured(peak, step_s, _generate(case), cpu.tflops, cpu.gbps)


def _run_steps(case: Case) -> tuple[int, float]:
    """Bytes at the peak of two steps, and seconds of the second."""
    small = replace(case, width=32, feed_forward=64, layers=1, vocabulary=64, heads=2, kv_heads=1, completion=9)
    _train(small)
    gc.collect()
    before = _read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins again from here
    step_s = _train(case)
    return _read_status("VmHWM") - before, step_s


def _train(case: Case) -> float:
    """Seconds of the second of two steps."""
    torch.manual_seed(0)
    config = case.config
    model = AutoModelForCausalLM.from_config(case.architecture).to(getattr(torch, config.policy.dtype))
    learner = Learner(model, config.learner, max_tokens=case.completion)
    groups = _make_groups(case, config.batch.group_size)
    learner.train_step(groups)
    start = time.perf_counter()
    learner.train_step(groups)
    return time.perf_counter() - start


def _make_groups(case: Case, size: int) -> Sequence[Group]:
    rng = np.random.default_rng(0)

    def make_rollout(index: int, prompt: np.ndarray) -> Rollout:
        return Rollout(
            id=str(index),
            prompt_ids=prompt,
            token_ids=rng.integers(0, case.vocabulary, case.completion).astype(np.int32),
            logprobs=np.full(case.completion, -np.log(case.vocabulary), np.float32),
            finish=Finish.LENGTH,
            versions=(VersionRange(0, 0, case.completion),),
            temperature=1.0,
            seed=0,
        )

    groups = []
    for index in range(case.groups):
        prompt = rng.integers(0, case.vocabulary, case.prompt).astype(np.int32)
        rollouts = tuple(make_rollout(sample, prompt) for sample in range(size))
        scores = tuple(Score(float(sample % 2), "") for sample in range(size))
        groups.append(Group(index=index, task_id=str(index), rollouts=rollouts, scores=scores))
    return groups


def _generate(case: Case) -> float:
    """Tokens per second of the torch engine with all rollouts side by side."""
    config = case.config
    model = AutoModelForCausalLM.from_config(case.architecture).to(getattr(torch, config.policy.dtype)).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight[0] = -1e3  # the end token is never drawn: all have the same length
    engine = open_engine(config.engine.model_copy(update={"slots": _GENERATED}), model, eos_id=0)
    prompt = tuple(range(1, 1 + case.prompt))
    requests = [
        Request(id=str(index), prompt_ids=prompt, seed=index, max_tokens=case.completion) for index in range(_GENERATED)
    ]
    list(engine.generate(requests[:2]))
    start = time.perf_counter()
    tokens = sum(rollout.num_tokens for rollout in engine.generate(requests))
    return tokens / (time.perf_counter() - start)


def _read_status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _read_case(text: str) -> Case:
    given = json.loads(text)
    return Case(**(given | {"settings": tuple(given["settings"])}))


if __name__ == "__main__":
    if sys.argv[1] == "peaks":
        torch.set_num_threads(1)
        for word in sys.argv[2:]:
            print(_run_steps(_read_case(word))[0])
    else:
        print(json.dumps(asdict(run_case(_read_case(sys.argv[1])))))
