"""Routes of the accused: by what their own submissions were judged, for owners and their nodes, also banned ones."""

from fastapi import APIRouter
from starlette.responses import Response

from shoal.swarm.api.judges import BLOB, BlobResponse
from shoal.swarm.api.nodes import REFUSED
from shoal.swarm.api.signed import AccusedRoute, CallerArg, DeskArg
from shoal.swarm.messages import EvidenceAnswer, SubmissionId

accused_routes = APIRouter(prefix="/v1", route_class=AccusedRoute, tags=["accused"], responses=REFUSED)


@accused_routes.get("/submissions/{submission}/evidence")
async def get_evidence(desk: DeskArg, caller: CallerArg, submission: SubmissionId) -> EvidenceAnswer:
    """The jobs and verdicts of a submission that is decided."""
    return await desk.coordinator.show_evidence(caller.node, submission)


@accused_routes.get("/submissions/{submission}/file", response_class=Response, responses=BLOB)
async def get_file(desk: DeskArg, caller: CallerArg, submission: SubmissionId) -> Response:
    """The file of a submission that is decided, as long as it is kept."""
    return BlobResponse(await desk.coordinator.open_evidence(caller.node, submission))
