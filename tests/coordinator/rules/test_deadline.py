"""How long things may take."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.leases import is_backup_due, lease_time, upload_time
from shoal.protocol.params import RunParams

PARAMS = RunParams()


def test_a_lease_gets_three_medians_of_what_groups_took():
    assert lease_time(PARAMS, [90_000, 100_000, 100_000, 5_000_000, 100_000], 2) == 600_000


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
