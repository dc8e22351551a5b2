"""Parameters of a run."""

import pytest

from shoal.commands.admin import describe_params
from shoal.errors import ConfigError
from shoal.ledger.event import MAX_BODY_BYTES, decode_body, encode_body
from shoal.protocol.messages import Standing
from shoal.protocol.params import FIXED, PARAM_GROUPS, RunParams, check_change, dump_params, name_unit, parse_params


def test_parameters_survive_the_ledger():
    params = RunParams(price=7, validators=("a" * 64, "b" * 64))
    assert parse_params(decode_body(encode_body(dump_params(params)))) == params


@pytest.mark.parametrize("content", [None, {}, {"price": 1}, {**dump_params(RunParams()), "unknown": 1}])
def test_what_are_no_parameters_is_refused(content):
    with pytest.raises(ConfigError, match="invalid run parameters"):
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


def test_every_parameter_is_shown_in_one_group_with_its_unit() -> None:
    names = [name for group in PARAM_GROUPS.values() for name in group]
    assert sorted(names) == sorted(RunParams.model_fields)
    units = ["lease_min_s", "blob_max_bytes", "price", "second_share", "guarantee_probability", "steps"]
    assert [name_unit(name) for name in units] == ["s", "bytes", "micro-credits", "millionths", "millionths", ""]
    shown = describe_params(dump_params(RunParams(price=3)))
    assert "  price = 3 micro-credits  (" in shown and "  validators = none  (" in shown
