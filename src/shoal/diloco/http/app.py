"""The reducer's routes, as an ASGI app for `swarm.serve`.

    GET  /v1/diloco/plan | status | challenges/<node>                     open
    POST /v1/diloco/join                                                  signed, with a stamp of work
    POST /v1/diloco/leave | offers | holdings                             signed
    PUT  /v1/diloco/updates/<f>/<r>/<sha256>/<chunk>                      signed
    PUT  /v1/diloco/holdings/<hash>/<chunk>                               signed
    GET  /v1/diloco/watch/<rounds> | state | states/<hash>/<chunk>        signed
    GET  /v1/diloco/outcomes/<f>/<r>/<base>/<chunk>                       signed

Invariants:
- no byte of a body is read for who is not who it says, and none that its route does not expect;
- answers that wait do so for `?wait=` seconds at most; a peer that ends its connection meanwhile is noted as lost.
"""

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.diloco.http.desk import Desk
from shoal.diloco.http.messages import CHUNK_BYTES, TalkError
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.round import RoundKey
from shoal.shardcast.http import HttpError
from shoal.swarm.exchange import ENDED, Receive, Scope, Send
from shoal.swarm.refusal import AuthError
from shoal.swarm.server_auth import Caller

PREFIX = "/v1/diloco/"
MAX_WAIT_S = 20
MAX_BODY_BYTES = 1 << 16
_NUM, _HEX = r"(0|[1-9][0-9]{0,15})", r"([0-9a-f]{64})"
_WAIT = re.compile(rb"wait=([0-9]|1[0-9]|20)")


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as a route sees it."""

    desk: Desk
    scope: Scope
    receive: Receive
    parts: tuple[str, ...]
    caller: Caller | None
    wait_s: int

    @property
    def peer(self) -> str:
        """Who signed."""
        assert self.caller is not None, "only on routes that are signed"
        return self.caller.node

    async def read_body(self, note_piece: Callable[[], None] = lambda: None) -> bytes:
        """The body, whole and as it was signed; a connection that breaks in it is noted."""
        assert self.caller is not None, "open routes have no body"
        checker, pieces = self.caller.open_body(), []
        try:
            while True:
                message = await self.receive()
                if message["type"] != "http.request":
                    raise HttpError("closed in the middle of a body")
                if piece := message.get("body", b""):
                    checker.feed(piece)
                    pieces.append(piece)
                    note_piece()
                if not message.get("more_body", False):
                    break
        except HttpError as error:
            if error.status != 408:  # too slow is not gone
                self.desk.note_lost(self.peer)
            raise
        except OSError:
            self.desk.note_lost(self.peer)
            raise
        checker.finish()
        return b"".join(pieces)

    async def wait_until(self, is_ready: Callable[[], bool]) -> bool:
        """Wait for something to become true while the peer is there; whether it did."""
        ended = asyncio.ensure_future(self.scope["extensions"][ENDED]["wait"]())
        until_s = asyncio.get_running_loop().time() + self.wait_s
        try:
            while True:
                bell = asyncio.ensure_future(self.desk.bell.wait())
                left_s = until_s - asyncio.get_running_loop().time()
                if (is_over := is_ready()) or left_s <= 0:
                    bell.cancel()
                    return is_over
                await asyncio.wait([bell, ended], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                bell.cancel()
                if ended.done():
                    self.desk.note_lost(self.peer)
                    raise HttpError("the peer went away")
        finally:
            ended.cancel()


Handler = Callable[[Request], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, and who may use it."""

    method: str
    path: re.Pattern[str]
    handle: Handler
    kind: str = "signed"
    max_body_bytes: int = 0


async def _join(request: Request) -> bytes:
    return request.desk.join(request.peer)


async def _leave(request: Request) -> bytes:
    return request.desk.leave(request.peer)


async def _show_plan(request: Request) -> bytes:
    return request.desk.card


async def _show_status(request: Request) -> bytes:
    return request.desk.describe()


async def _challenge(request: Request) -> bytes:
    return request.desk.make_challenge(request.parts[0], os.urandom(8))


async def _watch(request: Request) -> bytes:
    known = int(request.parts[0])
    await request.wait_until(lambda: request.desk.num_rounds != known)
    return request.desk.tell_rounds()


async def _offer(request: Request) -> bytes:
    return request.desk.take_offer(request.peer, await request.read_body())


async def _put_chunk(request: Request) -> bytes:
    fragment, number, digest, index = request.parts
    parcel = request.desk.reducer.find_parcel(request.peer, int(fragment), int(number), digest)
    await _fill_chunk(request, parcel, int(index))
    if parcel.is_whole:
        await request.desk.reducer.deliver_parcel(request.peer, int(fragment), parcel)
    return b"{}"


async def _hold(request: Request) -> bytes:
    return request.desk.take_holding(request.peer, await request.read_body())


async def _put_holding(request: Request) -> bytes:
    digest, index = request.parts
    search = request.desk.search
    parcel = search.find_parcel(request.peer, digest)
    await _fill_chunk(request, parcel, int(index), search.note_progress)
    if parcel.is_whole:
        await request.desk.end_search(parcel)
    return b"{}"


async def _fill_chunk(
    request: Request, parcel: Parcel, index: int, note_piece: Callable[[], None] = lambda: None
) -> None:
    assert request.caller is not None
    if request.caller.length != parcel.measure_chunk(index) or request.caller.length == 0:
        raise AuthError(422, "length", "a chunk of another length than it must have")
    data = await request.read_body(note_piece)
    parcel.put_chunk(index, data)


async def _outcome(request: Request) -> bytes:
    fragment, number, base, index = request.parts
    desk = request.desk
    desk.check_round(int(fragment), int(number), base)
    await request.wait_until(lambda: desk.is_closed(int(fragment), int(number)))
    return await desk.read_outcome(RoundKey(desk.plan.run, int(number), int(fragment), base), int(index))


async def _state(request: Request) -> bytes:
    await request.wait_until(lambda: request.desk.may_fetch(request.peer))
    return await request.desk.offer_state(request.peer)


async def _state_chunk(request: Request) -> bytes:
    digest, index = request.parts
    return await request.desk.read_state(digest, int(index))


def _route(method: str, path: str, handle: Handler, kind: str = "signed", max_body_bytes: int = 0) -> Route:
    return Route(method, re.compile(PREFIX + path), handle, kind, max_body_bytes)


ROUTES = (
    _route("GET", "plan", _show_plan, "open"),
    _route("GET", "status", _show_status, "open"),
    _route("GET", f"challenges/{_HEX}", _challenge, "open"),
    _route("POST", "join", _join, "join"),
    _route("POST", "leave", _leave),
    _route("GET", f"watch/{_NUM}", _watch),
    _route("POST", "offers", _offer, max_body_bytes=MAX_BODY_BYTES),
    _route("PUT", f"updates/{_NUM}/{_NUM}/{_HEX}/{_NUM}", _put_chunk, max_body_bytes=CHUNK_BYTES),
    _route("POST", "holdings", _hold, "search", MAX_BODY_BYTES),
    _route("PUT", f"holdings/{_HEX}/{_NUM}", _put_holding, "search", CHUNK_BYTES),
    _route("GET", f"outcomes/{_NUM}/{_NUM}/{_HEX}/{_NUM}", _outcome),
    _route("GET", "state", _state),
    _route("GET", f"states/{_HEX}/{_NUM}", _state_chunk),
)


class ReducerApp:
    """Answers for one desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called for each request."""
        status, headers = 200, [(b"content-type", b"application/octet-stream")]
        try:
            body = await self._answer(scope, receive)
        except TalkError as error:
            status, body = 422, AuthError(422, "invalid", str(error)).to_bytes()
        except AuthError as refusal:
            self._desk.refusals.add(label=refusal.code)
            refusal.server_time_ms = self._desk.clock_ms()
            status, body = refusal.status, refusal.to_bytes()
            if refusal.retry_after_s is not None:
                headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope, receive: Receive) -> bytes:
        route, parts = _find_route(scope)
        wait_s = _read_wait(scope["query_string"])
        caller = self._check_caller(route, scope)
        return await route.handle(Request(self._desk, scope, receive, parts, caller, wait_s))

    def _check_caller(self, route: Route, scope: Scope) -> Caller | None:
        desk, address = self._desk, scope["client"][0]
        if route.kind == "open":
            desk.check_stranger(address)
            return None
        query = scope["query_string"]
        target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("ascii")
        head = scope["method"], target, scope["headers"], address, desk.clock_ms()
        if route.kind == "join":
            return desk.check_join(*head)
        caller = desk.check_caller(*head, max_body_bytes=route.max_body_bytes)
        if (route.kind == "search") != desk.is_searching:
            raise desk.refuse_phase()
        return caller


def _find_route(scope: Scope) -> tuple[Route, tuple[str, ...]]:
    path = scope["raw_path"].decode("ascii")
    for route in ROUTES:
        match = route.path.fullmatch(path)
        if match is not None and route.method == scope["method"]:
            return route, match.groups()
    raise AuthError(404, "not_found", "there is nothing here")


def _read_wait(query: bytes) -> int:
    if not query:
        return 0
    match = _WAIT.fullmatch(query)
    if match is None:
        raise AuthError(400, "malformed", f"a query here is wait= and up to {MAX_WAIT_S} seconds")
    return int(match[1])
