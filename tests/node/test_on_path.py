"""Someone between a node and its coordinator, without TLS: it reads, changes, replays, swaps and invents messages.

Every answer that changes what a role does is signed by the coordinator and bound to the request, so the worst it can do
is to hold messages back.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fixtures.api_server import Stand

from shoal.errors import UnreachableError
from shoal.identity.authenticator import BanNotice, Member
from shoal.identity.delegation import sign_revocation
from shoal.identity.keys import Key
from shoal.identity.signatures import ResponseSigner
from shoal.net.client import parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.node.public_client import PublicClient
from shoal.protocol.messages import (
    Done,
    Heartbeat,
    Manifest,
    RevokeRequest,
    RolloutEntry,
    SignedManifest,
    sign_message,
)
from shoal.util.clock import read_clock


def sign_own(key: Key) -> str:
    """A revocation by an owner that is its own node."""
    return sign_revocation(key, key.public, "demo").decode()


BEAT = Heartbeat(role="validator", wait=None, version=-1, leases=())
BANNED = b'{"code":"banned","server_time_ms":1,"text":"this node or its owner is banned from this run"}'


@dataclass
class Raw:
    """A message as it travels."""

    first: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def pack(self) -> bytes:
        kept = [(name, value) for name, value in self.headers if name.lower() != b"content-length"]
        lines = [self.first, *(b"%s: %s" % pair for pair in [*kept, (b"Content-Length", b"%d" % len(self.body))])]
        return b"\r\n".join([*lines, b"", b""]) + self.body

    def replace_header(self, name: bytes, change: Callable[[bytes], bytes]) -> "Raw":
        self.headers = [(key, change(value) if key.lower() == name else value) for key, value in self.headers]
        return self


async def read_raw(reader: asyncio.StreamReader) -> Raw:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).rstrip(b"\r\n").split(b"\r\n")
    headers = [(name, value) for name, value in (line.split(b": ", 1) for line in lines)]
    length = next((int(value) for name, value in headers if name.lower() == b"content-length"), 0)
    return Raw(first, headers, await reader.readexactly(length))


async def ask_raw(stand: Stand, request: Raw) -> Raw:
    reader, writer = await asyncio.open_connection(*stand.server.address)
    writer.write(request.pack())
    answer = await read_raw(reader)
    writer.close()
    return answer


@dataclass
class Interceptor:
    """A proxy that knows what it forwards; `meddle` answers in the coordinator's place."""

    stand: Stand
    meddle: Callable[["Interceptor", Raw], Awaitable[Raw]]
    seen: list[tuple[Raw, Raw]] = field(default_factory=list)
    other: Key = field(default_factory=Key.generate)

    async def forward(self, request: Raw) -> Raw:
        answer = await ask_raw(self.stand, request)
        self.seen.append((request, answer))
        return answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                writer.write((await self.meddle(self, await read_raw(reader))).pack())
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()


@asynccontextmanager
async def meddled(stand: Stand, meddle: Any, key: Key) -> AsyncIterator[NodeClient]:
    proxy = Interceptor(stand, meddle)
    stand.coordinator.admit(proxy.other.public, ban=BanNotice(1, "a test"))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    place = parse_endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    folder, asker = stand.folder / "nodes" / key.public[:8], RetryingClient(RetryPolicy(tries=2, first_s=0.01))
    client = NodeClient(place, key, run="demo", coordinator=stand.key.public, folder=folder, asker=asker)
    try:
        yield client
    finally:
        client.close()
        server.close()


async def alter_body(proxy: Interceptor, request: Raw) -> Raw:
    """Another job, another batch, another pause, another standing."""
    answer = await proxy.forward(request)
    changed = json.loads(answer.body)
    changed[next(iter(changed))] = None
    return Raw(answer.first, answer.headers, json.dumps(changed).encode())


async def alter_one_byte(proxy: Interceptor, request: Raw) -> Raw:
    answer = await proxy.forward(request)
    return Raw(answer.first, answer.headers, answer.body.replace(b"0", b"1", 1) + b" ")


async def strip_signature(proxy: Interceptor, request: Raw) -> Raw:
    answer = await proxy.forward(request)
    names = (b"signature", b"signature-input", b"content-digest")
    return Raw(answer.first, [pair for pair in answer.headers if pair[0].lower() not in names], answer.body)


async def double_signature(proxy: Interceptor, request: Raw) -> Raw:
    answer = await proxy.forward(request)
    return Raw(answer.first, [*answer.headers, *answer.headers], answer.body)


async def replay_answer(proxy: Interceptor, request: Raw) -> Raw:
    """The first answer, again and again: an old job, an old list of cancelled leases."""
    return proxy.seen[0][1] if proxy.seen else await _record_other_answer(proxy, request)


async def _record_other_answer(proxy: Interceptor, request: Raw) -> Raw:
    """A genuine answer to the same request of another node."""
    node = Key.generate()
    proxy.stand.coordinator.admit(node.public)
    method, target = request.first.decode().split()[:2]
    signed = proxy.stand.sign(node).sign_request(method, target, request.body)
    headers = [(name.encode(), value.encode()) for name, value in signed]
    return await proxy.forward(Raw(request.first, headers, request.body))


async def answer_for_another_node(proxy: Interceptor, request: Raw) -> Raw:
    return await _record_other_answer(proxy, request)


async def answer_to_another_route(proxy: Interceptor, request: Raw) -> Raw:
    """A public route answers whatever signature it is shown, so the path must be bound too."""
    return await proxy.forward(Raw(b"GET /v1/params HTTP/1.1", request.headers, b""))


async def sign_with_own_key(proxy: Interceptor, request: Raw) -> Raw:
    answer = await proxy.forward(request)
    method, target = request.first.decode().split()[:2]
    forger = ResponseSigner(proxy.other, "demo", lambda: 10**12)
    headers = [
        (name, proxy.other.public.encode() if name == b"shoal-audience" else value) for name, value in _lower(request)
    ]
    return Raw(answer.first, forger.sign_response(method, target, headers, 200, answer.body), answer.body)


async def sign_with_own_key_in_its_name(proxy: Interceptor, request: Raw) -> Raw:
    answer = await sign_with_own_key(proxy, request)
    return answer.replace_header(
        b"signature-input", lambda value: value.replace(proxy.other.public.encode(), proxy.stand.key.public.encode())
    )


def _lower(request: Raw) -> list[tuple[bytes, bytes]]:
    return [(name.lower(), value) for name, value in request.headers]


async def invent_ban(proxy: Interceptor, request: Raw) -> Raw:
    return Raw(b"HTTP/1.1 403 Forbidden", [], BANNED)


async def relabel_status(proxy: Interceptor, request: Raw) -> Raw:
    """The genuine answer, as a refusal."""
    answer = await proxy.forward(request)
    return Raw(b"HTTP/1.1 403 Forbidden", answer.headers, answer.body)


async def provoke_ban(proxy: Interceptor, request: Raw) -> Raw:
    """The coordinator itself signs a refusal, of the same request under the id of a banned node."""

    def rename(value: bytes) -> bytes:
        start = value.index(b'keyid="') + 7
        return value[:start] + proxy.other.public.encode() + value[start + 64 :]

    answer = await proxy.forward(request.replace_header(b"signature-input", rename))
    assert answer.first.split()[1] == b"403"
    return answer


async def provoke_unknown_node(proxy: Interceptor, request: Raw) -> Raw:
    def rename(value: bytes) -> bytes:
        start = value.index(b'keyid="') + 7
        return value[:start] + b"ab" * 32 + value[start + 64 :]

    return await proxy.forward(request.replace_header(b"signature-input", rename))


async def provoke_other_run(proxy: Interceptor, request: Raw) -> Raw:
    return await proxy.forward(request.replace_header(b"shoal-run", lambda _: b"other"))


async def provoke_replay(proxy: Interceptor, request: Raw) -> Raw:
    """Delivered twice, the second is refused: genuine, and no reason to stop."""
    await proxy.forward(request)
    return await proxy.forward(request)


async def break_the_body(proxy: Interceptor, request: Raw) -> Raw:
    return await proxy.forward(Raw(request.first, request.headers, request.body[:-1] + b" "))


ATTACKS = [
    alter_body,
    alter_one_byte,
    strip_signature,
    double_signature,
    replay_answer,
    answer_for_another_node,
    answer_to_another_route,
    sign_with_own_key,
    sign_with_own_key_in_its_name,
    invent_ban,
    relabel_status,
    provoke_ban,
    provoke_unknown_node,
    provoke_other_run,
    provoke_replay,
    break_the_body,
]
CALLS: dict[str, Callable[[NodeClient], Awaitable[Any]]] = {
    "heartbeat": lambda client: client.send_heartbeat(BEAT),
    "claim": lambda client: client.claim_jobs(),
    "lease": lambda client: client.ask_lease(version=0),
    "batch": lambda client: client.cut_batch(1),
    "join": lambda client: client.join(b"{}"),
    "params": lambda client: client.read_params(),
    "return": lambda client: client.return_lease("l1"),
    "revocation": lambda client: client.bring("/v1/revocations", RevokeRequest(revocation=sign_own(client._key)), Done),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("meddle", ATTACKS)
def test_no_forged_answer_is_acted_on(open_stand: Any, meddle: Any, call: str) -> None:
    bodiless = call in ("params", "return", "join")
    if meddle is break_the_body and bodiless:
        pytest.skip("there is no body to break")
    if meddle in (provoke_ban, provoke_replay) and call in ("params", "revocation", "join"):
        pytest.skip("a public route asks nobody who he is; a stamp is checked first")
    if meddle is answer_to_another_route and call == "params":
        pytest.skip("it is the route that was asked for")

    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            stand.coordinator.manifests["s1"] = _make_manifest(key)
            async with meddled(stand, meddle, key) as client:
                with pytest.raises(UnreachableError):
                    await CALLS[call](client)
                assert client.clock_offset_ms == 0

    asyncio.run(check())


@pytest.mark.parametrize("call", CALLS)
def test_a_proxy_that_only_forwards_changes_nothing(open_stand: Any, call: str) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.admit(key.public)
            stand.coordinator.manifests["s1"] = _make_manifest(key)
            async with meddled(stand, lambda proxy, request: proxy.forward(request), key) as client:
                await CALLS[call](client)

    asyncio.run(check())


def test_a_genuine_ban_ends_the_node(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            stand.coordinator.members[key.public] = Member(
                owner=key.public, scopes=frozenset(), ban=BanNotice(1, "a test")
            )
            async with meddled(stand, lambda proxy, request: proxy.forward(request), key) as client:
                with pytest.raises(RefusedError, match="banned"):
                    await client.send_heartbeat(BEAT)

    asyncio.run(check())


def test_a_client_without_a_key_gets_answers_bound_to_its_requests_too(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            client = PublicClient(stand.place, asker=RetryingClient(RetryPolicy(tries=2, first_s=0.01)))
            await client.read_params()  # not bound: nobody's key is known
            client.trust("demo", Key.generate().public)
            with pytest.raises(UnreachableError, match="did not sign"):
                await client.read_params()
            client.close()
            client = PublicClient(stand.place, asker=RetryingClient(RetryPolicy(tries=2, first_s=0.01)))
            client.trust("demo", stand.key.public)
            await client.read_params()
            client.close()

    asyncio.run(check())


def test_whatever_others_ask_a_newcomer_gets_answers_that_it_can_trust(open_stand: Any) -> None:
    """No flood uses up the signatures of answers: without them nobody could join, from any address."""

    async def check() -> None:
        async with open_stand() as stand:
            node, now_ms = Key.generate(), read_clock()  # unknown to the run
            stand.context.clock_ms = lambda: now_ms  # however slowly the flood comes
            for _ in range(300):
                headers = stand.sign(node).sign_request("POST", "/v1/leave")
                lines = [(name.encode(), value.encode()) for name, value in [("Host", "test"), *headers]]
                raw = Raw(b"POST /v1/leave HTTP/1.1", lines, b"")
                answer = await ask_raw(stand, raw)
                assert answer.first.split()[1] == b"401"
                assert any(name.lower() == b"signature" for name, _ in answer.headers)
            client = stand.client(Key.generate(), asker=RetryingClient(RetryPolicy(tries=1)))
            assert await client.read_challenge("0" * 64)
            client.close()

    asyncio.run(check())


def _make_manifest(key: Key) -> SignedManifest:
    entry = RolloutEntry(hash="0" * 64, tokens=1)
    manifest = Manifest(lease="l1", fence=1, blob="0" * 64, size=4, version=0, rollouts=(entry,))
    return SignedManifest(manifest=manifest, signature=sign_message(key, "demo", manifest))
