"""Decompression bombs: the footer is within bounds, but the pages ask for too much memory or time."""

import tracemalloc
from dataclasses import replace

import pytest

from shoal.redteam.behaviours.bad_files import make_list_page, squeeze_zeros
from shoal.submission.limits import FormError
from shoal.submission.read import ReadCost

MAX_INT32 = 2**31 - 1


def test_a_page_of_a_long_list_can_be_made(reader, footer):
    """The bombs below work: a small one is read as one list where four are expected."""
    footer.graft("token_ids", [make_list_page(60, first=True)], honest=True)
    with pytest.raises(FormError, match="token_ids expected length 4 but got length 1"):
        reader.read(footer.build())


@pytest.mark.parametrize("count", [10**8, MAX_INT32 // 4 - 100])
def test_one_page_that_unpacks_to_gigabytes_is_refused(reader, footer, count):
    footer.graft("token_ids", [make_list_page(count, first=True)])
    with pytest.raises(FormError, match="it needs more memory than a file of its kind may"):
        reader.read(footer.build())


def test_many_pages_of_one_endless_list_are_refused(reader, footer):
    page = make_list_page(10**6, first=False)
    pages = [make_list_page(10**6, first=True), *([page] * 1000)]
    footer.graft("token_ids", pages)
    data = footer.build()
    assert len(data) < 1 << 20
    with pytest.raises(FormError):
        reader.read(data)


def test_pages_that_cost_time_for_a_single_value_are_refused(open_reader, footer, bounds):
    """Each unpacks to 60 MB: minutes of work in a few megabytes, stopped after a second.

    A fast machine unpacks a thousand of them in less than that.
    """
    num_pages = 8000
    data, reader = make_slow_file(footer, num_pages), open_reader(cpu_s=1)
    with pytest.raises(FormError, match="it ends its parser each time: it took more than 1 s of CPU time"):
        reader.read(data, replace(bounds, file_bytes=1 << 24, max_tokens=num_pages))
    assert reader.num_started == 1


def make_slow_file(footer, num_pages: int) -> bytes:
    """A file whose pages unpack to 60 MB each."""
    size = 60_000_000
    header, body = make_list_page(1, first=False)
    body += squeeze_zeros(size - header[2][1])
    header[2][1], header[3][1] = size, len(body)
    footer.graft("token_ids", [make_list_page(1, first=True)] + [(header, body)] * (num_pages - 1))
    footer.meta("token_ids")[5][1] = num_pages
    return footer.build()


def test_a_slow_file_of_an_owner_without_a_record_costs_little_more_than_an_honest_one(
    open_reader, footer, good, bounds
):
    """It costs 20 s of CPU time otherwise: the limit of 10 s, twice."""
    reader, honest, slow = open_reader(), ReadCost(), ReadCost()
    assert reader.read(good, bounds, bounded=True, cost=honest).groups
    wide = replace(bounds, file_bytes=1 << 24, max_tokens=8000)
    with pytest.raises(FormError, match="it ends its parser each time: it took more than"):
        reader.read(make_slow_file(footer, 8000), replace(wide, max_rollouts=4), bounded=True, cost=slow)
    assert 0 < honest.cpu_s < 0.2
    # ten times what an honest file of so many tokens may take, and the known good file
    assert slow.cpu_s < 10 * honest.cpu_s * (1 + 4 / 16 * 8000 / 512) + 1.0


@pytest.mark.parametrize("value", [-1, -(2**31), 0, 1, 10**6, MAX_INT32])
@pytest.mark.parametrize("number", [2, 3])
def test_a_page_with_a_size_that_is_not_its_own_is_refused(reader, footer, number, value):
    for column in ("group", "token_ids", "proofs"):
        header, body = footer.page(column)
        header[number][1] = value
        footer.graft(column, [(header, body)])
        with pytest.raises(FormError):
            reader.read(footer.build())


@pytest.mark.parametrize("value", [-1, -(2**31), 0, 1, 10**6, MAX_INT32])
def test_a_page_with_a_number_of_values_that_is_not_its_own_is_refused_or_harmless(
    reader, good, take_apart, groups, make_proofs, is_same, value
):
    """A column without lists yields no more values than there are rows."""
    for column in ("group", "token_ids", "proofs"):
        footer = take_apart(good)
        header, body = footer.page(column)
        header[5][1][1][1] = value
        footer.graft(column, [(header, body)])
        try:
            contents = reader.read(footer.build())
        except FormError:
            continue
        assert column == "group"
        assert value > 4
        assert is_same(contents, groups, make_proofs(groups))


def test_the_parents_memory_stays_small_whatever_is_sent(reader, good, footer):
    reader.read(good)
    footer.graft("token_ids", [make_list_page(10**8, first=True)])
    bomb = footer.build()
    tracemalloc.start()
    try:
        for data in (bomb, good, good[:-1]):
            try:
                reader.read(data)
            except FormError:
                continue
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_after_all_this_an_honest_file_is_read(reader, good, groups, make_proofs, is_same):
    assert is_same(reader.read(good), groups, make_proofs(groups))
