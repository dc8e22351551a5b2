"""Who calls: the checks that every request passes before its body is read, cheap to dear.

    format and sizes -> clock -> node known, in good standing -> rates -> signature -> nonce -> body, as it arrives

Invariants:
- the identity comes from the signature: no body says who sends it;
- no signature is checked for an id that is not known or an address that is over its rate, and no nonce is stored for a
  signature that does not hold: a flood of forged requests costs microseconds each, and no memory;
- an owner's tokens are taken only by requests that it signed: nobody can use up another's rate by forging its id;
- addresses from which no signature ever held share one rate, so a flood from many of them leaves most of the core to
  the others;
- a join is open to strangers, who show a stamp of work instead of being known, before their signature is looked at.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Protocol

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field

from shoal.config import Settings
from shoal.errors import ConfigError
from shoal.keys import SIGNATURE_BYTES, check_public
from shoal.shardcast.limits import name_peer
from shoal.swarm.buckets import Buckets
from shoal.swarm.delegation import Scope, check_term, refuse_revoked
from shoal.swarm.digest import BodyChecker
from shoal.swarm.nonces import NonceBook
from shoal.swarm.refusal import AuthError, refuse_banned
from shoal.swarm.request_head import RawHeaders, RequestHead, read_head

FORGERY_TOKENS = 8
"""what a signature that does not hold costs its address, in tokens; one that holds costs 1"""
MAX_KEYS = 16_384
"""public keys kept ready, of nodes that called last; who is not known does not get so far"""
_FRESH = "fresh"

PerSecond = Annotated[float, Field(gt=0.0, le=1e6)]


class AuthLimits(Settings):
    """What callers are allowed."""

    window_s: Annotated[int, Field(ge=5, le=600)] = 60
    """how far a caller's clock may be from ours, both ways"""
    max_body_bytes: Annotated[int, Field(ge=0)] = 64 * 1024
    """of a route that says nothing else"""
    address_rate: PerSecond = 200.0
    """requests a second from one address (one /64 network in IPv6)"""
    owner_rate: PerSecond = 100.0
    """requests a second of all nodes of one owner"""
    fresh_rate: PerSecond = 1000.0
    """requests a second of all addresses together from which no signature held yet"""
    burst_s: Annotated[float, Field(gt=0.0, le=60.0)] = 2.0
    """how many seconds' worth of a rate may come at once"""
    max_tracked: Annotated[int, Field(ge=1, le=2**22)] = 32768
    """addresses and owners whose rate is remembered; the longest unused gives way"""


@dataclass(frozen=True, slots=True)
class Member:
    """What the coordinator knows of a node when it calls."""

    owner: str
    scopes: frozenset[Scope]
    not_before_ms: int = 0
    not_after_ms: int = 2**53
    is_banned: bool = False
    """the node or its owner"""
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """Who signed a request, and the body it promised."""

    node: str
    member: Member | None
    """None while it joins"""
    created_s: int
    nonce: str
    length: int
    digest: bytes

    def open_body(self) -> BodyChecker:
        """To feed the body to as it arrives."""
        return BodyChecker(self.length, self.digest)

    def check_scope(self, scope: Scope) -> None:
        """Refuse what the owner did not allow this node."""
        if self.member is None or scope not in self.member.scopes:
            raise AuthError(403, "scope", f"the owner did not allow this node to {scope.value}")


class StampCheck(Protocol):
    """What `WorkGate` does for a join."""

    def check_stamp(self, stamp: str, node: str, now_ms: int) -> None:
        """Refuse a stamp that is not this node's."""
        ...


class Authenticator:
    """The checks of one coordinator, with all they remember; for one thread."""

    def __init__(
        self,
        *,
        run: str,
        audience: str,
        find_member: Callable[[str], Member | None],
        find_owner: Callable[[str], str | None] = lambda _: None,
        nonces: NonceBook,
        gate: StampCheck,
        limits: AuthLimits | None = None,
        verify: Callable[[str, bytes, bytes], bool] | None = None,
    ) -> None:
        self._run = run
        self._audience = audience
        self._find_member = find_member
        self._find_owner = find_owner
        self._nonces = nonces
        self._gate = gate
        self._verify = verify or verify_known
        self._limits = limits or AuthLimits()
        self._window_ms = 1000 * self._limits.window_s
        self._addresses = self._make_buckets(self._limits.address_rate)
        self._owners = self._make_buckets(self._limits.owner_rate)
        self._fresh = self._make_buckets(self._limits.fresh_rate)
        self._proven: dict[str, None] = {}

    @property
    def num_tracked(self) -> int:
        """Entries of all tables here, which is what strangers could make grow."""
        return len(self._addresses) + len(self._owners) + len(self._fresh) + len(self._proven)

    def check_head(
        self,
        method: str,
        target: str,
        headers: RawHeaders,
        peer_ip: str,
        now_ms: int,
        *,
        max_body_bytes: int | None = None,
    ) -> Caller:
        """Who sent this request, if it is a node of this run that may call now; `AuthError` otherwise."""
        head = self._read_head(method, target, headers, now_ms, max_body_bytes)
        member = self._find_member(head.node)
        if member is None:
            raise AuthError(401, "unknown_node", "this node is not known to this run; join it first")
        _check_member(member, now_ms)
        address, now_s = name_address(peer_ip), now_ms / 1000
        self._check_rates(address, member.owner, now_s)
        self._check_signature(head, address, now_ms)
        self._owners.take_tokens(member.owner, now_s)
        self._note_proven(address)
        return _make_caller(head, member)

    def check_join(self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int) -> Caller:
        """The same for a node that wants to join, known or not: it shows a stamp of work in `Shoal-Work`."""
        head = self._read_head(method, target, headers, now_ms, None)
        member = self._find_member(head.node)
        if member is not None and member.is_banned:
            raise refuse_banned()
        address, now_s = name_address(peer_ip), now_ms / 1000
        self._check_rates(address, None, now_s)
        self._gate.check_stamp(head.work, head.node, now_ms)
        self._check_signature(head, address, now_ms)
        return _make_caller(head, None)

    def check_accused(self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int) -> Caller:
        """The same for who wants to see what concerns an owner: the owner or one of its nodes, banned or not."""
        head = self._read_head(method, target, headers, now_ms, 0)
        owner = self._find_owner(head.node)
        if owner is None:
            raise AuthError(401, "unknown_key", "this key is of no owner and no node of this run, or was revoked")
        address, now_s = name_address(peer_ip), now_ms / 1000
        self._check_rates(address, owner, now_s)
        self._check_signature(head, address, now_ms)
        self._owners.take_tokens(owner, now_s)
        return _make_caller(head, None)

    def _read_head(
        self, method: str, target: str, headers: RawHeaders, now_ms: int, max_body_bytes: int | None
    ) -> RequestHead:
        head = read_head(method, target, headers, self._run, self._audience)
        limit = self._limits.max_body_bytes if max_body_bytes is None else max_body_bytes
        if head.length > limit:
            raise AuthError(413, "too_large", f"a body of {head.length} bytes, more than the {limit} allowed here")
        skew_ms = 1000 * head.created_s - now_ms
        if abs(skew_ms) > self._window_ms:
            raise _refuse_clock(skew_ms, self._limits.window_s, now_ms)
        return head

    def _check_rates(self, address: str, owner: str | None, now_s: float) -> None:
        """Refuse what is over a rate; count what is not against its address."""
        is_fresh = address not in self._proven
        wait_s = self._addresses.find_wait(address, now_s)
        if owner is not None:
            wait_s = max(wait_s, self._owners.find_wait(owner, now_s))
        if is_fresh:
            wait_s = max(wait_s, self._fresh.find_wait(_FRESH, now_s))
        if wait_s > 0.0:
            after_s = math.ceil(wait_s)
            raise AuthError(429, "too_many", f"too many requests; try again in {after_s} s", retry_after_s=after_s)
        self._addresses.take_tokens(address, now_s)
        if is_fresh:
            self._fresh.take_tokens(_FRESH, now_s)

    def _check_signature(self, head: RequestHead, address: str, now_ms: int) -> None:
        if not self._verify(head.node, head.base, head.signature):
            self._addresses.take_tokens(address, now_ms / 1000, FORGERY_TOKENS - 1)
            raise AuthError(401, "signature", "the signature does not hold")
        self._nonces.add_nonce(head.node, head.nonce, head.created_s, now_ms)

    def _note_proven(self, address: str) -> None:
        self._proven.pop(address, None)
        self._proven[address] = None
        if len(self._proven) > self._limits.max_tracked:
            del self._proven[next(iter(self._proven))]

    def _make_buckets(self, rate: float) -> Buckets:
        return Buckets(rate, max(1.0, rate * self._limits.burst_s), self._limits.max_tracked)


def _check_member(member: Member, now_ms: int) -> None:
    if member.is_banned:
        raise refuse_banned()
    if member.is_revoked:
        raise refuse_revoked()
    check_term(member.not_before_ms, member.not_after_ms, now_ms)


def _make_caller(head: RequestHead, member: Member | None) -> Caller:
    return Caller(head.node, member, head.created_s, head.nonce, head.length, head.digest)


def _refuse_clock(skew_ms: int, window_s: int, now_ms: int) -> AuthError:
    way = "ahead of" if skew_ms > 0 else "behind"
    skew_s = round(abs(skew_ms) / 1000)
    text = f"your clock is {skew_s} s {way} this server's, and {window_s} s are allowed; set it, or sign by ours"
    return AuthError(401, "clock", text, server_time_ms=now_ms)


def verify_known(public: str, message: bytes, signature: bytes) -> bool:
    """As `keys.verify_signature`, for keys that come again: reading one costs a fifth of using it."""
    key = _load_public(public)
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=MAX_KEYS)
def _load_public(public: str) -> Ed25519PublicKey | None:
    try:
        return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_public(public)))
    except (ConfigError, ValueError):
        return None


@lru_cache(maxsize=4096)
def name_address(peer_ip: str) -> str:
    """What counts as one address; a peer without one (a local socket) goes by what the server calls it."""
    try:
        return name_peer(peer_ip)[0]
    except ValueError:
        return peer_ip[:64]
