"""The control plane's app: all routes, one form of refusal, and the OpenAPI document at /v1/openapi.json.

A path without parts that vary is looked up and answered at once: FastAPI's own way there (its middleware, trying route
after route) costs as much as checking a signature, and a coordinator does little else than answer heartbeats.
"""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal import __version__
from shoal.swarm.api.accused import accused_routes
from shoal.swarm.api.audit import audit_routes
from shoal.swarm.api.desk import Desk
from shoal.swarm.api.judges import judge_routes
from shoal.swarm.api.nodes import join_routes, node_routes, upload_routes
from shoal.swarm.api.open import command_routes, open_routes
from shoal.swarm.api.refuse import build_refusal, explain_failure

ROUTERS = (
    node_routes,
    judge_routes,
    upload_routes,
    join_routes,
    open_routes,
    command_routes,
    audit_routes,
    accused_routes,
)


class Api(FastAPI):
    """FastAPI, but for the requests that `shortcuts` has an answer to."""

    shortcuts: dict[tuple[str, bytes], ASGIApp]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called for each request."""
        shortcut = self.shortcuts.get((scope.get("method", ""), scope.get("raw_path", b"")))
        if shortcut is None:
            await super().__call__(scope, receive, send)
            return
        scope["app"] = self
        await shortcut(scope, receive, send)


def build_app(desk: Desk) -> Api:
    """The app that answers for a desk."""
    app = Api(
        title="shoal coordinator",
        version=__version__,
        openapi_url="/v1/openapi.json",
        docs_url=None,  # pages that would load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        # What is measured is in /metrics; nothing of a request goes anywhere else, whatever the environment says.
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
    )
    app.state.desk = desk
    for router in ROUTERS:
        app.include_router(router)
    app.shortcuts = {key: app_of for router in ROUTERS for key, app_of in _list_shortcuts(router)}
    app.add_exception_handler(HTTPException, _refuse_request)
    app.add_exception_handler(Exception, _refuse_request)
    return app


def _list_shortcuts(router: APIRouter) -> list[tuple[tuple[str, bytes], ASGIApp]]:
    """Method, path and app of each route whose path is always the same."""
    fixed = [route for route in router.routes if isinstance(route, APIRoute) and "{" not in route.path]
    return [((method, route.path.encode()), _wrap_route(route)) for route in fixed for method in route.methods or ()]


def _wrap_route(route: APIRoute) -> ASGIApp:
    handle: Callable[[Request], Awaitable[Response]] = route.get_route_handler()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await handle(Request(scope, receive, send))
        await response(scope, receive, send)

    return ServerErrorMiddleware(answer, handler=_refuse_request)


async def _refuse_request(request: Request, error: Exception) -> Response:
    """What no route answered, and bugs, which the server writes down when they are raised again after this."""
    desk: Desk = request.app.state.desk
    refusal = explain_failure(error)
    desk.refusals.add(label=refusal.code)
    return build_refusal(refusal, desk.clock_ms)
