"""Asking until there is an answer: when to try again, how long to wait before, and when a no is final.

Invariants:
- each try is made anew by its caller (a new signature, a new nonce); that a second one is harmless is the caller's
  promise;
- the wait doubles with each failure, is never shorter than the server asked for (up to `longest_s`), and has a random
  share, so that a thousand nodes do not come back at once;
- a no to a signed request is final if it is the coordinator's. A page of somebody on the way (a proxy whose server is
  away, the door of a hotel's network) is no answer, whatever its status: a node that ended for it would not come back;
- a clock is corrected once, at once; a connection that was stale costs no wait.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.link import Answer, LinkError
from shoal.swarm.refusal import AuthError

RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})


class RefusedError(Exception):
    """The coordinator said no, and would again."""

    def __init__(self, refusal: AuthError) -> None:
        super().__init__(f"{refusal.text} ({refusal.code})")
        self.refusal = refusal


class UnreachableError(Exception):
    """No usable answer, after all tries; the text is about the last one."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long a node tries."""

    tries: int = 8
    first_s: float = 0.5
    longest_s: float = 60.0
    """between two tries, also if the server asks for more"""


class Asker:
    """Sends requests until they are answered or refused for good."""

    def __init__(
        self,
        patience: Patience | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._patience = patience or Patience()
        self._sleep, self._draw = sleep, draw

    async def persist(self, attempt: Callable[[], Awaitable[Answer]], signer: RequestSigner | None = None) -> Answer:
        """The answer with status 200 that one of the attempts got."""
        failure = ""
        for number in range(self._patience.tries):
            asked_s = 0
            try:
                answer = await attempt()
            except LinkError as error:
                if error.is_stale:
                    continue  # the server had closed it; a new connection says how things are
                failure = str(error)
            else:
                if answer.status == 200:
                    _note_success(signer)
                    return answer
                refusal = read_refusal(answer)
                if _corrects_clock(signer, refusal):
                    continue
                if answer.status not in RETRY_STATUSES and (signer is None or _is_word(answer)):
                    raise RefusedError(refusal)
                failure, asked_s = refusal.text, refusal.retry_after_s or 0
            if number + 1 < self._patience.tries:
                await self._sleep(self._find_pause(number, asked_s))
        raise UnreachableError(failure or "the server closed every connection")

    def _find_pause(self, number: int, asked_s: float) -> float:
        limits = self._patience
        pause_s = min(limits.longest_s, max(asked_s, limits.first_s * 2.0 ** min(number, 32)))
        # Whoever was asked to wait waits that long and up to half as long again, the others at least half.
        return pause_s * (1.0 + self._draw() / 2) if asked_s else pause_s * (0.5 + self._draw() / 2)


def read_refusal(answer: Answer) -> AuthError:
    """What an answer other than 200 says; that of a proxy says little."""
    refusal = AuthError.from_bytes(answer.status, answer.body)
    if refusal is None:
        refusal = AuthError(answer.status, "http", f"answered with status {answer.status}")
    if refusal.retry_after_s is None:
        refusal.retry_after_s = answer.retry_after_s
    return refusal


def _is_word(answer: Answer) -> bool:
    """Whether an answer other than 200 is a coordinator's."""
    return AuthError.from_bytes(answer.status, answer.body) is not None


def _note_success(signer: RequestSigner | None) -> None:
    if signer is not None:
        signer.note_success()


def _corrects_clock(signer: RequestSigner | None, refusal: AuthError) -> bool:
    return refusal.code == "clock" and signer is not None and signer.correct_clock(refusal)
