"""The report: its figures, and that what strangers wrote stays text."""

from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from shoal.launch.report import (
    ReportSection,
    RunEvidence,
    describe_broadcasts,
    describe_cases,
    describe_costs,
    describe_learning,
    describe_times,
    describe_verdicts,
    draw_picture,
    format_page,
    format_text,
    summarise,
)
from shoal.launch.timeline import Broadcast, BusySpan, PartTrack
from shoal.protocol.messages import LeaderLine, Standing

OWNER, CHEAT = "1" * 64, "2" * 64
NAMES = {OWNER: "worker-1", CHEAT: "cheat-1"}
LINES = [
    {"step": 0, "eval/pass_at_1": 0.25, "eval/greedy": 0.5},
    {"step": 1, "reward/mean": 0.5, "off_policy/lag_max": 1.0, "train/generated_tokens": 1000.0},
    {
        "step": 2,
        "reward/mean": 0.5,
        "off_policy/lag_max": 2.0,
        "train/generated_tokens": 1500.0,
        "eval/pass_at_1": 0.75,
    },
]
TRACKS = [
    PartTrack(
        name="trainer",
        spans=[BusySpan("train", "busy", 0.0, 30.0), BusySpan("publish", "busy", 30.0, 50.0, "publish", 1)],
        busy=[(0.0, 30.0)],
        wait=[(30.0, 60.0)],
    ),
    PartTrack(name="worker-1", spans=[BusySpan("lease", "wait", 20.0, 60.0)], busy=[], wait=[(20.0, 60.0)]),
]
EVIDENCE = RunEvidence(
    holds=True,
    summary="the ledger holds: 9 events",
    leaders=(
        LeaderLine(owner=OWNER, standing=Standing.GOOD, accepted=21, rejected=0, tokens=9, earned=1_500_000),
        LeaderLine(owner=CHEAT, standing=Standing.BANNED, accepted=0, rejected=1, tokens=0, earned=0),
    ),
    verdicts={OWNER: Counter(accepted=21), CHEAT: Counter(rejected_hard=1)},
    worst={CHEAT: "s8"},
    cases={CHEAT: "s8 is rejected_hard.\n  logprob: 3, threshold 1: FAILED"},
)


class Reader(HTMLParser):
    """The tags and texts of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_learning_is_told_by_its_first_and_last_evaluation() -> None:
    section = describe_learning(LINES, TRACKS, 2)
    assert list(section.rows[1:]) == [("sampled", "0.250", "0.750"), ("greedy", "0.500", "0.500")]
    assert section.text == "2,500 tokens trained in 1:00; no batch was older than 2 versions."


def test_times_are_shares_of_the_whole_period() -> None:
    head, trainer, worker = describe_times(TRACKS).rows
    assert len(head) == len(trainer) == len(worker)
    assert trainer == ("trainer", "30.0", "30.0", "50%", "train")
    assert worker == ("worker-1", "0.0", "40.0", "0%", "waiting: lease")


def test_costs_say_what_of_them_was_checking() -> None:
    section = describe_costs({"validator-1": 2.0, "worker-1": 8.0, "trainer": 10.0})
    assert section.text.endswith("Checking took 25% of the CPU that generation took.")
    assert list(section.rows[1]) == ["validator-1", "2.0", "10%"]
    assert describe_costs({}).text == "Not counted on this machine."
    assert "Checking" not in describe_costs({"trainer": 10.0}).text


def test_a_worker_that_skipped_a_version_has_a_dash() -> None:
    broadcasts = [Broadcast(0, 0.5, {"worker-1": 1.0, "worker-2": 1.25}), Broadcast(1, 0.5, {"worker-2": 2.0})]
    rows = describe_broadcasts(broadcasts).rows
    assert list(rows[0]) == ["version", "origin has it after", "worker-1", "worker-2"]
    assert list(rows[2]) == ["v1", "0.50 s", "-", "2.00 s"]


def test_verdicts_name_only_what_happened() -> None:
    rows = describe_verdicts(EVIDENCE, NAMES).rows
    assert list(rows[0]) == ["owner of", "accepted", "rejected hard", "credits", "standing"]
    assert list(rows[1]) == ["worker-1", "21", "0", "1.500000", "good"]
    assert list(rows[2]) == ["cheat-1", "0", "1", "0.000000", "banned"]


def test_the_standing_of_an_owner_that_submitted_nothing_is_a_dash() -> None:
    lines = [
        LeaderLine(owner=OWNER, standing=standing, accepted=0, rejected=0, tokens=0, earned=0)
        for standing in (Standing.PROBATION, Standing.LIMITED)
    ]
    rows = describe_verdicts(replace(EVIDENCE, leaders=tuple(lines), verdicts={}), NAMES).rows
    assert [row[-1] for row in rows[1:]] == ["-", "limited"]


def test_the_summary_names_the_command_that_explains_a_ban() -> None:
    lines = summarise(describe_learning(LINES, TRACKS, 2), EVIDENCE, NAMES, [], Path("runs/demo-seed0"))
    assert lines[1:3] == ["caught cheating: cheat-1", "why cheat-1: shoal explain runs/demo-seed0 s8"]


def test_the_evidence_is_that_of_the_accused() -> None:
    assert describe_cases(EVIDENCE, NAMES).blocks == [
        "cheat-1\ns8 is rejected_hard.\n  logprob: 3, threshold 1: FAILED"
    ]


def test_what_strangers_wrote_is_text_and_nothing_is_loaded() -> None:
    evil = "<script>alert(1)</script>\x1b[2J"
    sections = [ReportSection(title=evil, text=evil, rows=[(evil, evil), (evil, evil)], blocks=[evil])]
    page = format_page(evil, sections, b"")
    reader = Reader(page)
    assert "script" not in reader.tags and reader.sources == [] and "\x1b" not in format_text("t", sections)
    assert "\x1b" not in page


def test_the_picture_is_in_the_page() -> None:
    picture = draw_picture(LINES, TRACKS, [Broadcast(0, 0.5, {"worker-1": 1.0})], "t")
    assert picture.startswith(b"\x89PNG")
    (source,) = Reader(format_page("t", [], picture)).sources
    assert source.startswith("data:image/png;base64,")


def test_a_picture_of_nothing_is_drawn_all_the_same() -> None:
    assert draw_picture([], [], [], "t").startswith(b"\x89PNG")


def test_tables_of_the_text_are_aligned() -> None:
    text = format_text("title", [describe_times(TRACKS), describe_verdicts(EVIDENCE, NAMES)])
    lines = text.splitlines()
    start = lines.index("Who was busy when") + 3
    assert len({len(line) for line in lines[start : start + 3]}) == 1
