"""Runs in which peers and reducer die, hang, join, leave and are cut off: real processes on loopback."""

import signal
import time
from itertools import pairwise
from statistics import median
from typing import Any

from fleet import QUICK, SIZE, Cut, Fleet

from shoal.diloco.http.round_log import REBUILT, ROUND, read_log
from shoal.diloco.outer import DilocoPlan, Rules

NAMES = ("a", "b", "c")


def start_crew(fleet: Fleet, reducer: str, names: tuple[str, ...] = NAMES, **changes: object) -> None:
    for number, name in enumerate(names):
        fleet.start_peer(name, reducer, seed=number, **changes)


def find_late(fleet: Fleet) -> list[str]:
    late: list[str] = fleet.read_status()["rounds"][0]["late"]
    return late


def assert_agree(fleet: Fleet, names: tuple[str, ...]) -> None:
    """After every round that two peers completed, both have the same hash."""
    found: dict[int, str] = {}
    for name in names:
        for report in fleet.read_reports(name):
            if report["peers"]:
                assert found.setdefault(report["round"], report["hash"]) == report["hash"]
    assert found, "nobody finished a round"


def test_a_peer_killed_in_the_middle_of_a_transfer_costs_the_others_less_than_a_second_and_no_step(fleet) -> None:
    reducer = fleet.start_reducer(4)
    fleet.start_peer("stuck", reducer, stuck=True)
    start_crew(fleet, reducer, rounds=2)
    stuck = fleet.find_public("stuck")
    fleet.wait_for(lambda: fleet.read_lines("stuck"), "nothing was sent")
    fleet.wait_for(lambda: find_late(fleet) == [stuck], "the others did not deliver")
    killed_s = time.monotonic()
    fleet.send_signal("stuck", signal.SIGKILL)
    fleet.wait_for(lambda: fleet.read_status()["rounds"][0]["round"] >= 1, "the round did not close")
    assert time.monotonic() - killed_s <= 1.0
    ends = [fleet.read_end(name) for name in NAMES]
    assert len({end["hash"] for end in ends}) == 1
    assert all(end["steps"] == 40 for end in ends), "two rounds of 20 steps, all in the mean"
    assert all(len(report["peers"]) == 3 and not report["note"] for report in fleet.read_reports("a"))


def test_a_peer_that_hangs_in_a_transfer_costs_the_grace_and_is_evicted_after_two_misses(fleet) -> None:
    reducer = fleet.start_reducer(4, patience=QUICK.model_copy(update={"grace_s": 2.0}))
    fleet.start_peer("stuck", reducer, stuck=True)
    start_crew(fleet, reducer, rounds=5)
    fleet.wait_for(lambda: fleet.read_lines("stuck"), "nothing was sent")
    fleet.send_signal("stuck", signal.SIGSTOP)
    ends = [fleet.read_end(name) for name in NAMES]
    fleet.send_signal("stuck", signal.SIGCONT)
    assert len({end["hash"] for end in ends}) == 1 and all(end["steps"] == 100 for end in ends)
    times = [report["time_s"] for report in fleet.read_reports("a")]
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] >= 2.0, "the grace was given a second time"
    assert all(gap < 2.0 for gap in gaps[1:]), "and then no more"


def test_the_others_are_hardly_idle_next_to_a_peer_at_a_fifth_of_their_speed(fleet) -> None:
    """Its pace makes the others wait at most 10 %; a busy machine adds less than running without pace would.

    The grace is longer than the slow peer would take for all steps: were it not for its pace, every round would be 80 %
    waiting. The middle of all rounds counts, so that single late ones do not decide.
    """
    fleet.plan = DilocoPlan("test", (SIZE,), Rules(interval=80, codec="fp32"))
    reducer = fleet.start_reducer(4, patience=QUICK.model_copy(update={"grace_s": 15.0}))
    start_crew(fleet, reducer, rounds=8, step_s=0.01, delay=40)
    fleet.start_peer("slow", reducer, rounds=8, step_s=0.05, delay=8, seed=9)
    for name in (*NAMES, "slow"):
        fleet.join(name)
    spent, idle = {}, []
    for name in (*NAMES, "slow"):
        computed, waited = split_rounds(fleet.read_reports(name)[1:])  # in the first round nobody knows who is slow
        spent[name] = computed
        idle += [] if name == "slow" else [b / (a + b) for a, b in zip(computed, waited, strict=True)]
    longer = [1.0 - fast / slow for name in NAMES for fast, slow in zip(spent[name], spent["slow"], strict=True)]
    assert len(longer) == len(idle) == 18
    assert median(longer) <= 0.1, longer
    assert median(idle) <= 0.5, idle
    slow, reports = fleet.find_public("slow")[:8], fleet.read_reports("a")
    assert all(slow in report["peers"] for report in reports), "its work counts"
    assert fleet.read_end("slow")["steps"] < 0.8 * fleet.read_end("a")["steps"]
    assert_agree(fleet, (*NAMES, "slow"))


def split_rounds(reports: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Compute and wait seconds of a peer in each round but the first."""
    computed, waited = ([line[key] for line in reports] for key in ("compute_s", "waited_s"))
    return [b - a for a, b in pairwise(computed)], [b - a for a, b in pairwise(waited)]


def test_a_late_peer_gets_the_state_and_counts_from_the_next_round_and_a_leaver_is_not_waited_for(fleet) -> None:
    reducer = fleet.start_reducer(2, patience=QUICK.model_copy(update={"grace_s": 5.0}))
    start_crew(fleet, reducer, ("a", "b"), rounds=10_000, step_s=0.01)
    fleet.wait_for(lambda: len(fleet.read_reports("a")) >= 2, "no rounds")
    fleet.start_peer("late", reducer, stay=3, step_s=0.01, seed=5)
    fleet.join("late")
    began = fleet.read_lines("late")[0]
    first, end = began["began"], began["began"] + 3
    assert first >= 2 and began["position"] == 20 * first
    fleet.wait_for(lambda: len(fleet.read_reports("a")) >= end + 2, "the others waited for the leaver")
    late, reports = fleet.find_public("late")[:8], fleet.read_reports("a")
    assert [report["round"] for report in reports if late in report["peers"]] == list(range(first, end))
    assert_agree(fleet, ("a", "b", "late"))
    assert reports[end]["time_s"] - reports[end - 1]["time_s"] < 4.0, "the round after it left did not wait"


def test_a_peer_cut_off_for_a_round_trains_on_and_comes_back_to_the_same_state(fleet) -> None:
    reducer = fleet.start_reducer(3)
    way = Cut(fleet.port)
    start_crew(fleet, reducer, ("a", "b"), rounds=9, step_s=0.01)
    fleet.start_peer("cut", reducer, rounds=9, step_s=0.01, seed=7, url=way.url, wait_s=0.5)
    fleet.wait_for(lambda: len(fleet.read_reports("cut")) >= 2, "no rounds")
    way.cut()
    held = len(fleet.read_reports("a"))
    fleet.wait_for(lambda: len(fleet.read_reports("a")) >= held + 2, "the others waited for ever")
    way.mend()
    for name in ("a", "b", "cut"):
        fleet.join(name)
    way.close()
    cut = fleet.find_public("cut")[:8]
    rounds = [cut in report["peers"] for report in fleet.read_reports("a")]
    assert rounds[0] and not all(rounds) and rounds[-1], "in, out and in again"
    assert_agree(fleet, ("a", "b", "cut"))


def test_a_new_reducer_takes_the_state_that_most_peers_hold_and_the_run_continues(fleet) -> None:
    reducer = fleet.start_reducer(3)
    start_crew(fleet, reducer, rounds=8, step_s=0.01, wait_s=1.0)
    fleet.wait_for(lambda: all(len(fleet.read_reports(name)) >= 3 for name in NAMES), "no rounds")
    fleet.send_signal("reducer", signal.SIGKILL)
    held = {name: fleet.read_reports(name)[-1] for name in NAMES}
    time.sleep(0.3)
    (fleet.root / "second").mkdir()
    (fleet.root / "reducer" / "reducer.key").rename(fleet.root / "second" / "reducer.key")
    fleet.start_reducer(3, "second", rebuild=True)
    took_s = fleet.wait_for(lambda: fleet.read_status()["phase"] == "serving", "no state was found")
    assert took_s <= 10.0
    for name in NAMES:
        fleet.join(name)
    events = list(read_log(fleet.root / "second" / "rounds.jsonl", "test", reducer))
    rebuilt = next(event for event in events if event.kind == REBUILT)
    assert rebuilt.content["outer"] in {line["hash"] for line in held.values()}
    assert len(rebuilt.content["holders"]) >= 2
    assert len({fleet.read_lines(name)[-1]["hash"] for name in NAMES}) == 1
    assert sum(event.kind == ROUND for event in events) >= 4
    assert_agree(fleet, NAMES)


def test_all_killed_and_restarted_from_disk_continue_from_the_last_round(fleet) -> None:
    reducer = fleet.start_reducer(3)
    start_crew(fleet, reducer, rounds=100, step_s=0.005)
    fleet.wait_for(lambda: all(len(fleet.read_reports(name)) >= 3 for name in NAMES), "no rounds")
    for name in ("reducer", *NAMES):
        fleet.send_signal(name, signal.SIGKILL)
    last = max(fleet.read_reports("a") + fleet.read_reports("b"), key=lambda line: line["round"])
    assert fleet.start_reducer(3) == reducer, "the same key"
    status = fleet.read_status()
    reached = status["rounds"][0]["round"]
    assert reached in (last["round"] + 1, last["round"] + 2), "no reported round is lost"
    if reached == last["round"] + 1:
        assert status["outer"] == last["hash"]
    start_crew(fleet, reducer, rounds=reached + 2, step_s=0.005)
    ends = [fleet.read_end(name) for name in NAMES]
    assert len({end["hash"] for end in ends}) == 1
    assert_agree(fleet, NAMES)
