"""Row counts that may be mixed."""

import pytest
import torch
import torch.nn.functional as F

from shoal.engine.batch_invariance import RowCounts, measure_rows
from shoal.policy.decoder import fuse_layers
from shoal.policy.model import Policy


@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_all_counts_have_the_same_bits_in_any_place(qwen: Policy, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    layers = fuse_layers(qwen.model)
    rows = measure_rows(qwen.model, layers, slots=40)
    for weight in (layers[0].qkv, layers[0].out, layers[0].gate_up, layers[0].down, qwen.model.lm_head.weight):
        inputs = torch.randn(rows.most, weight.shape[1])
        whole = F.linear(inputs, weight)
        for count in rows.counts:
            for shift in (0, 1, count // 2, rows.most - count):
                got = F.linear(inputs.roll(shift, 0)[:count], weight)
                assert torch.equal(got, whole.roll(shift, 0)[:count])
    torch.set_num_threads(before)


def test_engines_of_few_slots_agree_on_the_counts(qwen: Policy) -> None:
    layers = fuse_layers(qwen.model)
    few, many = (measure_rows(qwen.model, layers, slots=slots) for slots in (1, 256))
    assert few == many and few.most >= 256
    assert measure_rows(qwen.model, layers, slots=300).most >= 300


def test_a_run_is_padded_to_the_next_count() -> None:
    rows = RowCounts((32, 48, 96, 256))
    lengths = [len(rows.pad_flat(torch.ones(n, dtype=torch.long))) for n in (1, 32, 33, 49, 96, 97, 256)]
    assert lengths == [32, 32, 48, 96, 96, 256, 256]
    assert rows.pad_flat(torch.tensor([7, 8])).tolist() == [7, 8] + [0] * 30


def test_a_run_longer_than_all_counts_is_padded_by_its_own_length() -> None:
    assert len(RowCounts((32, 256)).pad_flat(torch.ones(300))) == 304
