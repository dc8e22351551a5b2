"""Signing requests and checking their answers, for any HTTP client, and a limited correction of the clock.

    headers = signer.sign_request("POST", "/v1/heartbeat", body)
    answer = signer.check_answer("POST", "/v1/heartbeat", headers, await send(...)); answer.is_signed
    ... status 401: refusal = ApiError.from_bytes(status, data); signer.correct_clock(refusal) -> sign once more

Invariants:
- every call of `sign_request` draws a new nonce: a retry is a new request, made harmless by its idempotency key;
- the clock is corrected once; only after a successful request (`note_success`) may it be corrected again. Callers use
  only signed refusals, so the time is the server's own. Whoever holds an answer back makes it late by that much at
  most: a client does not wait longer than its deadline.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace

from shoal.identity.keys import Key, check_public
from shoal.identity.signatures import (
    ALGORITHM,
    BARE_COMPONENTS,
    BODY_COMPONENTS,
    LABEL,
    NONCE_BYTES,
    REQUEST_TAG,
    build_base,
    derive_components,
    format_digest,
    format_input,
    format_signature,
    verify_response,
)
from shoal.net.api_error import ApiError
from shoal.net.client import HttpResponse
from shoal.net.http import Headers
from shoal.util.clock import read_clock
from shoal.util.units import check_run


class RequestSigner:
    """Signs one node's requests to one coordinator."""

    def __init__(
        self,
        key: Key,
        run: str,
        audience: str,
        *,
        clock_ms: Callable[[], int] = read_clock,
        draw_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._key = key
        self._run = check_run(run)
        self._audience = check_public(audience)
        self._clock_ms = clock_ms
        self._draw_bytes = draw_bytes
        self._may_correct = True
        self.offset_ms = 0
        """estimated offset of the server's clock from ours"""

    def sign_request(self, method: str, target: str, body: bytes = b"") -> Headers:
        """The headers to send with a request; `target` is path and query as sent."""
        if not body:
            return self._sign_fields(method, target, BARE_COMPONENTS, [])
        return self.sign_stream(method, target, len(body), hashlib.sha256(body).digest())

    def sign_stream(self, method: str, target: str, length: int, digest: bytes) -> Headers:
        """The same for a body that is sent in pieces, of known length and SHA-256."""
        fields = [("Content-Digest", format_digest(digest)), ("Content-Length", str(length))]
        return self._sign_fields(method, target, BODY_COMPONENTS, fields)

    def check_answer(self, method: str, target: str, headers: Headers, answer: HttpResponse) -> HttpResponse:
        """The answer, marked as signed if the server signed it for the request with these headers."""
        raw = [(name.encode(), value.encode()) for name, value in headers]
        signed = answer.signature_input, answer.signature
        is_signed = verify_response(self._audience, method, target, raw, answer.status, answer.body, signed)
        return replace(answer, is_signed=is_signed)

    def correct_clock(self, refusal: ApiError) -> bool:
        """Take the server's time from its refusal; True if the request should be signed and sent again."""
        if refusal.server_time_ms is None or not self._may_correct:
            return False
        self._may_correct = False
        self.offset_ms = refusal.server_time_ms - self._clock_ms()
        return True

    def note_success(self) -> None:
        """Note a successful request: the clock is right, and may be corrected again if it drifts."""
        self._may_correct = True

    def _sign_fields(self, method: str, target: str, components: tuple[str, ...], fields: Headers) -> Headers:
        fields = [("Shoal-Run", self._run), ("Shoal-Audience", self._audience), *fields]
        parameters: dict[str, int | str] = {
            "created": (self._clock_ms() + self.offset_ms) // 1000,
            "nonce": self._draw_bytes(NONCE_BYTES).hex(),
            "keyid": self._key.public,
            "alg": ALGORITHM,
            "tag": REQUEST_TAG,
        }
        text = format_input(components, parameters)
        values = {name.lower(): value for name, value in fields} | derive_components(method, target)
        signature = self._key.sign(build_base(components, values, text))
        signed = [("Signature-Input", f"{LABEL}={text}"), ("Signature", format_signature(LABEL, signature))]
        return fields + signed
