"""How much of a batch one owner may generate."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.coordinator.rules.leases import count_equals, is_bounded, most_groups
from shoal.protocol.params import MILLION, RunParams

PARAMS = st.builds(
    lambda groups, share: RunParams(groups_per_batch=groups, owner_share=share),
    st.integers(1, 300),
    st.integers(1, MILLION),
)


def test_a_run_has_no_bound_by_default():
    assert not is_bounded(RunParams()) and is_bounded(RunParams(owner_share=MILLION - 1))


def test_one_owner_may_write_its_share_and_few_owners_equal_parts():
    params = RunParams(groups_per_batch=20, owner_share=250_000)
    assert [most_groups(params, owners) for owners in (1, 2, 3, 4, 5, 100)] == [20, 10, 7, 5, 5, 5]


@given(PARAMS, st.integers(1, 400))
def test_the_owners_at_work_can_always_fill_a_batch(params, owners):
    most = most_groups(params, owners)
    assert 1 <= most <= params.groups_per_batch
    assert most * owners >= params.groups_per_batch


@given(PARAMS, st.integers(0, 50))
def test_from_some_number_of_owners_on_the_bound_is_the_share(params, more):
    most = most_groups(params, count_equals(params) + more)
    assert most <= max(1, -(-params.groups_per_batch * params.owner_share // MILLION))
