"""Proof of work for joining: an identity costs its maker some seconds, and more when many are made.

    challenge (server, stateless) -> solve (client, `work` hashes on average) -> stamp in the header Shoal-Work

Invariants:
- the server keeps nothing for a challenge, which carries node, work, end and a MAC under the server's secret. It is for
  one node of one run: a stamp is of no use to another, and using it twice joins the same node;
- checking a stamp costs two short hashes, whatever it says; a wrong MAC costs one;
- a challenge made when joining was cheap loses its worth when it is dear: there is nothing to hoard;
- the work follows from joins that succeeded, so asking for challenges makes it no dearer for others.

A stamp is good if SHA-256(tag, challenge, counter) < 2**256 / work. So `work` hashes are tried on average and the work
is a plain number that can be doubled, or raised by a tenth.
"""

import hashlib
import hmac
import math
import re
from collections.abc import Callable
from typing import NamedTuple

from shoal.swarm.refusal import AuthError

MAX_STAMP_CHARS = 256
MAX_COUNTER = 2**63
STALE_FACTOR = 4
"""how many times dearer joining may have become since a challenge was made"""
_SALT_BYTES = 8
_TRIES_PER_ASK = 65536
_TAG = b"shoal-work-1\x00"
_CHALLENGE = re.compile(r"1\.([0-9a-f]{64})\.([1-9][0-9]{0,17})\.([1-9][0-9]{0,14})\.[0-9a-f]{16}\.([0-9a-f]{64})")
_STAMP = re.compile(r"(.+)\.(0|[1-9][0-9]{0,18})")


class Challenge(NamedTuple):
    """What a server asks of a node before it may join."""

    node: str
    work: int
    """hashes to try, on average"""
    expires_s: int
    text: str


class JoinRate:
    """How much work a join costs now: `base_work` at rest, in proportion to the join rate above `target_per_minute`.

    The rate is an average with half-life `half_life_s`, kept as one number.
    """

    def __init__(
        self,
        *,
        base_work: int = 1 << 22,
        max_factor: float = 64.0,
        target_per_minute: float = 6.0,
        half_life_s: float = 120.0,
    ) -> None:
        self.base_work = base_work
        self._max_factor = max_factor
        self._target = target_per_minute / 60.0
        self._decay = math.log(2.0) / half_life_s
        self._rate = 0.0
        self._seen_s = 0.0

    def note_join(self, now_s: float) -> None:
        """A node joined."""
        self._rate = self._rate_at(now_s) + self._decay
        self._seen_s = max(self._seen_s, now_s)

    def find_work(self, now_s: float) -> int:
        """The work that a join costs now."""
        factor = self._rate_at(now_s) / self._target
        return int(self.base_work * min(self._max_factor, max(1.0, factor)))

    def _rate_at(self, now_s: float) -> float:
        """Joins a second; a clock that was set back lets nothing grow."""
        return self._rate * math.exp(-self._decay * max(0.0, now_s - self._seen_s))


class WorkGate:
    """The server's side: makes challenges and checks stamps."""

    def __init__(self, secret: bytes, run: str, rate: JoinRate, *, valid_s: int = 900) -> None:
        if len(secret) < 16:
            raise ValueError("the secret of the work gate must have 16 random bytes or more")
        self._secret = secret
        self._run = run.encode()
        self._valid_s = valid_s
        self.rate = rate

    def make_challenge(self, node: str, now_ms: int, salt: bytes) -> str:
        """A challenge for a node, with 8 bytes of randomness that make two of one second differ."""
        assert len(salt) == _SALT_BYTES
        now_s = now_ms // 1000
        text = f"1.{node}.{self.rate.find_work(now_s)}.{now_s + self._valid_s}.{salt.hex()}"
        return f"{text}.{self._compute_mac(text)}"

    def check_stamp(self, stamp: str, node: str, now_ms: int) -> None:
        """Refuse a stamp that is not this node's solution of a challenge of ours."""
        match = _STAMP.fullmatch(stamp) if len(stamp) <= MAX_STAMP_CHARS else None
        challenge = None if match is None else _parse_challenge(match[1])
        if match is None or challenge is None:
            raise AuthError(
                401, "work", "joining needs a stamp of work in the header Shoal-Work; ask for a challenge first"
            )
        if challenge.node != node:
            raise AuthError(401, "work", "the stamp of work was made for another node")
        text, _, mac = challenge.text.rpartition(".")
        if not hmac.compare_digest(mac, self._compute_mac(text)):
            raise AuthError(401, "work", "the stamp of work is not for a challenge of this server; ask for a new one")
        if now_ms >= challenge.expires_s * 1000:
            raise AuthError(401, "work", "the challenge has expired; ask for a new one")
        if STALE_FACTOR * challenge.work < self.rate.find_work(now_ms // 1000):
            raise AuthError(401, "work", "joining became dearer since this challenge was made; ask for a new one")
        if not is_solution(challenge, int(match[2])):
            raise AuthError(401, "work", "the stamp of work does not solve its challenge")

    def _compute_mac(self, text: str) -> str:
        return hmac.digest(self._secret, _TAG + self._run + b"\x00" + text.encode(), "sha256").hex()


def read_challenge(text: str, node: str, max_work: int) -> Challenge:
    """A server's challenge for this node, as its client reads it; ValueError if it asks for too much."""
    challenge = _parse_challenge(text) if len(text) <= MAX_STAMP_CHARS else None
    if challenge is None or challenge.node != node:
        raise ValueError("the server sent no challenge for this node")
    if challenge.work > max_work:
        raise ValueError(f"the server asks for {challenge.work} hashes to join, more than the {max_work} allowed here")
    return challenge


def solve_challenge(challenge: Challenge, should_stop: Callable[[], bool]) -> str | None:
    """The stamp for a challenge; None if `should_stop`, asked about ten times a second, said so before."""
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
    """Digests below it are solutions; bytes of one length compare as the numbers they spell."""
    return (((1 << 256) - 1) // work).to_bytes(32, "big")


def _parse_challenge(text: str) -> Challenge | None:
    match = _CHALLENGE.fullmatch(text)
    return None if match is None else Challenge(match[1], int(match[2]), int(match[3]), text)
