"""How files are cut: every byte is in one shard, in order, found by its number."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.format.layout import File, ShardLayout, count_shards, group_shards, is_single_pair


def make_layout(sizes: list[int], shard_size: int) -> ShardLayout:
    return ShardLayout([File(f"f{number}", size) for number, size in enumerate(sizes)], shard_size)


layouts = st.builds(make_layout, st.lists(st.integers(0, 40), max_size=8), st.integers(1, 12))


def test_files_are_cut_on_their_own_and_empty_ones_have_no_shards() -> None:
    layout = make_layout([0, 10, 0, 4, 3, 0], 4)
    found = [(shard.index, shard.file, shard.offset, shard.size) for shard in layout.shards]
    assert found == [(0, "f1", 0, 4), (1, "f1", 4, 4), (2, "f1", 8, 2), (3, "f3", 0, 4), (4, "f4", 0, 3)]
    assert layout.total == 17


@given(layouts)
def test_the_shards_cover_every_byte_of_every_file_once_and_in_order(layout: ShardLayout) -> None:
    shards = list(layout.shards)
    assert [shard.index for shard in shards] == list(range(len(layout.shards)))
    covered = [(shard.file, shard.offset + byte) for shard in shards for byte in range(shard.size)]
    assert covered == [(file.name, byte) for file in layout.files for byte in range(file.size)]
    assert all(0 < shard.size <= layout.shard_size for shard in shards)
    assert layout.total == len(covered)


@given(layouts)
def test_only_the_last_shard_of_a_file_is_short(layout: ShardLayout) -> None:
    for _, group in groupby(layout.shards, key=lambda shard: shard.file):
        assert all(shard.size == layout.shard_size for shard in list(group)[:-1])


@given(layouts, st.integers(-5, 60))
def test_a_number_that_is_no_shard_is_an_index_error(layout: ShardLayout, index: int) -> None:
    if 0 <= index < len(layout.shards):
        assert layout.shards[index].index == index
    else:
        with pytest.raises(IndexError):
            layout.shards[index]


def test_a_layout_of_a_million_shards_is_made_without_them() -> None:
    layout = make_layout([(1 << 44) - 5, 5], 1 << 24)
    assert len(layout.shards) == (1 << 20) + 1
    assert layout.shards[(1 << 20) - 1].size == (1 << 24) - 5
    assert layout.shards[1 << 20].file == "f1"


@given(st.integers(0, 1 << 44), st.integers(1, 1 << 26))
def test_the_number_of_shards_is_the_size_over_the_shard_size_rounded_up(size: int, shard_size: int) -> None:
    count = count_shards(size, shard_size)
    assert (count - 1) * shard_size < size <= count * shard_size or size == count == 0


@given(layouts, st.integers(1, 50))
def test_groups_hold_every_shard_in_order_one_file_each_and_are_not_larger_than_need_be(
    layout: ShardLayout, size: int
) -> None:
    groups = list(group_shards(layout.shards, size))
    assert [shard for group in groups for shard in group] == list(layout.shards)
    for group in groups:
        assert len({shard.file for shard in group}) == 1
        assert len(group) == 1 or sum(shard.size for shard in group) <= size
    for one, other in pairwise(groups):
        filled = sum(shard.size for shard in one)
        assert one[0].file != other[0].file or filled + other[0].size > size


def test_a_pair_is_single_only_if_both_sides_are_one_file() -> None:
    one, two = make_layout([3], 2), make_layout([3, 0], 2)
    assert is_single_pair(one, one)
    assert not is_single_pair(one, two)
    assert not is_single_pair(two, one)
