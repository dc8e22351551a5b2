"""Parts of the shardcast benchmark: processes, links, ratios."""

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.fixtures.benches import load_bench

for _name in (
    "shardcast_processes",
    "shardcast_link",
    "shardcast_trees",
    "shardcast_peers",
    "shardcast_sample",
    "shardcast",
):
    load_bench(_name)

from shardcast import compare_runs, format_table, grow_rate  # noqa: E402
from shardcast_link import CUT_BYTES, REFUSAL, Lane, Link  # noqa: E402
from shardcast_peers import find_missing  # noqa: E402
from shardcast_processes import Processes, Reading, parse_stat, read_anon, sum_cpu  # noqa: E402
from shardcast_sample import Sample, hash_blake3, hash_sha256, interleave  # noqa: E402

SHARD = b"GET /v/1/0123456789abcdef/full/3 HTTP/1.1\r\nHost: a\r\n\r\n"
LIST = b"GET /versions?after=0&wait=0 HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path / "processes") as processes:
        yield processes


def test_ratios_compare_runs_of_the_same_round() -> None:
    theirs = [Reading(2.0), Reading(30.0), Reading(8.0)]
    ours = [Reading(1.0), Reading(10.0), Reading(2.0)]
    assert compare_runs(theirs, ours) == 3.0


def test_growth_is_the_mean_from_each_level_to_the_next() -> None:
    assert grow_rate([10.0, 11.0, 13.2]) == pytest.approx(0.15)


def test_the_table_has_medians_and_sums() -> None:
    readings = [Reading(seconds, {"origin": seconds / 2, "client": 1.0}, 7.0) for seconds in (2.0, 4.0, 1.0)]
    row = format_table({"some": readings}, 8 << 20).splitlines()[-1]
    assert row == "| some | 2.00 | 1.00 - 4.00 | 4 | 2.00 | origin 1.00, client 1.00 | 7 |"


def test_jobs_take_turns_in_a_folder_that_is_fresh_each_time(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    sample = Sample(tmp_path / "source" / "file", "", "")
    order = []

    def job(name: str) -> Reading:
        sample.scratch.mkdir()
        order.append(name)
        return Reading(float(len(order)))

    runs = interleave({"a": lambda _: job("a"), "b": lambda _: job("b")}, sample, 2)
    assert order == ["a", "b", "a", "b"]
    assert [run.seconds for run in runs["b"]] == [2.0, 4.0]


def test_another_content_ends_the_benchmark(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_bytes(b"weights")
    wrong.write_bytes(b"weighty")
    sample = Sample(right, hash_blake3(right), hash_sha256(right))
    sample.check(right)
    with pytest.raises(SystemExit, match="wrong bytes"):
        sample.check(wrong)


def test_a_missing_reference_is_a_sentence() -> None:
    assert "--reference" in find_missing(None)["shardcast"]
    assert "cannot import" in find_missing(sys.executable)["shardcast"]


def test_cpu_time_is_read_behind_any_name() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    text = f"7 (a) b (c)) S 1 7 7 0 -1 4194304 10 20 30 40 {ticks} {2 * ticks} {4 * ticks} {8 * ticks} 20 0 1 0"
    assert parse_stat(text) == 15.0


def test_memory_and_cpu_of_who_is_gone_are_nothing() -> None:
    assert read_anon(os.getpid()) > 1000
    assert read_anon(2**22 + 1) == 0
    assert sum_cpu(2**22 + 1) == 0.0


def test_cpu_time_of_one_that_ended_still_counts(processes: Processes) -> None:
    with processes.measure() as reading:
        processes.start("busy", [sys.executable, "-c", "sum(range(10_000_000))"])
        processes.wait_until(lambda: processes.has_ended("busy"), "it was done")
    assert reading.cpu_s["busy"] > 0.05
    assert reading.seconds > 0.05


def test_one_that_fails_ends_the_benchmark_with_its_log(processes: Processes) -> None:
    processes.start("bad", [sys.executable, "-c", "import sys; sys.exit('no such luck')"])
    with pytest.raises(SystemExit, match="no such luck"):
        processes.wait_until(lambda: False, "never")


def test_a_wait_that_takes_too_long_ends_the_benchmark(processes: Processes) -> None:
    with pytest.raises(SystemExit, match="never: not within"):
        processes.wait_until(lambda: False, "never", 0.05)


def test_leaving_the_block_ends_children_and_grandchildren(tmp_path: Path) -> None:
    deaf = "['sh', '-c', 'trap \"\" TERM; sleep 1000']"
    script = f"import subprocess, time; print(subprocess.Popen({deaf}).pid, flush=True); time.sleep(1000)"
    with suppress(KeyError), Processes(tmp_path) as processes:
        member = processes.start("parent", [sys.executable, "-c", script])
        processes.wait_until(lambda: processes.read_log("parent").endswith("\n"), "it had a child")
        child = int(processes.read_log("parent"))
        raise KeyError("a mistake in the benchmark")
    assert member.poll() is not None
    limit = time.monotonic() + 10
    while _is_running(child):
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_lane_gives_every_byte_its_time() -> None:
    lane = Lane(rate=100.0, delay_s=0.5)
    assert lane.send_bytes(50, now=10.0) == 11.0  # half a second on the link, half a second of delay
    assert lane.send_bytes(50, now=10.0) == 11.5  # behind the first
    assert lane.send_bytes(100, now=20.0) == 21.5  # idle time is not saved up
    assert Lane(rate=None, delay_s=0.25).send_bytes(10**9, now=1.0) == 1.25


def test_only_shards_fail_and_half_of_them_in_both_ways() -> None:
    link = Link(0, fail=0.5)
    assert {link.draw_cut(LIST) for _ in range(100)} == {None}
    cuts = [link.draw_cut(SHARD) for _ in range(1000)]
    assert 400 < cuts.count(None) < 600
    assert set(cuts) == {None, 0, CUT_BYTES}
    assert {Link(0).draw_cut(SHARD) for _ in range(100)} == {None}


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_link_passes_on_what_it_gets(size: int) -> None:
    body = os.urandom(size)
    answers = asyncio.run(_ask_through(body, [SHARD, LIST], delay_s=0.001, rate=1e9))
    assert answers == [body, body]


def test_a_request_that_fails_is_refused_or_cut_and_ends_its_connection() -> None:
    body = bytes(4 * CUT_BYTES)
    seen = {asyncio.run(_ask_through(body, [SHARD], fail=1.0, turns=turn))[-1] for turn in (1, 2, 3, 4, 5, 6)}
    assert REFUSAL in seen
    cut = seen - {REFUSAL}
    assert cut and all(CUT_BYTES <= len(part) < len(body) for part in cut)


async def _ask_through(body: bytes, requests: list[bytes], *, turns: int = 1, **traits: float) -> list[bytes]:
    """Responses of a server that sends the body for every request, through one link, one connection per turn."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async with asyncio.timeout(20), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        link = Link(server.sockets[0].getsockname()[1], **traits)  # type: ignore[arg-type]
        async with await asyncio.start_server(link.serve, "127.0.0.1", 0) as near:
            answers = []
            for _ in range(turns):
                reader, writer = await asyncio.open_connection(*near.sockets[0].getsockname())
                for request in requests:
                    writer.write(request)
                    answers.append(await _read_up_to(reader, len(body)))
                writer.close()
            return answers


async def _read_up_to(reader: asyncio.StreamReader, size: int) -> bytes:
    try:
        return await reader.readexactly(size)
    except asyncio.IncompleteReadError as error:
        return error.partial


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
