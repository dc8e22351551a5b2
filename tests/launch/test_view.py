"""What a person sees: the figures that matter, and nothing that a stranger could make a terminal do."""

import asyncio
import io

import pytest
from rich.console import Console

from shoal.launch.prepare import PreparedSwarm
from shoal.launch.supervisor import Supervisor
from shoal.launch.view import SnapshotReader, SwarmSnapshot, describe_line, draw_page, name_nodes
from shoal.protocol.messages import LeaderLine, Standing, Status, WaitInfo

NODE, OWNER, CHEAT = "ab12cd34" + "0" * 56, "1" * 64, "2" * 64
HOSTILE = "\x1b[2J\x07[bold]boo[/bold]\r\u202e"


def make_status(*texts: str, **changes: object) -> Status:
    waits = tuple(
        WaitInfo(name="n", owner="o", for_whom="w", since_ms=0, deadline_ms=0, overdue=False, text=text)
        for text in texts
    )
    values = {
        "run": "demo",
        "server_time_ms": 0,
        "finished": False,
        "stopped": False,
        "steps": 8,
        "trained": 3,
        "newest_version": 3,
        "open_steps": (),
        "queue": 2,
        "nodes_live": 5,
        "nodes_stale": 1,
        "nodes_gone": 0,
        "waits": waits,
        "alarms": (),
    }
    return Status.model_validate(values | changes)


def make_snapshot(**changes: object) -> SwarmSnapshot:
    leaders = (
        LeaderLine(owner=OWNER, standing=Standing.GOOD, accepted=21, rejected=0, tokens=9, earned=1_500_000),
        LeaderLine(owner=CHEAT, standing=Standing.BANNED, accepted=0, rejected=1, tokens=0, earned=0),
    )
    values: dict[str, object] = {
        "elapsed_s": 83.0,
        "steps": 8,
        "status": make_status("step 4 waits for 2 of 8 groups: node ab12cd34 has l91 for 9 s more"),
        "leaders": leaders,
        "names": {NODE: "worker-1", OWNER: "worker-1", CHEAT: "cheat-1"},
        "lines": [
            {"step": 0, "eval/pass_at_1": 0.25, "eval/greedy": 0.5},
            {"step": 3, "reward/mean": 0.5, "off_policy/lag": 1.25, "off_policy/lag_max": 2.0},
        ],
        "parts": {"worker-1": "runs, pid 7", "cheat-1": "ended, exit code 3", "relay-1": "runs"},
        "news": (),
    }
    return SwarmSnapshot(**(values | changes))  # type: ignore[arg-type]


def draw(snapshot: SwarmSnapshot, width: int = 120, height: int = 40) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, force_terminal=False, highlight=False).print(draw_page(snapshot, width, height))
    return stream.getvalue()


def test_a_line_says_where_the_run_is_how_it_learns_and_who_waits() -> None:
    line = describe_line(make_snapshot())
    assert line == (
        "1:23  step 3/8  v3  reward 0.500  held-out 0.250  greedy 0.500  age 1.2, at most 2  2 awaiting validation  "
        "worker-1 +21  cheat-1 +0-1 banned  step 4 waits for 2 of 8 groups: worker-1 has l91 for 9 s more"
    )


def test_the_page_has_a_row_for_each_part_with_what_the_ledger_says_of_it() -> None:
    page = draw(make_snapshot())
    rows = {line.split()[0]: line.split() for line in page.splitlines() if line.strip()}
    assert rows["worker-1"][1:6] == [OWNER[:8], "good", "21", "0", "1.500"]
    assert rows["cheat-1"][1:6] == [CHEAT[:8], "banned", "0", "1", "0.000"]
    assert rows["relay-1"] == ["relay-1", "runs"]
    assert "step 3/8  v3" in page and "age 1.2, at most 2" in page and "who waits for whom" in page


def test_before_the_coordinator_answers_it_says_so() -> None:
    snapshot = make_snapshot(status=None, leaders=(), lines=[], problem="the coordinator does not answer: refused")
    assert describe_line(snapshot) == "1:23  starting  the coordinator does not answer: refused"
    assert "does not answer: refused" in draw(snapshot)


def test_nothing_that_a_stranger_says_reaches_the_terminal() -> None:
    snapshot = make_snapshot(
        status=make_status(HOSTILE, alarms=(HOSTILE,)), news=(HOSTILE,), parts={HOSTILE: HOSTILE}, problem=HOSTILE
    )
    for text in (draw(snapshot), describe_line(snapshot)):
        assert not set(text) & set("\x1b\x07\r\u202e")
        assert "[bold]boo[/bold]" in text  # as it was written, not as markup


def test_a_narrow_terminal_gets_narrow_lines() -> None:
    long = make_snapshot(status=make_status("w" * 500), news=("n" * 500,))
    assert max(len(line) for line in draw(long, 60).splitlines()) <= 60


def test_a_low_terminal_gets_a_low_chart() -> None:
    low, high = (len(draw(make_snapshot(), height=height).splitlines()) for height in (20, 60))
    assert low < high


@pytest.mark.parametrize("height", [18, 24, 30, 40])
def test_a_page_fits_its_terminal_and_what_is_wrong_is_on_it(height: int) -> None:
    """What does not fit is cut off at the end, where a reader would look for it."""
    names = [f"worker-{number}" for number in range(2, 10)]
    parts = {"worker-1": "runs, pid 7", "relay-1": "ended with SIGKILL, starts again in 4 s"}
    snapshot = make_snapshot(
        parts=parts | dict.fromkeys(names, "runs, pid 8"),
        status=make_status("step 4 waits for its groups", "trainer waits", "validator waits", alarms=("no relays",)),
        news=tuple(f"worker-{number} ended" for number in range(4)),
    )
    page = draw(snapshot, 80, height)
    assert page.count("\n") < height
    for text in ("no relays", "step 4 waits for its groups", "relay-1", "good"):
        assert text in page
    assert ("step 0" in page) == (height >= 24) and ("8 more" in page) == (height < 40)


def test_nodes_are_called_by_their_names_and_strangers_by_their_keys() -> None:
    text = "node ab12cd34 has l1; node ffffffff has l2; xnode ab12cd34"
    assert name_nodes(text, {NODE: "worker-1"}) == "worker-1 has l1; node ffffffff has l2; xnode ab12cd34"


def test_a_swarm_that_starts_or_is_being_stopped_raises_no_alarm(
    prepared: PreparedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def look(supervisor: Supervisor) -> tuple[str, str]:
        reader = SnapshotReader(prepared, supervisor)
        try:
            snapshot = await reader.read()
            return snapshot.problem, snapshot.note
        finally:
            reader.close()

    supervisor = Supervisor([], prepared.layout.logs, {})
    assert asyncio.run(look(supervisor)) == ("", "the coordinator is starting")
    monkeypatch.setattr("shoal.launch.view.START_S", 0.0)
    problem, note = asyncio.run(look(supervisor))
    assert "the coordinator has not answered" in problem and not note
    supervisor.is_stopping = True
    assert asyncio.run(look(supervisor)) == ("", "stopping all processes in order, the coordinator last")


def test_a_note_is_shown_and_is_no_alarm() -> None:
    snapshot = make_snapshot(note="stopping all processes", status=None)
    assert describe_line(snapshot).endswith("  stopping all processes")
    page = draw(snapshot)
    assert "stopping all processes" in page and "alarms" not in page
