"""Learner, SFT, replay, evaluation and engine on the pretend device, compared with the CPU; one JSON object per check.

A process of its own: the device must be registered before shoal is imported, because decorators use
`torch.inference_mode`.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from tests.device.names import NAMES
from tests.fixtures import pretend_device
from tests.fixtures.paths import TINY as PATHS_TINY
from tests.fixtures.pretend_device import move_model, read_value, use_device

pretend_device.register_device()

import numpy as np  # noqa: E402
import torch  # noqa: E402

from shoal.calibrate import variants  # noqa: E402
from shoal.config.run import LearnerConfig, LossConfig, PolicyConfig, TinyConfig, load_config  # noqa: E402
from shoal.engine import open_engine  # noqa: E402
from shoal.engine.torch import TorchEngine  # noqa: E402
from shoal.learner import logprobs  # noqa: E402
from shoal.learner.advantage import build_samples  # noqa: E402
from shoal.learner.learner import Learner  # noqa: E402
from shoal.policy.model import Policy, load_policy  # noqa: E402
from shoal.policy.packing import build_packs  # noqa: E402
from shoal.rollout import Group, Request, Rollout, Score  # noqa: E402
from shoal.tasks.open import open_tasks  # noqa: E402
from shoal.toploc.build import ProofBuilder  # noqa: E402
from shoal.toploc.replay import replay_rollouts  # noqa: E402
from shoal.train import sft  # noqa: E402
from shoal.train.eval import evaluate  # noqa: E402

TINY = TinyConfig(layers=2, width=64, heads=4, kv_heads=2, context=256)
MAX_TOKENS = 40


def make_policy(arch: str = "llama") -> Policy:
    tiny = TINY.model_copy(update={"arch": arch})
    return load_policy(PolicyConfig(tiny=tiny, device="cpu"), alphabet="abcdefgh", seed=3)


def list_requests(policy: Policy, *, temperature: float = 1.0) -> list[Request]:
    prompts = [tuple(policy.tokenizer.encode(text)) for text in ("abc", "hgfedc", "aa")]
    return [
        Request(
            id=f"{group}.{n}",
            prompt_ids=prompt,
            seed=100 * group + n,
            max_tokens=MAX_TOKENS,
            temperature=temperature,
        )
        for group, prompt in enumerate(prompts)
        for n in range(4)
    ]


def generate(policy: Policy, **options: Any) -> list[Rollout]:
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=5)
    return sorted(engine.generate(list_requests(policy, **options)), key=lambda rollout: rollout.id)


def make_groups(policy: Policy) -> list[Group]:
    rollouts = generate(policy)
    scored = [Score(float(len(rollout.token_ids) % 3) / 2, "") for rollout in rollouts]
    return [
        Group(
            index=first // 4,
            task_id=str(first),
            rollouts=tuple(rollouts[first : first + 4]),
            scores=tuple(scored[first : first + 4]),
        )
        for first in range(0, len(rollouts), 4)
    ]


def list_weights(model: Any) -> list[torch.Tensor]:
    return [read_value(parameter.data) for parameter in model.parameters()]


def check_refusals() -> dict[str, Any]:
    """The pretend device refuses what a device refuses."""
    with use_device() as device:
        x = torch.ones(3, device=device)
        refused = []
        for attempt in (lambda: x + torch.ones(3), x.numpy):
            try:
                attempt()
            except (pretend_device.MixedDevicesError, TypeError) as error:
                refused.append(type(error).__name__)
        return {"refused": refused, "sum": float((x * 2).sum())}


def check_learner(loss: str, correction: str, arch: str = "llama") -> dict[str, Any]:
    """A training step: metrics and weights equal the CPU's bit for bit."""
    policy = make_policy(arch)
    groups = make_groups(copy.deepcopy(policy))
    settings = LossConfig(name=loss, correction=correction, kl=0.01, entropy=0.001)  # type: ignore[arg-type]
    config = LearnerConfig(updates=2, micro_tokens=32, loss=settings)

    def learn(model: Any, reference: Any) -> tuple[dict[str, float], Any]:
        learner = Learner(model, config, max_tokens=MAX_TOKENS, reference=reference)
        learner.train_step(groups)
        pretend_device.waits.clear()
        return learner.train_step(groups), learner.model

    metrics, model = learn(copy.deepcopy(policy.model), copy.deepcopy(policy.model))
    with use_device():
        ours, moved = learn(*(move_model(copy.deepcopy(policy.model)) for _ in range(2)))
    same = all(torch.equal(one, other) for one, other in zip(list_weights(model), list_weights(moved), strict=True))
    packs = sum(len(build_packs(build_samples(part, config.advantage), config.micro_tokens)) for part in (groups,))
    return {"metrics": ours == metrics, "weights": same, "updates": int(metrics["optim/updates"]), "packs": packs}


def check_chunks() -> dict[str, Any]:
    """A training step whose logits are computed in chunks of a few tokens."""
    before, logprobs.CHUNK_BYTES = logprobs.CHUNK_BYTES, 256
    try:
        return check_learner("intellect2", "token")
    finally:
        logprobs.CHUNK_BYTES = before


def check_sft() -> dict[str, Any]:
    """Supervised fine-tuning: losses and weights equal the CPU's bit for bit."""
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(PATHS_TINY, [f"out={folder}", "sft.steps=4", "sft.eval_every=4", "policy.device=cpu"])
        cpu, model = fine_tune(config, Path(folder) / "cpu", lambda policy: policy)
        with use_device():
            moving = lambda policy: Policy(model=move_model(policy.model), tokenizer=policy.tokenizer)  # noqa: E731
            ours, moved = fine_tune(config, Path(folder) / "device", moving)
    same = all(torch.equal(one, other) for one, other in zip(list_weights(model), list_weights(moved), strict=True))
    return {"loss": ours == cpu, "weights": same, "steps": 4}


def fine_tune(config: Any, folder: Path, place: Callable[[Policy], Policy]) -> tuple[float, Any]:
    """A few steps of SFT with the policy where `place` puts it."""
    before = sft.load_shards
    sft.load_shards = lambda *args, **options: place(before(*args, **options))  # type: ignore[assignment]
    try:
        tuning = sft._FineTuning(config, folder)
    finally:
        sft.load_shards = before
    pretend_device.waits.clear()
    for _ in range(4):
        tuning._train_step()
    waits = dict(pretend_device.waits)
    loss = tuning._heldout_loss()
    pretend_device.waits.clear()
    pretend_device.waits.update(waits)
    return loss, tuning._policy.model


def check_evaluation() -> dict[str, Any]:
    """Held-out pass rates equal the CPU's."""
    config = load_config(PATHS_TINY, ["policy.device=cpu"])
    family = open_tasks(config)
    policy = load_policy(config.policy, alphabet=family.alphabet, seed=0)

    def measure(model: Any) -> Any:
        engine = open_engine(config.engine, model, eos_id=policy.eos_id)
        return evaluate(engine, family, policy, config)

    cpu = measure(copy.deepcopy(policy.model))
    with use_device():
        ours = measure(move_model(copy.deepcopy(policy.model)))
    return {"figures": ours == cpu}


def check_calibration() -> dict[str, Any]:
    """The variant of calibration that decodes by transformers, whose attention kernel depends on the device."""
    policy = make_policy()
    requests = list_requests(policy)

    def decode(model: Any) -> Any:
        states: list[Any] = []
        rollouts = variants._decode_plain(
            model, requests, batch=4, eos_id=policy.eos_id, sink=lambda *state: states.append(state[:2])
        )
        return rollouts, states

    cpu = decode(copy.deepcopy(policy.model).eval())
    with use_device():
        ours = decode(cast(Any, move_model(copy.deepcopy(policy.model))).eval())
    pairs = list(zip(cpu[0], ours[0], strict=True))
    return {
        "tokens": all(one.id == other.id and np.array_equal(one.token_ids, other.token_ids) for one, other in pairs),
        "logprobs": all(np.allclose(one.logprobs, other.logprobs, atol=1e-5) for one, other in pairs),
        "chunks": cpu[1] == ours[1],
    }


def check_replay(temperature: float) -> dict[str, Any]:
    """A validator's replay: every number equals the CPU's bit for bit."""
    policy = make_policy()
    rollouts = generate(copy.deepcopy(policy), temperature=temperature)
    cpu = replay_rollouts(copy.deepcopy(policy.model), rollouts, eos_id=policy.eos_id, shape=True)
    with use_device():
        moved: Any = move_model(copy.deepcopy(policy.model))
        pretend_device.waits.clear()
        ours = replay_rollouts(moved, rollouts, eos_id=policy.eos_id, shape=True)
    columns = ("logprobs", "distances", "eos_probs", "tilts", "masses")
    return {
        "columns": all(
            np.array_equal(getattr(one, name), getattr(other, name))
            for one, other in zip(cpu, ours, strict=True)
            for name in columns
        ),
        "hidden": all(torch.equal(one.hidden, other.hidden) for one, other in zip(cpu, ours, strict=True)),
        "num": len(ours),
    }


def check_engine(arch: str) -> dict[str, Any]:
    """Rollouts and proofs, with a swap of weights in the middle: all bytes equal the CPU's."""
    policy, second = make_policy(arch), make_policy(arch)
    weights = {name: tensor * 1.01 for name, tensor in second.model.state_dict().items()}

    num_steps = []

    def work(model: Any) -> list[tuple[Any, ...]]:
        builder = ProofBuilder()
        engine = TorchEngine(model, eos_id=policy.eos_id, slots=5, sink=builder)
        engine.submit(list_requests(policy))
        num_steps.append(7)
        done = [rollout for _ in range(7) for rollout in engine.step()]
        engine.swap_weights(1, weights)
        engine.cancel(["2.3"])
        while engine.busy:
            done += engine.step()
            num_steps[-1] += 1
        done.sort(key=lambda rollout: rollout.id)
        proofs = builder.take_many([rollout.id for rollout in done])
        return [
            (r.id, r.token_ids.tobytes(), r.logprobs.tobytes(), r.versions, own)
            for r, own in zip(done, proofs, strict=True)
        ]

    cpu = work(copy.deepcopy(policy.model))
    with use_device():
        moved = move_model(copy.deepcopy(policy.model))
        pretend_device.waits.clear()
        ours = work(moved)
    return {
        "rollouts": ours == cpu,
        "versions": max(len(entry[3]) for entry in cpu),
        "steps": num_steps[-1],
        "chunks": sum(len(entry[4]) for entry in cpu) + 1,
    }


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "refusals": check_refusals,
    "learner": lambda: check_learner("intellect2", "token"),
    "learner gspo sequence": lambda: check_learner("gspo", "sequence"),
    "learner qwen3": lambda: check_learner("dapo", "none", "qwen3"),
    "learner chunked": check_chunks,
    "sft": check_sft,
    "evaluation": check_evaluation,
    "calibration": check_calibration,
    "replay": lambda: check_replay(1.0),
    "replay greedy": lambda: check_replay(0.0),
    "engine": lambda: check_engine("llama"),
    "engine qwen3": lambda: check_engine("qwen3"),
}


def main() -> None:
    torch.set_num_threads(1)
    assert tuple(CHECKS) == NAMES
    for name in sys.argv[1:] or CHECKS:
        pretend_device.waits.clear()
        result = CHECKS[name]()
        print(json.dumps({"name": name, **result, "waits": dict(pretend_device.waits)}), flush=True)


if __name__ == "__main__":
    main()
