"""The node's client against a real server, and against servers that lie, stall or go away."""

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ConfigError, UnreachableError
from shoal.identity.authenticator import BanNotice
from shoal.identity.keys import Key
from shoal.identity.signatures import ResponseSigner
from shoal.identity.signer import RequestSigner
from shoal.ledger.event import EventKind
from shoal.ledger.head import ForkError, Head, SignedHead, sign_head
from shoal.net.api_error import ApiError
from shoal.net.client import HttpClient, HttpDeadlines, parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.node.public_client import PublicClient
from shoal.node.receipts import InvalidDocumentError
from shoal.protocol.messages import Heartbeat, LeaseAnswer, Manifest, RolloutEntry
from shoal.util.clock import read_clock

BEAT = Heartbeat(version=0)


def make_asker(pauses: list[float], tries: int = 5) -> RetryingClient:
    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    return RetryingClient(RetryPolicy(tries=tries, first_s=1.0, longest_s=60.0), sleep=sleep, draw=lambda: 1.0)


def test_a_wrong_clock_is_corrected_once_and_without_a_wait(open_stand: Any) -> None:
    async def check() -> None:
        key, pauses = Key.generate(), []
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key, asker=make_asker(pauses))
            client._signer = stand.sign(key, clock_ms=lambda: read_clock() - 600_000)
            await client.send_heartbeat(BEAT)
            await client.send_heartbeat(BEAT)
            assert abs(client.clock_offset_ms - 600_000) < 5000
            assert pauses == []
            assert stand.context.refusals.values == {"clock": 1}
            client.close()

    asyncio.run(check())


def test_a_final_no_is_not_asked_again(open_stand: Any) -> None:
    async def check() -> None:
        key, pauses = Key.generate(), []
        async with open_stand() as stand:
            stand.coordinator.admit(key.public, ban=BanNotice(1, "a test"))
            client = stand.client(key, asker=make_asker(pauses))
            with pytest.raises(RefusedError, match="banned") as caught:
                await client.send_heartbeat(BEAT)
            assert caught.value.refusal.status == 403
            assert (pauses, stand.context.refusals.total) == ([], 1)
            client.close()

    asyncio.run(check())


def test_a_busy_server_is_asked_again_later_each_time_with_a_new_nonce(open_stand: Any) -> None:
    async def check() -> None:
        key, pauses = Key.generate(), []
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            answer, left = stand.coordinator.heartbeat, [3]

            def refuse_some(node: str, beat: Heartbeat) -> Any:
                if left[0]:
                    left[0] -= 1
                    raise ApiError(503, "busy", "later", retry_after_s=7 if left[0] == 1 else None)
                return answer(node, beat)

            stand.coordinator.heartbeat = refuse_some
            client = stand.client(key, asker=make_asker(pauses))
            await client.send_heartbeat(BEAT)
            assert pauses == [1.0, 10.5, 4.0]  # doubled; the middle one was requested: 7 s plus a random share
            assert stand.context.refusals.values == {"busy": 3}
            client.close()

    asyncio.run(check())


def test_a_server_that_is_away_is_given_up_after_all_tries(tmp_path: Path) -> None:
    async def check() -> None:
        pauses: list[float] = []
        key = Key.generate()
        client = NodeClient(
            parse_endpoint("http://127.0.0.1:1"),
            key,
            run="demo",
            coordinator=key.public,
            folder=tmp_path,
            asker=make_asker(pauses),
        )
        with pytest.raises(UnreachableError, match="Connection refused"):
            await client.send_heartbeat(BEAT)
        assert pauses == [1.0, 2.0, 4.0, 8.0]

    asyncio.run(check())


def test_pauses_are_bounded_and_never_shorter_than_asked_for() -> None:
    asker = make_asker([])
    for number in range(200):
        for asked_s in (0, 1, 30, 10**9):
            pause_s = asker._backoff.pause_s(number, asked_s)
            assert min(asked_s, 60.0) <= pause_s <= 90.0


def test_a_connection_that_the_server_closed_meanwhile_costs_no_wait(open_stand: Any) -> None:
    async def check() -> None:
        key, pauses = Key.generate(), []
        async with open_stand(idle_seconds=0.05) as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key, asker=make_asker(pauses))
            for _ in range(3):
                await client.send_heartbeat(BEAT)
                await asyncio.sleep(0.2)
            assert pauses == []
            client.close()

    asyncio.run(check())


def test_a_restarted_coordinator_is_found_again(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            await client.send_heartbeat(BEAT)
            host, port = stand.server.address
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            await stand.server.close()
            other = type(stand.server)(stand.app)
            await other.start(host, port)
            await client.send_heartbeat(BEAT)
            await other.close()
            client.close()

    asyncio.run(check())


# Heads


def test_heads_that_grow_are_followed_by_proof(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            for size in range(2, 6):
                await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
                await stand.ledger.sign_head()
                await client.send_heartbeat(BEAT)
                assert client.heads.held is not None and client.heads.held.head.size == size
            client.close()

    asyncio.run(check())


@pytest.mark.parametrize(("size", "later_ms"), [(1, 5000), (2, 5000), (3, -1)])
def test_a_fork_stops_the_node_for_good_and_the_evidence_is_kept(open_stand: Any, size: int, later_ms: int) -> None:
    """A head of a smaller ledger and a later time, of the same size, of a larger one and an earlier time."""

    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
            held = await stand.ledger.sign_head()
            await client.send_heartbeat(BEAT)
            await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
            forged = sign_head(stand.key, Head("demo", size, "0" * 64, "1" * 64, held.head.time_ms + later_ms))
            answer = stand.coordinator.heartbeat(key.public, BEAT)
            lying = answer.model_copy(update={"head": forged.to_bytes().decode()})
            stand.coordinator.heartbeat = lambda node, beat: lying
            with pytest.raises(ForkError):
                await client.send_heartbeat(BEAT)
            before = len(stand.coordinator.calls)
            for client_again in (client, stand.client(key)):
                with pytest.raises(ForkError):
                    await client_again.ask_lease(version=0)
            assert len(stand.coordinator.calls) == before  # not even asked
            assert client.heads.evidence_path.exists()
            client.close()

    asyncio.run(check())


@pytest.mark.parametrize("altered", [1, 2, 3, 7])
def test_a_proof_that_was_altered_on_the_way_is_asked_for_again(open_stand: Any, altered: int) -> None:
    """Twice, over new connections; three bad proofs stop the node, which checks again after a restart."""

    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
            await stand.ledger.sign_head()
            await client.send_heartbeat(BEAT)
            await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
            await stand.ledger.sign_head()
            read, asked = PublicClient.read_proof, []

            async def alter(self: PublicClient, old: int, new: int) -> tuple[bytes, ...]:
                asked.append((old, new))
                proof = await read(self, old, new)
                return (bytes(32), *proof[1:]) if len(asked) <= altered else proof

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(PublicClient, "read_proof", alter)
                for again in range(altered // 3):
                    with pytest.raises(ForkError, match="no proof that it begins with the 2"):
                        await client.send_heartbeat(BEAT)
                    with pytest.raises(ForkError):
                        await client.ask_lease(version=0)
                    assert len(asked) == 3 * (again + 1) and client.heads.evidence_path.exists()
                    client.close()
                    client = stand.client(key)
                await client.send_heartbeat(BEAT)
            assert client.heads.held is not None and client.heads.held.head.size == 3
            assert client.heads.doubted is None and not client.heads.evidence_path.exists()
            client.close()

    asyncio.run(check())


def test_a_head_of_somebody_else_is_refused_and_not_taken_for_a_fork(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            stranger = sign_head(Key.generate(), Head("demo", 5, "0" * 64, "1" * 64, 1))
            with pytest.raises(InvalidDocumentError):
                await client.check_head(stranger)
            assert client.heads.fork is None and client.heads.held is None
            client.close()

    asyncio.run(check())


# Documents


@pytest.mark.parametrize("lie", ["price", "node", "signer", "nothing"])
def test_a_lease_that_is_not_signed_as_it_was_sent_is_not_worked_for(open_stand: Any, lie: str) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            true = await stand.coordinator.grant_lease(key.public, "0" * 32, 0)
            changes: dict[str, dict[str, Any]] = {
                "price": {"lease": true.lease.model_copy(update={"price": 99})},
                "node": (await stand.coordinator.grant_lease("1" * 64, "0" * 32, 0)).model_dump(),
                "signer": {"document": true.document.replace(stand.key.public, key.public)},
                "nothing": {"document": ""},
            }
            lying = LeaseAnswer.model_validate({**true.model_dump(), **changes[lie]}, strict=False)

            async def grant(node: str, request_key: str, version: int) -> LeaseAnswer:
                return lying

            stand.coordinator.grant_lease = grant
            with pytest.raises(InvalidDocumentError):
                await client.ask_lease(version=0)
            assert list((stand.folder / "nodes").rglob("l1.json")) == []
            client.close()

    asyncio.run(check())


def test_a_receipt_for_something_else_is_refused(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key, data = Key.generate(), b"data"
        entry = RolloutEntry(hash="1" * 64, tokens=5)
        digest = hashlib.sha256(data).hexdigest()
        manifest = Manifest(lease="l1", fence=1, blob=digest, size=4, version=0, rollouts=(entry,))
        (tmp_path / "file").write_bytes(data)
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            make = stand.coordinator.make_receipt
            stand.coordinator.make_receipt = lambda node, submission: make("2" * 64, submission)
            with pytest.raises(InvalidDocumentError, match="another submission"):
                await client.submit(manifest, tmp_path / "file")
            client.close()

    asyncio.run(check())


# Servers that are not coordinators

COORDINATOR = Key.generate()
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def scripted(script: Script, tmp_path: Path, **deadlines: Any) -> AsyncIterator[tuple[NodeClient, list[float]]]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    key, pauses = COORDINATOR, []
    place = parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    times = {"answer_s": 0.2, "rest_s": 0.2, "window_s": 0.2, "min_rate": 1000, **deadlines}
    client = NodeClient(
        place,
        key,
        run="demo",
        coordinator=key.public,
        folder=tmp_path / "node",
        link=HttpClient(place, HttpDeadlines(**times)),
        asker=make_asker(pauses, tries=2),
    )
    try:
        async with asyncio.timeout(20):
            yield client, pauses
    finally:
        client.close()
        server.close()


def answer_with(data: bytes, *, drip_s: float = 0.0, hold: bool = False) -> Script:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            for start in range(0, len(data), 1 if drip_s else max(1, len(data))):
                writer.write(data[start : start + 1] if drip_s else data)
                await writer.drain()
                await asyncio.sleep(drip_s)
            if hold:
                await asyncio.sleep(5)
            writer.close()
        except (ConnectionError, asyncio.IncompleteReadError):
            writer.close()

    return script


def answer_signed(make_body: Callable[[str], bytes]) -> Script:
    """A coordinator that answers with anything, under its own signature; the function gets the request's target."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
        method, target = first.decode().split()[:2]
        pairs = [line.split(b": ", 1) for line in lines]
        body = make_body(target)
        signed = ResponseSigner(COORDINATOR, "demo", read_clock).sign_response(
            method, target, [(name, value) for name, value in pairs], 200, body
        )
        head = b"".join(b"%s: %s\r\n" % pair for pair in signed)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), head, body))

    return script


@pytest.mark.parametrize(
    ("script", "match"),
    [
        (answer_with(b"", hold=True), "timed out"),
        (answer_with(b"HTTP/1.1 200 OK\r\n", hold=True), "timed out"),
        (answer_with(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", drip_s=0.05), "timed out|closed"),
        (answer_with(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{", hold=True), "too slow"),
        (
            answer_with(b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"),
            "closed in the middle|without sending complete",
        ),
        (answer_with(b"rubbish\r\n\r\n"), "illegal status line"),
        (answer_with(b"HTTP/1.1 200 OK\r\nX: " + b"a" * 20000), "too long|Receive buffer|head"),
        (answer_with(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + bytes(3 << 20)), "exceeds the limit"),
        (answer_with(b"HTTP/1.1 100 \r\n\r\n" * 1000), "ConnectionClosed"),
        (answer_with(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>"), "status 502"),
        (answer_with(b""), r"without a response; does it expect https://\?"),
    ],
)
def test_a_server_that_stalls_or_talks_nonsense_is_given_up(tmp_path: Path, script: Script, match: str) -> None:
    async def check() -> None:
        async with scripted(script, tmp_path) as (client, pauses):
            with pytest.raises(UnreachableError, match=match):
                await client.send_heartbeat(BEAT)
            assert len(pauses) == 1  # tried twice

    asyncio.run(check())


@pytest.mark.parametrize("body", [b"{}", b"[]", b"null", b"<html>", b'{"cancelled":[]}', b"\xff" * 10])
def test_an_answer_of_another_form_is_no_answer(tmp_path: Path, body: bytes) -> None:
    async def check() -> None:
        data = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        async with scripted(answer_with(data), tmp_path) as (client, _):
            with pytest.raises(UnreachableError, match="did not sign this answer"):
                await client.send_heartbeat(BEAT)
        async with scripted(answer_signed(lambda _: body), tmp_path) as (client, _):
            with pytest.raises(UnreachableError, match="not an answer of a coordinator"):
                await client.send_heartbeat(BEAT)

    asyncio.run(check())


def test_a_redirect_is_no_answer_and_never_followed(tmp_path: Path) -> None:
    async def check() -> None:
        data = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"
        async with scripted(answer_with(data), tmp_path) as (client, _):
            with pytest.raises(UnreachableError, match="status 302"):
                await client.send_heartbeat(BEAT)

    asyncio.run(check())


def test_work_without_measure_is_not_done(tmp_path: Path) -> None:
    async def check() -> None:
        def make_challenge(target: str) -> bytes:
            node = target.rpartition("/")[2]
            challenge = f"1.{node}.{10**17}.{10**10}.{'0' * 16}.{'0' * 64}"
            return json.dumps({"challenge": challenge}).encode()

        async with scripted(answer_signed(make_challenge), tmp_path) as (client, _):
            with pytest.raises(InvalidDocumentError, match="more than the"):
                await client.join(b"{}")

    asyncio.run(check())


def test_a_blob_with_other_bytes_is_not_kept(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            data = os.urandom(1000)
            name = hashlib.sha256(data).hexdigest()

            async def chunks() -> AsyncIterator[bytes]:
                yield data

            await stand.blobs.put(name, 1000, chunks())
            stand.coordinator.open_blob = lambda reader, submission: stand.blobs.open(name)
            client = stand.client(key)
            with pytest.raises(UnreachableError, match="other bytes"):
                await client.fetch_blob("s1", "0" * 64, 1000, tmp_path / "copy")
            with pytest.raises(UnreachableError, match="exceeds the limit of 999"):
                await client.fetch_blob("s1", name, 999, tmp_path / "copy")
            assert not (tmp_path / "copy").exists() and not list(tmp_path.glob(".copy*"))
            await client.fetch_blob("s1", name, 1000, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == data
            client.close()

    asyncio.run(check())


def test_addresses_are_http_or_https(tmp_path: Path) -> None:
    assert str(parse_endpoint("http://a.example:80/")) == "http://a.example"
    secure = parse_endpoint("https://a.example")
    assert (secure.url.port, isinstance(secure.tls, ssl.SSLContext)) == (443, True)
    assert parse_endpoint("https://a.example:8443").url.port == 8443
    for text in ("a.example", "ftp://a", "https://", "https://user@a", "https://a/path", "http://a:99999"):
        with pytest.raises(ConfigError):
            parse_endpoint(text)
    with pytest.raises(ConfigError, match="cannot load certificates from this file"):
        parse_endpoint("https://a", tmp_path / "missing")


def test_signed_heads_survive_their_way_as_text() -> None:
    key = Key.generate()
    head = sign_head(key, Head("demo", 5, "0" * 64, "1" * 64, 1))
    assert SignedHead.from_bytes(head.to_bytes().decode().encode()) == head
    assert RequestSigner(key, "demo", key.public).offset_ms == 0
