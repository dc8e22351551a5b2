"""Outcomes of attempts read from a ledger: expected ones, and each way to miss the expectation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from shoal.protocol.messages import Standing, SubmissionState, Verdict
from shoal.redteam.campaign import AttackAttempt
from shoal.redteam.ledger_summary import LedgerSummary, OwnerBalance, SubmissionSummary, VerdictSummary
from shoal.redteam.matrix import COLUMNS, Matrix, Proportion, build_matrix, find_column
from shoal.redteam.registry import Expected, list_attacks
from shoal.toploc.finding import Check

HONEST, LIAR = "1" * 64, "9" * 64
WORKER, CHEAT, HELPER = "a" * 64, "c" * 64, "d" * 64
GOOD, HARD, SOFT, FORM = Verdict.ACCEPTED, Verdict.HARD, Verdict.SOFT, Verdict.FORM


def make_piece(
    number: int, owner: str, *verdicts: Verdict, by: str = HONEST, failed: str = "", **other: Any
) -> SubmissionSummary:
    """A submission of 10 tokens in 2 groups; the last verdict decides its state."""
    words = [VerdictSummary(by, verdict, (failed,) if failed and verdict is not GOOD else ()) for verdict in verdicts]
    state = SubmissionState(verdicts[-1].value) if verdicts else SubmissionState.RECEIVED
    fields = {"version": 0, "groups": 2, "tokens": 10, "paid": 10 if state is SubmissionState.ACCEPTED else 0}
    fields |= {"place": (1, number)} | other
    return SubmissionSummary(
        submission=f"s{number}", lease=f"l{number}", owner=owner, state=state, verdicts=words, **fields
    )


def make_tally(pieces: Sequence[SubmissionSummary], *, credit: int = 0, **standings: Standing) -> LedgerSummary:
    """A ledger in which an honest worker has submitted twice, without a rejection."""
    every = [make_piece(1, WORKER, GOOD), make_piece(2, WORKER, GOOD), *pieces]
    owners = sorted({piece.owner for piece in every})
    balance = OwnerBalance()
    balance.add(credit)
    return LedgerSummary(
        holds=True,
        summary="",
        group_size=4,
        price=1,
        repeated=6,
        submissions={owner: [piece for piece in every if piece.owner == owner] for owner in owners},
        balances={CHEAT: balance},
        standings={WORKER: Standing.GOOD, CHEAT: standings.get("cheat", Standing.PROBATION)},
        granted={CHEAT: 2 * len(pieces)},
        nodes={LIAR: "b" * 64},
    )


def make_attempt(attack: str, **other: Any) -> AttackAttempt:
    fields = {"number": 1, "share": 1.0, "owners": (CHEAT,), "ended": "judged"} | other
    return AttackAttempt(attack=attack, **fields)


def build(
    attack: str, pieces: Sequence[SubmissionSummary], *, credit: int = 0, banned: bool = False, **other: Any
) -> Matrix:
    standing = Standing.BANNED if banned else Standing.LIMITED
    tally = make_tally(pieces, credit=credit, cheat=standing)
    return build_matrix(tally, [make_attempt(attack, **other)], honest={WORKER: "worker-1"}, liars={LIAR: "liar-1"})


def find_fault(attack: str, pieces: Sequence[SubmissionSummary], **other: Any) -> str:
    """The fault of the only attempt."""
    (outcome,) = build(attack, pieces, **other).rows[0].outcomes
    return outcome.fault


CONVICTED = [make_piece(10, CHEAT, HARD, HARD, failed="sampling")]


def test_a_cheat_that_is_convicted_at_once_and_has_nothing_left_met_its_fate() -> None:
    matrix = build("greedy", CONVICTED, banned=True)
    (row,) = matrix.rows
    assert row.met and row.caught and row.until == 1 and row.until_tokens == 10 and not matrix.faults
    assert (row.detection.hits, row.detection.trials) == (1, 1)
    assert row.columns == {"sampling": 1} and matrix.columns == ["sampling"]


@pytest.mark.parametrize(
    ("pieces", "banned", "credit", "fault"),
    [
        ([make_piece(10, CHEAT, GOOD)], False, 10, "not convicted"),
        ([make_piece(10, CHEAT, HARD, SOFT)], False, 0, "not convicted"),
        (CONVICTED, True, 5, "kept 5 micro-credits"),
        ([], False, 0, "not convicted"),
        (
            [*(make_piece(n, CHEAT, GOOD) for n in range(10, 13)), make_piece(13, CHEAT, HARD, HARD)],
            True,
            0,
            "only at submission",
        ),
    ],
)
def test_a_hard_cheat_that_gets_away_with_anything_did_not(
    pieces: list[SubmissionSummary], banned: bool, credit: int, fault: str
) -> None:
    assert fault in find_fault("greedy", pieces, banned=banned, credit=credit)


def test_work_accepted_only_by_a_liar_does_not_count_against_the_checks() -> None:
    passed = [make_piece(number, CHEAT, GOOD, by=LIAR) for number in range(10, 15)]
    (row,) = build("greedy", [*passed, make_piece(15, CHEAT, HARD, HARD)], banned=True).rows
    assert row.met and row.until == 1 and row.sum("by_liar") == 5 and row.sum("judged") == 1
    assert row.until_tokens == 60, "the cost for the run counts anyway"


def test_work_in_which_an_attack_found_nothing_to_change_is_honest() -> None:
    pieces = [*(make_piece(n, CHEAT, GOOD) for n in range(10, 15)), make_piece(15, CHEAT, HARD, HARD)]
    assert "only at submission 6" in find_fault("best_of_n", pieces, banned=True)
    (row,) = build("best_of_n", pieces, banned=True, unchanged=[f"l{n}" for n in range(10, 16)]).rows
    assert row.met and row.until == 1 and row.sum("judged") == 1


@pytest.mark.parametrize("attack", ["stale", "previous"])
def test_with_its_first_version_an_old_one_is_honest(attack: str) -> None:
    pieces = [*(make_piece(n, CHEAT, GOOD) for n in range(10, 14)), make_piece(14, CHEAT, HARD, HARD, version=1)]
    (row,) = build(attack, pieces, banned=True).rows
    assert row.met and row.until == 1 and row.sum("judged") == 1


def test_a_copier_is_honest_until_there_is_something_to_copy() -> None:
    pieces = [*(make_piece(n, CHEAT, GOOD) for n in range(10, 14)), make_piece(20, CHEAT, HARD, HARD)]
    helper = make_piece(15, HELPER, GOOD)
    (row,) = build("copy_all", [*pieces, helper], banned=True, owners=(CHEAT, HELPER)).rows
    assert row.met and row.until == 1
    (row,) = build("copy_all", pieces, banned=True, owners=(CHEAT, HELPER)).rows
    assert not row.met, "nothing leaked, so nothing was tried"


@pytest.mark.parametrize(("attack", "verdict"), [("padding", SOFT), ("garbage", FORM)])
def test_soft_attacks_are_rejected_every_time_without_a_ban(attack: str, verdict: Verdict) -> None:
    bad = [make_piece(number, CHEAT, verdict) for number in (10, 11)]
    other = SOFT if verdict is FORM else FORM
    assert not find_fault(attack, bad)
    assert "not always rejected" in find_fault(attack, [*bad, make_piece(12, CHEAT, GOOD)], credit=10)
    assert "not always rejected" in find_fault(attack, [*bad, make_piece(12, CHEAT, other)])
    assert "not always rejected" in find_fault(attack, [])
    assert "banned" in find_fault(attack, bad, banned=True)
    assert not find_fault(attack, [make_piece(number, CHEAT, verdict) for number in range(10, 16)], banned=True)
    assert "kept 3" in find_fault(attack, bad, credit=3)
    assert not find_fault(attack, [*bad, make_piece(12, CHEAT, GOOD, by=LIAR)], credit=10)


def test_what_must_be_refused_is_refused_and_was_tried() -> None:
    assert not find_fault("late", [], trials=3, ended="done")
    assert "nothing was attempted" in find_fault("late", [], ended="done")
    assert "not refused: a second file" in find_fault("late", [], trials=3, taken=("a second file: taken",))


def test_of_what_must_be_refused_honest_work_is_paid_once() -> None:
    same = [make_piece(number, CHEAT, GOOD, tokens=40, place=(1, 0)) for number in (10, 11)]
    assert not find_fault("two_manifests", same[:1], credit=40, trials=3)
    assert "earned 80 micro-credits, honest work of the same size earns 40" in find_fault(
        "two_manifests", same, credit=80, trials=3
    )


@pytest.mark.parametrize(
    "attack", [name for name, attack in list_attacks().items() if attack.expect is Expected.FRUITLESS]
)
def test_what_is_allowed_earns_no_more_than_honest_work_of_its_size(attack: str) -> None:
    pieces = [make_piece(10, CHEAT, GOOD)]  # two leased groups, for which honest work earns 10
    assert not find_fault(attack, pieces, credit=18)  # one of twelve: a wider tolerance
    assert "honest work of the same size earns 10" in find_fault(attack, pieces, credit=19)
    many = [make_piece(number, CHEAT, GOOD) for number in range(10, 22)]
    assert not find_fault(attack, many, credit=150)
    assert "honest work of the same size earns 120" in find_fault(attack, many, credit=151)
    assert find_fault(attack, []) == "nothing was attempted"


def test_a_bounded_attack_must_at_least_submit_something() -> None:
    assert not find_fault("noise", [make_piece(10, CHEAT, GOOD)], credit=10)
    assert find_fault("noise", []) == "nothing was attempted"


def test_a_failed_attempt_does_not_meet_the_expectation() -> None:
    assert "the attempt failed: KeyError" in find_fault(
        "greedy", CONVICTED, banned=True, ended="failed", text="KeyError"
    )
    assert "nobody joined" in find_fault("greedy", [], owners=())
    assert find_fault("garbage", [], ended="refused", text="too long") == "no validator saw its work: too long"


def test_honest_workers_are_counted() -> None:
    honest = build("greedy", CONVICTED, banned=True).honest
    assert (honest.rollouts, honest.submissions, honest.alarms, honest.punished) == (16, 2, 0, ())
    assert honest.ratios == {"worker-1": 1.0} and honest.pay == 5.0


def test_an_honest_worker_that_is_rejected_or_limited_shows() -> None:
    tally = make_tally([make_piece(5, WORKER, SOFT, failed="reward")])
    tally = LedgerSummary(
        **{**{name: getattr(tally, name) for name in LedgerSummary.__slots__}, "standings": {WORKER: Standing.LIMITED}}
    )
    matrix = build_matrix(tally, [], honest={WORKER: "worker-1"}, liars={})
    assert matrix.honest.alarms == 1 and matrix.honest.punished == ("worker-1",)
    assert matrix.honest.ratios["worker-1"] == pytest.approx(2 / 3)
    assert matrix.faults == [
        "worker-1: honest, but penalised",
        "worker-1: honest, but paid 66.7% of the value of its work",
    ]


def test_an_honest_worker_that_was_made_poorer_was_punished_whatever_its_standing_is_now() -> None:
    tally, balance = make_tally([]), OwnerBalance()
    tally.balances[WORKER] = balance
    for amount in (20, -5):
        balance.add(amount)
    assert build_matrix(tally, [], honest={WORKER: "worker-1"}, liars={}).faults == ["worker-1: honest, but penalised"]


def test_every_check_has_a_column() -> None:
    assert all(find_column(check.value) != "other" for check in Check)
    assert find_column("reward") == "reward" and find_column("history_reward") == "history"
    assert find_column("anything") == "other" and set(COLUMNS) >= {"form", "toploc", "sampling"}


def test_an_interval_holds_its_share_and_narrows_with_trials() -> None:
    assert Proportion(0, 0).interval == (0.0, 1.0)
    low, high = Proportion(3, 3).interval
    assert 0.4 < low < 0.5 and high == pytest.approx(1.0)
    wide, narrow = Proportion(5, 10).interval, Proportion(500, 1000).interval
    assert wide[0] < narrow[0] < 0.5 < narrow[1] < wide[1]


def test_old_weights_are_no_offence_while_nothing_was_trained() -> None:
    pieces = [make_piece(10, CHEAT, GOOD), replace(make_piece(11, CHEAT, GOOD), version=1)]
    pieces.append(replace(make_piece(12, CHEAT, HARD, failed="logprob"), version=2))
    for attack in ("stale", "previous"):
        tally = replace(make_tally(pieces, cheat=Standing.BANNED), roots={0: "a", 1: "a", 2: "b"})
        matrix = build_matrix(tally, [make_attempt(attack)], honest={WORKER: "worker-1"}, liars={})
        (row,) = (row for row in matrix.rows if row.name == attack)
        assert row.met and row.outcomes[0].judged == 1 and row.until == 1
