"""All routes of the coordinator: each handler calls `Coordinator`, or reads public data.

nodes       join, heartbeat, leave; leases and submissions of workers
judges      claims, files and verdicts of validators; batches and versions of trainers
accused     the evidence on their own submissions, for owners and their nodes, including banned ones
public      the state of the run, its files, its ledger with proofs, and signed statements
"""

from collections.abc import AsyncIterator
from functools import partial

from shoal.coordinator.api.context import ApiContext
from shoal.coordinator.blobs.base import MAX_URL_S, BlobReader, DirectReader, DirectStore
from shoal.coordinator.coordinator import Coordinator
from shoal.errors import ConfigError
from shoal.identity.authenticator import Caller
from shoal.identity.delegation import Scope, open_revocation
from shoal.identity.documents import DocumentError, Tag, read_signer
from shoal.identity.routes import BINARY, JSON, Access, Response, RouteRequest, RouteTable
from shoal.ledger.event import EventError
from shoal.ledger.head import InclusionProof, SignedHead
from shoal.ledger.ledger import Ledger
from shoal.ledger.reader import read_event, read_events
from shoal.net.api_error import ApiError
from shoal.net.server import Send
from shoal.protocol import messages
from shoal.protocol.params import dump_params
from shoal.util.metrics import METRICS_TYPE, render_metrics

LINK_S = 600
MAX_LEADERS = 100
MAX_PAGE_BYTES = 1 << 19
"""size of a page of the ledger; its last event may exceed it"""

nodes, judges = RouteTable("/v1", "nodes"), RouteTable("/v1", "judges")
everybody, accused = RouteTable(tag="everybody"), RouteTable("/v1", "accused")
TABLES = (nodes, judges, everybody, accused)


# Nodes and workers


@nodes.post("/heartbeat", Access.MEMBER)
def post_heartbeat(context: ApiContext, caller: Caller, message: messages.Heartbeat) -> messages.HeartbeatAnswer:
    """Report that the node is alive; the answer contains what is new."""
    return context.coordinator.heartbeat(caller.node, message)


@nodes.post("/join", Access.JOIN)
async def post_join(context: ApiContext, caller: Caller, message: messages.JoinRequest) -> messages.MemberInfo:
    """Join the run; needs a proof of work in the header Shoal-Work."""
    return await context.join(caller.node, caller.stamp, message.delegation.encode())


@nodes.post("/leave", Access.MEMBER)
async def post_leave(context: ApiContext, caller: Caller) -> messages.Done:
    """Leave the run for now; its leases are treated as returned."""
    await context.coordinator.leave(caller.node)
    return messages.Done()


@nodes.post("/leases", Access.MEMBER)
async def post_lease(context: ApiContext, caller: Caller, message: messages.LeaseRequest) -> messages.LeaseAnswer:
    """Request work."""
    caller.check_scope(Scope.WORK)
    return await context.long_poll.grant_lease(caller.node, message)


@nodes.post("/leases/{lease}/return", Access.MEMBER)
async def return_lease(context: ApiContext, caller: Caller, lease: messages.LeaseId) -> messages.ReturnAnswer:
    """Return a lease before its deadline."""
    return await context.coordinator.return_lease(caller.node, lease)


@nodes.post("/submissions", Access.MEMBER)
async def post_submission(
    context: ApiContext, caller: Caller, message: messages.SignedManifest
) -> messages.CommitAnswer:
    """Commit to a file before uploading it."""
    caller.check_scope(Scope.WORK)
    answer = await context.coordinator.commit_submission(caller.node, message)
    return await _offer_upload(context, answer, message.manifest.blob, caller.node)


@nodes.put("/submissions/{submission}/blob", Access.MEMBER)
async def put_blob(
    context: ApiContext, caller: Caller, chunks: AsyncIterator[bytes], submission: messages.SubmissionId
) -> messages.ReceiptAnswer:
    """Upload the file of a submission; the answer is its receipt."""
    caller.check_scope(Scope.WORK)
    return await context.coordinator.put_blob(caller.node, submission, chunks)


@nodes.post("/submissions/{submission}/receipt", Access.MEMBER)
async def post_receipt(
    context: ApiContext, caller: Caller, submission: messages.SubmissionId
) -> messages.ReceiptAnswer:
    """The receipt of a file that has arrived: again, or for one that was uploaded directly to the store."""
    caller.check_scope(Scope.WORK)
    return await context.coordinator.receive(caller.node, submission)


# Validators, trainers, and the accused


@judges.post("/claims", Access.MEMBER)
async def post_claim(context: ApiContext, caller: Caller, message: messages.ClaimRequest) -> messages.ClaimAnswer:
    """Claim submissions to judge."""
    caller.check_scope(Scope.VALIDATE)
    return await context.long_poll.claim_jobs(caller.node, message)


@judges.get("/submissions/{submission}/blob", Access.MEMBER, answer=BINARY)
async def get_blob(context: ApiContext, caller: Caller, submission: messages.SubmissionId) -> Response:
    """The file of a submission, for nodes that judge it or train on it."""
    return await _send_blob(await context.coordinator.open_blob(caller.node, submission))


@judges.get("/submissions/{submission}/link", Access.MEMBER)
async def get_link(context: ApiContext, caller: Caller, submission: messages.SubmissionId) -> messages.BlobLink:
    """A URL of the store for the file of a submission, for nodes that judge it or train on it."""
    async with await context.coordinator.open_blob(caller.node, submission) as reader:
        if not isinstance(reader, DirectReader):
            return messages.BlobLink(url="", expires_s=0)
        return messages.BlobLink(url=await reader.sign_download(LINK_S), expires_s=LINK_S)


@judges.post("/verdicts", Access.MEMBER)
async def post_verdict(context: ApiContext, caller: Caller, message: messages.SignedVerdict) -> messages.VerdictAnswer:
    """Report a verdict."""
    caller.check_scope(Scope.VALIDATE)
    return await context.coordinator.post_verdict(caller.node, message)


@judges.post("/batches/{step}", Access.MEMBER)
async def cut_batch(
    context: ApiContext, caller: Caller, step: messages.Number, message: messages.CutRequest
) -> messages.BatchAnswer:
    """Fix the batch of a step."""
    caller.check_scope(Scope.TRAIN)
    return await context.long_poll.cut_batch(caller.node, step, message)


@judges.get("/batches/{step}", Access.MEMBER)
async def get_batch(context: ApiContext, caller: Caller, step: messages.Number) -> messages.BatchAnswer:
    """A batch that was cut."""
    caller.check_scope(Scope.TRAIN)
    return await context.coordinator.get_batch(caller.node, step)


@judges.post("/versions", Access.MEMBER)
async def post_version(context: ApiContext, caller: Caller, message: messages.SignedVersion) -> messages.VersionAnswer:
    """Announce a published version."""
    caller.check_scope(Scope.TRAIN)
    return await context.coordinator.publish_version(caller.node, message)


@accused.get("/submissions/{submission}/evidence", Access.OWNER)
async def get_evidence(
    context: ApiContext, caller: Caller, submission: messages.SubmissionId
) -> messages.EvidenceAnswer:
    """The jobs and verdicts of a decided submission."""
    return await context.coordinator.show_evidence(caller.node, submission)


@accused.get("/submissions/{submission}/file", Access.OWNER, answer=BINARY)
async def get_file(context: ApiContext, caller: Caller, submission: messages.SubmissionId) -> Response:
    """The file of a decided submission, as long as it is kept."""
    return await _send_blob(await context.coordinator.open_evidence(caller.node, submission))


# Public


@everybody.get("/healthz", Access.FREE)
def get_health(context: ApiContext) -> messages.Health:
    """Whether the server is up."""
    return messages.Health(
        run=context.coordinator.run, coordinator=context.coordinator.public, server_time_ms=context.clock_ms()
    )


@everybody.get("/metrics", Access.PUBLIC, answer=METRICS_TYPE)
def get_metrics(context: ApiContext) -> bytes:
    """Metrics for Prometheus."""
    return render_metrics(context.registry)


@everybody.get("/v1/status", Access.PUBLIC, answer=messages.Status)
async def get_status(context: ApiContext) -> Response:
    """Overview of the run, and who waits for whom."""
    return Response(await context.read_status())


@everybody.get("/v1/leaders", Access.PUBLIC)
async def get_leaders(context: ApiContext) -> messages.Leaders:
    """Owners by accepted tokens."""
    return messages.Leaders(leaders=tuple(await context.read(partial(context.coordinator.read_leaders, MAX_LEADERS))))


@everybody.get("/v1/owners/{owner}", Access.PUBLIC)
async def get_account(context: ApiContext, owner: messages.Digest) -> messages.OwnerAccount:
    """The record and the credit of one owner."""
    account = await context.read(partial(context.coordinator.read_account, owner))
    if account is None:
        raise ApiError(404, "not_found", "no node of this owner has joined this run")
    return account


@everybody.get("/v1/keys/{prefix}", Access.PUBLIC)
async def get_key(context: ApiContext, prefix: messages.KeyPrefix) -> messages.KeyAnswer:
    """Owners by the beginning of a key, their own or a node's: standing, nodes, latest rejections."""
    return await context.read(partial(context.coordinator.find_key, prefix))


@everybody.get("/v1/submissions/{submission}/explanation", Access.PUBLIC)
async def get_explanation(context: ApiContext, submission: messages.SubmissionId) -> messages.Explanation:
    """Every check, number, threshold and posting of a submission, as sentences."""
    try:
        return await context.read(partial(_explain, context.coordinator, submission))
    except ConfigError:
        raise ApiError(404, "not_found", "no such submission") from None


@everybody.get("/v1/descriptor", Access.FREE, answer=JSON)
def get_descriptor(context: ApiContext) -> bytes:
    """The signed descriptor of the run."""
    if context.descriptor is None:
        raise ApiError(404, "not_found", "this coordinator was started without a descriptor")
    return context.descriptor


@everybody.get("/v1/challenges/{node}", Access.FREE)
def get_challenge(context: ApiContext, node: messages.Digest) -> messages.ChallengeAnswer:
    """The proof of work that this node must compute to join."""
    return messages.ChallengeAnswer(challenge=context.make_challenge(node))


@everybody.get("/v1/head", Access.FREE)
def get_head(context: ApiContext) -> messages.HeadAnswer:
    """The newest signed head."""
    return messages.HeadAnswer(head=context.coordinator.ledger.head_text)


@everybody.get("/v1/proofs/{old}/{new}", Access.PUBLIC)
async def get_proof(context: ApiContext, old: messages.Number, new: messages.Number) -> messages.ProofAnswer:
    """The proof that the ledger of `new` events begins with that of `old`."""
    try:
        proof = await context.read(partial(context.coordinator.ledger.prove_extension, old, new))
    except EventError:
        raise ApiError(404, "not_found", "no ledgers of these two sizes") from None
    return messages.ProofAnswer(old=old, new=new, proof=tuple(item.hex() for item in proof))


@everybody.get("/v1/events/{seq}", Access.PUBLIC)
async def get_event(context: ApiContext, seq: messages.Number) -> messages.InclusionAnswer:
    """An event, and the proof that it is in the ledger of the newest signed head."""
    return messages.InclusionAnswer(bundle=await context.read(partial(_prove_event, context.coordinator.ledger, seq)))


@everybody.post("/v1/appeals", Access.PUBLIC)
async def post_appeal(
    context: ApiContext, request: RouteRequest, message: messages.SignedAppeal
) -> messages.AppealAnswer:
    """Request a second look at a rejection; signed by the owner."""
    _check_statement(context, request, message.owner, message.appeal, message.signature)
    return await context.coordinator.appeal(message)


@everybody.post("/v1/redeems", Access.PUBLIC)
async def post_redeem(
    context: ApiContext, request: RouteRequest, message: messages.SignedRedeem
) -> messages.RedeemAnswer:
    """Request a payout of credit; signed by the owner."""
    _check_statement(context, request, message.owner, message.redeem, message.signature)
    return await context.coordinator.redeem(message)


@everybody.post("/v1/unbonds", Access.PUBLIC)
async def post_unbond(
    context: ApiContext, request: RouteRequest, message: messages.SignedUnbond
) -> messages.UnbondAnswer:
    """Request the bond back; signed by the owner."""
    _check_statement(context, request, message.owner, message.unbond, message.signature)
    return await context.coordinator.unbond(message)


@everybody.post("/v1/revocations", Access.PUBLIC)
async def post_revocation(context: ApiContext, request: RouteRequest, message: messages.RevokeRequest) -> messages.Done:
    """Revoke a node's delegation; signed by the owner."""
    document = message.revocation.encode()
    try:
        owner = read_signer(Tag.REVOCATION, document)
        context.check_statement(request.address, owner, partial(open_revocation, document))
    except DocumentError as error:
        raise ApiError(400, "revocation", f"invalid revocation: {error}") from None
    await context.coordinator.revoke(message.revocation.encode())
    return messages.Done()


@everybody.post("/v1/commands", Access.OPERATOR)
async def post_command(context: ApiContext, message: messages.SignedCommand) -> messages.CommandAnswer:
    """Execute an operator's command; signed by the operator."""
    return await context.coordinator.command(message)


@everybody.get("/v1/params", Access.FREE)
def get_params(context: ApiContext) -> messages.ParamsAnswer:
    """The run's current parameters."""
    return messages.ParamsAnswer(params=dump_params(context.coordinator.params))


@everybody.get("/v1/recipe", Access.PUBLIC, answer=JSON)
def get_recipe(context: ApiContext) -> bytes:
    """How the run's rollouts are generated; its hash is in the descriptor."""
    return _require(context.run_files.recipe)


@everybody.get("/v1/calibration", Access.PUBLIC, answer=JSON)
def get_calibration(context: ApiContext) -> bytes:
    """The validator's thresholds, measured on honest rollouts; its hash is in the recipe."""
    return _require(context.run_files.calibration)


@everybody.get("/v1/tasks", Access.PUBLIC, answer=JSON)
def get_tasks(context: ApiContext) -> bytes:
    """The run's task set in canonical form; its hash is in the recipe."""
    return _require(context.run_files.tasks)


@everybody.get("/v1/ledger/{first}", Access.PUBLIC)
async def get_page(context: ApiContext, first: messages.Number) -> messages.PageAnswer:
    """Events starting at number `first`, up to the newest signed head."""
    return messages.PageAnswer(events=tuple(await context.read(partial(_read_page, context.coordinator.ledger, first))))


def _check_statement(
    context: ApiContext, request: RouteRequest, owner: str, message: messages.Signable, signature: str
) -> None:
    """Check the signature of an owner's statement before it is decided."""
    check = partial(messages.open_message, context.coordinator.run, owner, message, signature)
    context.check_statement(request.address, owner, check)


async def _offer_upload(
    context: ApiContext, answer: messages.CommitAnswer, blob: str, node: str
) -> messages.CommitAnswer:
    """Add an upload URL, if the store offers one; it expires with the deadline of the file.

    A URL does not bound what is uploaded, so only owners with accepted work get one."""
    store = context.coordinator.blobs
    left_s = (answer.deadline_ms - context.clock_ms()) // 1000
    if not isinstance(store, DirectStore) or left_s < 1 or not context.coordinator.find_payer(node):
        return answer
    url = await store.sign_upload(blob, answer.size, min(left_s, MAX_URL_S))
    return answer.model_copy(update={"upload_url": url})


class BlobResponse(Response):
    """A blob, sent while it is read; its reader checks it by hash."""

    is_complete = False

    def __init__(self, reader: BlobReader) -> None:
        super().__init__(b"", BINARY)
        self.headers[0] = (b"content-length", b"%d" % reader.size)
        self._reader = reader

    async def send_to(self, send: Send) -> None:
        """Send head and file; if the reader fails, the response ends early, which the client notices."""
        async with self._reader as reader:
            await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
            async for chunk in reader:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_blob(reader: BlobReader) -> BlobResponse:
    try:
        await reader.check_bytes()
    except BaseException:
        await reader.__aexit__(None, None, None)
        raise
    return BlobResponse(reader)


def _explain(coordinator: Coordinator, submission: str) -> messages.Explanation:
    text, findings = coordinator.explain(submission), tuple(coordinator.list_findings(submission))
    return messages.Explanation(text=text, findings=findings, state=coordinator.read_state(submission))


def _prove_event(ledger: Ledger, seq: int) -> str:
    head = _require_head(ledger, seq)
    with ledger.read() as connection:
        event = read_event(connection, seq)
    assert event is not None, "events covered by a signed head exist"
    return InclusionProof(event, head, tuple(ledger.prove_event(seq, head.head.size))).to_bytes().decode()


def _require(data: bytes) -> bytes:
    if not data:
        raise ApiError(404, "not_found", "this run does not have this file")
    return data


def _read_page(ledger: Ledger, first: int) -> list[str]:
    head, page, size = _require_head(ledger, first), [], 0
    with ledger.read() as connection:
        for event in read_events(connection, first, min(first + messages.MAX_PAGE_EVENTS, head.head.size)):
            page.append(InclusionProof(event, head, ()).to_bytes().decode())
            size += len(page[-1])
            if size > MAX_PAGE_BYTES:
                break
    return page


def _require_head(ledger: Ledger, seq: int) -> SignedHead:
    """The newest head, if it covers an event."""
    head = ledger.head
    if head is None or head.head.size <= seq:
        raise ApiError(404, "not_found", "no signed head covers this event yet", retry_after_s=60)
    return head
