"""What a server answers: one function per route, all of them lookups.

Invariants:
- nothing of a request becomes a path: versions, digests, blobs and numbers are matched by strict patterns and looked up
  in the store; whatever matches no route is 404, and there are no listings;
- a refusal is one short line of text of our own; nothing of the request is repeated in it;
- a shard is sent as far as the store says it may be (`Blob.ready`), in bytes of one writer only. If that writer gives
  up, or nothing comes for too long, the connection ends short.
"""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import h11

from shoal.shardcast.blob import Blob
from shoal.shardcast.connection import Connection, CutError
from shoal.shardcast.errors import ShardError
from shoal.shardcast.http import parse_count
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.metrics import Registry, ServeMetrics
from shoal.shardcast.store import Entry, Store
from shoal.shardcast.target import RefusalError, parse_range, parse_target
from shoal.shardcast.tickets import Ticket, TicketBook, TicketError

MAX_PROBE_BYTES = 1 << 20
JSON, LINES, TEXT, BYTES = "application/json", "application/x-ndjson", "text/plain", "application/octet-stream"
_BATCH_BYTES = 1 << 16
_VERSION_PATH = re.compile(
    r"/v/(?P<version>[0-9]{1,19})/(?P<digest>[0-9a-f]{16})/(?:manifest|(?P<blob>full|delta)/(?P<index>[0-9]{1,7}))"
)

Want = Callable[[Entry, str, int], Awaitable[None] | None]
"""Called for a shard that is not there yet: (entry, "full" or "delta", index). Returns as soon as it is asked for."""
Describe = Callable[[], Mapping[str, object]]
"""Further fields of /status, shown to this machine only."""


class Routes:
    """Answers requests from a store."""

    def __init__(
        self,
        store: Store,
        *,
        limits: ServeLimits,
        registry: Registry,
        metrics: ServeMetrics,
        role: str,
        want: Want | None = None,
        tickets: TicketBook | None = None,
        describe: Describe | None = None,
        list_peers: Callable[[], list[dict[str, object]]] = list,
    ) -> None:
        self._store = store
        self._limits = limits
        self._registry = registry
        self._metrics = metrics
        self._role = role
        self._want = want
        self._tickets = tickets
        self._describe = describe
        self._list_peers = list_peers
        self._open = {"/healthz": self._answer_health, "/metrics": self._answer_metrics, "/status": self._answer_status}

    async def answer_request(self, conn: Connection, request: h11.Request) -> None:
        """Answer one request, if need be with a refusal."""
        try:
            await self._route_request(conn, request)
        except RefusalError as refusal:
            await send_refusal(conn, refusal.status, str(refusal), *refusal.headers)
        except TicketError as error:
            challenge = [("WWW-Authenticate", "Shoal")] if error.status == 401 else []
            await send_refusal(conn, error.status, str(error), *challenge)

    async def _route_request(self, conn: Connection, request: h11.Request) -> None:
        if request.method != b"GET":
            raise RefusalError(405, "only GET", ("Allow", "GET"))
        target = parse_target(request.target)
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        if (answer := self._open.get(target.path)) is not None:
            target.read_query()
            await answer(conn)
            return
        ticket = self._tickets.check_header(headers.get(b"authorization")) if self._tickets else None
        if target.path == "/versions":
            await self._answer_versions(conn, *target.read_query(after=-1, wait=0))
        elif target.path == "/probe":
            await self._answer_probe(conn, ticket, *target.read_query(bytes=MAX_PROBE_BYTES))
        elif (match := _VERSION_PATH.fullmatch(target.path)) is not None:
            entry = self._find_entry(match["version"], match["digest"])
            if match["blob"] is None:
                await self._answer_manifest(conn, entry, *target.read_query(**{"from": 0}))
            else:
                target.read_query()
                shard = _Shard(entry, match["blob"], _take_count(match["index"]))
                await self._answer_shard(conn, shard, headers.get(b"range"), ticket)
        else:
            raise RefusalError(404, "not found")

    async def _answer_health(self, conn: Connection) -> None:
        entries = self._store.entries()
        complete = [entry.version for entry in entries if entry.complete]
        fields = {
            "ok": True,
            "role": self._role,
            "run": self._store.run,
            "newest": entries[-1].version if entries else None,
            "complete": complete[-1] if complete else None,
        }
        await _send_json(conn, fields)

    async def _answer_metrics(self, conn: Connection) -> None:
        await conn.send_answer(200, self._registry.render_text(), f"{TEXT}; version=0.0.4")

    async def _answer_status(self, conn: Connection) -> None:
        fields: dict[str, object] = {
            "role": self._role,
            "run": self._store.run,
            "sent_bytes": self._metrics.sent.total,
            "sent_rate": round(self._metrics.window.rate),
            "transfers": self._metrics.transfers,
            "versions": [_describe_entry(entry) for entry in self._store.entries()],
        }
        if conn.peer.is_trusted:
            fields["peers"] = self._list_peers()
            fields.update(self._describe() if self._describe else {})
        await _send_json(conn, fields)

    async def _answer_versions(self, conn: Connection, after: int, wait_s: int) -> None:
        deadline_s = _now() + min(wait_s, self._limits.poll_seconds)
        while not (heads := self._list_heads(after)) and (left_s := deadline_s - _now()) > 0:
            await _wait_parked(conn, self._store.changed.wait(), left_s)
        await conn.send_answer(200, b"".join(heads), LINES)

    def _list_heads(self, after: int) -> list[bytes]:
        return [entry.log.lines[0] + b"\n" for entry in self._store.entries() if entry.serial > after]

    async def _answer_probe(self, conn: Connection, ticket: Ticket | None, size: int) -> None:
        if size > MAX_PROBE_BYTES:
            raise RefusalError(400, f"at most {MAX_PROBE_BYTES} bytes")
        with self._charge_ticket(conn, ticket, size):
            await conn.send_answer(200, bytes(size), BYTES)

    async def _answer_manifest(self, conn: Connection, entry: Entry, number: int) -> None:
        """Lines from `number` on, and those to come until the log ends or it is time to ask again."""
        deadline_s = _now() + self._limits.poll_seconds
        await conn.start_answer(200, ("Content-Type", LINES), ("Transfer-Encoding", "chunked"))
        while True:
            lines = _take_lines(entry.log.lines, number)
            number += len(lines)
            left_s = deadline_s - _now()
            if lines:
                await conn.send_data(b"".join(line + b"\n" for line in lines))
            elif entry.log.ended or entry.gone or left_s <= 0:
                break
            else:
                await _wait_parked(conn, entry.grown.wait(), left_s)
        await conn.end_answer()

    async def _answer_shard(
        self, conn: Connection, shard: "_Shard", range_header: str | None, ticket: Ticket | None
    ) -> None:
        conn.peer.version = max(shard.entry.version, conn.peer.version or 0)
        with shard.entry.hold():
            deadline_s = _now() + self._limits.first_seconds
            blob = await self._await_blob(conn, shard, deadline_s)
            if shard.index >= len(blob.layout.shards):
                raise RefusalError(404, "no such shard")
            size = blob.layout.shards[shard.index].size
            span = parse_range(range_header, size)
            first, end = span or (0, size)
            with self._charge_ticket(conn, ticket, end - first):
                await self._await_bytes(conn, shard, blob, first, deadline_s)
                attempt = blob.attempt(shard.index)
                headers = [("Content-Type", BYTES), ("Content-Length", str(end - first)), ("Accept-Ranges", "bytes")]
                if span is not None:
                    headers.append(("Content-Range", f"bytes {first}-{end - 1}/{size}"))
                await conn.start_answer(200 if span is None else 206, *headers)
                await self._send_span(conn, _Span(blob, shard.index, first, end, attempt))
                await conn.end_answer()

    async def _await_blob(self, conn: Connection, shard: "_Shard", deadline_s: float) -> Blob:
        """The blob asked for; whether there is a delta is known only some time after the head."""
        entry = shard.entry
        if shard.blob == "full":
            return entry.full
        while not entry.log.delta_settled and not entry.gone:
            await self._await_signal(conn, entry.grown.wait(), deadline_s)
        if entry.delta is None:
            raise RefusalError(410 if entry.gone else 404, "no delta")
        return entry.delta

    async def _await_bytes(self, conn: Connection, shard: "_Shard", blob: Blob, first: int, deadline_s: float) -> None:
        """Wait until there is a byte to send, so that a source that can send nothing says so by its status."""
        if blob.ready(shard.index) <= first and self._want is not None:
            await self._ask_for(shard, deadline_s)
        while blob.ready(shard.index) <= first:
            if shard.entry.gone:
                raise RefusalError(410, "gone")
            await self._await_signal(conn, blob.progress(shard.index).wait(), deadline_s)
        try:
            with blob.locate(shard.index):
                return  # the file is there, and is still the one that was published
        except ShardError:
            raise RefusalError(410, "gone") from None

    async def _ask_for(self, shard: "_Shard", deadline_s: float) -> None:
        assert self._want is not None, "only a relay can ask"
        asked = self._want(shard.entry, shard.blob, shard.index)
        try:
            async with asyncio.timeout_at(deadline_s):
                if asked is not None:
                    await asked
        except TimeoutError:
            raise RefusalError(503, "not to be had now", ("Retry-After", "1")) from None

    async def _await_signal(self, conn: Connection, signal: "asyncio.Future[None]", deadline_s: float) -> None:
        if not await _wait_parked(conn, signal, deadline_s - _now()):
            raise RefusalError(503, "not to be had now", ("Retry-After", "1"))

    async def _send_span(self, conn: Connection, span: "_Span") -> None:
        """Send the bytes as they become ready."""
        self._metrics.transfers += 1
        sent = span.first
        try:
            while sent < span.end:
                ready = min(span.blob.ready(span.index), span.end)
                if not span.is_valid():
                    raise CutError("writer")
                if ready > sent:
                    with span.blob.locate(span.index) as (descriptor, offset, _):
                        await conn.send_file(descriptor, offset + sent, ready - sent, span.is_valid)
                    sent = ready
                else:
                    await self._await_growth(span.blob, span.index)
        except ShardError as error:
            raise CutError("gone") from error
        finally:
            self._metrics.transfers -= 1

    async def _await_growth(self, blob: Blob, index: int) -> None:
        try:
            async with asyncio.timeout(self._limits.stall_seconds):
                await blob.progress(index).wait()
        except TimeoutError as error:
            raise CutError("stalled") from error

    def _find_entry(self, version: str, digest: str) -> Entry:
        number = _take_count(version)
        entry = self._store.find_digest(digest)
        if entry is not None and entry.version == number:
            return entry
        if self._store.find(number) is None and self._store.is_gone(number):
            raise RefusalError(410, "gone")
        raise RefusalError(404, "no such version")

    @contextmanager
    def _charge_ticket(self, conn: Connection, ticket: Ticket | None, size: int) -> Iterator[None]:
        """Charge before, and give back after what was not sent."""
        if ticket is None or self._tickets is None:
            yield
            return
        self._tickets.charge_bytes(ticket, size)
        before = conn.sent_bytes
        try:
            yield
        finally:
            self._tickets.return_bytes(ticket, size - (conn.sent_bytes - before))


@dataclass(frozen=True)
class _Shard:
    entry: Entry
    blob: str
    index: int


@dataclass(frozen=True)
class _Span:
    """The bytes of a shard that an answer is made of, and the writer they come from."""

    blob: Blob
    index: int
    first: int
    end: int
    attempt: int

    def is_valid(self) -> bool:
        """Whether the bytes still come from the writer that they came from when the answer began."""
        return self.blob.attempt(self.index) == self.attempt and self.blob.ready(self.index) > 0


async def send_refusal(conn: Connection, status: int, reason: str, *headers: tuple[str, str]) -> None:
    """A refusal as one line of text."""
    await conn.send_answer(status, f"{reason}\n".encode(), TEXT, *headers)


async def _wait_parked(conn: Connection, signal: "asyncio.Future[None]", left_s: float) -> bool:
    """Wait for a signal; False if it did not come in time."""
    try:
        with conn.park():
            async with asyncio.timeout(left_s):
                await signal
    except TimeoutError:
        return False
    return True


async def _send_json(conn: Connection, fields: Mapping[str, object]) -> None:
    body = json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    await conn.send_answer(200, body + b"\n", JSON)


def _describe_entry(entry: Entry) -> dict[str, object]:
    head, delta = entry.log.head, entry.delta
    return {
        "version": entry.version,
        "digest": entry.digest,
        "serial": entry.serial,
        "anchor": head.anchor,
        "parent": head.parent,
        "shards": len(entry.full.layout.shards),
        "ended": entry.log.ended,
        "complete": entry.complete,
        "total_bytes": entry.full.layout.total,
        "have_bytes": entry.full.have_bytes,
        "delta_bytes": None if delta is None else delta.layout.total,
        "have_delta_bytes": None if delta is None else delta.have_bytes,
    }


def _take_lines(lines: list[bytes], first: int) -> list[bytes]:
    """Some lines from `first` on, about a batch."""
    taken, size = first, 0
    while taken < len(lines) and size < _BATCH_BYTES:
        size += len(lines[taken])
        taken += 1
    return lines[first:taken]


def _take_count(text: str) -> int:
    number = parse_count(text)
    if number is None:
        raise RefusalError(404, "not found")
    return number


def _now() -> float:
    return asyncio.get_running_loop().time()
