"""Tuning of the process."""

import torch

from shoal.config.run import RunConfig
from shoal.train.sft import fix_threads
from shoal.util.process import tune_process


def test_threads_are_set_and_zero_leaves_them() -> None:
    tune_process(1)
    assert torch.get_num_threads() == 1
    tune_process(0)
    assert torch.get_num_threads() == 1


def test_all_cores_become_a_number_and_a_number_stays() -> None:
    assert fix_threads(RunConfig()).threads == torch.get_num_threads()
    assert fix_threads(RunConfig(threads=3)).threads == 3
