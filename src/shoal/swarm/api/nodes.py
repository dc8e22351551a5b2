"""Routes of workers: to join and leave, heartbeats, leases, submissions. See `Coordinator` for what they do."""

from typing import Any

from fastapi import APIRouter

from shoal.swarm.api.answers import Done
from shoal.swarm.api.desk import Desk
from shoal.swarm.api.refuse import Refusal
from shoal.swarm.api.signed import CallerArg, ChunksArg, DeskArg, JoinRoute, SignedRoute, StreamRoute
from shoal.swarm.blobs.direct import MAX_URL_S, DirectStore
from shoal.swarm.delegation import Scope
from shoal.swarm.messages import (
    CommitAnswer,
    Heartbeat,
    HeartbeatAnswer,
    JoinRequest,
    LeaseAnswer,
    LeaseId,
    LeaseRequest,
    MemberInfo,
    ReceiptAnswer,
    ReturnAnswer,
    SignedManifest,
    SubmissionId,
)

REFUSED: dict[int | str, dict[str, Any]] = {"4XX": {"model": Refusal}, "5XX": {"model": Refusal}}

node_routes = APIRouter(prefix="/v1", route_class=SignedRoute, tags=["nodes"], responses=REFUSED)
join_routes = APIRouter(prefix="/v1", route_class=JoinRoute, tags=["nodes"], responses=REFUSED)
upload_routes = APIRouter(prefix="/v1", route_class=StreamRoute, tags=["nodes"], responses=REFUSED)

_BLOB_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}


@node_routes.post("/heartbeat")
def post_heartbeat(desk: DeskArg, caller: CallerArg, message: Heartbeat) -> HeartbeatAnswer:
    """Say that the node lives, and hear what is new."""
    return desk.coordinator.heartbeat(caller.node, message)


@join_routes.post("/join")
async def post_join(desk: DeskArg, caller: CallerArg, message: JoinRequest) -> MemberInfo:
    """Become a node of the run; with a stamp of work in the header Shoal-Work."""
    is_new = desk.coordinator.find_member(caller.node) is None
    info = await desk.coordinator.join(caller.node, message.delegation.encode())
    if is_new:
        desk.note_join()
    return info


@node_routes.post("/leave")
async def post_leave(desk: DeskArg, caller: CallerArg) -> Done:
    """Leave the run for now; leases are as if returned."""
    await desk.coordinator.leave(caller.node)
    return Done()


@node_routes.post("/leases")
async def post_lease(desk: DeskArg, caller: CallerArg, message: LeaseRequest) -> LeaseAnswer:
    """Ask for work."""
    caller.check_scope(Scope.WORK)
    return await desk.lounge.grant_lease(caller.node, message)


@node_routes.post("/leases/{lease}/return")
async def return_lease(desk: DeskArg, caller: CallerArg, lease: LeaseId) -> ReturnAnswer:
    """Give work back before its deadline."""
    return await desk.coordinator.return_lease(caller.node, lease)


@node_routes.post("/submissions")
async def post_submission(desk: DeskArg, caller: CallerArg, message: SignedManifest) -> CommitAnswer:
    """Commit to what will be uploaded."""
    caller.check_scope(Scope.WORK)
    answer = await desk.coordinator.commit_submission(caller.node, message)
    return await _offer_upload(desk, answer, message.manifest.blob)


@upload_routes.put("/submissions/{submission}/blob", openapi_extra=_BLOB_BODY)
async def put_blob(desk: DeskArg, caller: CallerArg, chunks: ChunksArg, submission: SubmissionId) -> ReceiptAnswer:
    """Upload the file of a submission; the answer is its receipt."""
    caller.check_scope(Scope.WORK)
    return await desk.coordinator.put_blob(caller.node, submission, chunks)


@node_routes.post("/submissions/{submission}/receipt")
async def post_receipt(desk: DeskArg, caller: CallerArg, submission: SubmissionId) -> ReceiptAnswer:
    """The receipt of a file that arrived: once more, or for one that went into the store past this server."""
    caller.check_scope(Scope.WORK)
    return await desk.coordinator.receive(caller.node, submission)


async def _offer_upload(desk: Desk, answer: CommitAnswer, blob: str) -> CommitAnswer:
    """The same with a URL for the file, where the store gives such, until the file is late."""
    store = desk.coordinator.blobs
    left_s = (answer.deadline_ms - desk.clock_ms()) // 1000
    if not isinstance(store, DirectStore) or left_s < 1:
        return answer
    url = await store.sign_upload(blob, answer.size, min(left_s, MAX_URL_S))
    return answer.model_copy(update={"upload_url": url})
