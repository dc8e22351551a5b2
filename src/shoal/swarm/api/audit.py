"""Routes for whoever checks a run: its parameters, and its ledger piece by piece."""

from collections.abc import Iterator
from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from shoal.swarm.api.nodes import REFUSED
from shoal.swarm.api.pages import MAX_PAGE_EVENTS, PageAnswer, ParamsAnswer
from shoal.swarm.api.refuse import JSON
from shoal.swarm.api.signed import DeskArg, OpenRoute
from shoal.swarm.bundle import Bundle
from shoal.swarm.ledger import Ledger
from shoal.swarm.messages import Number
from shoal.swarm.params import dump_params
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_events

MAX_PAGE_BYTES = 1 << 19
"""of a page, whose last event may go beyond"""

audit_routes = APIRouter(prefix="/v1", route_class=OpenRoute, tags=["everybody"], responses=REFUSED)


@audit_routes.get("/params")
def get_params(desk: DeskArg) -> ParamsAnswer:
    """The run's parameters as they are now."""
    return ParamsAnswer(params=dump_params(desk.coordinator.params))


@audit_routes.get("/recipe", response_class=Response)
def get_recipe(desk: DeskArg) -> Response:
    """How the run's rollouts are made; its hash is in the descriptor."""
    return _hand_out(desk.papers.recipe)


@audit_routes.get("/calibration", response_class=Response)
def get_calibration(desk: DeskArg) -> Response:
    """How honest rollouts look to a validator; its hash is in the recipe."""
    return _hand_out(desk.papers.calibration)


@audit_routes.get("/tasks", response_class=Response)
def get_tasks(desk: DeskArg) -> Response:
    """The run's task set in its canonical form; its hash is in the recipe."""
    return _hand_out(desk.papers.tasks)


@audit_routes.get("/ledger/{first}")
async def get_page(desk: DeskArg, first: Number) -> PageAnswer:
    """Events from number `first` on, up to the newest signed head."""
    return PageAnswer(events=tuple(await desk.read(partial(_read_page, desk.coordinator.ledger, first))))


def _hand_out(data: bytes) -> Response:
    if not data:
        raise AuthError(404, "not_found", "this run has none")
    return Response(data, media_type=JSON)


def _read_page(ledger: Ledger, first: int) -> list[str]:
    head = ledger.head
    if head is None or head.head.size <= first:
        raise AuthError(404, "not_found", "no signed head covers this event yet", retry_after_s=60)
    page: list[str] = []
    with ledger.read() as connection:
        events = read_events(connection, first, min(first + MAX_PAGE_EVENTS, head.head.size))
        texts: Iterator[str] = (Bundle(event, head, ()).to_bytes().decode() for event in events)
        size = 0
        for text in texts:
            page.append(text)
            size += len(text)
            if size > MAX_PAGE_BYTES:
                break
    return page
