"""Flex attention: the forward of packed attention, and blocks of tokens as torch finds them in the mask of all pairs.

Its backward needs an accelerator (docs/gpu.md).
"""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PreTrainedModel

from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import run_decoder
from shoal.policy.flex import BLOCK, FlexAttention, build_block_mask, place_attention

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 16


def draw_segments(seed: int) -> list[Segment]:
    """Prompts with completions, of lengths around the size of a block."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    roots: list[int] = []
    for _ in range(int(rng.integers(1, 12))):
        start = segments[-1].end if segments else 0
        end = start + int(rng.choice([1, 5, 30, BLOCK, BLOCK + 2, 2 * BLOCK, 300, 700]))
        prefix = int(rng.choice(roots)) if roots and rng.random() < 0.6 else None
        if prefix is None:
            roots.append(len(segments))
        segments.append(Segment(start, end, prefix))
    return segments


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 8))])
@torch.no_grad()
def test_the_forward_is_that_of_packed_attention(seed: int) -> None:
    segments = draw_segments(seed)
    size = segments[-1].end
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(size, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
    difference = FlexAttention(segments, CPU)(0, q, k, v) - PackedAttention(segments)(0, q, k, v)
    assert float(difference.abs().max()) < 1e-5


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_those_that_the_mask_of_all_pairs_has(seed: int) -> None:
    segments = draw_segments(seed)
    size = segments[-1].end
    ours = build_block_mask(segments, CPU)
    theirs = create_block_mask(ours.mask_mod, None, None, size, size, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense()) and ours.shape == theirs.shape
    # A block that spans a prefix and its segment may be full although no single segment fills it: then it is masked.
    assert bool((ours.full_kv_num_blocks <= theirs.full_kv_num_blocks).all())
    token = torch.arange(size)
    seen = ours.mask_mod(None, None, token[:, None], token)
    for row, num in enumerate(ours.full_kv_num_blocks[0, 0].tolist()):
        for column in ours.full_kv_indices[0, 0, row, :num].tolist():
            block = seen[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            assert block.shape == (BLOCK, BLOCK) and bool(block.all())


def test_a_long_sequence_has_full_blocks_below_its_diagonal() -> None:
    mask = build_block_mask([Segment(0, 4 * BLOCK)], CPU)
    assert mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1]]]
    assert mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3]]]


@torch.no_grad()
def test_a_model_has_the_states_of_packed_attention(make_model) -> None:
    model: PreTrainedModel = make_model("qwen3", num_key_value_heads=2, head_dim=8)
    segments = [Segment(0, 20), Segment(20, 41, 0), Segment(41, 60), Segment(60, 75, 0)]
    token_ids = torch.randint(3, 40, (75,), generator=torch.Generator().manual_seed(0))
    states = [
        run_decoder(model, token_ids, positions_of(segments), attend)
        for attend in (FlexAttention(segments, CPU), PackedAttention(segments))
    ]
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-5)


def test_auto_is_flex_on_gpus_for_packs_that_are_trained_on() -> None:
    meta = torch.device("meta")
    assert isinstance(place_attention(PackedAttention([Segment(0, 9)]), meta, "flex"), FlexAttention)
    assert isinstance(place_attention(PackedAttention([Segment(0, 9)]), CPU, "auto"), PackedAttention)
    assert isinstance(place_attention(PackedAttention([Segment(0, 9)], strips=True), CPU, "auto"), PackedAttention)
