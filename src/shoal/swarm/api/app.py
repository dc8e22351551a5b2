"""The control plane's app: all routes, one form of refusal, and the OpenAPI document at /v1/openapi.json."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shoal import __version__
from shoal.swarm.api.desk import Desk
from shoal.swarm.api.judges import judge_routes
from shoal.swarm.api.nodes import join_routes, node_routes, upload_routes
from shoal.swarm.api.open import open_routes
from shoal.swarm.api.refuse import build_refusal, explain_failure


def build_app(desk: Desk) -> FastAPI:
    """The app that answers for a desk."""
    app = FastAPI(
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
    # Heartbeats are most of the traffic, and routes are tried in order.
    for router in (node_routes, judge_routes, upload_routes, join_routes, open_routes):
        app.include_router(router)
    app.add_exception_handler(HTTPException, _refuse_request)
    app.add_exception_handler(Exception, _refuse_request)
    return app


async def _refuse_request(request: Request, error: Exception) -> Response:
    """What no route answered, and bugs, which the server writes down when they are raised again after this."""
    desk: Desk = request.app.state.desk
    refusal = explain_failure(error)
    desk.refusals.add(label=refusal.code)
    return build_refusal(refusal, desk.clock_ms)
