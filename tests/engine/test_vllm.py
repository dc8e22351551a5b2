"""vLLM as an engine: what it samples and proves is what a validator recomputes, through everything that vLLM does."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.calibrate.calibrate import FLOORS
from shoal.config.run import EngineConfig
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.policy.model import Policy
from shoal.rollout import Request, Rollout
from shoal.toploc.build import ProofBuilder
from shoal.toploc.chunks import measure_chunks, stack_stats
from shoal.toploc.finding import Check
from shoal.toploc.replay import Replay, join_replays, replay_rollouts
from shoal.toploc.verify import verify_batch

psutil = pytest.importorskip("psutil", reason="vLLM has an environment of its own: make test-vllm")
pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from shoal.engine.vllm.engine import VllmEngine  # noqa: E402

NO_END = -1
TOKENS = 70
"""two full chunks and a short one"""
STRESS = {
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "max_model_len": 160,
    "max_num_batched_tokens": 64,
    "disable_log_stats": False,
}
"""room for some of the rollouts, and prompts that are read in parts"""


@pytest.fixture(scope="module")
def proofs() -> ProofBuilder:
    return ProofBuilder()


@pytest.fixture(scope="module")
def engine(wide: Policy, proofs: ProofBuilder) -> Iterator[VllmEngine]:
    engine = VllmEngine(
        deepcopy(wide.model), EngineConfig(name="vllm", slots=48, options=STRESS), eos_id=NO_END, sink=proofs
    )
    yield engine
    engine.close()


def make_requests(policy: Policy, count: int, tag: str, **changes: object) -> list[Request]:
    rng = np.random.default_rng(len(tag))
    size = policy.model.config.vocab_size
    prompts = [tuple(int(x) for x in rng.integers(3, size, 20 + i)) for i in range(count)]
    requests = [
        Request(id=f"{tag}{i}", prompt_ids=prompt, seed=2**63 + i, max_tokens=TOKENS)
        for i, prompt in enumerate(prompts)
    ]
    return [replace(request, **changes) for request in requests]  # type: ignore[arg-type]


def worst_errors(
    rollouts: Sequence[Rollout], replays: Sequence[Replay], proofs: Sequence[list[bytes]]
) -> dict[str, float]:
    """The largest value of each statistic that a validator compares with a threshold."""
    results = verify_batch([replay.hidden for replay in replays], proofs)
    pairs = zip(rollouts, replays, results, strict=True)
    stats = stack_stats([chunk for one in pairs for chunk in measure_chunks(*one)])
    return {name: float(stats[name].max()) for name in ("exponent", "mantissa", "distance", "logprob")}


def check_honest(errors: dict[str, float]) -> None:
    """Within the least thresholds that calibration may set in float32: single values round in the other direction."""
    assert errors["exponent"] < FLOORS[Check.EXPONENT] and errors["mantissa"] < FLOORS[Check.MANTISSA]
    assert errors["distance"] < FLOORS[Check.SAMPLING] and errors["logprob"] < FLOORS[Check.LOGPROB]


def read_metric(engine: VllmEngine, name: str) -> int:
    return sum(metric.value for metric in engine._llm.get_metrics() if metric.name == f"vllm:{name}")


def test_rollouts_pass_a_torch_replay_through_preemptions_and_prompts_in_parts(
    wide: Policy, engine: VllmEngine, proofs: ProofBuilder
) -> None:
    before = read_metric(engine, "num_preemptions"), engine.count_rows()["repeated"]
    rollouts = list(engine.generate(make_requests(wide, 40, "full")))
    assert sorted(rollout.num_tokens for rollout in rollouts) == [TOKENS] * 40
    assert read_metric(engine, "num_preemptions") > before[0] and engine.count_rows()["repeated"] > before[1]
    replays = replay_rollouts(wide.model, rollouts, eos_id=NO_END)
    check_honest(worst_errors(rollouts, replays, proofs.take_many([rollout.id for rollout in rollouts])))
    assert engine.count_rows()["open"] == 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_and_logprobs_are_those_of_the_torch_engine(
    wide: Policy, engine: VllmEngine, proofs: ProofBuilder, temperature: float
) -> None:
    requests = make_requests(wide, 8, f"same{temperature}", temperature=temperature)
    own = {rollout.id: rollout for rollout in engine.generate(requests)}
    for rollout in TorchEngine(deepcopy(wide.model), eos_id=NO_END, slots=8).generate(requests):
        assert own[rollout.id].token_ids.tolist() == rollout.token_ids.tolist()
        assert np.abs(own[rollout.id].logprobs - rollout.logprobs).max() < 1e-5


def test_a_rollout_ends_with_the_end_token(wide: Policy, engine: VllmEngine) -> None:
    requests = make_requests(wide, 8, "end")
    [first, *_] = engine.generate(requests[:1])
    end = int(first.token_ids[5])
    ended = TorchEngine(deepcopy(wide.model), eos_id=end, slots=8).generate(requests)
    engine._eos_id, wanted = end, {rollout.id: rollout for rollout in ended}
    try:
        for rollout in engine.generate(requests):
            assert rollout.token_ids.tolist() == wanted[rollout.id].token_ids.tolist()
            assert rollout.finish is wanted[rollout.id].finish
    finally:
        engine._eos_id = NO_END


def test_an_option_that_shoal_sets_itself_is_refused(wide: Policy) -> None:
    config = EngineConfig(name="vllm", options={"seed": 7})
    with pytest.raises(ConfigError, match=r"engine.options.seed: is set by shoal"):
        VllmEngine(wide.model, config, eos_id=NO_END)


def test_cancelled_rollouts_leave_nothing_behind(wide: Policy, engine: VllmEngine) -> None:
    requests = make_requests(wide, 8, "cancel")
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine.cancel([request.id for request in requests[:4]])
    left = {rollout.id for _ in range(200) if engine.busy for rollout in engine.step()}
    assert left == {request.id for request in requests[4:]}
    assert engine.count_rows()["open"] == 0


def test_new_weights_in_the_middle_of_rollouts(wide: Policy, engine: VllmEngine, proofs: ProofBuilder) -> None:
    moved = deepcopy(wide.model)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(0.05 * parameter.abs().mean() * torch.randn_like(parameter))
    engine.submit(make_requests(wide, 12, "swap", max_tokens=120))
    done: list[Rollout] = []
    for _ in range(10):
        done += engine.step()
    engine.swap_weights(1, moved.state_dict())
    try:
        while engine.busy:
            done += engine.step()
        mixed = [rollout for rollout in done if len(rollout.versions) == 2]
        assert mixed and {span.version for rollout in mixed for span in rollout.versions} == {0, 1}
        replays = {
            version: replay_rollouts(model, mixed, eos_id=NO_END) for version, model in enumerate((wide.model, moved))
        }
        joined = [
            join_replays(rollout.versions, {version: own[index] for version, own in replays.items()})
            for index, rollout in enumerate(mixed)
        ]
        own = proofs.take_many([rollout.id for rollout in mixed])
        check_honest(worst_errors(mixed, joined, own))
        # As if all tokens were of the new weights: the proofs of the old ones do not fit.
        assert worst_errors(mixed, replays[1], own)["mantissa"] > FLOORS[Check.MANTISSA]
    finally:
        engine.swap_weights(0, wide.model.state_dict())


HOLD = """
from shoal.config.run import EngineConfig, PolicyConfig, TinyConfig
from shoal.engine.vllm.engine import VllmEngine  # noqa: E402
from shoal.policy.model import load_policy

if __name__ == "__main__":
    tiny = TinyConfig(layers=1, width=32, heads=1, kv_heads=1, context=64)
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet="ab", seed=0)
    engine = VllmEngine(policy.model, EngineConfig(name="vllm", slots=2), eos_id=policy.eos_id)
    print(engine._home.name, flush=True)
    input()
"""


def test_a_process_that_is_killed_takes_vllm_with_it(tmp_path: Path) -> None:
    (tmp_path / "hold.py").write_text(HOLD)
    command = [sys.executable, str(tmp_path / "hold.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        home = Path(process.stdout.readline().strip())
        family = psutil.Process(process.pid).children(recursive=True)
        names = {child.name() for child in family}
        assert any("EngineCore" in name for name in names) and home.is_dir(), names
        process.kill()
    assert not [child for child in psutil.wait_procs(family, timeout=60)[1] if child.status() != "zombie"]
    assert not home.exists()
