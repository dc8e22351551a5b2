"""The field: who takes part, when it goes on where it was, and what is told of it."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.cli import _build_parser
from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.launch.layout import Layout
from shoal.launch.part import Part
from shoal.launch.prepare import Prepared
from shoal.redteam.crew import ATTEMPTS, Attempt, parse_trials
from shoal.redteam.field import PLAN, QUICK, WORKERS, Field, Plan, _goes_on, list_field, load_field, make_plan
from shoal.redteam.matrix import build_matrix
from shoal.redteam.rate import Rate
from shoal.redteam.registry import ATTACKS, Fate
from shoal.redteam.report import collect_figures, format_matrix, measure_cost
from shoal.redteam.tally import Piece, Purse, Tally, Word
from shoal.swarm.messages import Standing, SubmissionState, Verdict


def make_ready(plan: Plan) -> Prepared:
    """A swarm whose keys are there, which is enough to say what would be started."""
    config = load_field(plan)
    layout = Layout.of(config)
    layout.launch.mkdir(parents=True)
    Key.generate().save(layout.publisher_key)
    return Prepared(config, layout, {"coordinator": 1, "origin": 2, "relay-1": 3})


def list_named(plan: Plan) -> dict[str, Part]:
    return {part.name: part for part in list_field(plan, make_ready(plan))}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return make_plan(None, quick=False, seed=0, out=tmp_path)


def test_every_part_is_a_command_that_exists(plan: Plan) -> None:
    parser = _build_parser()
    for part in list_named(plan).values():
        assert callable(parser.parse_args(part.arguments).command), part.name


def test_the_field_is_over_when_the_crews_are(plan: Plan) -> None:
    parts = list_named(plan)
    assert {name for name, part in parts.items() if part.ends} == {"crew-1", "crew-2", "crew-3"}
    assert "evaluator" not in parts and 0 in parts["trainer"].last


def test_all_attacks_are_tried_by_some_crew_and_none_by_two(plan: Plan) -> None:
    parser, tried = _build_parser(), []
    for name, part in list_named(plan).items():
        if name.startswith("crew-"):
            args = parser.parse_args(part.arguments)
            tried += parse_trials(args.attacks, args.repeat)
    assert sorted(trial.name for trial in tried) == sorted(trial.name for trial in plan.trials)
    assert {trial.attack for trial in tried} == set(ATTACKS)


def test_honest_workers_differ_and_two_of_four_validators_lie(plan: Plan) -> None:
    parts = list_named(plan)
    kinds = {parts[f"worker-{number}"].arguments[-4:] for number in range(1, plan.workers + 1)}
    assert len(kinds) == len(WORKERS) == plan.workers
    assert {threads for _, threads, _, _ in kinds} == {"1", "2"}
    liars = {name: part.arguments for name, part in parts.items() if "--lie" in part.arguments}
    assert {name: words[-1] for name, words in liars.items()} == {"validator-3": "accept", "validator-4": "abstain"}
    assert {words[:2] for words in liars.values()} == {("redteam", "judge")}


def test_the_quick_form_has_some_of_each_fate() -> None:
    assert {ATTACKS[name].fate for name in QUICK} == set(Fate)


def test_an_attack_that_is_none_and_a_seed_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--attack bribe"):
        make_plan(["bribe"], quick=True, seed=0, out=tmp_path)
    with pytest.raises(ConfigError, match="--seed"):
        make_plan(None, quick=True, seed=-1, out=tmp_path)


def test_a_field_goes_on_only_if_it_is_the_same_and_not_done(tmp_path: Path) -> None:
    plan = make_plan(["int8", "stale"], quick=True, seed=0, out=tmp_path)
    layout = make_ready(plan).layout
    assert not _goes_on(plan, layout), "nothing was begun"
    (layout.launch / PLAN).write_text(json.dumps(asdict(plan)))
    assert _goes_on(plan, layout)
    assert not _goes_on(replace(plan, attacks=("int8",)), layout)
    attempts = [Attempt(attack=name, number=1, share=1.0, owners=(), ended="judged") for name in plan.attacks]
    (layout.root / "crew-1").mkdir()
    lines = "".join(f"{json.dumps(asdict(attempt))}\n" for attempt in attempts)
    (layout.root / "crew-1" / ATTEMPTS).write_text(lines)
    assert not _goes_on(plan, layout), "all was tried"


@pytest.fixture
def field(plan: Plan) -> Field:
    """One cheat that was caught beside one honest worker."""
    attempt = Attempt(attack="greedy", number=1, share=1.0, owners=("c" * 64,), ended="banned")
    cpu_s = {
        "validator-1": 1.0,
        "validator-2": 1.0,
        "validator-3": 50.0,
        "worker-1": 15.0,
        "crew-1": 5.0,
        "trainer": 9.0,
    }
    return Field(plan=plan, prepared=make_ready(plan), attempts=(attempt,), cpu_s=cpu_s, seconds=61.0, code=0)


def read_field(field: Field) -> Tally:
    (worker, *_) = field.honest
    word = Word("1" * 64, Verdict.HARD, ("sampling", "toploc_sign", "toploc_median"))
    common = {"version": 0, "place": (1, 0), "groups": 2, "tokens": 10}
    bad = Piece(submission="s2", owner="c" * 64, state=SubmissionState.HARD, paid=0, words=[word, word], **common)
    good = Piece(submission="s1", owner=worker, state=SubmissionState.ACCEPTED, paid=10, words=[], **common)
    return Tally(
        holds=True,
        summary="3 events",
        group_size=4,
        price=1,
        pieces={worker: [good], "c" * 64: [bad]},
        purses={"c" * 64: Purse()},
        standings={worker: Standing.GOOD, "c" * 64: Standing.BANNED},
        granted={},
        nodes={},
    )


def test_a_program_finds_what_it_looks_for(field: Field) -> None:
    matrix = build_matrix(read_field(field), field.attempts, honest=field.honest, liars=field.liars)
    figures = json.loads(json.dumps(collect_figures(field, matrix), allow_nan=False))
    (row,) = figures["attacks"]
    wanted = {
        "name": "greedy",
        "hard": True,
        "fate": "hard",
        "caught": True,
        "submissions_until_caught": 1,
        "credit": 0,
    }
    assert wanted.items() <= row.items()
    assert (figures["honest_punished"], figures["honest_rollouts"], figures["honest_false_alarms"]) == (0, 8, 0)
    assert (
        figures["liars"] == {"validator-3": "never joined", "validator-4": "never joined"} and figures["ledger_holds"]
    )


def test_the_table_has_a_column_for_each_kind_of_check_that_failed(field: Field) -> None:
    matrix = build_matrix(read_field(field), field.attempts, honest=field.honest, liars=field.liars)
    head, _, row = format_matrix(matrix)
    assert head.endswith("| toploc | sampling |") and row.startswith(
        "| greedy | hard | yes | 1 | 1 | 100% (21% to 100%) |"
    )
    assert row.endswith("| 100% | 100% |")


def test_the_cost_of_checking_leaves_out_who_does_not_check(field: Field) -> None:
    assert measure_cost(field.cpu_s, field) == 0.1
    assert measure_cost({}, field) is None
    assert math.isnan(Rate(0, 0).value)
