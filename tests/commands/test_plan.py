import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
OWN = "own:100:0.001:1000"


def run(*args: str) -> int:
    return main(["plan", str(EXAMPLES / "demo.toml"), "--gpus", f"2x{OWN}", "--workers", f"3x{OWN}", *args])


def test_a_plan_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--price", "own=2", "--prompt-tokens", "20") == 0
    shown = capsys.readouterr().out
    for words in ("total per rank", "time of a step", "3 x own", "full", "delta", "cost per step", "no warnings"):
        assert words in shown


def test_a_cost_that_cannot_be_known_is_not_blamed_on_the_prices(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "tiny:1:0.001:1000"
    assert run("--workers", f"3x{tiny}", "--price", "own=2", "--price", "tiny=1") == 0
    shown = capsys.readouterr().out
    assert "unknown: no worker can generate" in shown and "give --price" not in shown


def test_a_plan_is_printed_as_json_and_follows_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for width in (128, 256):
        assert run("--json", f"policy.tiny.width={width}") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["memory_total_bytes"] < found[1]["memory_total_bytes"]
    assert found[0]["versions"]["full"]["bytes"] == 4 * found[0]["parameters"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--gpus", "8xH1000"], "--gpus: unknown device 'H1000'"),
        (["--workers", "20x4090,,"], "--workers: cannot read ''"),
        (["--validators", "1xH100,1xA10"], "--validators: one kind of machine"),
        (["--relays", "-1"], "--relays: must be 0 or more"),
        (["--uplink-gbps", "0"], "--uplink-gbps: must be above 0"),
        (["--uplink-gbps", "nan"], "--uplink-gbps: must be above 0"),
        (["--price", "own"], "--price: cannot read 'own'"),
        (["--price", "H200=3"], "--price: 'H200' is not a device of this plan"),
        (["--assume", "luck=1"], "--assume: unknown 'luck'"),
        (["--completion-tokens", "99"], "--completion-tokens: must be 1 to engine.max_tokens = 13"),
        (["learner.lr=fast"], "learner.lr"),
        (["policy.path=nowhere/at/all"], "policy.path: no such folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("-q", *args) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_the_help_needs_no_torch() -> None:
    code = (
        "import sys; from shoal.cli import main\n"
        "try: main(['plan', '--help'])\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--gpus" in done.stdout, done.stderr
