"""Signed HTTP routes: a table of routes with their access rules, and its ASGI app. Used by coordinator and reducer.

    request -> route -> path parameters -> caller (signature) -> body, bounded -> message -> handler -> response

The parameters of a handler declare what it needs: `context` (the service), `caller` (the signer), the body (one
pydantic model, or `body` as bytes, or `chunks` as they arrive), `wait_s` (the query `?wait=`), `request`, and the
parameters of the path. The OpenAPI document is generated from the same signatures.

Invariants:
- no handler runs, and no byte of a body is read, before the caller passed the check of the route's `Access`;
- a body in memory is never longer than `MAX_BODY_BYTES`, and never used before its digest was verified;
- path parameters are validated by their types, and a path has one spelling: no `%`, no `01`;
- a response contains nothing that the caller sent, and of an internal error only one sentence: the traceback goes to
  the server's log;
- every answer to a signed request is signed and bound to it (`signatures`), refusals included; except files, which
  their readers check by hash. There is no limit on it: whoever used it up would keep newcomers from joining.
"""

import asyncio
import hashlib
import inspect
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, get_type_hints

from prometheus_client import CollectorRegistry, Histogram
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.json_schema import models_json_schema

from shoal.identity.authenticator import Authenticator, Caller
from shoal.identity.signatures import ResponseSigner, parse_digest
from shoal.net.api_error import ApiError
from shoal.net.http import HttpError
from shoal.net.server import VERIFIED, Receive, Scope, Send
from shoal.util.metrics import Counter

MAX_BODY_BYTES = 64 * 1024
MAX_STATEMENT_BYTES = 4 * 1024
"""of a body whose sender is not known, except the operator's"""
MAX_WAIT_S = 20
LATENCY_BUCKETS_S = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
JSON, BINARY = "application/json", "application/octet-stream"
OPENAPI_PATH = "/openapi.json"
_PARAMETER = re.compile(r"\{(\w+)\}")
_GIVEN = ("context", "caller", "request", "body", "chunks", "wait_s")
_REFS = "#/components/schemas/{model}"

WaitSeconds = Annotated[int, Field(ge=0, le=MAX_WAIT_S)]
Handler = Callable[..., Any]


class Access(Enum):
    """Who may call a route."""

    FREE = "free"
    """everyone, without limit: the answer is short and in memory, and costs no more than a refusal"""
    PUBLIC = "public"
    """everyone, limited by address"""
    OPERATOR = "operator"
    """everyone, with separate limits: the statement in the body carries the operator's signature"""
    MEMBER = "member"
    """nodes of the run; signed"""
    OWNER = "owner"
    """owners and their nodes, including banned ones; signed"""
    JOIN = "join"
    """any node; signed, with proof of work"""


class ErrorAnswer(BaseModel):
    """The body of every error response."""

    code: str
    """for programs"""
    text: str
    """for people"""
    server_time_ms: int
    retry_after_s: int | None = None
    """present if the same call may succeed later"""


class Response:
    """A response with a complete body."""

    is_complete = True
    """whether `body` is all of it; a response that is sent while it is read cannot be signed"""

    def __init__(
        self, body: bytes, media_type: str = JSON, *, status: int = 200, headers: Sequence[tuple[bytes, bytes]] = ()
    ) -> None:
        self.status, self.body = status, body
        self.headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode()), *headers]

    async def send_to(self, send: Send) -> None:
        """Send head and body."""
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


def build_error(error: ApiError, now_ms: int, media_type: str = JSON) -> Response:
    """The response for an `ApiError`."""
    error.server_time_ms = now_ms
    headers = [] if error.retry_after_s is None else [(b"retry-after", b"%d" % error.retry_after_s)]
    return Response(error.to_bytes(), media_type, status=error.status, headers=headers)


@dataclass(slots=True)
class RouteRequest:
    """What a handler may need besides caller and body."""

    scope: Scope
    receive: Receive

    @property
    def address(self) -> str:
        """The IP address of the peer."""
        return str(self.scope["client"][0])

    @property
    def port(self) -> int:
        """The port of the peer, which identifies its connection; 0 if a proxy hides it."""
        return int(self.scope["client"][1])

    def note_verified(self) -> None:
        """Report to the server that the caller's signature was verified: its connection goes before those of others."""
        if (report := self.scope.get(VERIFIED)) is not None:
            report()

    async def wait_disconnect(self) -> None:
        """Return when the peer has disconnected; only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    def read_target(self) -> str:
        """Path and query as signed."""
        query = self.scope["query_string"]
        target: bytes = self.scope["raw_path"] + (b"?" + query if query else b"")
        return target.decode("ascii")


class RouteContext:
    """State shared by the routes of one service. A service derives its own context from it."""

    authenticator: Authenticator
    responses: ResponseSigner
    registry: CollectorRegistry
    refusals: Counter
    """by code"""
    clock_ms: Callable[[], int]

    @property
    def max_stream_bytes(self) -> int:
        """Largest body that a handler reads as `chunks`."""
        raise NotImplementedError

    def check_address(self, access: Access, method: str, address: str) -> None:
        """Raise if an address calls public routes too often."""
        raise NotImplementedError

    def explain_error(self, error: Exception) -> ApiError | None:
        """The error to report for an exception; None for a bug."""
        if isinstance(error, HttpError):
            return ApiError(error.status, "http", "the request was incomplete or too slow")
        return error if isinstance(error, ApiError) else None

    def check_caller(self, route: "Route", request: RouteRequest) -> Caller | None:
        """The caller; None on public routes. `ApiError` for a caller without permission."""
        scope, check = request.scope, self.authenticator
        if route.access is Access.FREE:
            return None
        head = route.method, request.read_target(), scope["headers"], request.address, self.clock_ms()
        if route.access in (Access.PUBLIC, Access.OPERATOR):
            try:
                self.check_address(route.access, route.method, request.address)
            except ApiError as refusal:
                if route.method != "GET":
                    raise
                try:  # what others send from its address does not keep a node from what it needs: proofs, tasks
                    check.check_head(*head, peer_port=request.port, max_body_bytes=0)
                except ApiError:
                    raise refusal from None
                request.note_verified()
            return None
        if route.access is Access.JOIN:
            return check.check_join(*head, peer_port=request.port)
        if route.access is Access.OWNER:
            return check.check_accused(*head, peer_port=request.port)
        limit = self.max_stream_bytes if "chunks" in route.given else MAX_BODY_BYTES
        return check.check_head(*head, peer_port=request.port, max_body_bytes=limit)

    def note_disconnect(self, caller: Caller) -> None:
        """Note that the connection of a caller broke while its body was read."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table: method, path, access, and what the handler's signature declares."""

    method: str
    path: str
    access: Access
    handler: Handler
    tag: str
    answer: Any
    """a pydantic model, or the media type of another response"""
    is_async: bool
    given: frozenset[str]
    """parameters of the handler that are neither message nor part of the path"""
    path_types: dict[str, TypeAdapter[Any]]
    message: tuple[str, type[BaseModel]] | None
    """parameter and model of the body"""

    @classmethod
    def declare(cls, method: str, path: str, access: Access, handler: Handler, tag: str, answer: Any) -> "Route":
        """Read a handler's signature."""
        hints = get_type_hints(handler, include_extras=True)  # patterns and bounds are in the extras
        answer = answer or hints.pop("return")
        names = list(inspect.signature(handler).parameters)
        in_path = {name: TypeAdapter(hints[name]) for name in _PARAMETER.findall(path)}
        bodies = [(name, hints[name]) for name in names if _is_model(hints[name])]
        given = frozenset(names) - in_path.keys() - {name for name, _ in bodies}
        assert given <= set(_GIVEN) and len(bodies) <= 1, f"{method} {path}: parameters that no request provides"
        is_async = inspect.iscoroutinefunction(handler)
        return cls(method, path, access, handler, tag, answer, is_async, given, in_path, bodies[0] if bodies else None)

    def read_path(self, given: Sequence[str]) -> dict[str, Any]:
        """The parameters of the path, by name."""
        values = {}
        for (name, adapter), text in zip(self.path_types.items(), given, strict=True):
            try:
                values[name] = adapter.validate_strings(text)
            except ValidationError:
                raise refuse_path() from None
            if str(values[name]) != text:
                raise refuse_path()  # a number in a different spelling: 01, +1, 1_0
        return values

    def read_message(self, body: bytes) -> dict[str, Any]:
        """Parse the message in the body; returns it by its parameter."""
        if "body" in self.given:
            return {"body": body}
        if self.message is None:
            if body:
                raise ApiError(422, "invalid", "this route takes no request body")
            return {}
        name, model = self.message
        try:
            return {name: model.model_validate_json(body)}
        except ValidationError as error:
            raise ApiError(422, "invalid", describe_invalid(error)) from None

    def read_wait(self, values: dict[str, Any]) -> int:
        """How long the caller lets the answer wait, according to its query or message."""
        if self.message is not None and "wait_s" in self.message[1].model_fields:
            return int(values[self.message[0]].wait_s)
        return int(values.get("wait_s", 0))


class RouteTable:
    """Routes in order of declaration; `get`, `post` and `put` decorate their handlers."""

    def __init__(self, prefix: str = "", tag: str = "") -> None:
        self._prefix, self._tag = prefix, tag
        self.routes: list[Route] = []

    def get(self, path: str, access: Access, *, answer: Any = None) -> Callable[[Handler], Handler]:
        """Declare a GET handler; `answer` if the return annotation does not describe the body."""
        return self._declare("GET", path, access, answer)

    def post(self, path: str, access: Access, *, answer: Any = None) -> Callable[[Handler], Handler]:
        """Declare a POST handler."""
        return self._declare("POST", path, access, answer)

    def put(self, path: str, access: Access, *, answer: Any = None) -> Callable[[Handler], Handler]:
        """Declare a PUT handler."""
        return self._declare("PUT", path, access, answer)

    def _declare(self, method: str, path: str, access: Access, answer: Any) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.routes.append(Route.declare(method, self._prefix + path, access, handler, self._tag, answer))
            return handler

        return add


class RouteApp:
    """The ASGI app of a table. Every request gets an answer: from its handler, or an `ErrorAnswer`."""

    def __init__(
        self,
        context: RouteContext,
        tables: Iterable[RouteTable],
        *,
        title: str,
        version: str,
        timeout_s: float,
        media_type: str = JSON,
        openapi_paths: Sequence[str] = (OPENAPI_PATH,),
    ) -> None:
        """`timeout_s` is for a handler, plus the wait that the caller allows; `media_type` is for messages."""
        self._context, self._title, self._version = context, title, version
        self._timeout_s, self._media_type = timeout_s, media_type
        self._routes = [route for table in tables for route in table.routes]
        self._openapi = b""
        text = "Time from a request's head to the end of its response, waiting included, by route and class of status."
        self._latency = Histogram(
            "shoal_request_seconds", text, ["route", "status"], registry=context.registry, buckets=LATENCY_BUCKETS_S
        )
        self._latencies: dict[tuple[str, int], Histogram] = {}
        own = RouteTable()
        for path in openapi_paths:
            own.get(path, Access.PUBLIC, answer=JSON)(self._get_openapi)
        self._fixed: dict[bytes, dict[str, Route]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Route]]] = {}
        for route in (*self._routes, *own.routes):
            if route.path_types:
                pattern = re.compile(_PARAMETER.sub("([^/%]+)", route.path))
                self._patterns.setdefault(route.path, (pattern, {}))[1][route.method] = route
            else:
                self._fixed.setdefault(route.path.encode(), {})[route.method] = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called for each request."""
        start_s = time.perf_counter()
        route, bug, request = None, None, RouteRequest(scope, receive)
        try:
            route, values = self._find_route(scope)
            response = await self._answer(route, values, request)
        except Exception as error:  # noqa: BLE001 - a bug is raised again below
            failure = self._context.explain_error(error)
            bug = error if failure is None else None
            response = self._refuse(failure or ApiError(500, "bug", "internal server error; it was logged"))
        self._sign_response(request, response)
        try:
            await response.send_to(send)
        finally:
            self._note_latency(route, response.status, time.perf_counter() - start_s)
        if bug is not None:
            raise bug  # the server logs it

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI document of the table."""
        return build_openapi(self._routes, title=self._title, version=self._version, media_type=self._media_type)

    async def _get_openapi(self) -> bytes:
        self._openapi = self._openapi or json.dumps(self.openapi()).encode()
        return self._openapi

    def _refuse(self, error: ApiError) -> Response:
        self._context.refusals.labels(error.code).inc()
        return build_error(error, self._context.clock_ms(), self._media_type)

    def _sign_response(self, request: RouteRequest, response: Response) -> None:
        is_ascii = request.scope["raw_path"].isascii() and request.scope["query_string"].isascii()
        if response.is_complete and is_ascii:
            head = request.scope["method"], request.read_target(), request.scope["headers"]
            response.headers += self._context.responses.sign_response(*head, response.status, response.body)

    def _note_latency(self, route: Route | None, status: int, seconds: float) -> None:
        # Both label values are ours: the declared path and the class of the status.
        key = "" if route is None else route.path, status // 100
        histogram = self._latencies.get(key)
        if histogram is None:
            histogram = self._latencies[key] = self._latency.labels(key[0], f"{key[1]}xx")
        histogram.observe(seconds)

    def _find_route(self, scope: Scope) -> tuple[Route, dict[str, Any]]:
        raw_path: bytes = scope["raw_path"]
        if not raw_path.isascii() or not scope["query_string"].isascii():
            raise refuse_path()
        given: Sequence[str] = ()
        methods = self._fixed.get(raw_path)
        if methods is None:
            path = raw_path.decode("ascii")
            matches = ((pattern.fullmatch(path), found) for pattern, found in self._patterns.values())
            match, methods = next(((match, found) for match, found in matches if match is not None), (None, {}))
            if match is None:
                raise refuse_path()
            given = match.groups()
        route = methods.get(scope["method"])
        if route is None:
            raise ApiError(405, "method", "method not allowed")
        return route, route.read_path(given) if given else {}

    async def _answer(self, route: Route, values: dict[str, Any], request: RouteRequest) -> Response:
        context, given = self._context, route.given
        if "wait_s" in given:
            values["wait_s"] = _read_wait(request.scope["query_string"])
        caller = context.check_caller(route, request)
        if caller is not None:
            request.note_verified()
        if "chunks" in given:
            assert caller is not None, "only a signed body is read as it arrives"
            values["chunks"] = _read_chunks(context, caller, request)
        else:
            limit = MAX_STATEMENT_BYTES if route.access is Access.PUBLIC else MAX_BODY_BYTES
            values |= route.read_message(await _read_body(context, caller, request, limit))
        shared = {"context": context, "caller": caller, "request": request}
        arguments = values | {name: shared[name] for name in shared if name in given}
        if not route.is_async:
            return self._build_response(route, route.handler(**arguments))
        # The server aborts a body that is too slow.
        timeout_s = None if "chunks" in given else self._timeout_s + route.read_wait(values)
        async with asyncio.timeout(timeout_s):
            return self._build_response(route, await route.handler(**arguments))

    def _build_response(self, route: Route, answer: Any) -> Response:
        if isinstance(answer, BaseModel):
            return Response(answer.model_dump_json().encode(), self._media_type)
        if isinstance(answer, Response):
            return answer
        assert isinstance(answer, bytes) and isinstance(route.answer, str), "a handler returns what its route declares"
        return Response(answer, route.answer)


def refuse_path() -> ApiError:
    """The error for an unknown path."""
    return ApiError(404, "not_found", "not found")


def _is_model(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, BaseModel)


def _read_wait(query: bytes) -> int:
    if not query:
        return 0
    number = query.removeprefix(b"wait=")
    if number == query or not number.isdigit() or len(number) > 2 or int(number) > MAX_WAIT_S:
        raise ApiError(400, "malformed", f"the query must be wait= with at most {MAX_WAIT_S} seconds")
    return int(number)


async def _read_body(context: RouteContext, caller: Caller | None, request: RouteRequest, limit: int) -> bytes:
    if caller is not None:
        return b"".join([piece async for piece in _read_chunks(context, caller, request)])
    pieces, size = [], 0
    async for piece in _read_pieces(request):
        size += len(piece)
        if size > limit:
            raise ApiError(413, "too_large", f"the request body exceeds {limit} bytes")
        pieces.append(piece)
    body = b"".join(pieces)
    claimed = [value for name, value in request.scope["headers"] if name == b"content-digest"]
    if claimed and parse_digest(claimed[0].decode("latin-1")) != hashlib.sha256(body).digest():
        raise ApiError(400, "body", "the body does not match its digest")  # the answer is bound to the digest
    return body


async def _read_chunks(context: RouteContext, caller: Caller, request: RouteRequest) -> AsyncIterator[bytes]:
    """Yield the signed body; raises at the end if it differs, and then nothing of it may be used."""
    checker = caller.open_body()
    try:
        async for piece in _read_pieces(request):
            checker.feed(piece)
            yield piece
    except (HttpError, OSError) as error:
        if not (isinstance(error, HttpError) and error.status == 408):  # a slow peer is still connected
            context.note_disconnect(caller)
        raise
    checker.finish()


async def _read_pieces(request: RouteRequest) -> AsyncIterator[bytes]:
    is_over = False
    while not is_over:
        message = await request.receive()
        if message["type"] != "http.request":
            raise HttpError("connection closed in the middle of a body")
        is_over = not message.get("more_body", False)
        if piece := message.get("body", b""):
            yield piece


def describe_invalid(error: ValidationError) -> str:
    """What is wrong with a message and where, in the names of our own fields."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place = first["type"], first["loc"]
    if kind == "json_invalid":
        return "the body is not JSON"
    if kind == "extra_forbidden" or "[key]" in place:
        return "the body has an unknown field"
    # The keys of a table come from the caller; anything longer than our names is left out.
    names = [str(part) for part in place if isinstance(part, int) or part.isidentifier()]
    return f"invalid body at {'.'.join(names)[:80] or 'top level'}: {_KINDS.get(kind, 'value not allowed')}"


_KINDS = {
    "missing": "a field is missing",
    "string_pattern_mismatch": "the text has the wrong form",
    "string_too_long": "the text is too long",
    "too_long": "the list is too long",
    "too_short": "the list is too short",
    "less_than_equal": "the number is too large",
    "greater_than_equal": "the number is too small",
}


def build_openapi(routes: Sequence[Route], *, title: str, version: str, media_type: str) -> dict[str, Any]:
    """Build the OpenAPI 3.1 document of a table."""
    inputs = {route.message[1] for route in routes if route.message is not None}
    outputs = {route.answer for route in routes if _is_model(route.answer)} | {ErrorAnswer}
    modes: list[Any] = [(model, "validation") for model in inputs] + [(model, "serialization") for model in outputs]
    modes.sort(key=lambda pair: (pair[0].__name__, pair[1]))
    schemas, definitions = models_json_schema(modes, ref_template=_REFS)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _describe_route(route, schemas, media_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {})},
    }


def _describe_route(route: Route, schemas: dict[Any, Any], media_type: str) -> dict[str, Any]:
    error = {"description": "Refused.", "content": {media_type: {"schema": schemas[ErrorAnswer, "serialization"]}}}
    if _is_model(route.answer):
        content = {media_type: {"schema": schemas[route.answer, "serialization"]}}
    else:
        content = {route.answer: {}}
    doc = inspect.getdoc(route.handler) or ""
    found: dict[str, Any] = {
        "tags": [route.tag],
        "summary": doc.partition("\n")[0],
        "operationId": route.handler.__name__,
        "x-access": route.access.value,
        "responses": {"200": {"description": "Answered.", "content": content}, "4XX": error, "5XX": error},
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": adapter.json_schema()}
        for name, adapter in route.path_types.items()
    ]
    if "wait_s" in route.given:
        parameters.append({"name": "wait", "in": "query", "schema": TypeAdapter(WaitSeconds).json_schema()})
    if parameters:
        found["parameters"] = parameters
    if route.message is not None:
        body = {JSON: {"schema": schemas[route.message[1], "validation"]}}
        found["requestBody"] = {"required": True, "content": body}
    elif route.given & {"body", "chunks"}:
        body = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
        found["requestBody"] = {"required": True, "content": body}
    return found
