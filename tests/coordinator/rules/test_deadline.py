"""How long things may take."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.leases import extend_time, is_backup_due, lease_size, lease_time, upload_time
from shoal.protocol.params import RunParams

PARAMS = RunParams()


def test_a_lease_gets_three_times_what_nine_of_ten_groups_took():
    times = [90_000, *[100_000] * 8, 5_000_000]
    assert lease_time(PARAMS, times, 2) == 600_000


def test_many_fast_owners_do_not_shorten_the_deadline_of_a_slow_one():
    times = [100] * 56 + [100_000] * 8
    assert lease_time(PARAMS, times, 1) == 300_000
    assert lease_time(PARAMS, [100] * 60, 1, own_ms=[100_000]) == 300_000, "its own times give it more"
    assert lease_time(PARAMS, [100] * 60, 1) == 60_000


def test_progress_gives_a_lease_the_time_it_needs_and_no_more_than_the_most():
    assert extend_time(PARAMS, 300_000, 4, 8) == 900_000
    assert extend_time(PARAMS, 300_000, 1, 256) == 3_600_000


def test_a_lease_has_as_many_groups_as_take_ten_seconds_shared_by_the_nodes():
    params = RunParams(groups_per_batch=32, group_size=8)
    assert lease_size(params, [100] * 4, 1) == 1, "nothing measured yet"
    assert [lease_size(params, [time] * 5, 2) for time in (1, 1000, 5000, 60_000)] == [16, 10, 2, 1]
    assert lease_size(params, [1] * 5, 100) == 1
    assert lease_size(RunParams(groups_per_lease=3), [60_000] * 5, 9) == 3, "a run may fix it"


def test_until_enough_was_measured_a_lease_gets_a_fixed_time():
    assert lease_time(PARAMS, [1, 1, 1, 1], 1) == 1000 * PARAMS.lease_first_s


@given(st.lists(st.integers(0, 10**9), max_size=20), st.integers(1, 256))
def test_a_lease_is_never_shorter_than_the_least_or_longer_than_the_most(times, count):
    assert 1000 * PARAMS.lease_min_s <= lease_time(PARAMS, times, count) <= 1000 * PARAMS.lease_max_s


def test_an_upload_gets_the_time_that_its_size_takes():
    assert upload_time(120, 0, 8) == 120_000
    assert upload_time(120, 2**20, 8) == 120_000 + 16_000


def test_an_upload_of_few_rollouts_gets_no_more_time_for_being_announced_as_large():
    assert upload_time(120, 64 * 2**20, 8) == upload_time(120, 2**40, 8) == 120_000 + 32_000


def test_a_backup_is_due_at_half_of_the_time():
    assert [is_backup_due(PARAMS, age, 1000) for age in (499, 500)] == [False, True]
