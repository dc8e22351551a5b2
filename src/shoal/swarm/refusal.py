"""What a caller hears who is not let in: a status, a code for programs and one sentence for people.

An honest mistake (a clock, another run, an ended delegation) is told in full; a forger learns that the signature does
not hold and nothing else. The text never repeats what the caller sent.
"""

from shoal.canonical import CanonicalError, decode_canonical, encode_canonical

MAX_REFUSAL_BYTES = 4096


class AuthError(Exception):
    """A request that is not answered, and why."""

    def __init__(
        self, status: int, code: str, text: str, *, server_time_ms: int | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(text)
        self.status = status
        self.code = code
        self.text = text
        self.server_time_ms = server_time_ms
        """present where the caller's clock was the mistake (code `clock`), and in whatever the API refuses"""
        self.retry_after_s = retry_after_s
        """present where the same call may succeed later; also for the header `Retry-After`"""

    def to_bytes(self) -> bytes:
        """The body of the answer."""
        body: dict[str, int | str] = {"code": self.code, "text": self.text}
        if self.server_time_ms is not None:
            body["server_time_ms"] = self.server_time_ms
        if self.retry_after_s is not None:
            body["retry_after_s"] = self.retry_after_s
        return encode_canonical(body)

    @classmethod
    def from_bytes(cls, status: int, data: bytes) -> "AuthError | None":
        """The refusal that an answer carries; None for an answer of another kind, such as a proxy's page."""
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


def refuse_banned() -> AuthError:
    """What a banned caller hears."""
    return AuthError(403, "banned", "this node or its owner is banned from this run; the ledger says why")


def _take_count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
