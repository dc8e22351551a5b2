"""Row counts that may be mixed."""

import torch
import torch.nn.functional as F

from shoal.engine.rows import RowCounts, measure_rows
from shoal.policy.decoder import fuse_layers
from shoal.policy.model import Policy


def test_rows_from_the_floor_on_have_the_same_bits(qwen: Policy) -> None:
    layers = fuse_layers(qwen.model)
    counts = measure_rows(qwen.model, layers, slots=40)
    assert counts.floor % 16 == 0 and 16 <= counts.floor <= counts.most == 256
    with torch.inference_mode():
        for weight in (layers[0].qkv, layers[0].out, layers[0].gate_up, layers[0].down):
            inputs = torch.randn(counts.most, weight.shape[1])
            whole = F.linear(inputs, weight)
            for rows in range(counts.floor, counts.most, 16):
                assert torch.equal(F.linear(inputs[:rows], weight), whole[:rows])


def test_more_slots_widen_the_range(qwen: Policy) -> None:
    assert measure_rows(qwen.model, None, slots=300).most == 304


def test_a_run_is_padded_to_the_floor_and_to_a_multiple_of_16() -> None:
    counts = RowCounts(floor=32, most=256)
    assert [len(counts.pad_flat(torch.ones(n, dtype=torch.long))) for n in (1, 32, 33, 256, 300)] == [
        32,
        32,
        48,
        256,
        304,
    ]
    assert counts.pad_flat(torch.tensor([7, 8])).tolist() == [7, 8] + [0] * 30
