"""Evaluation: estimates compared with brute force, results with a scripted engine, and the command on real runs."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.fixtures.paths import TINY

from shoal.cli import main
from shoal.config.run import EvalConfig, RunConfig, load_config
from shoal.engine.torch import TorchEngine
from shoal.policy.model import Policy, load_policy
from shoal.policy.tokenizer import encode_completion
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.tasks.base import Family, Task
from shoal.tasks.registry import load_family
from shoal.tasks.split import Split, split_task
from shoal.train.eval import (
    EvalResult,
    draw_tasks,
    estimate_mean,
    estimate_pass_k,
    estimate_rate,
    estimate_share,
    evaluate,
)
from shoal.train.report import read_metrics
from shoal.train.rundir import RunDir


@pytest.fixture
def config() -> RunConfig:
    torch.set_num_threads(1)
    return load_config(TINY, ["engine.max_tokens=8"])


def draw_with(family: Family, seed: int, **settings: int) -> list[Task]:
    return draw_tasks(family, RunConfig(seed=seed, eval=EvalConfig(**settings)))


@pytest.fixture
def family(config: RunConfig) -> Family:
    return load_family(config.tasks.name, config.tasks.options)


@pytest.fixture
def policy(config: RunConfig, family: Family) -> Policy:
    return load_policy(config.policy, alphabet=family.alphabet, seed=0)


def build_engine(policy: Policy, *, slots: int = 8, version: int = 0) -> TorchEngine:
    return TorchEngine(policy.model, eos_id=policy.eos_id, slots=slots, version=version)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample() -> None:
    for num in range(1, 7):
        for right, k in itertools.product(range(num + 1), range(1, num + 1)):
            outcomes = [True] * right + [False] * (num - right)
            subsets = [any(subset) for subset in itertools.combinations(outcomes, k)]
            assert estimate_pass_k(num, right, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@pytest.mark.parametrize(
    ("right", "num", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_of_a_share_is_wilsons(right: int, num: int, low: float, high: float) -> None:
    estimate = estimate_share(right, num)
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((right / num, low, high), abs=5e-5)


def test_the_interval_of_a_share_is_symmetric_and_stays_inside() -> None:
    for num in (1, 2, 30):
        for right in range(num + 1):
            one, other = estimate_share(right, num), estimate_share(num - right, num)
            assert 0 <= one.low <= one.value <= one.high <= 1
            assert one.low == pytest.approx(1 - other.high, abs=1e-12)


def test_the_interval_of_a_mean_is_two_standard_errors() -> None:
    estimate = estimate_mean([0.0, 1.0, 1.0, 0.0])
    # ddof 1: std = sqrt(1/3), standard error sqrt(1/12)
    half = 1.959964 / 12**0.5
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((0.5, 0.5 - half, 0.5 + half))


def test_the_interval_of_rates_stays_inside_and_is_not_empty_where_tasks_agree() -> None:
    assert (estimate_rate([0.0, 0.0, 0.0, 1.0]).low, estimate_rate([1.0, 1.0, 1.0, 0.0]).high) == (0.0, 1.0)
    for value, num in ((0.0, 5), (1.0, 1), (0.25, 1)):
        estimate, share = estimate_rate([value] * num), estimate_share(value * num, num)
        assert (estimate.value, estimate.low, estimate.high) == (value, share.low, share.high)
        assert estimate.low < estimate.high


class ScriptedEngine:
    """Answers with given texts by request id, so that the results can be computed by hand."""

    def __init__(self, policy: Policy, texts: dict[str, str]) -> None:
        self._policy, self._texts = policy, texts

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        for request in reversed(list(requests)):
            tokens = np.array(encode_completion(self._policy.tokenizer, self._texts[request.id]), dtype=np.int32)
            yield Rollout(
                id=request.id,
                prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
                token_ids=tokens,
                logprobs=np.zeros(len(tokens), dtype=np.float32),
                finish=Finish.STOP,
                versions=(VersionRange(9, 0, len(tokens)),),
                temperature=request.temperature,
                seed=request.seed,
            )


def test_figures_match_hand_computed_numbers(config: RunConfig, family: Family, policy: Policy) -> None:
    config = config.model_copy(update={"eval": EvalConfig(tasks=2, samples=3, k=2)})
    first, second = (family.demonstrate(task) for task in draw_tasks(family, config))
    texts = {"s0.0": first, "s0.1": "zzzzz", "s0.2": "", "greedy0.0": first}
    texts |= {"s1.0": second, "s1.1": second, "s1.2": second, "greedy1.0": ""}
    result = evaluate(
        ScriptedEngine(policy, texts),  # type: ignore[arg-type]
        family,
        policy,
        config,
    )
    assert (result.version, result.num_tasks, result.num_samples) == (9, 2, 3)
    assert result.pass_1.value == pytest.approx((1 / 3 + 1) / 2)
    assert result.pass_k.value == pytest.approx((2 / 3 + 1) / 2)
    assert result.greedy.value == 0.5
    # With the end token, without the greedy completions.
    assert result.mean_length.value == pytest.approx(((len(first) + 5) / 3 + 1 + len(second) + 1) / 2)


def test_tasks_are_held_out_and_the_same_for_every_version(family: Family) -> None:
    tasks = draw_with(family, 3, tasks=6)
    assert {split_task(task) for task in tasks} == {Split.HELDOUT}
    assert tasks == draw_with(family, 3, tasks=6, samples=9, k=1)
    assert tasks != draw_with(family, 4, tasks=6)


def test_a_result_does_not_depend_on_slots_or_earlier_evaluations(
    config: RunConfig, family: Family, policy: Policy
) -> None:
    one, other = build_engine(policy, slots=3), build_engine(policy, slots=64)
    results = [evaluate(engine, family, policy, config) for engine in (one, one, other)]
    assert results[0] == results[1] == results[2]


def test_a_result_names_the_version_it_measured(config: RunConfig, family: Family, policy: Policy) -> None:
    engine = build_engine(policy, version=7)
    assert evaluate(engine, family, policy, config).version == 7
    engine.swap_weights(8, policy.model.state_dict())
    assert evaluate(engine, family, policy, config).version == 8


class RestlessEngine(TorchEngine):
    """Gets new weights while it generates."""

    def step(self) -> list[Rollout]:
        self.swap_weights(self.version + 1, {name: t.clone() for name, t in self._model.state_dict().items()})
        return super().step()


def test_an_evaluation_of_changing_weights_is_refused(config: RunConfig, family: Family, policy: Policy) -> None:
    engine = RestlessEngine(policy.model, eos_id=policy.eos_id, slots=8)
    with pytest.raises(AssertionError, match="weights changed"):
        evaluate(engine, family, policy, config)


@pytest.fixture
def result() -> EvalResult:
    return EvalResult(
        version=12,
        num_tasks=200,
        num_samples=4,
        k=4,
        pass_1=estimate_share(50, 200),
        pass_k=estimate_share(120, 200),
        greedy=estimate_share(0, 200),
        reward=estimate_mean([0.5, 0.25]),
        mean_length=estimate_mean([3.0, 5.0]),
    )


def test_the_markdown_form_is_a_table(result: EvalResult) -> None:
    lines = result.to_markdown().splitlines()
    assert lines[0] == "| v12 on 200 held-out tasks | value | 95 % interval |"
    assert lines[2] == "| pass@1, sampled | 0.250 | 0.195 to 0.314 |"
    assert [line.split("|")[1].strip() for line in lines[3:]] == [
        "pass@4, sampled",
        "pass@1, greedy",
        "mean reward, sampled",
        "mean length (tokens)",
    ]
    assert {line.count("|") for line in lines} == {4}


def test_the_json_form_holds_every_figure_with_its_interval(result: EvalResult) -> None:
    data = json.loads(result.to_json())
    assert (data["version"], data["num_tasks"], data["num_samples"], data["k"]) == (12, 200, 4, 4)
    assert data["pass_1"] == {
        "value": 0.25,
        "low": pytest.approx(0.195, abs=1e-3),
        "high": pytest.approx(0.314, abs=1e-3),
    }
    assert set(data) >= {"pass_k", "greedy", "mean_length"}


def test_metrics_carry_the_names_of_the_console_and_the_report(result: EvalResult) -> None:
    names = {
        "eval/pass_at_1": 0.25,
        "eval/pass_at_4": 0.6,
        "eval/greedy": 0.0,
        "eval/reward": 0.375,
        "eval/length": 4.0,
    }
    assert result.metrics() == names


def test_the_command_repeats_what_the_run_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(TINY), f"out={tmp_path}", "steps=1"]) == 0
    run = tmp_path / "tiny-seed0"
    first, _, last = read_metrics(run / "metrics.jsonl")
    capsys.readouterr()
    assert main(["eval", str(run), "--json", str(tmp_path / "v1.json"), "--markdown", str(tmp_path / "v1.md")]) == 0
    assert (tmp_path / "v1.md").read_text() == capsys.readouterr().out
    after = json.loads((tmp_path / "v1.json").read_text())
    assert (after["version"], after["pass_1"]["value"]) == (1, last["eval/pass_at_1"])
    assert after["mean_length"]["value"] == last["eval/length"]

    # The same settings under another name: no run, so the starting policy is used.
    assert main(["eval", str(TINY), f"out={tmp_path}", "name=other", "--json", str(tmp_path / "v0.json")]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("| v0 on 6 held-out tasks |")
    assert "SFT: cached" in shown.err
    before = json.loads((tmp_path / "v0.json").read_text())
    assert (before["version"], before["mean_length"]["value"]) == (0, first["eval/length"])


def test_a_run_without_a_checkpoint_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.open(load_config(TINY, [f"out={tmp_path}"]))
    run.append_metrics(0, {})
    run.close()
    assert main(["eval", str(run.path)]) == 2
    assert capsys.readouterr().err.endswith(f"loading libraries\nshoal: {run.path}: has no checkpoint yet\n")


def test_a_report_without_a_folder_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none" / "v0.json"
    assert main(["eval", str(TINY), f"out={tmp_path}", "--json", str(path)]) == 2
    text = f"loading libraries\nshoal: {path}: cannot be written, there is no folder {path.parent}\n"
    assert capsys.readouterr().err.endswith(text)
    assert list(tmp_path.iterdir()) == []
