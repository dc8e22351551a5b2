"""Retry of HTTP requests: when to retry, how long to wait, and which refusals are final.

Invariants:
- the caller builds every attempt from scratch (new signature, new nonce) and guarantees that a repeated request is
  harmless;
- the pause doubles with each failure, is never shorter than the server's `Retry-After` (up to `longest_s`), and has
  random jitter, so that a thousand nodes do not come back at the same moment;
- an answer to a signed request counts only if the server signed it for this request. Anything else (the error page of
  a proxy or captive portal, an answer that was forged, altered or sent before) is retried whatever its status and text:
  nobody on the way can stop a node or tell it what to do;
- a signed refusal is final, except for what may happen to a request on its way (`TRANSIT_CODES`);
- the clock is corrected once, without a pause; a stale connection costs no pause.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from shoal.errors import UnreachableError
from shoal.net.api_error import ApiError
from shoal.net.client import HttpClientError, HttpResponse
from shoal.util.aio import Backoff

TOO_MANY, UNSIGNED = 429, "unsigned"
RETRY_STATUSES = frozenset({408, 425, TOO_MANY, 500, 502, 503, 504})
TRANSIT_CODES = frozenset({"body", "http", "length_required", "malformed", "replay"})
"""codes of refusals that anyone on the way can cause, by changing a body or delivering a request twice"""


class RefusedError(Exception):
    """The server refused the request and would refuse it again."""

    def __init__(self, refusal: ApiError) -> None:
        super().__init__(f"{refusal.text} ({refusal.code})")
        self.refusal = refusal


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of attempts and the pauses between them."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 60.0
    """upper bound of a pause, even if the server asks for a longer one"""


class ClockCorrection(Protocol):
    """What a retry needs to know about the signer of its requests; its attempts return checked answers."""

    def correct_clock(self, refusal: ApiError) -> bool:
        """Take the server's time from a refusal; True if signing and sending the request again is worthwhile."""
        ...

    def note_success(self) -> None:
        """A request was accepted."""
        ...


class RetryingClient:
    """Repeats a request until it is answered or finally refused."""

    def __init__(
        self,
        policy: RetryPolicy | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy or RetryPolicy()
        self._sleep, self._backoff = sleep, Backoff(self._policy.first_s, self._policy.longest_s, draw)

    async def call_with_retry(
        self, attempt: Callable[[], Awaitable[HttpResponse]], signer: ClockCorrection | None = None
    ) -> HttpResponse:
        """Return the first response with status 200; otherwise raise `RefusedError` or `UnreachableError`."""
        failure, is_busy = "", False
        for number in range(self._policy.tries):
            asked_s = 0
            try:
                answer = await attempt()
            except HttpClientError as error:
                if error.is_stale:
                    continue  # the server had already closed it; try a new connection at once
                failure, is_busy = str(error), False
            else:
                refusal = self._take_answer(answer, signer)
                if refusal is None:
                    return answer
                if refusal.code == "clock" and signer is not None:
                    if not signer.correct_clock(refusal):
                        raise RefusedError(refusal)
                    continue
                failure, asked_s = refusal.text, refusal.retry_after_s or 0
                is_busy = refusal.status == TOO_MANY and refusal.code != UNSIGNED
            if number + 1 < self._policy.tries:
                await self._sleep(self._backoff.pause_s(number, least_s=asked_s))
        raise UnreachableError(failure or "the server closed every connection", is_busy=is_busy)

    def _take_answer(self, answer: HttpResponse, signer: ClockCorrection | None) -> ApiError | None:
        """None for an answer to return, otherwise the refusal to retry; `RefusedError` if that is final."""
        is_authentic = signer is None or answer.is_signed
        if answer.status == 200 and is_authentic:
            if signer is not None:
                signer.note_success()
            return None
        refusal = read_refusal(answer)
        if not is_authentic:
            text = f"{refusal.text}; the server did not sign this answer to this request"
            return ApiError(refusal.status, UNSIGNED, text, retry_after_s=refusal.retry_after_s)
        if signer is None:
            is_over = refusal.status not in RETRY_STATUSES
        else:
            is_over = is_final(refusal) and refusal.code != "clock"
        if is_over:
            raise RefusedError(refusal)
        return refusal


def is_final(refusal: ApiError) -> bool:
    """Whether the same signed request would be refused again."""
    return refusal.status not in RETRY_STATUSES and refusal.code not in TRANSIT_CODES


def read_refusal(answer: HttpResponse) -> ApiError:
    """The error in a response with a status other than 200; a generic one for an intermediary's page."""
    refusal = ApiError.from_bytes(answer.status, answer.body)
    if refusal is None:
        refusal = ApiError(answer.status, "http", f"answered with status {answer.status}")
    if refusal.retry_after_s is None:
        refusal.retry_after_s = answer.retry_after_s
    return refusal
