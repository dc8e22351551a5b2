"""Decompression bombs: the footer is within bounds, but the pages ask for too much memory or time."""

import re
import tracemalloc
from dataclasses import replace

import pytest

from shoal.redteam.behaviours.bad_files import make_list_page, squeeze_zeros
from shoal.submission.limits import FormError

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


def test_a_slow_file_of_an_owner_without_a_record_is_stopped_early_and_not_parsed_again(open_reader, footer, bounds):
    """It takes the whole CPU limit twice otherwise. How early depends on this machine's time for an honest file."""
    limit_s = 10
    reader = open_reader(cpu_s=limit_s)
    lease = replace(bounds, file_bytes=1 << 24, max_tokens=8000, max_rollouts=4)
    with pytest.raises(FormError, match="it ends its parser each time: it took more than") as refusal:
        reader.read(make_slow_file(footer, 8000), lease, bounded=True)
    assert 0 < float(re.search(r"more than ([\d.]+) s", str(refusal.value))[1]) < limit_s
    assert reader.num_started == 1


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
