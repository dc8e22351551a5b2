"""Tuning of the process."""

import torch

from shoal.runtime import tune_process


def test_threads_are_set_and_zero_leaves_them() -> None:
    tune_process(1)
    assert torch.get_num_threads() == 1
    tune_process(0)
    assert torch.get_num_threads() == 1


def test_tuning_again_changes_nothing() -> None:
    for _ in range(3):
        tune_process(1)
    blocks = [torch.ones(2**22) for _ in range(4)]  # 16 MB each, of the size that tuning is about
    assert all(float(block.sum()) == 2**22 for block in blocks)
