"""Error response of the API: an HTTP status, a code for programs and one sentence for people.

An honest mistake (wrong clock, wrong run, expired delegation) is explained in full. A forger only learns that the
signature is invalid. The text never repeats what the caller sent.
"""

from shoal.util.canonical import CanonicalError, decode_canonical, encode_canonical

MAX_REFUSAL_BYTES = 4096


class ApiError(Exception):
    """A refused request: status, code and reason."""

    def __init__(
        self, status: int, code: str, text: str, *, server_time_ms: int | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.server_time_ms = server_time_ms
        """set if the caller's clock was the mistake (code `clock`), and in every refusal of the API"""
        self.retry_after_s = retry_after_s
        """set if the same call may succeed later; also sent as the header `Retry-After`"""

    def to_bytes(self) -> bytes:
        """Encode the response body."""
        names = ("code", "text", "server_time_ms", "retry_after_s")
        return encode_canonical({name: getattr(self, name) for name in names if getattr(self, name) is not None})

    @classmethod
    def from_bytes(cls, status: int, data: bytes) -> "ApiError | None":
        """Parse the refusal in a response. None for any other response, such as the error page of a proxy."""
        try:
            body = decode_canonical(data, max_bytes=MAX_REFUSAL_BYTES)
        except CanonicalError:
            return None
        if not isinstance(body, dict):
            return None
        code, text = body.get("code"), body.get("text")
        if not isinstance(code, str) or not isinstance(text, str):
            return None
        return cls(
            status,
            code,
            text,
            server_time_ms=_take_count(body.get("server_time_ms")),
            retry_after_s=_take_count(body.get("retry_after_s")),
        )


BANNED = "banned"


def refuse_banned(seq: int, reason: str) -> ApiError:
    """Build the refusal for a caller that an event of the ledger has banned."""
    return ApiError(403, BANNED, f"this node or its owner is banned from this run by event {seq}: {reason}")


def _take_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
