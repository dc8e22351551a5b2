"""SFT: learns, is cached by everything that decides it, and resumes where it stopped."""

import fcntl
import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fixtures.paths import TINY
from transformers import PreTrainedModel

import shoal.tasks.open
import shoal.train.sft
from shoal.config.run import RunConfig, SftConfig, load_config
from shoal.errors import ConfigError, DiskError
from shoal.learner.logprobs import TokenScores
from shoal.learner.parallel import score_model
from shoal.policy.model import save_policy
from shoal.policy.packing import Pack
from shoal.tasks.base import Family, Task
from shoal.tasks.open import check_tasks
from shoal.tasks.registry import load_family
from shoal.tasks.split import Split, split_task
from shoal.train.sft import load_start, run_sft, schedule_rate
from shoal.util.files import hash_file
from shoal.util.process import use_threads


def configure(folder: Path, *overrides: str) -> RunConfig:
    """Three times five steps of eight demonstrations."""
    return load_config(TINY, [f"out={folder}", "sft.steps=15", "sft.eval_every=5", "sft.batch=8", *overrides])


def read_losses(folder: Path) -> dict[int, float]:
    losses = json.loads((folder / "sft.json").read_text())["heldout_loss"]
    return {int(step): loss for step, loss in losses.items()}


def test_the_loss_on_held_out_demonstrations_falls(tmp_path: Path) -> None:
    losses = read_losses(run_sft(configure(tmp_path)))
    assert list(losses) == [5, 10, 15]
    assert losses[15] < losses[5] < math.log(30)


def test_a_second_call_takes_no_step(tmp_path: Path, log) -> None:
    folder = run_sft(configure(tmp_path))
    log.messages.clear()
    assert run_sft(configure(tmp_path)) == folder
    assert log.messages == [f"SFT: cached in {folder}"]


@pytest.mark.parametrize(
    "override",
    [
        "learner.lr=1e-3",
        "learner.loss.name=grpo",
        "batch.groups=3",
        "steps=7",
        "async_level=1",
        "eval.tasks=3",
        "name=b",
    ],
)
def test_settings_of_rl_alone_keep_the_cache(tmp_path: Path, override: str) -> None:
    assert run_sft(configure(tmp_path, "sft.steps=1")) == run_sft(configure(tmp_path, "sft.steps=1", override))


@pytest.mark.parametrize(
    "override",
    ["sft.lr=1e-3", "sft.options.max_length=5", "tasks.options.max_length=5", "policy.tiny.width=48", "seed=1"],
)
def test_what_decides_the_weights_decides_the_folder(tmp_path: Path, override: str) -> None:
    first, second = (run_sft(configure(tmp_path, "sft.steps=1", *more)) for more in ([], [override]))
    assert first != second
    assert hash_file(first / "model.safetensors") != hash_file(second / "model.safetensors")


def test_other_weights_in_the_same_folder_are_fine_tuned_again(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    first, second = (run_sft(configure(tmp_path, "sft.steps=1", f"seed={seed}")) for seed in (0, 1))
    override = f"policy.path={folder}"
    shutil.copytree(first, folder)
    before = run_sft(configure(tmp_path, "sft.steps=1", override))
    assert run_sft(configure(tmp_path, "sft.steps=1", override)) == before
    shutil.copy(second / "model.safetensors", folder)
    after = run_sft(configure(tmp_path, "sft.steps=1", override))
    assert hash_file(after / "model.safetensors") != hash_file(before / "model.safetensors")


def test_the_number_of_threads_belongs_to_the_key_for_it_changes_the_last_bits(tmp_path: Path) -> None:
    first, second = (run_sft(configure(tmp_path, "sft.steps=1", f"threads={num}")) for num in (2, 1))
    assert first != second


def test_its_own_number_of_threads_holds_during_sft_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[int] = set()

    def score(model: PreTrainedModel, pack: Pack) -> TokenScores:
        seen.add(torch.get_num_threads())
        return score_model(model, pack)

    monkeypatch.setattr("shoal.train.sft.score_model", score)
    with use_threads(1):
        run_sft(configure(tmp_path, "sft.steps=1", "threads=1", "sft.threads=2"))
        assert (seen, torch.get_num_threads()) == ({2}, 1)


def test_an_interrupted_sft_resumes_bit_for_bit(tmp_path: Path, log) -> None:
    def interrupt(text: str) -> None:
        if "step 10/15" in text:
            raise KeyboardInterrupt

    whole = run_sft(configure(tmp_path / "whole"))
    log.on_message = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_sft(configure(tmp_path / "cut"))
    assert not list((tmp_path / "cut" / "sft").glob("*/policy"))
    log.messages.clear()
    log.on_message = lambda text: None
    resumed = run_sft(configure(tmp_path / "cut"))
    assert log.messages[0] == "SFT: resuming from step 5"
    assert hash_file(resumed / "model.safetensors") == hash_file(whole / "model.safetensors")
    assert read_losses(resumed) == read_losses(whole)
    assert sorted(path.name for path in resumed.parent.iterdir()) == [".lock", "policy"]


def test_the_same_settings_give_the_same_weights(tmp_path: Path) -> None:
    folders = [run_sft(configure(tmp_path / name, "sft.steps=5")) for name in "ab"]
    assert len({hash_file(folder / "model.safetensors") for folder in folders}) == 1


def test_held_out_demonstrations_are_never_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Task] = []

    def load_recorder(name: str, options: Any) -> Family:
        family = load_family(name, options)

        class Recorder(type(family)):  # type: ignore[misc]
            def demonstrate(self, task: Task) -> str:
                seen.append(task)
                return str(super().demonstrate(task))

        return Recorder(**options)  # type: ignore[no-any-return]

    monkeypatch.setattr(shoal.tasks.open, "load_family", load_recorder)
    run_sft(configure(tmp_path))
    heldout, trained = seen[:8], seen[8:]
    assert {split_task(task) for task in heldout} == {Split.HELDOUT}
    assert {split_task(task) for task in trained} == {Split.TRAIN}
    assert len(trained) == 15 * 8


def test_a_damaged_cache_is_computed_again(tmp_path: Path) -> None:
    folder = run_sft(configure(tmp_path, "sft.steps=2"))
    good = hash_file(folder / "model.safetensors")
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert run_sft(configure(tmp_path, "sft.steps=2")) == folder
    assert hash_file(folder / "model.safetensors") == good


def test_a_second_process_waits_for_the_first_and_says_so(tmp_path: Path, log) -> None:
    config = configure(tmp_path, "sft.steps=2")
    folder = run_sft(config)
    (folder / "sft.json").unlink()
    waits = threading.Event()
    log.messages.clear()
    log.on_message = lambda text: waits.set()
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("4321\n")
        lock.flush()
        thread = threading.Thread(target=run_sft, args=(config,))
        thread.start()
        assert waits.wait(timeout=60)
        assert not (folder / "sft.json").exists()
    thread.join(timeout=60)
    assert log.messages[0] == f"SFT: waiting for process 4321, which computes it in {folder.parent}"
    assert (folder / "sft.json").exists()


def test_the_starting_policy_is_the_fine_tuned_one(tmp_path: Path) -> None:
    config = configure(tmp_path, "sft.steps=2")
    cold = load_start(config.model_copy(update={"sft": SftConfig()}))
    warm = load_start(config)
    assert not (warm.model.lm_head.weight == cold.model.lm_head.weight).all()
    assert warm.tokenizer.get_vocab() == cold.tokenizer.get_vocab()


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = run_sft(configure(Path("~/r"), "sft.steps=1"))
    assert folder.parents[1] == tmp_path / "r" / "sft"


def test_the_rate_rises_then_falls_to_a_tenth() -> None:
    settings = SftConfig(steps=12, warmup_steps=4, lr=0.8)
    rates = [schedule_rate(settings, step) for step in range(13)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
    assert rates[8] == pytest.approx(0.8 * 0.55)  # half way down the cosine
    assert rates[12] == pytest.approx(0.08)
    assert rates[4:] == sorted(rates[4:], reverse=True)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["sft.steps=0"], "sft.steps"),
        (["sft.heldout=5000"], "sft.heldout"),
        (["policy.tiny.context=8"], "tasks.options"),
        (["policy.tiny.context=8", "tasks.set=family:reverse:500"], "tasks.filter.max_chars"),
    ],
)
def test_impossible_sft_is_one_sentence(tmp_path: Path, overrides: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run_sft(check_tasks(configure(tmp_path, *overrides)))
    assert str(caught.value).startswith(f"{key}: ")


def test_sft_that_diverges_ends_with_a_sentence(tmp_path: Path) -> None:
    policy = load_start(configure(tmp_path, "sft.steps=1"))
    with torch.no_grad():
        policy.model.lm_head.weight.mul_(1e34)
    save_policy(policy, tmp_path / "base")
    with pytest.raises(ConfigError, match=r"^sft\.lr: non-finite gradient in step 1"):
        run_sft(configure(tmp_path, f"policy.path={tmp_path / 'base'}"))


def test_a_folder_that_cannot_be_written_is_a_disk_error(tmp_path: Path) -> None:
    (tmp_path / "sft").write_text("a file where the folder belongs")
    with pytest.raises(DiskError, match="cannot be written"):
        run_sft(configure(tmp_path))
