"""Invalid requests over real sockets: each is refused with its reason, and nothing is decided."""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.fixtures.api_server import RUN

from shoal.coordinator.api.context import ApiLimits
from shoal.coordinator.blobs.disk import DiskLimits
from shoal.identity.authenticator import BanNotice
from shoal.identity.delegation import Scope
from shoal.identity.keys import Key
from shoal.identity.proof_of_work import read_challenge, solve_challenge
from shoal.identity.routes import Access
from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.protocol.messages import (
    AppealStatement,
    CommitAnswer,
    Heartbeat,
    Manifest,
    RolloutEntry,
    SignedAppeal,
    SignedManifest,
    SubmissionState,
    sign_message,
)
from shoal.util.clock import read_clock
from shoal.util.metrics import render_metrics

BEAT = b'{"version":0}'


def heads(stand: Any, key: Key, method: str = "POST", target: str = "/v1/heartbeat", body: bytes = BEAT, **at: Any):
    """The lines of a signed request."""
    signed = stand.sign(key, **at).sign_request(method, target, body)
    return [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in signed)]


def code_of(answer: tuple[int, bytes]) -> tuple[int, str]:
    return answer[0], json.loads(answer[1])["code"]


def test_each_forgery_is_refused_with_its_reason_and_reaches_nobody(open_stand: Any) -> None:
    async def check() -> None:
        key, other = Key.generate(), Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            good = heads(stand, key)

            async def ask(lines: list[str], body: bytes = BEAT) -> tuple[int, str]:
                return code_of(await stand.send(lines, body))

            plain = ["POST /v1/heartbeat HTTP/1.1", f"Content-Length: {len(BEAT)}"]
            assert await ask(plain) == (401, "unsigned")
            assert await ask(heads(stand, other)) == (401, "unknown_node")
            assert await ask(heads(stand, key, run="other")) == (421, "other_run")
            assert await ask(heads(stand, key, audience=other.public)) == (421, "other_audience")
            assert await ask(["POST /v1/leave HTTP/1.1", *good[1:]]) == (401, "signature")
            assert await ask(["PUT /v1/heartbeat HTTP/1.1", *good[1:]]) == (405, "method")
            assert await ask(good, BEAT.replace(b"0", b"1")) == (400, "body")
            assert await ask(good) == (401, "replay")  # its nonce was used by the previous request
            late = heads(stand, key, clock_ms=lambda: read_clock() - 300_000)
            assert await ask(late) == (401, "clock")
            assert await ask([*heads(stand, key), "Transfer-Encoding: chunked"]) == (400, "http")
            assert stand.coordinator.calls == []
            assert (await stand.send(heads(stand, key), BEAT))[0] == 200
            assert stand.coordinator.calls == ["heartbeat"]

    asyncio.run(check())


def test_a_request_counts_once_also_across_a_restart(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            lines = heads(stand, key)
            assert (await stand.send(lines, BEAT))[0] == 200
            assert code_of(await stand.send(lines, BEAT)) == (401, "replay")
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            assert code_of(await stand.send(lines, BEAT)) == (401, "replay")
            assert stand.coordinator.calls == []

    asyncio.run(check())


def test_a_banned_node_is_refused_on_every_route_that_knows_its_caller(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public, ban=BanNotice(1, "a test"))
            asked = 0
            for path, methods in stand.app.openapi()["paths"].items():
                for method, operation in methods.items():
                    if operation["tags"] in (["everybody"], ["accused"]):  # a banned owner may see why
                        continue
                    target = path.format(lease="l1", submission="s1", step="1")
                    body = BEAT if "requestBody" in operation else b""
                    lines = heads(stand, key, method.upper(), target, body)
                    if path == "/v1/join":
                        challenge = read_challenge(stand.context.make_challenge(key.public), key.public, 1 << 20)
                        lines.append(f"Shoal-Work: {solve_challenge(challenge, lambda: False)}")
                    assert code_of(await stand.send(lines, body)) == (403, "banned"), path
                    asked += 1
            assert asked == 15
            assert stand.coordinator.calls == []

    asyncio.run(check())


def test_what_an_owner_did_not_allow_is_refused(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public, scopes=frozenset({Scope.RELAY}))
            versions = b'{"version": {"version": 0, "root": "%s", "manifest": "%s", "batch": ""}, "signature": "%s"}'
            signed = versions % (b"0" * 64, b"0" * 64, b"0" * 128)
            bodies = {"/v1/claims": b"{}", "/v1/submissions/s1/receipt": b"", "/v1/batches/1": b"{}"}
            for target, body in {**bodies, "/v1/versions": signed}.items():
                lines = heads(stand, key, target=target, body=body)
                assert code_of(await stand.send(lines, body)) == (403, "scope")
            assert stand.coordinator.calls == []

    asyncio.run(check())


def test_a_join_needs_its_own_stamp_of_work(open_stand: Any) -> None:
    async def check() -> None:
        key, other = Key.generate(), Key.generate()
        body = b'{"delegation":"{}"}'
        async with open_stand() as stand:
            lines = heads(stand, key, target="/v1/join", body=body)
            assert code_of(await stand.send(lines, body)) == (401, "work")
            challenge = read_challenge(stand.context.make_challenge(other.public), other.public, 1 << 20)
            stolen = f"Shoal-Work: {solve_challenge(challenge, lambda: False)}"
            lines = heads(stand, key, target="/v1/join", body=body)
            assert code_of(await stand.send([*lines, stolen], body)) == (401, "work")
            assert stand.coordinator.calls == []

    asyncio.run(check())


def test_a_body_is_not_read_from_who_is_refused(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            too_large = stand.sign(key).sign_stream("POST", "/v1/heartbeat", 10**9, bytes(32))
            lines = ["POST /v1/heartbeat HTTP/1.1", *(f"{name}: {value}" for name, value in too_large)]
            assert code_of(await stand.send(lines)) == (413, "too_large")
            too_large = stand.sign(key).sign_stream("PUT", "/v1/submissions/s1/blob", 2**30, bytes(32))
            lines = ["PUT /v1/submissions/s1/blob HTTP/1.1", *(f"{name}: {value}" for name, value in too_large)]
            assert code_of(await stand.send(lines)) == (413, "too_large")
            assert code_of(await stand.send(["POST /v1/appeals HTTP/1.1", "Content-Length: 70000"], bytes(70000))) == (
                413,
                "too_large",
            )

    asyncio.run(check())


def test_a_body_shorter_than_signed_is_never_used(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            reader, writer = await asyncio.open_connection(*stand.server.address)
            lines = [*heads(stand, key), "Host: test", "", ""]
            writer.write("\r\n".join(lines).encode() + BEAT[:-1])
            writer.write_eof()
            assert (await reader.read(-1)).startswith(b"HTTP/1.1 400 ")
            assert stand.coordinator.calls == []

    asyncio.run(check())


TRICKS = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..%2fetc",
    "%2e%2e%2f",
    "%00",
    "s1%00",
    "s1%2f..",
    "s1%0a",
    "S1",
    "s",
    "s-1",
    "s1.json",
    "s" + "1" * 500,
    "s" + "9" * 19,
    "%f0%9f%90%9f",
    "s%31",
    "~",
    "*",
    "0x10",
    "1e3",
    "01x",
    "01",
    "+1",
    "1_0",
    "-1",
    "9007199254740993",
]


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        ("PUT", "/v1/submissions/{}/blob"),
        ("GET", "/v1/submissions/{}/blob"),
        ("POST", "/v1/submissions/{}/receipt"),
        ("GET", "/v1/submissions/{}/explanation"),
        ("POST", "/v1/leases/{}/return"),
        ("POST", "/v1/batches/{}"),
        ("GET", "/v1/batches/{}"),
        ("GET", "/v1/challenges/{}"),
        ("GET", "/v1/events/{}"),
        ("GET", "/v1/proofs/{}/1"),
        ("GET", "/v1/proofs/0/{}"),
        ("GET", "/{}/healthz"),
        ("GET", "/v1/{}"),
    ],
)
def test_no_part_of_a_path_has_a_second_spelling_or_leads_anywhere(open_stand: Any, method: str, pattern: str) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            for trick in TRICKS:
                target = pattern.format(trick)
                status, body = await stand.send(heads(stand, key, method, target, b""))
                assert status in (400, 404), target
                assert trick not in json.loads(body)["text"] or len(trick) < 3
            assert stand.coordinator.calls == []

    asyncio.run(check())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'{"version":"0"}',
        b'{"version":0.5}',
        b'{"version":1e400}',
        b'{"version":9007199254740993}',
        b'{"version":0,"secret_words":1}',
        b'{"tokens_per_s":"secret_words"}',
        b'{"tokens_per_s":NaN}',
        b'{"tokens_per_s":1000000001}',
        b'{"leases":[{"lease":"secret_words","done":1}]}',
        b'{"leases":' + b"[" * 30000,
        b'{"leases":[' + b'{"lease":"l1","done":1},' * 100 + b'{"lease":"l1","done":1}]}',
        b"\xff\xfe",
        b'{"version":0}}',
    ],
)
def test_a_message_of_another_form_is_refused_and_not_repeated(open_stand: Any, body: bytes) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            status, answer = await stand.send(heads(stand, key, body=body), body)
            assert (status, json.loads(answer)["code"]) == (422, "invalid")
            assert b"secret_words" not in answer and len(answer) < 400
            assert stand.coordinator.calls == []

    asyncio.run(check())


def test_strangers_have_a_rate_each(open_stand: Any) -> None:
    async def check() -> None:
        limits = ApiLimits(read_rate=2.0, stranger_rate=0.5, burst_s=2.0)
        async with open_stand(api=limits) as stand:
            answers = [await stand.send(["GET /metrics HTTP/1.1"]) for _ in range(6)]
            assert [status for status, _ in answers] == [200] * 4 + [429] * 2
            for path in (f"/v1/challenges/{'0' * 64}", "/v1/params", "/v1/head", "/healthz"):
                assert (await stand.send([f"GET {path} HTTP/1.1"]))[0] == 200, "a neighbour can still join"
            refusal = json.loads(answers[-1][1])
            assert refusal["code"] == "too_many" and refusal["retry_after_s"] >= 1 and refusal["server_time_ms"] > 0
            answers = [await stand.send(["POST /v1/commands HTTP/1.1"]) for _ in range(2)]
            assert [status for status, _ in answers] == [422, 429]
            assert (await stand.send(["POST /v1/commands HTTP/1.1"], source="127.0.0.2"))[0] == 422

    asyncio.run(check())


def test_a_node_reads_what_it_needs_although_others_use_up_the_rate_of_its_address(open_stand: Any) -> None:
    async def check() -> None:
        key, once = Key.generate(), RetryingClient(RetryPolicy(tries=1))
        async with open_stand(api=ApiLimits(read_rate=0.01, burst_s=1.0)) as stand:
            stand.coordinator.admit(key.public)
            assert [(await stand.send(["GET /v1/status HTTP/1.1"]))[0] for _ in range(2)] == [200, 429]
            assert (await stand.send(heads(stand, Key.generate(), "GET", "/v1/status", b"")))[0] == 429
            signed = heads(stand, key, "GET", "/v1/status", b"")
            assert [(await stand.send(signed))[0] for _ in range(2)] == [200, 429], "a nonce counts once"
            client = stand.client(key, asker=once)
            assert (await client.read_status()).run == RUN
            client.close()

    asyncio.run(check())


def test_forged_statements_keep_no_owner_from_making_its_own(open_stand: Any) -> None:
    async def check() -> None:
        owner, other = Key.generate(), Key.generate()
        async with open_stand(api=ApiLimits()) as stand:
            stand.coordinator.admit(owner.public)

            async def appeal(signer: Key, name: str) -> tuple[int, str]:
                body = write_appeal(signer, name)
                status, answer = await stand.send(["POST /v1/appeals HTTP/1.1", f"Content-Length: {len(body)}"], body)
                return status, json.loads(answer).get("code", "")

            assert await appeal(owner, owner.public) == (200, "")
            for _ in range(30):  # from the same address: nonsense, of nobody, and in the name of the owner
                assert (await stand.send(["POST /v1/appeals HTTP/1.1"]))[0] == 422
                assert await appeal(other, other.public) == (404, "unknown_owner")
                assert await appeal(other, owner.public) == (403, "statement")
            assert stand.coordinator.calls.count("appeal") == 1
            assert await appeal(owner, owner.public) == (200, "")
            codes = [await appeal(owner, owner.public) for _ in range(10)]
            assert (429, "too_many") in codes, "its own are limited"
            huge = b'{"appeal":' + b" " * 5000
            assert code_of(await stand.send(["POST /v1/appeals HTTP/1.1", f"Content-Length: {len(huge)}"], huge)) == (
                413,
                "too_large",
            )

    asyncio.run(check())


def write_appeal(signer: Key, owner: str) -> bytes:
    statement = AppealStatement(submission="s1")
    signed = SignedAppeal(appeal=statement, owner=owner, signature=sign_message(signer, RUN, statement))
    return signed.model_dump_json().encode()


def test_a_flood_of_commands_from_elsewhere_does_not_reach_the_operator_on_this_machine(open_stand: Any) -> None:
    async def check() -> None:
        limits = ApiLimits(stranger_rate=1000.0, all_commands_rate=1.0, burst_s=2.0)
        async with open_stand(api=limits) as stand:
            for number in range(2):
                stand.context.check_address(Access.OPERATOR, "POST", f"192.0.2.{number}")
            with pytest.raises(ApiError, match="too many requests"):
                stand.context.check_address(Access.OPERATOR, "POST", "192.0.2.9")
            stand.context.check_address(Access.OPERATOR, "POST", "127.0.0.1")

    asyncio.run(check())


def test_a_bug_is_reported_as_a_bug_without_details(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)

            def fail(node: str, beat: Heartbeat) -> None:
                raise KeyError("inner secret")

            stand.coordinator.heartbeat = fail
            status, body = await stand.send(heads(stand, key), BEAT)
            assert status == 500 and json.loads(body)["code"] == "bug" and b"secret" not in body
        assert [type(error) for error in errors] == [KeyError]

    asyncio.run(check())


def test_a_decision_that_takes_too_long_is_given_up_and_can_be_asked_for_again(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand(api=ApiLimits(decide_seconds=0.1)) as stand:
            stand.coordinator.admit(key.public)

            async def stall(node: str) -> None:
                await asyncio.sleep(60)

            stand.coordinator.leave = stall
            answer = await stand.send(heads(stand, key, target="/v1/leave", body=b""))
            assert code_of(answer) == (503, "busy") and json.loads(answer[1])["retry_after_s"] > 0

    asyncio.run(check())


def test_distinct_forged_ids_leave_nothing_behind(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            keys = [os.urandom(32).hex() for _ in range(300)]
            good = heads(stand, Key.generate())
            before = stand.context.authenticator.num_tracked
            for forged in keys:
                await stand.send([line.replace(good[-2][good[-2].index("keyid") + 7 :][:64], forged) for line in good])
            assert stand.context.authenticator.num_tracked <= before + 2
            assert len(stand.nonces) == 0
            series = render_metrics(stand.context.registry).decode().splitlines()
            assert len(series) < 100

    asyncio.run(check())


# Blobs


def commit_to(stand: Any, key: Key, data: bytes) -> Manifest:
    entry = RolloutEntry(hash="1" * 64, tokens=5)
    blob = hashlib.sha256(data).hexdigest()
    manifest = Manifest(lease="l1", fence=1, blob=blob, size=len(data), version=0, rollouts=(entry,))
    signed = SignedManifest(manifest=manifest, signature=sign_message(key, "demo", manifest))
    stand.coordinator.manifests["s1"] = signed
    return manifest


def answer_commit(manifest: Manifest) -> CommitAnswer:
    """The answer to such a commitment."""
    return CommitAnswer(submission="s1", state=SubmissionState.COMMITTED, size=manifest.size, deadline_ms=2**50)


def test_an_upload_of_other_bytes_than_committed_leaves_no_blob(open_stand: Any) -> None:
    async def check() -> None:
        key, data = Key.generate(), os.urandom(300_000)
        target = "/v1/submissions/s1/blob"
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            manifest = commit_to(stand, key, data)
            flipped = bytes([data[0] ^ 1]) + data[1:]
            # Signed with its own digest, which was not committed; or with the committed digest, which does not match.
            assert code_of(await stand.send(heads(stand, key, "PUT", target, flipped), flipped)) == (400, "blob")
            assert code_of(await stand.send(heads(stand, key, "PUT", target, data), flipped)) == (400, "body")
            short = data[:-1]
            assert code_of(await stand.send(heads(stand, key, "PUT", target, short), short)) == (400, "blob")
            longer = data + b"x"
            assert code_of(await stand.send(heads(stand, key, "PUT", target, longer), longer)) == (400, "blob")
            assert not await stand.blobs.has(manifest.blob)
            assert (stand.blobs.num_bytes, stand.blobs.num_uploads) == (0, 0)
            assert (await stand.send(heads(stand, key, "PUT", target, data), data))[0] == 200
            assert await stand.blobs.has(manifest.blob)

    asyncio.run(check())


def test_an_upload_that_breaks_off_leaves_nothing_and_the_next_one_succeeds(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key, data = Key.generate(), os.urandom(2_000_000)
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            manifest = commit_to(stand, key, data)
            _, writer = await asyncio.open_connection(*stand.server.address)
            lines = [*heads(stand, key, "PUT", "/v1/submissions/s1/blob", data), "Host: test", "", ""]
            writer.write("\r\n".join(lines).encode() + data[:1_000_000])
            while stand.blobs.num_uploads == 0:
                await asyncio.sleep(0.01)
            writer.transport.abort()
            while stand.blobs.num_uploads:
                await asyncio.sleep(0.01)
            assert (stand.blobs.num_bytes, list((tmp_path / "blobs" / "incoming").iterdir())) == (0, [])
            (tmp_path / "file").write_bytes(data)
            client = stand.client(key)
            assert (await client.upload(answer_commit(manifest), manifest, tmp_path / "file")).receipt.size == len(data)
            client.close()

    asyncio.run(check())


def test_two_uploads_of_one_blob_at_once_both_get_their_receipt(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key, data = Key.generate(), os.urandom(3_000_000)
        (tmp_path / "file").write_bytes(data)
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            manifest = commit_to(stand, key, data)
            client = stand.client(key)
            uploads = [client.upload(answer_commit(manifest), manifest, tmp_path / "file") for _ in range(3)]
            assert len({answer.receipt.blob for answer in await asyncio.gather(*uploads)}) == 1
            assert (stand.blobs.num_blobs, stand.blobs.num_bytes) == (1, len(data))
            client.close()

    asyncio.run(check())


def test_a_full_store_says_when_to_retry_and_accepts_the_same_upload_then(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key, data, pauses = Key.generate(), os.urandom(100_000), []
        (tmp_path / "file").write_bytes(data)
        async with open_stand(disk=DiskLimits(max_blobs=1)) as stand:
            stand.coordinator.admit(key.public)
            other = hashlib.sha256(b"x").hexdigest()

            async def one_byte() -> AsyncIterator[bytes]:
                yield b"x"

            async def make_room(pause_s: float) -> None:
                pauses.append(pause_s)
                await stand.blobs.remove(other)

            await stand.blobs.put(other, 1, one_byte())
            manifest = commit_to(stand, key, data)
            client = stand.client(key, asker=RetryingClient(RetryPolicy(tries=2), sleep=make_room, draw=lambda: 0.0))
            assert (
                await client.upload(answer_commit(manifest), manifest, tmp_path / "file")
            ).receipt.blob == manifest.blob
            assert pauses == [30.0] and stand.context.refusals.values == {"full": 1}
            client.close()

    asyncio.run(check())


def test_a_blob_is_for_those_the_coordinator_lets_read_it(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key, data = Key.generate(), os.urandom(1000)
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            manifest = commit_to(stand, key, data)
            client = stand.client(key)
            for target in (f"/v1/blobs/{manifest.blob}", "/v1/blobs", "/v1/submissions", "/v1/submissions/s2/blob"):
                status, _ = await stand.send(heads(stand, key, "GET", target, b""))
                assert status in (404, 405), target
            with pytest.raises(RefusedError, match="no such blob"):
                await client.fetch_blob("s1", manifest.blob, manifest.size, tmp_path / "copy")
            assert not list(tmp_path.glob(".copy*")) and not (tmp_path / "copy").exists()
            client.close()

    asyncio.run(check())


def test_signed_heartbeats_go_on_while_two_thousand_sockets_dribble(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand(max_connections=512) as stand:
            stand.coordinator.admit(key.public)
            client = stand.client(key)
            dribblers = asyncio.create_task(dribble(stand.server.address, 2000))
            waits = []
            for _ in range(60):
                began = time.monotonic()
                await client.send_heartbeat(Heartbeat(version=0))
                waits.append(time.monotonic() - began)
                await asyncio.sleep(0.01)
            assert await dribblers == 2000
            assert stand.coordinator.calls.count("heartbeat") == 60
            assert sorted(waits)[-1] < 5.0  # unaffected by the slow connections
            client.close()

    asyncio.run(check())


async def dribble(address: tuple[str, int], count: int) -> int:
    writers: list[asyncio.StreamWriter] = []
    try:
        for number in range(count):
            _, writer = await asyncio.open_connection(*address)
            writers.append(writer)
            for one in writers[number % 40 :: 40]:
                with suppress(OSError):
                    one.write(b"POST /v1/heartbeat HTTP/1.1\r\n"[number % 29 :][:1])
        return len(writers)
    finally:
        for writer in writers:
            writer.transport.abort()
