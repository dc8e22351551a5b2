"""How a request becomes a call: who signs is known before a byte of the body is read, the body is checked as it comes.

    head -> Authenticator -> body, piece by piece -> message (strict) -> endpoint -> answer

An endpoint is a plain function whose arguments say what it needs: `desk`, `caller`, `chunks` (the body as it arrives),
one message (the body, whole) and parts of the path. FastAPI reads the same signature for the OpenAPI document; it does
not run it, for it would read the body first.

Invariants:
- on a `SignedRoute` and a `JoinRoute` no endpoint runs, and no byte of a body is read, for who is not who it says, or
  is banned; on an `AccusedRoute` the same for who is not who it says;
- a body is never longer in memory than its route allows, and never used before its digest was found right;
- parts of the path are matched by the types of the endpoint's arguments, and a path has one spelling: no `%`.
"""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Annotated, Any, get_type_hints

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import Response

from shoal.shardcast.http import HttpError
from shoal.swarm.api.desk import Desk
from shoal.swarm.api.refuse import FAILURES, JSON, build_refusal, describe_invalid, explain_failure
from shoal.swarm.digest import BodyChecker
from shoal.swarm.refusal import AuthError
from shoal.swarm.server_auth import Caller

MAX_BODY_BYTES = 64 * 1024


def _never_called() -> Any:
    raise AssertionError("endpoints are called by their route")


DeskArg = Annotated[Desk, Depends(_never_called)]
CallerArg = Annotated[Caller, Depends(_never_called)]
ChunksArg = Annotated[AsyncIterator[bytes], Depends(_never_called)]


class OpenRoute(APIRoute):
    """A route for everybody: strangers, and those who are banned. Rates are by address."""

    is_streaming = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """What FastAPI calls for a request."""
        plan = _Plan(self.endpoint, self.path)

        async def handle(request: Request) -> Response:
            desk: Desk = request.app.state.desk
            try:
                return await self._answer(desk, request, plan)
            except FAILURES as error:
                refusal = explain_failure(error)
                desk.refusals.add(label=refusal.code)
                return build_refusal(refusal, desk.clock_ms)

        return handle

    async def _answer(self, desk: Desk, request: Request, plan: "_Plan") -> Response:
        if b"%" in request.scope["raw_path"]:
            raise _refuse_path()
        values = plan.read_path(request.path_params)
        caller = self.check_caller(desk, request)
        if self.is_streaming:
            assert caller is not None, "only who signed may stream"
            chunks = _read_chunks(request, caller.open_body())
            return await plan.call(desk, caller, {**values, "chunks": chunks})
        body = await _read_body(request, caller)
        values = plan.read_message(values, body)
        if not plan.is_async:
            return await plan.call(desk, caller, values)
        async with asyncio.timeout(desk.limits.decide_seconds + plan.read_wait(values)):
            return await plan.call(desk, caller, values)

    def check_caller(self, desk: Desk, request: Request) -> Caller | None:
        """Who calls, if that matters here; `AuthError` for who may not."""
        address = request.scope["client"][0]
        if request.method == "GET":
            desk.check_reader(address)
        else:
            desk.check_stranger(address)
        return None


class CommandRoute(OpenRoute):
    """The route for the operator, whom no number of strangers keeps from being heard."""

    def check_caller(self, desk: Desk, request: Request) -> Caller | None:
        """As `OpenRoute.check_caller`."""
        desk.check_operator(request.scope["client"][0])
        return None


class SignedRoute(OpenRoute):
    """A route for nodes of the run."""

    def check_caller(self, desk: Desk, request: Request) -> Caller | None:
        """As `OpenRoute.check_caller`."""
        limit = desk.coordinator.params.blob_max_bytes if self.is_streaming else MAX_BODY_BYTES
        return desk.authenticator.check_head(*_read_head(request), desk.clock_ms(), max_body_bytes=limit)


class AccusedRoute(OpenRoute):
    """A route for owners and their nodes, those that are banned too."""

    def check_caller(self, desk: Desk, request: Request) -> Caller | None:
        """As `OpenRoute.check_caller`."""
        return desk.authenticator.check_accused(*_read_head(request), desk.clock_ms())


class StreamRoute(SignedRoute):
    """A route for nodes of the run whose body is a blob."""

    is_streaming = True


class JoinRoute(OpenRoute):
    """The route for nodes that want to be of the run."""

    def check_caller(self, desk: Desk, request: Request) -> Caller | None:
        """As `OpenRoute.check_caller`."""
        return desk.authenticator.check_join(*_read_head(request), desk.clock_ms())


class _Plan:
    """What an endpoint's arguments ask for, read once."""

    def __init__(self, endpoint: Callable[..., Any], path: str) -> None:
        self._endpoint = endpoint
        self.is_async = inspect.iscoroutinefunction(endpoint)
        hints = get_type_hints(endpoint, include_extras=True)  # the patterns and bounds are in the extras
        names = inspect.signature(endpoint).parameters
        self._path = {name: TypeAdapter(hints[name]) for name in names if f"{{{name}}}" in path}
        models = [name for name in names if isinstance(hints[name], type) and issubclass(hints[name], BaseModel)]
        assert len(models) <= 1, "a request has one body"
        self._message = models[0] if models else None
        self._model: type[BaseModel] | None = hints[models[0]] if models else None
        self._given = [name for name in ("desk", "caller") if name in names]

    def read_path(self, given: dict[str, str]) -> dict[str, Any]:
        """The parts of the path; what does not fit is not there."""
        try:
            values = {name: adapter.validate_strings(given[name]) for name, adapter in self._path.items()}
        except ValidationError:
            raise _refuse_path() from None
        if any(str(value) != given[name] for name, value in values.items()):
            raise _refuse_path()  # a number in another spelling: 01, +1, 1_0
        return values

    def read_message(self, values: dict[str, Any], body: bytes) -> dict[str, Any]:
        """The same with the message that the body holds."""
        if self._model is None:
            if body:
                raise AuthError(422, "invalid", "a request here has no body")
            return values
        assert self._message is not None
        try:
            return {**values, self._message: self._model.model_validate_json(body)}
        except ValidationError as error:
            raise AuthError(422, "invalid", describe_invalid(error)) from None

    def read_wait(self, values: dict[str, Any]) -> int:
        """How long the message lets its answer be kept back."""
        wait_s = getattr(values.get(self._message or ""), "wait_s", 0)
        assert isinstance(wait_s, int)
        return wait_s

    async def call(self, desk: Desk, caller: Caller | None, values: dict[str, Any]) -> Response:
        """Run the endpoint."""
        for name in self._given:
            values[name] = desk if name == "desk" else caller
        answer = self._endpoint(**values)
        if self.is_async:
            answer = await answer
        if isinstance(answer, Response):
            return answer
        assert isinstance(answer, BaseModel), "an endpoint answers with a message"
        return Response(answer.model_dump_json(), media_type=JSON)


def _read_head(request: Request) -> tuple[str, str, Any, str]:
    """Method, target, headers and address as the wire had them, which is what was signed."""
    scope = request.scope
    query = scope["query_string"]
    target = scope["raw_path"] + (b"?" + query if query else b"")
    return scope["method"], target.decode("ascii"), scope["headers"], scope["client"][0]


def _refuse_path() -> AuthError:
    return AuthError(404, "not_found", "there is nothing here")


async def _read_body(request: Request, caller: Caller | None) -> bytes:
    checker = None if caller is None else caller.open_body()
    pieces, size = [], 0
    async for piece in _read_pieces(request):
        size += len(piece)
        if checker is not None:
            checker.feed(piece)
        elif size > MAX_BODY_BYTES:
            raise AuthError(413, "too_large", f"a body of more than the {MAX_BODY_BYTES} bytes allowed here")
        pieces.append(piece)
    if checker is not None:
        checker.finish()
    return b"".join(pieces)


async def _read_chunks(request: Request, checker: BodyChecker) -> AsyncIterator[bytes]:
    """What was signed: it ends with an error if it is anything else, and must not be used then."""
    async for piece in _read_pieces(request):
        checker.feed(piece)
        yield piece
    checker.finish()


async def _read_pieces(request: Request) -> AsyncIterator[bytes]:
    is_over = False
    while not is_over:
        message = await request.receive()
        if message["type"] != "http.request":
            raise HttpError("closed in the middle of a body")
        is_over = not message.get("more_body", False)
        if piece := message.get("body", b""):
            yield piece
