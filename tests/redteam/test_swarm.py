"""The red-team swarm: its parts, when it resumes, and its report."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.cli import build_parser
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.launch.layout import SwarmPaths
from shoal.launch.prepare import PreparedSwarm
from shoal.launch.process import Part
from shoal.protocol.messages import Standing, SubmissionState, Verdict
from shoal.redteam.campaign import ATTEMPTS, AttackAttempt, parse_attempts
from shoal.redteam.ledger_summary import LedgerSummary, OwnerBalance, SubmissionSummary, VerdictSummary
from shoal.redteam.matrix import Proportion, build_matrix
from shoal.redteam.registry import Expected, list_attacks
from shoal.redteam.report import collect_figures, format_matrix, measure_cost
from shoal.redteam.swarm import (
    PLAN,
    QUICK,
    WORKERS,
    RedTeamPlan,
    RedTeamSwarm,
    _can_resume,
    list_swarm_parts,
    load_settings,
    make_plan,
)


def make_ready(plan: RedTeamPlan) -> PreparedSwarm:
    """A swarm with keys, which is enough to list what would be started."""
    config = load_settings(plan)
    layout = SwarmPaths.of(config)
    layout.launch.mkdir(parents=True)
    Key.generate().save(layout.publisher_key)
    return PreparedSwarm(config, layout, {"coordinator": 1, "origin": 2, "relay-1": 3})


def list_named(plan: RedTeamPlan) -> dict[str, Part]:
    return {part.name: part for part in list_swarm_parts(plan, make_ready(plan))}


@pytest.fixture
def plan(tmp_path: Path) -> RedTeamPlan:
    return make_plan(None, quick=False, seed=0, out=tmp_path)


def test_every_part_is_a_command_that_exists(plan: RedTeamPlan) -> None:
    parser = build_parser()
    for part in list_named(plan).values():
        assert callable(parser.parse_args(part.arguments).command), part.name


def test_the_run_ends_with_its_campaigns(plan: RedTeamPlan) -> None:
    parts = list_named(plan)
    assert {name for name, part in parts.items() if part.ends} == {"campaign-1", "campaign-2", "campaign-3"}
    assert "evaluator" not in parts and 0 in parts["trainer"].last


def test_every_attack_belongs_to_exactly_one_campaign(plan: RedTeamPlan) -> None:
    parser, tried = build_parser(), []
    for name, part in list_named(plan).items():
        if name.startswith("campaign-"):
            args = parser.parse_args(part.arguments)
            tried += parse_attempts(args.attacks, args.repeat)
    assert sorted(trial.name for trial in tried) == sorted(trial.name for trial in plan.attempts)
    assert {trial.attack for trial in tried} == set(list_attacks())


def test_honest_workers_differ_and_two_of_four_validators_lie(plan: RedTeamPlan) -> None:
    parts = list_named(plan)
    kinds = {parts[f"worker-{number}"].arguments[-4:] for number in range(1, plan.workers + 1)}
    assert len(kinds) == len(WORKERS) == plan.workers
    assert {threads for _, threads, _, _ in kinds} == {"1", "2"}
    liars = {name: part.arguments for name, part in parts.items() if "--lie" in part.arguments}
    assert {name: words[-1] for name, words in liars.items()} == {"validator-3": "accept", "validator-4": "abstain"}
    assert {words[:2] for words in liars.values()} == {("redteam", "judge")}


def test_the_quick_form_has_some_of_each_fate() -> None:
    assert {list_attacks()[name].expect for name in QUICK} == set(Expected)


def test_an_unknown_attack_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--attack bribe"):
        make_plan(["bribe"], quick=True, seed=0, out=tmp_path)


def test_a_run_can_resume_only_with_the_same_plan_and_if_it_is_not_done(tmp_path: Path) -> None:
    plan = make_plan(["int8", "stale"], quick=True, seed=0, out=tmp_path)
    layout = make_ready(plan).layout
    assert not _can_resume(plan, layout), "nothing was started"
    (layout.launch / PLAN).write_text(json.dumps(asdict(plan)))
    assert _can_resume(plan, layout)
    assert not _can_resume(replace(plan, attacks=("int8",)), layout)
    attempts = [AttackAttempt(attack=name, number=1, share=1.0, owners=(), ended="judged") for name in plan.attacks]
    (layout.root / "campaign-1").mkdir()
    lines = "".join(f"{json.dumps(asdict(attempt))}\n" for attempt in attempts)
    (layout.root / "campaign-1" / ATTEMPTS).write_text(lines)
    assert not _can_resume(plan, layout), "all attempts are done"


@pytest.fixture
def field(plan: RedTeamPlan) -> RedTeamSwarm:
    """One cheat that was caught, and one honest worker."""
    attempt = AttackAttempt(attack="greedy", number=1, share=1.0, owners=("c" * 64,), ended="banned")
    cpu_s = {
        "validator-1": 1.0,
        "validator-2": 1.0,
        "validator-3": 50.0,
        "worker-1": 15.0,
        "campaign-1": 5.0,
        "trainer": 9.0,
    }
    return RedTeamSwarm(plan=plan, prepared=make_ready(plan), attempts=(attempt,), cpu_s=cpu_s, seconds=61.0, code=0)


def read_field(field: RedTeamSwarm) -> LedgerSummary:
    (worker, *_) = field.honest
    word = VerdictSummary("1" * 64, Verdict.HARD, ("sampling", "toploc_sign", "toploc_median"))
    common = {"version": 0, "place": (1, 0), "groups": 2, "tokens": 10}
    bad = SubmissionSummary(
        submission="s2", lease="l2", owner="c" * 64, state=SubmissionState.HARD, paid=0, verdicts=[word, word], **common
    )
    good = SubmissionSummary(
        submission="s1", lease="l1", owner=worker, state=SubmissionState.ACCEPTED, paid=10, verdicts=[], **common
    )
    return LedgerSummary(
        holds=True,
        summary="3 events",
        group_size=4,
        price=1,
        repeated=6,
        submissions={worker: [good], "c" * 64: [bad]},
        balances={"c" * 64: OwnerBalance()},
        standings={worker: Standing.GOOD, "c" * 64: Standing.BANNED},
        granted={},
        nodes={},
    )


def test_a_program_finds_what_it_looks_for(field: RedTeamSwarm) -> None:
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


def test_the_table_has_a_column_for_each_kind_of_check_that_failed(field: RedTeamSwarm) -> None:
    matrix = build_matrix(read_field(field), field.attempts, honest=field.honest, liars=field.liars)
    head, _, row = format_matrix(matrix)
    assert head.endswith("| toploc | sampling |") and row.startswith(
        "| greedy | hard | yes | 1 | 1 | 100% (21% to 100%) |"
    )
    assert row.endswith("| 100% | 100% |")


def test_the_cost_of_checking_excludes_validators_that_do_not_check(field: RedTeamSwarm) -> None:
    assert measure_cost(field.cpu_s, field) == 0.1
    assert measure_cost({}, field) is None
    assert math.isnan(Proportion(0, 0).value)
