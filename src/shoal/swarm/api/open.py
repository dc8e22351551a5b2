"""Routes for everybody: the state of the run, proofs of the ledger, and statements that carry their own signature."""

from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from shoal.errors import ConfigError
from shoal.swarm.api.answers import (
    BundleAnswer,
    ChallengeAnswer,
    Done,
    Explanation,
    HeadAnswer,
    Health,
    Leaders,
    ProofAnswer,
)
from shoal.swarm.api.nodes import REFUSED
from shoal.swarm.api.refuse import JSON
from shoal.swarm.api.signed import CommandRoute, DeskArg, OpenRoute
from shoal.swarm.bundle import Bundle
from shoal.swarm.coordinator import Coordinator
from shoal.swarm.event import EventError
from shoal.swarm.ledger import Ledger
from shoal.swarm.messages import (
    AppealAnswer,
    CommandAnswer,
    Digest,
    Number,
    RedeemAnswer,
    RevokeRequest,
    SignedAppeal,
    SignedCommand,
    SignedRedeem,
    SignedUnbond,
    Status,
    SubmissionId,
    UnbondAnswer,
)
from shoal.swarm.refusal import AuthError
from shoal.swarm.rows import read_event

MAX_LEADERS = 100

open_routes = APIRouter(route_class=OpenRoute, tags=["everybody"], responses=REFUSED)
command_routes = APIRouter(route_class=CommandRoute, tags=["everybody"], responses=REFUSED)


@open_routes.get("/healthz")
def get_health(desk: DeskArg) -> Health:
    """Whether the server answers."""
    return Health(run=desk.coordinator.run, coordinator=desk.coordinator.public, server_time_ms=desk.clock_ms())


@open_routes.get("/metrics", response_class=Response)
def get_metrics(desk: DeskArg) -> Response:
    """Numbers for Prometheus."""
    return Response(desk.registry.render_text(), media_type="text/plain; version=0.0.4")


@open_routes.get("/v1/status", response_model=Status)
async def get_status(desk: DeskArg) -> Response:
    """The run at a glance, and who waits for whom."""
    return Response(await desk.read_status(), media_type=JSON)


@open_routes.get("/v1/leaders")
async def get_leaders(desk: DeskArg) -> Leaders:
    """Owners by accepted tokens."""
    return Leaders(leaders=tuple(await desk.read(partial(desk.coordinator.read_leaders, MAX_LEADERS))))


@open_routes.get("/v1/submissions/{submission}/explanation")
async def get_explanation(desk: DeskArg, submission: SubmissionId) -> Explanation:
    """Every check, number, threshold and posting of a submission, in words."""
    try:
        return await desk.read(partial(_explain, desk.coordinator, submission))
    except ConfigError:
        raise AuthError(404, "not_found", "there is no such submission") from None


@open_routes.get("/v1/descriptor", response_class=Response)
def get_descriptor(desk: DeskArg) -> Response:
    """The signed descriptor of the run."""
    if desk.descriptor is None:
        raise AuthError(404, "not_found", "this coordinator was started without a descriptor")
    return Response(desk.descriptor, media_type=JSON)


@open_routes.get("/v1/challenges/{node}")
def get_challenge(desk: DeskArg, node: Digest) -> ChallengeAnswer:
    """The work that this node must do to join."""
    return ChallengeAnswer(challenge=desk.make_challenge(node))


@open_routes.get("/v1/head")
def get_head(desk: DeskArg) -> HeadAnswer:
    """The newest signed head."""
    head = desk.coordinator.ledger.head
    return HeadAnswer(head=None if head is None else head.to_bytes().decode())


@open_routes.get("/v1/proofs/{old}/{new}")
async def get_proof(desk: DeskArg, old: Number, new: Number) -> ProofAnswer:
    """The proof that the ledger of `new` events begins with that of `old`."""
    try:
        proof = await desk.read(partial(desk.coordinator.ledger.prove_extension, old, new))
    except EventError:
        raise AuthError(404, "not_found", "there are no such ledgers, one after the other") from None
    return ProofAnswer(old=old, new=new, proof=tuple(item.hex() for item in proof))


@open_routes.get("/v1/events/{seq}")
async def get_event(desk: DeskArg, seq: Number) -> BundleAnswer:
    """An event, and the proof that it is in the ledger that was signed last."""
    return BundleAnswer(bundle=await desk.read(partial(_prove_event, desk.coordinator.ledger, seq)))


@open_routes.post("/v1/appeals")
async def post_appeal(desk: DeskArg, message: SignedAppeal) -> AppealAnswer:
    """Ask for a second look at a rejection; signed by the owner."""
    return await desk.coordinator.appeal(message)


@open_routes.post("/v1/redeems")
async def post_redeem(desk: DeskArg, message: SignedRedeem) -> RedeemAnswer:
    """Ask for credit to be paid out; signed by the owner."""
    return await desk.coordinator.redeem(message)


@open_routes.post("/v1/unbonds")
async def post_unbond(desk: DeskArg, message: SignedUnbond) -> UnbondAnswer:
    """Ask for the bond back; signed by the owner."""
    return await desk.coordinator.unbond(message)


@open_routes.post("/v1/revocations")
async def post_revocation(desk: DeskArg, message: RevokeRequest) -> Done:
    """Take back what was delegated to a node; signed by the owner."""
    await desk.coordinator.revoke(message.revocation.encode())
    return Done()


@command_routes.post("/v1/commands")
async def post_command(desk: DeskArg, message: SignedCommand) -> CommandAnswer:
    """Command the coordinator; signed by the operator."""
    return await desk.coordinator.command(message)


def _explain(coordinator: Coordinator, submission: str) -> Explanation:
    return Explanation(text=coordinator.explain(submission), state=coordinator.read_state(submission))


def _prove_event(ledger: Ledger, seq: int) -> str:
    head = ledger.head
    if head is None or head.head.size <= seq:
        raise AuthError(404, "not_found", "no signed head covers this event yet", retry_after_s=60)
    with ledger.read() as connection:
        event = read_event(connection, seq)
    assert event is not None, "a signed head covers events that are there"
    return Bundle(event, head, tuple(ledger.prove_event(seq, head.head.size))).to_bytes().decode()
