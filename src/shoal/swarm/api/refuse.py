"""Every way in which a request fails, as one kind of answer: {code, text, server_time_ms, retry_after_s?}.

Nothing of what the caller sent is repeated, and nothing of our own is shown but the sentence: a bug is "a bug", and
its traceback goes to the server's log.
"""

from collections.abc import Callable

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shoal.shardcast.http import HttpError
from shoal.swarm.blobs.base import BlobError, FullError, MissingBlobError, WrongBlobError
from shoal.swarm.messages import LongText, Message, Number, ShortText
from shoal.swarm.refusal import AuthError
from shoal.swarm.writer import WriterBusyError, WriterStoppedError

JSON = "application/json"
FULL_RETRY_S = 30
BUSY_RETRY_S = 2


class Refusal(Message):
    """An answer that is no."""

    code: ShortText
    """for programs"""
    text: LongText
    """for people"""
    server_time_ms: Number
    retry_after_s: Number | None = None
    """present where the same call may succeed later"""


_HTTP_CODES = {404: "not_found", 405: "method"}
_HTTP_TEXTS = {404: "there is nothing here", 405: "this cannot be done here"}


def explain_failure(error: Exception) -> AuthError:
    """What a caller is told of a failure."""
    match error:
        case AuthError():
            return error
        case BlobError():
            return _explain_blob(error)
        case WriterBusyError() | TimeoutError():
            text = "the ledger is busy; ask again, it will be answered once"
            return AuthError(503, "busy", text, retry_after_s=BUSY_RETRY_S)
        case WriterStoppedError():
            text = "the ledger takes nothing now; ask again when the coordinator is back"
            return AuthError(503, "stopped", text, retry_after_s=FULL_RETRY_S)
        case HttpError():
            return AuthError(error.status, "http", "the request did not arrive whole and in time")
        case HTTPException():
            code = _HTTP_CODES.get(error.status_code, "http")
            return AuthError(error.status_code, code, _HTTP_TEXTS.get(error.status_code, "not served here"))
    return AuthError(500, "bug", "a mistake of this server; it was written down")


FAILURES: tuple[type[Exception], ...] = (
    AuthError,
    BlobError,
    WriterBusyError,
    WriterStoppedError,
    TimeoutError,
    HttpError,
    HTTPException,
)
"""What is no bug of ours."""


def build_refusal(refusal: AuthError, clock_ms: Callable[[], int]) -> Response:
    """The answer to a request that is refused."""
    refusal.server_time_ms = clock_ms()
    headers = {} if refusal.retry_after_s is None else {"retry-after": str(refusal.retry_after_s)}
    return Response(refusal.to_bytes(), refusal.status, headers, JSON)


def describe_invalid(error: ValidationError) -> str:
    """Where a message is wrong, in the names of our own fields."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place = first["type"], first["loc"]
    if kind == "json_invalid":
        return "the body is not JSON"
    if kind == "extra_forbidden" or "[key]" in place:
        return "the body has a field that is not known here"
    # The keys of a table are the caller's own words; what is longer than a name of ours is left out.
    names = [str(part) for part in place if isinstance(part, int) or part.isidentifier()]
    return f"the body is not right at {'.'.join(names)[:80] or 'its top'}: {_KINDS.get(kind, 'not allowed there')}"


_KINDS = {
    "missing": "a field is missing",
    "string_pattern_mismatch": "not a text of this form",
    "string_too_long": "the text is too long",
    "too_long": "the list is too long",
    "too_short": "the list is too short",
    "less_than_equal": "the number is too large",
    "greater_than_equal": "the number is too small",
}


def _explain_blob(error: BlobError) -> AuthError:
    match error:
        case WrongBlobError():
            return AuthError(400, "blob", str(error))
        case FullError():
            return AuthError(503, "full", str(error), retry_after_s=FULL_RETRY_S)
        case MissingBlobError():
            return AuthError(404, "not_found", str(error))
    return AuthError(503, "blobs", "the store of blobs does not answer", retry_after_s=FULL_RETRY_S)
