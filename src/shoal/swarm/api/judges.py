"""Routes of validators and trainers: claims, files, verdicts, batches, versions."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from shoal.swarm.api.answers import BlobLink
from shoal.swarm.api.nodes import REFUSED
from shoal.swarm.api.signed import CallerArg, DeskArg, SignedRoute
from shoal.swarm.blobs.base import BlobReader
from shoal.swarm.blobs.direct import DirectReader
from shoal.swarm.delegation import Scope
from shoal.swarm.messages import (
    BatchAnswer,
    ClaimAnswer,
    ClaimRequest,
    CutRequest,
    Number,
    SignedVerdict,
    SignedVersion,
    SubmissionId,
    VerdictAnswer,
    VersionAnswer,
)

LINK_S = 600

judge_routes = APIRouter(prefix="/v1", route_class=SignedRoute, tags=["judges"], responses=REFUSED)

BLOB: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}, "description": "The file."}}


@judge_routes.post("/claims")
async def post_claim(desk: DeskArg, caller: CallerArg, message: ClaimRequest) -> ClaimAnswer:
    """Take submissions to judge."""
    caller.check_scope(Scope.VALIDATE)
    return await desk.lounge.claim_jobs(caller.node, message)


@judge_routes.get("/submissions/{submission}/blob", response_class=Response, responses=BLOB)
async def get_blob(desk: DeskArg, caller: CallerArg, submission: SubmissionId) -> Response:
    """The file of a submission, for who judges it or trains on it."""
    return BlobResponse(await desk.coordinator.open_blob(caller.node, submission))


@judge_routes.get("/submissions/{submission}/link")
async def get_link(desk: DeskArg, caller: CallerArg, submission: SubmissionId) -> BlobLink:
    """Where the file of a submission may be fetched past this server, for who judges it or trains on it."""
    async with await desk.coordinator.open_blob(caller.node, submission) as reader:
        if not isinstance(reader, DirectReader):
            return BlobLink(url="", expires_s=0)
        return BlobLink(url=await reader.sign_download(LINK_S), expires_s=LINK_S)


@judge_routes.post("/verdicts")
async def post_verdict(desk: DeskArg, caller: CallerArg, message: SignedVerdict) -> VerdictAnswer:
    """Say what was found."""
    caller.check_scope(Scope.VALIDATE)
    return await desk.coordinator.post_verdict(caller.node, message)


@judge_routes.post("/batches/{step}")
async def cut_batch(desk: DeskArg, caller: CallerArg, step: Number, message: CutRequest) -> BatchAnswer:
    """Fix what a step trains on."""
    caller.check_scope(Scope.TRAIN)
    return await desk.lounge.cut_batch(caller.node, step, message)


@judge_routes.get("/batches/{step}")
async def get_batch(desk: DeskArg, caller: CallerArg, step: Number) -> BatchAnswer:
    """A batch that was cut."""
    caller.check_scope(Scope.TRAIN)
    return await desk.coordinator.get_batch(caller.node, step)


@judge_routes.post("/versions")
async def post_version(desk: DeskArg, caller: CallerArg, message: SignedVersion) -> VersionAnswer:
    """Say that a version is out."""
    caller.check_scope(Scope.TRAIN)
    return await desk.coordinator.publish_version(caller.node, message)


class BlobResponse(Response):
    """A blob, sent as it is read."""

    def __init__(self, reader: BlobReader) -> None:
        super().__init__(media_type="application/octet-stream")
        self.headers["content-length"] = str(reader.size)
        self._reader = reader

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Called as an ASGI app. What the reader's end does to the sending stays an `OSError` or `HttpError`."""
        async with self._reader as reader:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in reader:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
