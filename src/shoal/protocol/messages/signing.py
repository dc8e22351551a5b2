"""Detached signatures of messages: the signature covers the message's canonical JSON, as a statement for the ledger."""

from typing import TypeVar

from shoal.identity.keys import Key
from shoal.ledger.event import EventError, EventKind, Statement, encode_body, sign_statement
from shoal.net.api_error import ApiError
from shoal.protocol.messages.base import Message
from shoal.protocol.messages.public import Action, Command, RedeemStatement, UnbondStatement
from shoal.protocol.messages.validation import AppealStatement, VerdictStatement
from shoal.protocol.messages.work import Manifest, VersionStatement

COMMAND_KINDS = {
    Action.BAN: EventKind.BAN,
    Action.UNBAN: EventKind.UNBAN,
    Action.PARAMS: EventKind.PARAMS,
    Action.STOP: EventKind.ADMIN,
    Action.RESUME: EventKind.ADMIN,
    Action.CANARY_SEAL: EventKind.CANARY_SEAL,
    Action.CANARY_REVEAL: EventKind.CANARY_REVEAL,
    Action.REDEEM_DONE: EventKind.REDEEM_DONE,
    Action.REDEEM_FAILED: EventKind.REDEEM_FAILED,
}

STATEMENT_KINDS: dict[type[Message], EventKind] = {
    Manifest: EventKind.SUB_COMMIT,
    VerdictStatement: EventKind.VAL_VERDICT,
    VersionStatement: EventKind.VERSION_PUBLISH,
    AppealStatement: EventKind.APPEAL,
    UnbondStatement: EventKind.STAKE_REQUEST,
    RedeemStatement: EventKind.REDEEM_REQUEST,
}

Signable = TypeVar(
    "Signable", Manifest, VerdictStatement, VersionStatement, AppealStatement, RedeemStatement, UnbondStatement, Command
)


def sign_message(key: Key, run: str, message: Signable) -> str:
    """The detached signature of a message, in hex."""
    kind, subject = frame_message(message)
    return sign_statement(key, run, kind, subject, message.model_dump(mode="json")).signature.hex()


def open_message(run: str, actor: str, message: Signable, signature: str) -> Statement:
    """The ledger statement of a message and its signature; `ApiError` if the signature is invalid."""
    kind, subject = frame_message(message)
    try:
        body = encode_body(message.model_dump(mode="json"))
        return Statement(run, actor, kind, subject, body, bytes.fromhex(signature))
    except EventError as error:
        raise ApiError(403, "statement", f"invalid signature: not signed by this key for this run ({error})") from None


def frame_message(message: Signable) -> tuple[EventKind, str]:
    """The kind and the subject of the event that a message becomes."""
    match message:
        case Command():
            return COMMAND_KINDS[message.action], message.target
        case Manifest():
            subject = message.lease
        case VersionStatement():
            subject = f"v{message.version}"
        case VerdictStatement() | AppealStatement():
            subject = message.submission
        case RedeemStatement() | UnbondStatement():
            subject = message.request
    return STATEMENT_KINDS[type(message)], subject
