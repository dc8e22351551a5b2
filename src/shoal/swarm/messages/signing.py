"""Signatures beside messages: what is signed is the canonical JSON of the message, as a statement for the ledger."""

from typing import TypeVar

from shoal.keys import Key
from shoal.swarm.event import EventError, Kind, Statement, encode_body, sign_statement
from shoal.swarm.messages.credit import RedeemStatement, UnbondStatement
from shoal.swarm.messages.judging import AppealStatement, VerdictStatement
from shoal.swarm.messages.operator import Action, Command
from shoal.swarm.messages.training import VersionStatement
from shoal.swarm.messages.work import Manifest
from shoal.swarm.refusal import AuthError

COMMAND_KINDS = {
    Action.BAN: Kind.BAN,
    Action.UNBAN: Kind.UNBAN,
    Action.PARAMS: Kind.PARAMS,
    Action.STOP: Kind.ADMIN,
    Action.RESUME: Kind.ADMIN,
    Action.CANARY_SEAL: Kind.CANARY_SEAL,
    Action.CANARY_REVEAL: Kind.CANARY_REVEAL,
    Action.REDEEM_DONE: Kind.REDEEM_DONE,
    Action.REDEEM_FAILED: Kind.REDEEM_FAILED,
}

Signable = TypeVar(
    "Signable",
    Manifest,
    VerdictStatement,
    VersionStatement,
    AppealStatement,
    RedeemStatement,
    UnbondStatement,
    Command,
)


def sign_message(key: Key, run: str, message: Signable) -> str:
    """The signature that goes beside a message, in hex."""
    kind, subject = frame_message(message)
    return sign_statement(key, run, kind, subject, message.model_dump(mode="json")).signature.hex()


def open_message(run: str, actor: str, message: Signable, signature: str) -> Statement:
    """The statement for the ledger that a message and its signature make; `AuthError` if it was not signed so."""
    kind, subject = frame_message(message)
    try:
        body = encode_body(message.model_dump(mode="json"))
        return Statement(run, actor, kind, subject, body, bytes.fromhex(signature))
    except EventError as error:
        raise AuthError(403, "statement", f"not a statement that this key signed for this run ({error})") from None


def frame_message(message: Signable) -> tuple[Kind, str]:
    """The kind and the subject of the event that a message becomes."""
    match message:
        case Manifest():
            return Kind.SUB_COMMIT, message.lease
        case VerdictStatement():
            return Kind.VAL_VERDICT, message.submission
        case AppealStatement():
            return Kind.APPEAL, message.submission
        case RedeemStatement():
            return Kind.REDEEM_REQUEST, message.request
        case UnbondStatement():
            return Kind.STAKE_REQUEST, message.request
        case VersionStatement():
            return Kind.VERSION_PUBLISH, f"v{message.version}"
    return COMMAND_KINDS[message.action], message.target
