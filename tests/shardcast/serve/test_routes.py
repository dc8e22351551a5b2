import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.shards import write_bytes

from shoal.identity.keys import Key
from shoal.net.limits import ServeLimits
from shoal.net.sockets import connect
from shoal.shardcast.format.records import Delta, Hashes, NoDelta
from shoal.shardcast.serve.server import RefusalError, parse_range, parse_target
from shoal.shardcast.store.blob import Blob
from shoal.shardcast.tickets import TicketTable, issue_ticket

SHARD = 1 << 18
NODE = "ab" * 32


def refuse_target(target: bytes) -> int:
    with pytest.raises(RefusalError) as caught:
        parse_target(target)
    return caught.value.status


def test_a_target_is_a_path_and_numbers() -> None:
    target = parse_target(b"/versions?after=12&wait=3")
    assert (target.path, target.query) == ("/versions", {"after": 12, "wait": 3})
    assert target.read_query(wait=0, after=-1) == [3, 12]
    assert parse_target(b"/versions").read_query(wait=0, after=-1) == [0, -1]


@pytest.mark.parametrize(
    "target",
    [b"http://x/versions", b"*", b"x", b"/a?", b"/a?b", b"/a?b=", b"/a?b=1&b=2", b"/a?b=-1", b"/a?b=01", b"/a?b=1&"],
)
def test_other_targets_are_refused(target: bytes) -> None:
    assert refuse_target(target) == 400


def test_a_long_target_is_refused() -> None:
    assert refuse_target(b"/" + b"a" * 1024) == 414


def test_a_query_that_the_route_does_not_have_is_refused() -> None:
    with pytest.raises(RefusalError):
        parse_target(b"/versions?from=1").read_query(after=0)


@pytest.mark.parametrize(
    ("header", "span"),
    [
        (None, None),
        ("bytes=0-", (0, 100)),
        ("bytes=99-", (99, 100)),
        ("bytes=5-9", (5, 10)),
        ("bytes=5-5", (5, 6)),
        ("bytes=5-1000", (5, 100)),
        ("bytes=9-5", None),
        ("bytes=-5", None),
        ("bytes=0-1,3-4", None),
        ("bytes=a-", None),
        ("bytes= 0-", None),
        ("items=0-", None),
    ],
)
def test_a_range_is_read_or_ignored(header: str | None, span: tuple[int, int] | None) -> None:
    assert parse_range(header, 100) == span


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=100-200", "bytes=9999999999999999999-"])
def test_a_range_beyond_the_end_is_refused_with_the_size(header: str) -> None:
    with pytest.raises(RefusalError) as caught:
        parse_range(header, 100)
    assert caught.value.status == 416 and caught.value.headers == (("Content-Range", "bytes */100"),)


@given(header=st.text(alphabet="bytes=0123456789-, ", max_size=30), size=st.integers(1, 1000))
def test_any_range_lies_inside_or_is_refused(header: str, size: int) -> None:
    try:
        span = parse_range(header, size)
    except RefusalError:
        return
    assert span is None or 0 <= span[0] < span[1] <= size


def test_health_says_what_is_newest_and_what_is_complete(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store(role="relay") as served:
            answer = await served.get("/healthz")
            fields = {"ok": True, "role": "relay", "run": "reef", "newest": None, "complete": None}
            assert (answer.status, json.loads(answer.body)) == (200, fields)
            await served.publish(3, make_bytes(1000, 1))
            await served.announce(4, make_bytes(1000, 2))
            answer = await served.get("/healthz")
            assert json.loads(answer.body) == fields | {"newest": 4, "complete": 3}
            assert answer.headers["server"] == "shoal"

    run(work)


def test_versions_are_the_head_lines_newer_than_a_serial(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entries = [await served.announce(version, make_bytes(9, version)) for version in (2, 0, 1)]
            announced = {entry.version: entry.log.lines[0] + b"\n" for entry in entries}
            assert (await served.get("/versions")).body == announced[0] + announced[1] + announced[2]
            assert (await served.get("/versions?after=100")).body == announced[1] + announced[2]
            assert (await served.get("/versions?after=102")).body == b""

    run(work)


def test_a_poll_for_versions_is_answered_when_one_comes_and_empty_when_its_time_is_over(
    open_served_store, run, make_bytes
) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(poll_seconds=0.05)) as served:
            assert (await served.get("/versions?wait=99999")).body == b""
        async with open_served_store(key=served.key) as served:
            await served.announce(0, b"abc")
            poll = asyncio.create_task(served.get("/versions?after=100&wait=20"))
            await asyncio.sleep(0.05)
            assert not poll.done()
            entry = await served.announce(1, b"abcd")
            assert (await poll).body == entry.log.lines[0] + b"\n"

    run(work)


def test_a_manifest_is_sent_from_any_line_and_as_it_grows(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            data = make_bytes(3 * SHARD, 1)
            entry = await served.announce(0, data, hashes=False)
            reading = [asyncio.create_task(served.get(served.target(entry, f"manifest?from={n}"))) for n in range(4)]
            await asyncio.sleep(0.05)
            assert not any(task.done() for task in reading)
            await served.append(entry, Hashes(0, (b"a" * 32,)))
            await asyncio.sleep(0.01)
            await served.append(entry, Hashes(1, (b"b" * 32, b"c" * 32)))
            await served.append_end(entry)
            lines = [line + b"\n" for line in entry.log.lines]
            assert len(lines) == 4
            for number, answer in enumerate(await asyncio.gather(*reading)):
                assert (answer.status, answer.body, answer.short) == (200, b"".join(lines[number:]), False)
            assert (await served.get(served.target(entry, "manifest?from=99"))).body == b""

    run(work)


def test_a_manifest_that_does_not_grow_is_ended_in_order(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(poll_seconds=0.05)) as served:
            entry = await served.announce(0, b"abc", hashes=False)
            answer = await served.get(served.target(entry, "manifest"))
            assert (answer.body, answer.short) == (entry.log.lines[0] + b"\n", False)

    run(work)


def test_a_long_manifest_arrives_whole(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            big = await served.announce(1, bytes((1 << 16) * 1000), shard_size=1 << 16, hashes=False)
            for first in range(0, 1000, 50):
                await served.append(big, Hashes(first, (make_bytes(32, first),) * 50))
            await served.append_end(big)
            assert (await served.get(served.target(big, "manifest"))).body == b"".join(x + b"\n" for x in big.log.lines)

    run(work)


def test_shards_are_sent_whole_and_in_part(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            data = make_bytes(2 * SHARD + 1000, 1)
            entry = await served.publish(7, data)
            for index in range(3):
                shard = data[index * SHARD :][:SHARD]
                answer = await served.get(served.target(entry, f"full/{index}"))
                assert (answer.status, answer.body) == (200, shard)
                assert answer.headers["content-length"] == str(len(shard))
            tail = await served.get(served.target(entry, "full/2"), ("Range", "bytes=990-"))
            assert (tail.status, tail.body) == (206, data[-10:])
            assert tail.headers["content-range"] == "bytes 990-999/1000"
            middle = await served.get(served.target(entry, "full/0"), ("Range", "bytes=5-14"))
            assert (middle.status, middle.body) == (206, data[5:15])
            beyond = await served.get(served.target(entry, "full/2"), ("Range", "bytes=1000-"))
            assert (beyond.status, beyond.headers["content-range"]) == (416, "bytes */1000")

    run(work)


def test_a_delta_is_served_once_it_is_known_and_refused_if_there_is_none(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            data, patch = make_bytes(SHARD, 1), make_bytes(500, 2)
            entry = await served.announce(1, data, parent=0)
            asking = asyncio.create_task(served.get(served.target(entry, "delta/0")))
            await asyncio.sleep(0.02)
            assert not asking.done()
            await served.append(entry, Delta(len(patch), b"r" * 32, (blake3(patch).digest(),)))
            assert entry.delta is not None
            with entry.delta.start(0) as writer:
                await write_bytes(writer, patch)
                await writer.finish()
            answer = await asking
            assert (answer.status, answer.body) == (200, patch)
            other = await served.announce(2, data, parent=1)
            asking = asyncio.create_task(served.get(served.target(other, "delta/0")))
            await asyncio.sleep(0.02)
            await served.append(other, NoDelta("larger than the full version"))
            assert (await asking).status == 404
            assert (await served.get(served.target(entry, "delta/1"))).status == 404

    run(work)


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "//",
        "/v",
        "/v/",
        "/v/0",
        "/healthz/",
        "/healthz/x",
        "/../etc/passwd",
        "/v/0/../../store.json",
        "/v/0/{d}/full/../manifest.ndjson",
        "/v/0/{d}/full/%2e%2e/manifest.ndjson",
        "/v/0/{d}/full/weights",
        "/v/0/{d}/full/00",
        "/v/0/{d}/full/1",
        "/v/0/{d}/full/-1",
        "/v/0/{d}/full/99999999",
        "/v/0/{d}/full",
        "/v/0/{d}/",
        "/v/0/{d}0/full/0",
        "/v/00/{d}/full/0",
        "/v/1/{d}/full/0",
        "/v/9999999999999999999/{d}/full/0",
        "/v/0/0000000000000000/full/0",
        "/v/0/{D}/full/0",
        "/store.lock",
        "/v0-{d}/full/weights",
    ],
)
def test_an_unknown_route_is_not_found(open_served_store, run, target: str) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entry = await served.publish(0, b"abc")
            path = target.replace("{d}", entry.digest[:16]).replace("{D}", entry.digest[:16].upper())
            if path == served.target(entry, "full/0"):
                return  # a digest without letters has no other case
            answer = await served.get(path)
            assert answer.status == 404 and answer.headers["content-type"] == "text/plain"

    run(work)


def test_a_query_that_a_route_does_not_take_is_refused(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entry = await served.publish(0, b"abc")
            for target in ("/healthz?a=1", "/versions?x=1", "/versions?after=x", served.target(entry, "full/0?a=1")):
                assert (await served.get(target)).status == 400

    run(work)


def test_a_dropped_version_is_gone_and_an_unknown_one_is_not_found(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store(keep=2) as served:
            first = await served.publish(0, b"abc")
            for version in (1, 2, 3):
                await served.publish(version, b"abcd")
            assert served.store.find(0) is None
            assert (await served.get(served.target(first, "full/0"))).status == 410
            assert (await served.get(served.target(first, "manifest"))).status == 410
            assert (await served.get(f"/v/9/{first.digest[:16]}/full/0")).status == 404

    run(work)


def test_a_replaced_version_is_found_under_its_new_digest_only(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            old = await served.publish(0, b"abc")
            new = await served.publish(0, b"abcd", serial=500)
            assert (await served.get(served.target(old, "full/0"))).status == 404
            assert (await served.get(served.target(new, "full/0"))).body == b"abcd"

    run(work)


def test_a_missing_shard_is_requested_and_sent_when_it_arrives(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        wanted: list[tuple[int, str, int]] = []

        @contextmanager
        def ask(blob: Blob, index: int, peer: str) -> Iterator[None]:
            wanted.append((blob.entry.version, blob.name, index))
            yield

        data = make_bytes(2 * SHARD, 1)
        async with open_served_store(want=ask) as served:
            entry = await served.announce(4, data)
            asking = asyncio.create_task(served.get(served.target(entry, "full/1")))
            while not wanted:
                await asyncio.sleep(0.001)
            with entry.full.start(1) as writer:
                await write_bytes(writer, data[SHARD:])
                await writer.finish()
            answer = await asking
            assert (answer.status, answer.body) == (200, data[SHARD:])
            assert wanted == [(4, "full", 1)]
            await served.get(served.target(entry, "full/1"))
            assert len(wanted) == 1

    run(work)


def test_a_shard_that_does_not_come_is_refused_with_a_time_to_come_back(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store(limits=ServeLimits(first_seconds=0.05)) as served:
            entry = await served.announce(0, make_bytes(SHARD, 1), parent=None)
            answer = await served.get(served.target(entry, "full/0"))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            waiting = await served.announce(2, make_bytes(SHARD, 1), parent=0)
            assert (await served.get(served.target(waiting, "delta/0"))).status == 503

    run(work)


def test_a_version_dropped_while_its_shard_is_waited_for_is_gone(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entry = await served.announce(0, make_bytes(SHARD, 1))
            writer = entry.full.start(0)
            asking = asyncio.create_task(served.get(served.target(entry, "full/0")))
            await asyncio.sleep(0.02)
            await served.store.drop(entry)
            writer.abort()
            assert (await asking).status == 410

    run(work)


def test_a_probe_is_as_long_as_asked_and_no_longer_than_allowed(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            assert (await served.get("/probe?bytes=12345")).body == bytes(12345)
            assert (await served.get("/probe?bytes=0")).body == b""
            assert len((await served.get("/probe")).body) == 1 << 20
            assert (await served.get("/probe?bytes=1048577")).status == 400

    run(work)


def test_status_shows_versions_to_all_and_peers_to_this_machine_only(open_served_store, run, make_bytes) -> None:
    async def work() -> None:
        async with open_served_store(describe=lambda: {"upstream": ["http://a"]}) as served:
            await served.publish(3, make_bytes(SHARD + 5, 1))
            await served.announce(4, make_bytes(SHARD, 1))
            fields = json.loads((await served.get("/status")).body)
            shown = [(v["version"], v["complete"], v["have_bytes"], v["total_bytes"]) for v in fields["versions"]]
            assert shown == [(3, True, SHARD + 5, SHARD + 5), (4, False, 0, SHARD)]
            (peer,) = fields["peers"]
            assert (peer["address"], peer["version"]) == ("127.0.0.1", None) and fields["upstream"] == ["http://a"]
            assert (peer["sent_bytes"], peer["connections"]) == (0, 1)
        wary = ServeLimits(trust_loopback=False)
        async with open_served_store(
            key=served.key, limits=wary, describe=lambda: {"upstream": ["http://a"]}
        ) as served:
            fields = json.loads((await served.get("/status")).body)
            assert "peers" not in fields and "upstream" not in fields and len(fields["versions"]) == 2

    run(work)


def test_status_says_which_version_a_peer_is_at(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entries = [await served.publish(version, b"abc") for version in (3, 4)]
            versions = []
            sock = await connect(served.url, 5)  # keeps the peer in the table between the requests
            with sock:
                for entry in (entries[0], entries[1], entries[0]):
                    await served.get(served.target(entry, "full/0"))
                    versions.append(json.loads((await served.get("/status")).body)["peers"][0]["version"])
            assert versions == [3, 4, 4]

    run(work)


def test_metrics_count_what_happened(open_served_store, run) -> None:
    async def work() -> None:
        async with open_served_store() as served:
            entry = await served.publish(3, b"abc")
            await served.get(served.target(entry, "full/0"))
            await served.get("/nowhere")
            answer = await served.get("/metrics")
            lines = answer.body.decode().splitlines()
            assert 'shoal_requests_total{status="200"} 1.0' in lines
            assert 'shoal_requests_total{status="404"} 1.0' in lines
            for line in (
                "shoal_versions 1.0",
                "shoal_have_bytes 3.0",
                "shoal_complete_version 3.0",
                "shoal_transfers 0.0",
            ):
                assert line in lines
            assert answer.headers["content-type"].startswith("text/plain")

    run(work)


def test_tickets_are_required_charged_and_refunded(open_served_store, run, tmp_path: Path, make_bytes) -> None:
    key = Key.generate()
    table = TicketTable(tmp_path / "book", run="reef", signers=[key.public], clock=lambda: 1000)
    text = issue_ticket(key, run="reef", node=NODE, expires=2000, num_bytes=SHARD + 5)
    shown = ("Authorization", f"Shoal {text}")
    ticket = table.check_header(shown[1])

    async def work() -> None:
        async with open_served_store(tickets=table) as served:
            entry = await served.publish(0, make_bytes(SHARD, 1))
            for target in (
                "/versions",
                "/probe?bytes=1",
                served.target(entry, "manifest"),
                served.target(entry, "full/0"),
            ):
                answer = await served.get(target)
                assert (answer.status, answer.headers["www-authenticate"]) == (401, "Shoal")
            for target in ("/healthz", "/metrics", "/status"):
                assert (await served.get(target)).status == 200
            assert (await served.get("/versions", shown)).status == 200
            assert (await served.get(served.target(entry, "full/0"), shown, ("Range", "bytes=0-4"))).status == 206
            assert table.count_spent(ticket) == 5
            assert (await served.get(served.target(entry, "full/9"), shown)).status == 404
            assert table.count_spent(ticket) == 5
            assert (await served.get(served.target(entry, "full/0"), shown)).status == 200
            assert table.count_spent(ticket) == SHARD + 5
            assert (await served.get(served.target(entry, "full/0"), shown, ("Range", "bytes=0-0"))).status == 403
            other = issue_ticket(key, run="atoll", node=NODE, expires=2000, num_bytes=5)
            assert (await served.get("/versions", ("Authorization", f"Shoal {other}"))).status == 403

    run(work)


def test_a_shard_that_never_came_costs_no_ticket(open_served_store, run, tmp_path: Path, make_bytes) -> None:
    key = Key.generate()
    table = TicketTable(tmp_path / "book", run="reef", signers=[key.public], clock=lambda: 1000)
    shown = f"Shoal {issue_ticket(key, run='reef', node=NODE, expires=2000, num_bytes=SHARD)}"

    async def work() -> None:
        async with open_served_store(tickets=table, limits=ServeLimits(first_seconds=0.02)) as served:
            entry = await served.announce(0, make_bytes(SHARD, 1))
            assert (await served.get(served.target(entry, "full/0"), ("Authorization", shown))).status == 503
            assert table.count_spent(table.check_header(shown)) == 0

    run(work)
