"""What a server answers: one function per route, all of them lookups.

Invariants:
- nothing of a request becomes a path: versions, digests, blobs and numbers are matched by strict patterns and looked up
  in the store; whatever matches no route is 404, and there are no listings;
- a refusal is one short line of text of our own; nothing of the request is repeated in it;
- only versions that `announce` passes are listed; what else is in the store is served to those who know of it.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import h11

from shoal.shardcast.answers import BYTES, LINES, TEXT, send_json, send_refusal
from shoal.shardcast.connection import Connection
from shoal.shardcast.http import parse_count
from shoal.shardcast.limits import ServeLimits
from shoal.shardcast.metrics import Registry, ServeMetrics
from shoal.shardcast.shards import ShardDesk, ShardRequest, Want
from shoal.shardcast.store import Entry, Store
from shoal.shardcast.target import RefusalError, parse_target
from shoal.shardcast.tickets import Ticket, TicketBook, TicketError

MAX_PROBE_BYTES = 1 << 20
_BATCH_BYTES = 1 << 16
_VERSION_PATH = re.compile(
    r"/v/(?P<version>[0-9]{1,19})/(?P<digest>[0-9a-f]{16})/(?:manifest|(?P<blob>full|delta)/(?P<index>[0-9]{1,7}))"
)

Announce = Callable[[Entry], bool]
"""Whether a version is to be listed."""
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
        announce: Announce = lambda _: True,
        tickets: TicketBook | None = None,
        describe: Describe | None = None,
        list_peers: Callable[[], list[dict[str, object]]] = list,
    ) -> None:
        self._store = store
        self._limits = limits
        self._registry = registry
        self._metrics = metrics
        self._role = role
        self._announce = announce
        self._desk = ShardDesk(limits, metrics, want)
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
                shard = ShardRequest(entry, match["blob"], _take_count(match["index"]), headers.get(b"range"))
                await self._desk.answer_shard(conn, shard, partial(self._charge_ticket, conn, ticket))
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
        await send_json(conn, fields)

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
        await send_json(conn, fields)

    async def _answer_versions(self, conn: Connection, after: int, wait_s: int) -> None:
        deadline_s = _now() + min(wait_s, self._limits.poll_seconds)
        while not (heads := self._list_heads(after)) and (left_s := deadline_s - _now()) > 0:
            await conn.wait_parked(self._store.changed.wait(), left_s)
        await conn.send_answer(200, b"".join(heads), LINES)

    def _list_heads(self, after: int) -> list[bytes]:
        entries = [entry for entry in self._store.entries() if entry.serial > after and self._announce(entry)]
        return [entry.log.lines[0] + b"\n" for entry in entries]

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
            lines, number = entry.read_lines(number, _BATCH_BYTES)
            left_s = deadline_s - _now()
            if lines:
                await conn.send_data(lines)
            elif entry.log.ended or entry.gone or left_s <= 0:
                break
            else:
                await conn.wait_parked(entry.grown.wait(), left_s)
        await conn.end_answer()

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


def _take_count(text: str) -> int:
    number = parse_count(text)
    if number is None:
        raise RefusalError(404, "not found")
    return number


def _now() -> float:
    return asyncio.get_running_loop().time()
