"""Proof of work for joining: every join, renewal and return takes some seconds of computing, and more when many join.

    challenge (server, stateless) -> solve (client, `work` hashes on average) -> stamp in the header Shoal-Work

Invariants:
- the server stores nothing for a challenge, which carries node, work, expiry and a MAC under the server's secret. It is
  for one node of one run: a stamp is useless to another, and pays for one join (`spend_stamp`);
- checking a stamp costs at most two short hashes; a wrong MAC costs one;
- a challenge issued when joining was cheap is refused when it is expensive: hoarding challenges does not help;
- the work follows from successful joins, so requesting challenges does not raise it for others;
- the work rises in proportion to the rate, up to `MAX_FACTOR` times the base work; at that rate no further join is
  taken. So n times as many joins cost n x n times the work, and there are never more than `MAX_FACTOR` x
  `TARGET_PER_S` per second;
- strangers share one rate. An owner with a record has a rate of its own for its known nodes: a flood of strangers
  makes nothing more expensive for it, nor it for others.

A stamp is valid if SHA-256(tag, challenge, counter) < 2**256 / work. So `work` hashes are tried on average, and the
work is a plain number that can be raised by any factor.
"""

import asyncio
import hashlib
import hmac
import math
import re
import threading
from collections.abc import Callable
from typing import NamedTuple

from shoal.net.api_error import ApiError

MAX_STAMP_CHARS = 256
MAX_COUNTER = 2**63
STALE_FACTOR = 4
"""how many times the current work may exceed that of an older challenge"""
VALID_S = 900
"""validity of a challenge in seconds"""
TARGET_PER_S, HALF_LIFE_S, MAX_FACTOR = 6.0 / 60.0, 120.0, 64.0
"""join rate up to which the base work suffices, half-life of its average, and largest factor over the base work"""
_DECAY = math.log(2.0) / HALF_LIFE_S
_SALT_BYTES = 8
_TRIES_PER_ASK = 65536
_TAG = b"shoal-work-1\x00"
_CHALLENGE = re.compile(r"1\.([0-9a-f]{64})\.([1-9][0-9]{0,17})\.([1-9][0-9]{0,14})\.[0-9a-f]{16}\.([0-9a-f]{64})")
_STAMP = re.compile(r"(.+)\.(0|[1-9][0-9]{0,18})")


class Challenge(NamedTuple):
    """The proof of work that a server requests before a node may join."""

    node: str
    work: int
    """hashes to try, on average"""
    expires_s: int
    text: str


class JoinRate:
    """The work of a join now: `base_work` at rest, in proportion to the join rate above `TARGET_PER_S`.

    The rate is an average with half-life `HALF_LIFE_S`, kept as one number.
    """

    def __init__(self, *, base_work: int = 1 << 22) -> None:
        self.base_work = base_work
        self._rate = 0.0
        self._seen_s = 0.0

    def note_join(self, now_s: float) -> None:
        """A node joined."""
        self._rate = self._rate_at(now_s) + _DECAY
        self._seen_s = max(self._seen_s, now_s)

    def find_wait(self, now_s: float) -> float:
        """Seconds until joins are taken again; 0 if they are taken now."""
        rate, most = self._rate_at(now_s), MAX_FACTOR * TARGET_PER_S
        return math.log(rate / most) / _DECAY if rate > most else 0.0

    def find_work(self, now_s: float) -> int:
        """The work that a join requires now."""
        factor = self._rate_at(now_s) / TARGET_PER_S
        return int(self.base_work * min(MAX_FACTOR, max(1.0, factor)))

    def _rate_at(self, now_s: float) -> float:
        """Joins per second; a clock that was set back does not increase it."""
        return self._rate * math.exp(-_DECAY * max(0.0, now_s - self._seen_s))


class WorkGate:
    """The server's side: issues challenges and checks stamps."""

    def __init__(
        self, secret: bytes, run: str, rate: JoinRate, find_payer: Callable[[str], str] = lambda _: ""
    ) -> None:
        """`rate` is that of strangers; `find_payer` names the owner with a record that a node belongs to, if any."""
        if len(secret) < 16:
            raise ValueError("the secret of the work gate must have at least 16 random bytes")
        self._secret = secret
        self._run = run.encode()
        self.rate = rate
        self._find_payer = find_payer
        self._own_rates: dict[str, JoinRate] = {}
        """of owners with a record"""
        self._spent: dict[str, int] = {}
        """challenges whose stamp was used, with the time at which they expire"""

    def find_rate(self, node: str) -> JoinRate:
        """The rate that determines the work of a node."""
        payer = self._find_payer(node)
        return self._own_rates.setdefault(payer, JoinRate(base_work=self.rate.base_work)) if payer else self.rate

    def spend_stamp(self, stamp: str, now_ms: int) -> bool:
        """Use up a stamp that was checked; returns whether it was not used before."""
        text = stamp.rpartition(".")[0]
        while self._spent and next(iter(self._spent.values())) * 1000 <= now_ms - 1000 * VALID_S:
            del self._spent[next(iter(self._spent))]
        if text in self._spent:
            return False
        challenge = _parse_challenge(text)
        assert challenge is not None, "the stamp was checked"
        self._spent[text] = challenge.expires_s
        return True

    def return_stamp(self, stamp: str) -> None:
        """Undo `spend_stamp`: the join was refused."""
        self._spent.pop(stamp.rpartition(".")[0], None)

    def make_challenge(self, node: str, now_ms: int, salt: bytes) -> str:
        """A challenge for a node, with 8 random bytes so that two in the same second differ."""
        assert len(salt) == _SALT_BYTES
        now_s = now_ms // 1000
        text = f"1.{node}.{self.find_rate(node).find_work(now_s)}.{now_s + VALID_S}.{salt.hex()}"
        return f"{text}.{self._compute_mac(text)}"

    def check_stamp(self, stamp: str, node: str, now_ms: int) -> None:
        """Raise unless a stamp is this node's solution of a challenge of ours."""
        match = _STAMP.fullmatch(stamp) if len(stamp) <= MAX_STAMP_CHARS else None
        challenge = None if match is None else _parse_challenge(match[1])
        if match is None or challenge is None:
            raise ApiError(
                401, "work", "joining needs a proof-of-work stamp in the header Shoal-Work; request a challenge first"
            )
        if challenge.node != node:
            raise ApiError(401, "work", "the proof-of-work stamp was made for another node")
        text, _, mac = challenge.text.rpartition(".")
        if not hmac.compare_digest(mac, self._compute_mac(text)):
            raise ApiError(401, "work", "the stamp is not for a challenge of this server; request a new one")
        if now_ms >= challenge.expires_s * 1000:
            raise ApiError(401, "work", "the challenge has expired; request a new one")
        rate = self.find_rate(node)
        if wait_s := rate.find_wait(now_ms / 1000):
            text = "too many nodes join now; keep the stamp and try again"
            raise ApiError(429, "joins", text, retry_after_s=math.ceil(wait_s))
        if STALE_FACTOR * challenge.work < rate.find_work(now_ms // 1000):
            raise ApiError(401, "work", "joining requires more work than this challenge asked for; request a new one")
        if not is_solution(challenge, int(match[2])):
            raise ApiError(401, "work", "the proof-of-work stamp does not solve its challenge")

    def _compute_mac(self, text: str) -> str:
        return hmac.digest(self._secret, _TAG + self._run + b"\x00" + text.encode(), "sha256").hex()


def read_challenge(text: str, node: str, max_work: int) -> Challenge:
    """Parse a server's challenge for this node, on the client; ValueError if it is invalid or asks for too much."""
    challenge = _parse_challenge(text) if len(text) <= MAX_STAMP_CHARS else None
    if challenge is None or challenge.node != node:
        raise ValueError("the server sent no valid challenge for this node")
    if challenge.work > max_work:
        raise ValueError(f"joining requires {challenge.work} hashes, more than the limit of {max_work}")
    return challenge


async def make_stamp(text: str, node: str, max_work: int) -> str:
    """Solve a server's challenge in a thread, which ends with its caller. Errors as in `read_challenge`."""
    challenge, stop = read_challenge(text, node, max_work), threading.Event()
    try:
        stamp = await asyncio.to_thread(solve_challenge, challenge, stop.is_set)
    finally:
        stop.set()
    assert stamp is not None, "the search was not stopped"
    return stamp


def solve_challenge(challenge: Challenge, should_stop: Callable[[], bool]) -> str | None:
    """The stamp for a challenge; None if `should_stop`, called about ten times a second, returned True first."""
    prefix, limit = _hash_prefix(challenge), _find_limit(challenge.work)
    for counter in range(MAX_COUNTER):
        if counter % _TRIES_PER_ASK == 0 and should_stop():
            return None
        attempt = prefix.copy()
        attempt.update(b"%d" % counter)
        if attempt.digest() < limit:
            return f"{challenge.text}.{counter}"
    return None


def is_solution(challenge: Challenge, counter: int) -> bool:
    """Whether a counter solves a challenge."""
    attempt = _hash_prefix(challenge)
    attempt.update(b"%d" % counter)
    return attempt.digest() < _find_limit(challenge.work)


def _hash_prefix(challenge: Challenge) -> "hashlib._Hash":
    return hashlib.sha256(_TAG + challenge.text.encode() + b".")


def _find_limit(work: int) -> bytes:
    """Digests below it are solutions; byte strings of equal length compare like numbers."""
    return (((1 << 256) - 1) // work).to_bytes(32, "big")


def _parse_challenge(text: str) -> Challenge | None:
    match = _CHALLENGE.fullmatch(text)
    return None if match is None else Challenge(match[1], int(match[2]), int(match[3]), text)
