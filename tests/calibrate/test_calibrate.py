"""`shoal calibrate` from the command to the file, and the parts that measure."""

import itertools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.calibrate import calibrate, variants
from shoal.calibrate.calibrate import (
    RATE,
    CalibrationPlan,
    calibrate_policy,
    cross_check,
    format_table,
    measure_variant,
    run_calibration,
)
from shoal.calibrate.prompts import PromptSource, draw_requests
from shoal.calibrate.variants import VariantSetup, cast_models, list_setups, replay_variant, run_variant
from shoal.cli import build_parser, main
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.policy.model import Policy, save_policy
from shoal.rollout import Finish, Request
from shoal.toploc.calibration import Calibration, load_calibration
from shoal.toploc.chunks import STATISTICS, ChunkStats
from shoal.toploc.replay import replay_rollouts

SOURCE = PromptSource(tokens=40, temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def folder(llama: Policy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_policy(llama, path)
    return path


def test_the_command_writes_a_file_that_verification_reads_and_that_is_checked_against_the_present_weights(
    folder: Path, llama: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "LEAST_SAMPLES", 50)
    out = tmp_path / "c.json"
    before = torch.get_num_threads()
    args = ["calibrate", str(folder), "--samples", "90", "--attacks", "8", "--tokens", "40", "--rate", "1e-3"]
    assert main([*args, "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert torch.get_num_threads() == before
    calibration = load_calibration(out, llama.model)
    names = [variant.name for variant in calibration.variants]
    assert names == [setup.name for setup in list_setups("float32", threads=2, mixed=False)]
    assert all(variant.chunks >= 90 // len(names) and not variant.skipped for variant in calibration.variants)
    assert (calibration.rate, calibration.model, calibration.max_tokens) == (1e-3, str(folder), 512)
    assert shown.err.count("chunks,") == len(names)
    assert "toploc_mantissa   full" in shown.out and f"written to {out}" in shown.out
    assert main([*args, "--check", str(out)]) == 0
    assert capsys.readouterr().out == f"{out} holds for these weights\n"
    data = json.loads(out.read_bytes())
    for kind in ("full", "short"):
        data[kind]["limits"]["logprob"]["threshold"] = 1e-12
        data[kind]["bets"]["logprob_mean"]["levels"] = [{"value": 0.0, "chance": 0.01}] * 4
    out.write_text(json.dumps(data))
    assert main([*args, "--check", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "honest rollouts would be accused" in shown and "an honest node would be accused after" in shown


def test_rollouts_run_to_their_limit_whether_the_model_ends_them_or_not(qwen: Policy) -> None:
    sizes = [
        tuple(chunk.tokens for chunk in chunks) for chunks in measure_variant(qwen, VariantSetup(name="x"), SOURCE, 40)
    ]
    assert len(sizes) == 40 and sizes.count((32, 8)) == 20
    assert all(len(size) == 1 and size[0] < 32 for size in sizes if size != (32, 8))


def test_a_calibration_can_be_repeated(qwen: Policy) -> None:
    setups = [VariantSetup(name="engine"), VariantSetup(name="again", replay="alone")]
    plan = CalibrationPlan(source=SOURCE, samples=60)
    first, second = (calibrate_policy(qwen, setups, plan, name="q") for _ in range(2))
    assert first == second
    other = calibrate_policy(qwen, setups, replace(plan, source=replace(SOURCE, seed=1)), name="q")
    assert other != first


def test_a_dtype_that_kills_is_skipped_with_the_reason(qwen: Policy, monkeypatch: pytest.MonkeyPatch, log) -> None:
    monkeypatch.setattr(calibrate, "probe_dtype", lambda dtype: "it kills" if dtype == "bfloat16" else "")
    setups = [VariantSetup(name="engine"), VariantSetup(name="worker in bfloat16", dtype="bfloat16")]
    result = calibrate_policy(qwen, setups, CalibrationPlan(source=SOURCE, samples=60), name="q")
    assert result.variants[1].skipped == "it kills" and result.variants[1].chunks == 0
    assert log.messages[1] == "worker in bfloat16: skipped, it kills"


def test_the_verifiers_own_dtype_cannot_be_skipped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "probe_dtype", lambda dtype: "it kills")
    with pytest.raises(ConfigError, match="--dtype bfloat16: it kills"):
        run_calibration(str(folder), "bfloat16", CalibrationPlan(source=SOURCE))


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})", "bfloat16 products crash the process here (SIGILL)"),
        ("raise RuntimeError('no {dtype}')", "bfloat16 products fail here: RuntimeError: no bfloat16"),
        ("pass", ""),
    ],
)
def test_a_dtype_is_probed_in_a_child(monkeypatch: pytest.MonkeyPatch, code: str, reason: str) -> None:
    monkeypatch.setattr(variants, "_PROBE", code)
    assert variants.probe_dtype("bfloat16").startswith(reason)
    assert bool(variants.probe_dtype("bfloat16")) == bool(reason)


def test_the_way_out_is_named_unless_it_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_PROBE", "import os; os.abort()")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE" in variants.probe_dtype("bfloat16")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert "ONEDNN" not in variants.probe_dtype("bfloat16")


def test_the_default_dtype_costs_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants.subprocess, "run", None)
    assert variants.probe_dtype("float32") == ""


def test_a_child_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "_PROBE", "import time; time.sleep(60)")
    monkeypatch.setattr(variants, "_PROBE_S", 0.05)
    assert variants.probe_dtype("bfloat16") == "bfloat16 products took more than 0 s"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--samples", "10"], "--samples: must be at least 1000, got 10"),
        (["--rate", "0"], "--rate: must be greater than 0 and less than 1, got 0"),
        (["--rate", "nan"], "--rate: must be greater than 0 and less than 1, got nan"),
        (["--confidence", "1"], "--confidence: must be greater than 0 and less than 1, got 1"),
        (["--tokens", "31"], "--tokens: must be at least 32, one full chunk, got 31"),
        (["--tokens", "512"], "--tokens: must be below the model's 512 positions, got 512"),
        (["--temperature", "0"], "--temperature: must be greater than 0, got 0"),
        (["--threads", "0"], "--threads: must be at least 1, got 0"),
        (["--out", "none/c.json"], "none/c.json: cannot be written, there is no folder none"),
        (["--task", "sorting"], "tasks.name = 'sorting': no such family"),
        (["--prompts", "none.txt"], "none.txt: cannot be read"),
    ],
)
def test_mistakes_are_one_sentence(
    folder: Path, args: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "-q", str(folder), *args]) == 2
    assert capsys.readouterr().err.startswith(f"shoal: {sentence}")


def test_its_help_does_not_import_torch() -> None:
    code = """
import contextlib, io, sys
from shoal.cli import build_parser, main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["calibrate", "--help"])
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_missing_model_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "no/such/folder"]) == 2
    assert "no such folder 'no/such/folder'" in capsys.readouterr().err


def test_held_out_alarms_are_counted_on_rollouts_the_fit_has_not_seen(calibration: Calibration) -> None:
    """One rollout in a hundred with a wild chunk: the half without it raises the alarm for it."""
    calm = ChunkStats(tokens=32, **dict.fromkeys(STATISTICS, 0.0))
    short = replace(calm, tokens=4)
    rollouts = [[calm], [short]] * 50
    rollouts[10] = [replace(calm, logprob=5.0)]
    checked = cross_check(calibration, {"a": rollouts})
    assert (checked.heldout_alarms, checked.heldout_rollouts) == (1, 100)
    assert "1 of 100 held-out rollouts gave one, which proves at most 0.047" in format_table(checked)


def take(policy: Policy, source: PromptSource, count: int) -> list[Request]:
    return list(itertools.islice(draw_requests(policy, source, "x"), count))


def test_requests_come_in_pairs_of_a_full_and_a_short_rollout(qwen: Policy) -> None:
    requests = take(qwen, SOURCE, 600)
    assert len({request.id for request in requests}) == len({request.seed for request in requests}) == 600
    assert all(request.max_tokens == 40 for request in requests[::2])
    assert {request.max_tokens for request in requests[1::2]} == set(range(1, 32))
    assert all(a.prompt_ids == b.prompt_ids for a, b in zip(requests[::2], requests[1::2], strict=True))
    assert {len(request.prompt_ids) for request in requests} == {1, 8, 32}
    assert max(max(request.prompt_ids) for request in requests) < qwen.model.config.vocab_size


def test_prompts_come_from_a_task_or_a_file(qwen: Policy, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("12+3=\n\n" + "9" * 600 + "\n")
    found = {request.prompt_ids for request in take(qwen, replace(SOURCE, file=lines), 40)}
    lengths = {len(prompt) for prompt in found}
    assert lengths == {5, 472}, "empty lines are skipped, and long ones are cut to what the model can read"
    tasks = {request.prompt_ids for request in take(qwen, replace(SOURCE, task="sort"), 40)}
    assert len(tasks) == 20
    lines.write_text("\n\n")
    with pytest.raises(ConfigError, match="has no prompts"):
        take(qwen, replace(SOURCE, file=lines), 1)


def test_plain_decoding_writes_what_the_engine_writes(speaker: Policy) -> None:
    requests = take(speaker, SOURCE, 14)
    endless = run_variant(VariantSetup(name="x"), speaker.model, requests, eos_id=-1, sink=lambda *args: None)
    common = int(np.bincount(np.concatenate([rollout.token_ids for rollout in endless])).argmax())
    states: dict[str, dict[str, list[torch.Tensor]]] = {"engine": {}, "plain": {}}
    texts = {}
    for source in ("engine", "plain"):

        def keep(rollout_id: str, start: int, hidden: torch.Tensor, source: str = source) -> None:
            own = states[source].setdefault(rollout_id, [])
            assert start == 32 * len(own)
            own.append(hidden.clone())

        setup = VariantSetup(name="x", source=source, batch=4)  # type: ignore[arg-type]
        rollouts = run_variant(setup, speaker.model, requests, eos_id=common, sink=keep)
        texts[source] = {rollout.id: rollout for rollout in rollouts}
    assert {rollout.finish for rollout in rollouts} == {Finish.STOP, Finish.LENGTH}
    assert texts["engine"].keys() == texts["plain"].keys() == {request.id for request in requests}
    for name, rollout in texts["engine"].items():
        other = texts["plain"][name]
        assert rollout.token_ids.tolist() == other.token_ids.tolist()
        assert (rollout.finish, rollout.versions, rollout.seed) == (other.finish, other.versions, other.seed)
        np.testing.assert_allclose(rollout.logprobs, other.logprobs, atol=1e-4)
        pair = torch.cat(states["engine"][name]), torch.cat(states["plain"][name])
        torch.testing.assert_close(*pair, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("setup", list_setups("float32", threads=2, mixed=False), ids=lambda setup: setup.name)
def test_no_variant_is_far_from_the_plain_replay(qwen: Policy, setup: VariantSetup) -> None:
    requests = take(qwen, SOURCE, 6)
    worker, verifier = cast_models(setup, qwen.model)
    assert (verifier.dtype == torch.float64) == (setup.replay == "double") and worker.dtype == torch.float32
    rollouts = run_variant(setup, worker, requests, eos_id=qwen.eos_id, sink=lambda *args: None)
    replays = replay_variant(setup, verifier, rollouts, eos_id=qwen.eos_id)
    plain = replay_rollouts(qwen.model, rollouts, eos_id=qwen.eos_id)
    for rollout, expected in zip(rollouts, plain, strict=True):
        assert replays[rollout.id].hidden.dtype == torch.float32
        np.testing.assert_allclose(replays[rollout.id].logprobs, expected.logprobs, atol=1e-4)
        np.testing.assert_allclose(rollout.logprobs, expected.logprobs, atol=1e-4)


def test_a_refreshed_engine_recomputes_its_cache(qwen: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    swaps = []
    real = TorchEngine.swap_weights
    monkeypatch.setattr(TorchEngine, "swap_weights", lambda self, v, w: (swaps.append(v), real(self, v, w)))
    request = Request(id="r", prompt_ids=(5, 6), seed=1, max_tokens=40)
    run_variant(VariantSetup(name="x", refresh=16), qwen.model, [request], eos_id=-1, sink=lambda *args: None)
    assert swaps == [0, 0]


def test_the_result_is_plain_json(calibration: Calibration) -> None:
    json.loads(calibration.model_dump_json(), parse_constant=pytest.fail)


def test_ways_follow_the_dtype() -> None:
    names = [setup.name for setup in list_setups("bfloat16", threads=1, mixed=True)]
    assert "replayed in float64" not in names and names[-1] == "worker in float32"
    assert list_setups("float32", threads=1, mixed=True)[-1].dtype == "bfloat16"


def test_the_command_states_the_rate_of_a_run() -> None:
    assert build_parser().parse_args(["calibrate", "model"]).rate == CalibrationPlan(source=SOURCE).rate == RATE
