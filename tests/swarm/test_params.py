"""Parameters of a run."""

import pytest

from shoal.errors import ConfigError
from shoal.swarm.event import MAX_BODY_BYTES, decode_body, encode_body
from shoal.swarm.messages import Standing
from shoal.swarm.params import FIXED, RunParams, check_change, dump_params, parse_params


def test_parameters_survive_the_ledger():
    params = RunParams(price=7, validators=("a" * 64, "b" * 64))
    assert parse_params(decode_body(encode_body(dump_params(params)))) == params


@pytest.mark.parametrize("content", [None, {}, {"price": 1}, {**dump_params(RunParams()), "unknown": 1}])
def test_what_are_no_parameters_is_refused(content):
    with pytest.raises(ConfigError, match="not the parameters"):
        parse_params(content)


@pytest.mark.parametrize(
    "changes",
    [
        {"groups_per_lease": 64, "group_size": 8},
        {"lease_min_s": 700},
        {"stale_s": 5},
        {"unbond_s": 86_400},
        {"check_trusted": 49_999},
        {"steps": 0},
        {"price": 1.5},
        {"price": True},
        {"validators": ("abc",)},
    ],
)
def test_parameters_that_do_not_fit_are_refused(changes):
    with pytest.raises(ValueError):
        RunParams(**changes)


def test_what_is_fixed_cannot_be_changed_and_all_else_can():
    old = RunParams(max_groups=100)
    check_change(old, RunParams(price=9, max_groups=100, trainers=("c" * 64,)))
    for name in FIXED:
        with pytest.raises(ConfigError, match=name):
            check_change(old, RunParams(**{"max_groups": 100, name: getattr(old, name) + 1}))


def test_new_and_limited_owners_are_checked_fully():
    params = RunParams()
    shares = {standing: params.check_share(standing, 16) for standing in Standing}
    assert shares[Standing.PROBATION] == shares[Standing.LIMITED] == 1_000_000
    assert shares[Standing.GOOD] > shares[Standing.TRUSTED] >= 50_000


def test_the_longest_parameters_fit_into_the_first_event_and_into_a_command():
    keys = [f"{number:064x}" for number in range(256)]
    params = RunParams(validators=tuple(keys), trainers=tuple(keys[:64]))
    assert 2 * len(encode_body({"params": dump_params(params)})) < MAX_BODY_BYTES
