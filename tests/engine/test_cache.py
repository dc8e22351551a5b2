"""Keys and values of active rollouts: attention over them, and bits that do not depend on the other rows."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.engine.cache import SlotCache, Tiling

HEADS = [(1, 1, 16), (2, 1, 8), (4, 2, 32), (4, 4, 4), (7, 1, 64)]


@pytest.fixture(params=[1, 3], ids="threads{}".format)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_prefix(length: int, kv_heads: int, dim: int) -> Tensor:
    return torch.randn(1, 2, kv_heads, length, dim, generator=torch.Generator().manual_seed(length))


def decode(lengths: list[int], heads: int, kv_heads: int, dim: int) -> Tensor:
    """Two steps of rows with prefixes of these lengths; a row's inputs depend only on its length."""
    slots = len(lengths)
    cache = SlotCache(
        layers=1, heads=heads, kv_heads=kv_heads, dim=dim, slots=slots, capacity=max(lengths) + 2, dtype=torch.float32
    )
    cache.open_rows(0, [make_prefix(length, kv_heads, dim) if length else None for length in lengths])
    steps = []
    for step in range(2):
        draws = [torch.randn(heads + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(n)) for n in lengths]
        fresh = torch.zeros(max(16, slots + 1), heads + 2 * kv_heads, dim)
        fresh[:slots] = torch.stack(draws) * (step + 1)
        q, k, v = fresh.split((heads, kv_heads, kv_heads), dim=1)
        steps.append(cache.begin_step(slots)(0, q, k, v)[:slots])
    return torch.stack(steps, 1)


@pytest.mark.parametrize("shape", HEADS)
def test_decode_attention_is_attention_over_the_row(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, dim = shape
    got = decode([0, 5, 300], *shape)
    for row, length in enumerate([0, 5, 300]):
        fresh = torch.randn(heads + 2 * kv_heads, dim, generator=torch.Generator().manual_seed(length))
        kept = make_prefix(length, kv_heads, dim)[0] if length else torch.zeros(2, kv_heads, 0, dim)
        for step in range(2):
            q, k, v = (fresh * (step + 1)).split((heads, kv_heads, kv_heads))
            kept = torch.cat((kept, torch.stack((k, v))[:, :, None]), dim=2)
            expected = F.scaled_dot_product_attention(q[:, None], kept[0], kept[1], enable_gqa=True)[:, 0]
            torch.testing.assert_close(got[row, step], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", HEADS)
def test_neighbours_leave_every_bit_as_it_was(shape: tuple[int, int, int]) -> None:
    lengths = [0, 3, 15, 40, 254, 300, 390]
    together = decode(lengths, *shape)
    for row, length in enumerate(lengths):
        assert torch.equal(decode([length], *shape)[0], together[row])
        assert torch.equal(decode([length, 600], *shape)[0], together[row])


@pytest.mark.parametrize(("repeat", "dim"), [(1, 2), (1, 16), (2, 8), (4, 32), (8, 128)])
def test_a_tile_is_large_enough_and_a_chunk_short_enough(repeat: int, dim: int) -> None:
    tiling = Tiling.for_heads(repeat, dim)
    assert tiling.tile * repeat * dim >= 400
    assert tiling.chunk % tiling.tile == 0 and tiling.chunk <= max(128, tiling.tile)
    assert [tiling.round_up(n) // tiling.tile for n in (1, tiling.tile, tiling.tile + 1)] == [1, 1, 2]


def test_rows_move_with_all_that_they_hold() -> None:
    cache = SlotCache(layers=2, heads=2, kv_heads=1, dim=8, slots=4, capacity=40, dtype=torch.float32)
    prefix = torch.randn(2, 2, 1, 33, 8)
    cache.open_rows(3, [prefix])
    cache.open_rows(0, [torch.randn(2, 2, 1, 20, 8)])
    before = _attend(cache, 4)[3]
    cache.open_rows(3, [prefix])
    cache.move_rows(torch.tensor([3]), torch.tensor([0]))
    assert torch.equal(_attend(cache, 1)[0], before)


def test_growing_keeps_what_is_held() -> None:
    cache = SlotCache(layers=2, heads=2, kv_heads=1, dim=8, slots=2, capacity=20, dtype=torch.float32)
    prefix = torch.randn(2, 2, 1, 12, 8)
    cache.open_rows(0, [prefix, prefix])
    before = _attend(cache, 2)
    cache.open_rows(0, [prefix, prefix])
    cache.reserve(500)
    assert cache.capacity >= 500
    assert torch.equal(_attend(cache, 2), before)


def test_a_cleared_cache_forgets_even_what_is_not_a_number() -> None:
    cache = SlotCache(layers=1, heads=2, kv_heads=1, dim=8, slots=1, capacity=40, dtype=torch.float32)
    cache.open_rows(0, [torch.full((1, 2, 1, 30, 8), float("nan"))])
    cache.clear()
    cache.open_rows(0, [torch.ones(1, 2, 1, 3, 8)])
    assert bool(_attend(cache, 1).isfinite().all())


def _attend(cache: SlotCache, rows: int) -> Tensor:
    ones = torch.ones(16, 1, 8)
    return cache.begin_step(rows)(0, torch.ones(16, 2, 8), ones, ones)[:rows].clone()
