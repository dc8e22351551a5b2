"""Sandboxes that fail, answers that no sandbox of ours would send, and slow programs."""

import os
import signal
import time
from dataclasses import replace

import pytest

from shoal.sandbox.pool import SandboxError, SandboxProcess
from shoal.tasks.verify.base import GAVE_UP, Agreement, Attempt, compare_claim, is_fault, is_firm
from shoal.tasks.verify.code.compare import match_values

PROGRAMS = "shoal.sandbox.programs.code"
HALF = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": 0.5}]}
JUDGED = {"test": "assert f(1) == 2", "entry_point": "f"}
RAW_FRAME = """
import os, struct
def f(x):
    body = b'{"value":%s}'
    data = struct.pack("<I", len(body)) + body
    while data:
        data = data[os.write(3, data):]
"""


def write_raw(value: str) -> str:
    """A candidate that answers with its own bytes; `value` is Python for the JSON of its value."""
    return f"```python\n{RAW_FRAME.replace('%s}' + chr(39), '%s}' + chr(39) + f' % ({value})')}\n```"


def test_a_zygote_that_dies_under_a_cell_is_the_fault_of_the_machine(boxes):
    warden = SandboxProcess(PROGRAMS)

    def lose_zygote():
        with warden.open_job(
            "calls", {"source": "def f(): 0", "function": "f", "seed": "0", "shift": 0}, boxes.limits
        ) as cell:
            os.killpg(warden._process.pid, signal.SIGKILL)
            cell.finish()

    with pytest.raises(SandboxError):
        lose_zygote()
    warden.close()


@pytest.mark.parametrize(
    ("info", "value"), [(HALF, 'b"1" * 4000'), (JUDGED, r'b"\"" + b"\xc3\xa9" * (3 << 19) + b"\""')]
)
def test_answers_of_a_candidates_own_making_never_raise(boxes, info, value):
    [score] = boxes.score_many([Attempt(info, "", write_raw(value))])
    assert score.value == 0.0 and "verifier failed" not in score.reason


def test_what_no_box_could_run_is_the_fault_of_the_machine_and_of_no_completion(boxes, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise SandboxError("cannot start a sandbox process")

    monkeypatch.setattr(SandboxProcess, "open_job", fail)
    [score] = boxes.score_many([Attempt(HALF, "", "```python\ndef f(x): return 0.5\n```")])
    assert is_fault(score) and not is_firm(score) and score.value == 0.0
    assert compare_claim(0.0, score) is Agreement.UNSURE, "it is unknown whether the answer is right"


def test_a_whole_number_without_a_float_equals_no_float():
    assert not match_values(10**400, 0.5)
    assert not match_values(0.5, -(10**400))
    assert match_values(2**52, float(2**52))


def test_a_program_has_one_time_for_all_its_cases(boxes, monkeypatch):
    monkeypatch.setattr(boxes, "limits", replace(boxes.limits, wall_s=0.5))
    cases = [{"type": "stdin_stdout", "input": "", "output": "1"}] * 100
    started = time.monotonic()
    score = boxes.score({"test_cases": cases}, "", "```\nimport time\ntime.sleep(0.3)\nprint(1)\n```")
    assert score.value == 0.0 and not is_firm(score) and "all cases" in score.reason
    assert time.monotonic() - started < 10


def test_the_hour_is_the_same_on_every_machine(boxes):
    source = "import os, time\ndef f(x): return [time.localtime(0).tm_hour, os.environ.get('TZ')]"
    info = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": [0, "UTC0"]}]}
    assert boxes.score(info, "", f"```python\n{source}\n```").value == 1.0


def test_boxes_that_score_differently_have_different_stamps(boxes, bare_boxes):
    source = "def f(x):\n  with open('a', 'w') as file: return file.write('12')"
    info = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": 2}]}
    values = {one.score(info, "", f"```python\n{source}\n```").value for one in (boxes, bare_boxes)}
    assert len({boxes.stamp, bare_boxes.stamp}) == len(values)


def test_tests_that_are_killed_have_not_failed(boxes):
    info = {"test": "while True: pass", "entry_point": "f"}
    assert boxes.score(info, "", "```python\ndef f(x): return x\n```").reason.startswith(GAVE_UP)


def test_a_candidate_is_not_told_how_it_was_started(boxes):
    info = {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [1], "output": ["candidate"]}]}
    assert boxes.score(info, "", "```python\nimport sys\ndef f(x): return sys.orig_argv\n```").value == 1.0
