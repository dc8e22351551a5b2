"""Tuning of the process."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from shoal.config.run import RunConfig
from shoal.train.sft import fix_threads
from shoal.util.process import tune_process, use_threads


def test_threads_are_set_and_zero_leaves_them() -> None:
    tune_process(1)
    assert torch.get_num_threads() == 1
    tune_process(0)
    assert torch.get_num_threads() == 1


def test_all_cores_become_a_number_and_a_number_stays() -> None:
    assert fix_threads(RunConfig()).threads == torch.get_num_threads()
    assert fix_threads(RunConfig(threads=3)).threads == 3


WORK = """
    import json
    from pathlib import Path

    import torch

    from shoal.util.process import release_memory, tune_process

    def read():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))

    tune_process(1)
    held = [torch.ones(64, 1024, 1024 // 4) for _ in range(4)]  # 64 MB each
    torch.ones(1)  # something above them
    found = [read()]
    held.clear()
    found.append(read())
    release_memory(2**20)
    found.append(read())
    release_memory(2**28)
    print(json.dumps([*found, read()]))
"""


def test_freed_memory_is_kept_until_much_of_it_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(WORK)], capture_output=True, text=True, check=True)
    full, freed, small, large = json.loads(done.stdout)
    assert full - freed < 16 and full - small < 16, "kept for the next tensors"
    assert full - large > 200


@pytest.mark.parametrize(("model_bytes", "kept"), [(2**29, True), (2**30, False)])
def test_blocks_that_a_large_model_frees_are_not_kept(model_bytes: int, kept: bool) -> None:
    work = WORK.replace("tune_process(1)", f"tune_process(1); tune_memory({model_bytes})")
    work = work.replace("import release_memory", "import release_memory, tune_memory")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(work)], capture_output=True, text=True, check=True)
    full, freed, *_ = json.loads(done.stdout)
    assert (full - freed < 16) is kept and (full - freed > 200) is not kept


def test_threads_are_put_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with use_threads(before + 1):
            seen.append(torch.get_num_threads())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before
