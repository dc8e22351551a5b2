"""Bodies of the ledger's events: one frozen class for each kind, checked when an event is read.

Invariants:
- a body has exactly the fields defined here, each of its type; anything else in a ledger is an `EventError`;
- what a node, an owner or the operator signs is a message of `protocol.messages`; the classes here are the
  coordinator's own statements;
- `read_body` parses an event once, however many handlers read it.

Counts and flags are integers: the canonical JSON of a ledger has no booleans, because the tables have none.

Changing breaks: every ledger. Field names are those of the canonical JSON.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from shoal.ledger.event import Event, EventError, EventKind
from shoal.protocol import messages

Flag = Literal[0, 1]


class EventBody(messages.Message):
    """Body of an event that the coordinator writes itself."""

    kind: ClassVar[EventKind]

    def to_body(self) -> dict[str, Any]:
        """The body as it is stored in the ledger."""
        return self.model_dump(mode="json")

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return type(self)(**{**dict(self), **changes})


# The run


class Genesis(EventBody):
    """The first event: run, keys, rules and parameters."""

    kind: ClassVar = EventKind.GENESIS
    run: str
    coordinator: str
    operator: str
    beacon: str
    """tip of the beacon chain"""
    params: dict[str, Any]
    recipe: str
    """hash"""
    rules: int = 1


class CoordinatorUp(EventBody):
    """The coordinator started again."""

    kind: ClassVar = EventKind.COORDINATOR_UP
    shift_ms: int
    """by how much deadlines move"""


class CoordinatorDown(EventBody):
    """The coordinator shuts down."""

    kind: ClassVar = EventKind.COORDINATOR_DOWN


class RunFinish(EventBody):
    """All steps are trained."""

    kind: ClassVar = EventKind.ADMIN
    action: Literal["finish"] = "finish"
    secret: str
    """end of the beacon chain"""


class StepOpen(EventBody):
    """A step starts accepting work."""

    kind: ClassVar = EventKind.STEP_OPEN
    step: int


class BatchCut(EventBody):
    """The batch of a step is fixed."""

    kind: ClassVar = EventKind.BATCH_CUT
    beacon: str
    """of the step; tasks and seeds of its groups follow from it"""
    groups: int
    """how many"""
    hash: str
    step: int


# Members


class NodeJoin(EventBody):
    """A node joined or rejoined."""

    kind: ClassVar = EventKind.NODE_JOIN
    delegation: str
    """the owner's signed document"""
    digest: str
    max_leases: int
    not_after_ms: int
    not_before_ms: int
    owner: str
    scopes: tuple[str, ...]


class NodeDelegate(NodeJoin):
    """A node presented a newer delegation."""

    kind: ClassVar = EventKind.NODE_DELEGATE


class NodeRevoke(EventBody):
    """An owner revoked a delegation."""

    kind: ClassVar = EventKind.NODE_REVOKE
    document: str


class NodeLeave(EventBody):
    """A node left."""

    kind: ClassVar = EventKind.NODE_LEAVE


class NodeStanding(EventBody):
    """An owner's standing changed."""

    kind: ClassVar = EventKind.NODE_STANDING
    reason: str
    standing: messages.Standing


class WatchStart(EventBody):
    """An owner's work differs from everyone else's and is checked in full for a while."""

    kind: ClassVar = EventKind.NODE_WATCH
    because: str
    evidence: int
    groups: int
    line: int
    state: Literal["watched"] = "watched"
    stream: str
    submissions: int


class WatchEnd(EventBody):
    """The watch on an owner ended."""

    kind: ClassVar = EventKind.NODE_WATCH
    because: str
    state: Literal["over"] = "over"


class Ban(EventBody):
    """An owner or node is banned."""

    kind: ClassVar = EventKind.BAN
    reason: str
    target: str


class Unban(Ban):
    """A ban was lifted."""

    kind: ClassVar = EventKind.UNBAN


# Leases and submissions


class LeaseGrant(EventBody):
    """A node was granted groups of a step to produce."""

    kind: ClassVar = EventKind.LEASE_GRANT
    backup: Flag
    count: int
    deadline_ms: int
    duplicate_tokens: int
    fence: int
    file_bytes: int
    """largest file; room for it is reserved"""
    first: int
    fresh: Flag
    node: str
    owner: str
    price: int
    request_key: str
    step: int
    trial: Flag
    """1 if its owner has no record"""
    upload_s: int
    version: int
    """version to use"""


class LeaseExtend(EventBody):
    """A lease that made progress got more time."""

    kind: ClassVar = EventKind.LEASE_EXTEND
    deadline_ms: int
    done: int
    """rollouts that its node reports as finished"""


class LeaseEnd(EventBody):
    """A lease ended, for whatever reason."""

    kind: ClassVar = EventKind.LEASE_END
    because: str
    failures: int
    first: int
    node: str
    owner: str
    progress: int
    reserved: str
    """owner that is offered the groups first; empty for none"""
    spacing_ms: int
    """time between trials after this event"""
    state: str
    step: int
    strikes: int
    """of its owner after this event"""
    width: int
    """lease limit of the node after this event"""


class SubmissionReceipt(EventBody):
    """The file of a submission has arrived."""

    kind: ClassVar = EventKind.SUB_RECEIPT
    blob: str
    first: int
    lease: str
    owner: str
    size: int
    step: int


class PayHold(messages.Message):
    """Pay held back by an outcome."""

    amount: int
    number: int
    """number of the owner's accepted submissions, including this one; 0 for a validator's pay"""
    owner: str


class SubmissionOutcome(EventBody):
    """A submission is decided, with all consequences for its owner. The defaults pay nothing and change no record."""

    kind: ClassVar = EventKind.SUB_OUTCOME
    appeal: Flag = 0
    because: str
    blob: str
    charge_ms: int = 0
    """time without a lease for the validators' CPU time"""
    drift: tuple[tuple[int, ...], ...] = ()
    earned: int = 0
    failures: int
    """consecutive failures of its owner after this event"""
    fills: Flag = 1
    """whether this outcome accepts the groups of its range or offers them again"""
    first: int
    group_ms: int = 0
    """time per group, if it is a measurement: see `rules.leases`"""
    holds: tuple[PayHold, ...] = ()
    node: str
    numbers: tuple[tuple[int, ...], ...] = ()
    owner: str
    paid: int = 0
    progress: int
    purse: str = ""
    """account that received its pay"""
    round: int = 0
    signals: tuple[int, ...] = ()
    spacing_ms: int
    """time between trials after this event"""
    spared: int = 0
    staked: tuple[str, ...] = ()
    state: messages.SubmissionState
    step: int
    strikes: int
    """of its owner after this event"""
    tokens: int = 0
    version: int
    width: int
    """lease limit of the node after this event"""

    @property
    def reason(self) -> str:
        """`because` for people: a check that failed for many rollouts is named once."""
        if self.because == "by 1 verdicts":
            return "by 1 verdict"
        head, failed, checks = self.because.partition("failed: ")
        return f"{head}{failed}{', '.join(dict.fromkeys(checks.split(', ')))}"


class BlobDrop(EventBody):
    """Files were deleted."""

    kind: ClassVar = EventKind.BLOB_DROP
    blobs: tuple[str, ...]


# Validation


class ValidationClaim(EventBody):
    """A validator claimed a submission; includes what it is asked to check."""

    kind: ClassVar = EventKind.VAL_CLAIM
    bounded: Flag
    """1 if the file must be read with little more CPU time than honest files need"""
    check_ppm: int
    deadline_ms: int
    duplicates: tuple[int, ...]
    owner: str
    """of the submission"""
    round: int
    validator: str


class ClaimLapse(EventBody):
    """A validator did not judge a claimed submission in time."""

    kind: ClassVar = EventKind.VAL_LAPSE
    owner: str
    """of the validator"""
    round: int
    validator: str


class SecondOpinion(EventBody):
    """A submission needs another verdict."""

    kind: ClassVar = EventKind.VAL_DOUBT
    because: str
    check_ppm: int
    share: int


class VerdictGrade(messages.Message):
    """Whether one verdict was right, and its owner's scores after this event."""

    bad: int
    good: int
    owner: str
    right: Flag
    validator: str


class VerdictGrades(EventBody):
    """The verdicts on a submission were graded."""

    kind: ClassVar = EventKind.VAL_GRADE
    by: str
    grades: tuple[VerdictGrade, ...]
    side: str


class CanaryGraded(EventBody):
    """How validators judged a canary's submission."""

    kind: ClassVar = EventKind.CANARY_GRADE
    good: Flag
    missed_by: tuple[str, ...]
    owner: str
    state: str
    trained: int


# Credit


class CreditPost(EventBody):
    """Held pay was released."""

    kind: ClassVar = EventKind.CREDIT_POST
    amount: int
    holds: tuple[tuple[int, int], ...]
    """event and line of each hold"""


class BondWaiting(EventBody):
    """A bond is being returned."""

    kind: ClassVar = EventKind.STAKE_UNBOND
    amount: int
    free_ms: int
    request: str
    state: Literal["waiting"] = "waiting"


class BondReleased(EventBody):
    """A bond was returned."""

    kind: ClassVar = EventKind.STAKE_UNBOND
    bond: int
    """event that started the return"""
    state: Literal["released"] = "released"


class Slash(EventBody):
    """Credit of an owner was burned."""

    kind: ClassVar = EventKind.SLASH
    amount: int
    free_ms: int
    owner: str
    pending: Flag
    """whether held pay is burned too"""
    rest: int
    """what remains of a bond that is being returned"""


Parser = Callable[[bytes], messages.Message]
Body = TypeVar("Body", bound=messages.Message)


def _choose_parser(choices: Sequence[type[messages.Message]]) -> Parser:
    """The parser for a kind of event; if the kind has two forms, their `state` field selects one."""
    if len(choices) == 1:
        return choices[0].model_validate_json
    union: Any = choices[0] | choices[1]
    return TypeAdapter[messages.Message](Annotated[union, Field(discriminator="state")]).validate_json


_FORMS: defaultdict[str, list[type[messages.Message]]] = defaultdict(list)
for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, EventBody) and _class is not EventBody:
        _FORMS[_class.kind].append(_class)
_SIGNED: dict[EventKind, type[messages.Message]] = dict.fromkeys(messages.COMMAND_KINDS.values(), messages.Command)
_SIGNED |= {kind: form for form, kind in messages.STATEMENT_KINDS.items()}
PARSERS: dict[str, Parser] = {kind: form.model_validate_json for kind, form in _SIGNED.items()}
PARSERS |= {kind: _choose_parser(choices) for kind, choices in _FORMS.items()}
"""What the body of each kind of event must be."""
_COMMANDED = _SIGNED.keys() & _FORMS.keys()
"""Kinds that the coordinator writes itself or the operator commands."""


def read_body(event: Event, kind: type[Body]) -> Body:
    """The body of an event, which must be of this class; otherwise `EventError`."""
    body = parse_event(event)
    if not isinstance(body, kind):
        raise EventError(f"event {event.seq}: {event.kind} by an actor that may not write it")
    return body


def read_ban(event: Event) -> Ban:
    """The body of a ban or unban, from the coordinator or the operator."""
    body = parse_event(event)
    return Ban(reason=body.reason, target=body.target) if isinstance(body, messages.Command) else read_body(event, Ban)


def stops_run(event: Event) -> bool:
    """Whether an event of kind admin is the operator's command to stop."""
    body = parse_event(event)
    return isinstance(body, messages.Command) and body.action is messages.Action.STOP


def parse_event(event: Event) -> messages.Message:
    """The validated body of an event; parsed only once."""
    return event.keep_parsed(_parse)


def _parse(event: Event) -> messages.Message:
    is_command = event.kind in _COMMANDED and bool(event.signature)
    try:
        return messages.Command.model_validate_json(event.body) if is_command else PARSERS[event.kind](event.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise EventError(
            f"event {event.seq}: invalid body of {event.kind}: {where!a:.80}: {first['msg']:.120}"
        ) from None
