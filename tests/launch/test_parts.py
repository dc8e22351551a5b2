"""The parts of a swarm: each a command that exists, stopped in an order in which nobody is missed."""

import pytest

from shoal.cli import build_parser
from shoal.launch.parts import EXIT_UNWANTED, list_parts
from shoal.launch.prepare import PreparedSwarm


def test_every_part_is_a_command_that_exists(prepared: PreparedSwarm) -> None:
    parser = build_parser()
    for part in list_parts(prepared):
        args = parser.parse_args(part.arguments)
        assert callable(args.command), part.name


def test_there_is_a_part_for_everybody(prepared: PreparedSwarm) -> None:
    names = [part.name for part in list_parts(prepared)]
    assert names == [
        *("coordinator", "origin", "relay-1", "trainer", "evaluator"),
        *("validator-1", "validator-2", "worker-1", "worker-2", "cheat-1"),
    ]


def test_who_is_needed_by_others_is_stopped_after_them(prepared: PreparedSwarm) -> None:
    ranks = {part.name: part.rank for part in list_parts(prepared)}
    order = ("worker-1", "validator-1", "trainer", "relay-1", "origin", "coordinator")
    assert sorted(order, key=lambda name: ranks[name]) == list(order)
    assert ranks["cheat-1"] == ranks["worker-1"] and ranks["evaluator"] == ranks["trainer"]


def test_the_run_is_over_when_trainer_and_evaluator_are(prepared: PreparedSwarm) -> None:
    assert [part.name for part in list_parts(prepared) if part.ends] == ["trainer", "evaluator"]


def test_who_is_not_wanted_is_not_started_again(prepared: PreparedSwarm) -> None:
    from shoal.commands import roles

    assert EXIT_UNWANTED == roles.EXIT_UNWANTED
    final = {part.name for part in list_parts(prepared) if EXIT_UNWANTED in part.last}
    assert final == {"trainer", "validator-1", "validator-2", "worker-1", "worker-2", "cheat-1"}


@pytest.mark.parametrize("name", ["worker-1", "cheat-1"])
def test_workers_decode_as_many_at_a_time_as_the_engine_has_slots(prepared: PreparedSwarm, name: str) -> None:
    part = next(part for part in list_parts(prepared) if part.name == name)
    assert part.arguments[part.arguments.index("--slots") + 1] == str(prepared.config.engine.slots)
