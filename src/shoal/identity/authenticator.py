"""Authentication of requests: the checks that every request passes before its body is read, cheapest first.

    format and sizes -> clock -> node known, in good standing -> rates -> signature -> nonce -> body, as it arrives

Invariants:
- the identity comes from the signature: no body states who sends it;
- a signature is not checked for an unknown id or an address over its rate, and no nonce is stored for an invalid
  signature: a flood of forged requests costs microseconds each, and no memory;
- only requests that an owner signed use up its tokens: forging an id cannot exhaust its owner's rate;
- addresses that never sent a valid signature share one rate, so a flood from many of them leaves most of a core to the
  others;
- a join is open to unknown nodes, which present a proof of work before their signature is checked.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

from pydantic import Field

from shoal.config.run import Settings
from shoal.identity.delegation import Delegation, Scope
from shoal.identity.keys import verify_signature
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import WorkGate
from shoal.identity.signatures import BodyChecker, RawHeaders, RequestHead, read_head
from shoal.net.api_error import ApiError, refuse_banned
from shoal.net.limits import Buckets, name_peer

FORGERY_TOKENS = 8
"""tokens that an invalid signature costs its address; a valid one costs 1"""
_FRESH = "fresh"

PerSecond = Annotated[float, Field(gt=0.0, le=1e6)]


class AuthLimits(Settings):
    """Limits for callers."""

    window_s: Annotated[int, Field(ge=5, le=600)] = 60
    """largest offset of a caller's clock from ours, both ways"""
    max_body_bytes: Annotated[int, Field(ge=0)] = 64 * 1024
    """largest body of a route without a limit of its own"""
    address_rate: PerSecond = 200.0
    """requests per second from one address (one /64 network in IPv6)"""
    owner_rate: PerSecond = 100.0
    """requests per second of all nodes of one owner"""
    fresh_rate: PerSecond = 1000.0
    """requests per second of all addresses together that have not sent a valid signature yet"""
    burst_s: Annotated[float, Field(gt=0.0, le=60.0)] = 2.0
    """burst: how many seconds' worth of a rate may arrive at once"""
    max_tracked: Annotated[int, Field(ge=1, le=2**22)] = 32768
    """addresses and owners whose rate is tracked; the least recently used is dropped"""


class BanNotice(NamedTuple):
    """What a banned caller is told about its ban."""

    seq: int
    """number of the event"""
    reason: str


@dataclass(frozen=True, slots=True)
class Member:
    """What the coordinator knows about a node when it calls."""

    owner: str
    scopes: frozenset[Scope]
    not_before_ms: int = 0
    not_after_ms: int = 2**53
    ban: BanNotice | None = None
    """of the node or its owner"""
    is_revoked: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """Who signed a request, and the body that was signed."""

    node: str
    member: Member | None
    """None while it joins"""
    length: int
    digest: bytes

    def open_body(self) -> BodyChecker:
        """A checker to feed the body to as it arrives."""
        return BodyChecker(self.length, self.digest)

    def check_scope(self, scope: Scope) -> None:
        """Raise unless the owner delegated this scope to the node."""
        if self.member is None or scope not in self.member.scopes:
            raise ApiError(403, "scope", f"the owner did not allow this node to {scope.value}")


class Authenticator:
    """The checks of one coordinator, with their state. Not thread-safe."""

    def __init__(
        self,
        *,
        run: str,
        audience: str,
        find_member: Callable[[str], Member | None],
        find_owner: Callable[[str], str | None] = lambda _: None,
        nonces: NonceStore,
        gate: WorkGate,
        limits: AuthLimits | None = None,
        verify: Callable[[str, bytes, bytes], bool] = verify_signature,
    ) -> None:
        self._run = run
        self._audience = audience
        self._find_member = find_member
        self._find_owner = find_owner
        self._nonces = nonces
        self._gate = gate
        self._verify = verify
        self._limits = limits or AuthLimits()
        self._window_ms = 1000 * self._limits.window_s
        self._addresses = self._make_buckets(self._limits.address_rate)
        self._owners = self._make_buckets(self._limits.owner_rate)
        self._fresh = self._make_buckets(self._limits.fresh_rate)
        self._proven: dict[str, None] = {}

    @property
    def num_tracked(self) -> int:
        """Entries of all tables here: what unknown callers can make grow."""
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
        """The caller, if it is a node of this run that may call now; `ApiError` otherwise."""
        head = self._read_head(method, target, headers, now_ms, max_body_bytes)
        member = self._find_member(head.node)
        if member is None:
            raise ApiError(401, "unknown_node", "this node is not known to this run; join it first")
        _check_member(member, now_ms)
        address = self._check_signed(head, member.owner, peer_ip, now_ms)
        self._note_proven(address)
        return _make_caller(head, member)

    def check_join(self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int) -> Caller:
        """The same for a node that wants to join, known or not: it sends a proof of work in `Shoal-Work`."""
        head = self._read_head(method, target, headers, now_ms, None)
        member = self._find_member(head.node)
        if member is not None and member.ban is not None:
            raise refuse_banned(*member.ban)
        address = name_address(peer_ip)
        self._check_rates(address, None, now_ms / 1000)
        self._gate.check_stamp(head.work, head.node, now_ms)
        self._check_signature(head, address, now_ms)
        return _make_caller(head, None)

    def check_accused(self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int) -> Caller:
        """The same for evidence about an owner: allowed for the owner and its nodes, banned or not."""
        head = self._read_head(method, target, headers, now_ms, 0)
        owner = self._find_owner(head.node)
        if owner is None:
            raise ApiError(401, "unknown_key", "this key belongs to no owner and no node of this run, or was revoked")
        self._check_signed(head, owner, peer_ip, now_ms)
        return _make_caller(head, None)

    def _check_signed(self, head: RequestHead, owner: str, peer_ip: str, now_ms: int) -> str:
        """Check rate and signature of an owner's request; returns its address."""
        address, now_s = name_address(peer_ip), now_ms / 1000
        self._check_rates(address, owner, now_s)
        self._check_signature(head, address, now_ms)
        self._owners.take_tokens(owner, now_s)
        return address

    def _read_head(
        self, method: str, target: str, headers: RawHeaders, now_ms: int, max_body_bytes: int | None
    ) -> RequestHead:
        head = read_head(method, target, headers, self._run, self._audience)
        limit = self._limits.max_body_bytes if max_body_bytes is None else max_body_bytes
        if head.length > limit:
            raise ApiError(413, "too_large", f"request body of {head.length} bytes, allowed are {limit} bytes")
        skew_ms = 1000 * head.created_s - now_ms
        if abs(skew_ms) > self._window_ms:
            raise _refuse_clock(skew_ms, self._limits.window_s, now_ms)
        return head

    def _check_rates(self, address: str, owner: str | None, now_s: float) -> None:
        """Raise if a rate is exceeded; otherwise count the request against its address."""
        is_fresh = address not in self._proven
        wait_s = self._addresses.find_wait(address, now_s)
        if owner is not None:
            wait_s = max(wait_s, self._owners.find_wait(owner, now_s))
        if is_fresh:
            wait_s = max(wait_s, self._fresh.find_wait(_FRESH, now_s))
        _refuse_wait(wait_s)
        self._addresses.take_tokens(address, now_s)
        if is_fresh:
            self._fresh.take_tokens(_FRESH, now_s)

    def _check_signature(self, head: RequestHead, address: str, now_ms: int) -> None:
        if not self._verify(head.node, head.base, head.signature):
            self._addresses.take_tokens(address, now_ms / 1000, FORGERY_TOKENS - 1)
            raise ApiError(401, "signature", "invalid signature")
        self._nonces.add_nonce(head.node, head.nonce, head.created_s, now_ms)

    def _note_proven(self, address: str) -> None:
        self._proven.pop(address, None)
        self._proven[address] = None
        if len(self._proven) > self._limits.max_tracked:
            del self._proven[next(iter(self._proven))]

    def _make_buckets(self, rate: float) -> Buckets:
        return Buckets(rate, max(1.0, rate * self._limits.burst_s), self._limits.max_tracked)


def _check_member(member: Member, now_ms: int) -> None:
    if member.ban is not None:
        raise refuse_banned(*member.ban)
    if member.is_revoked:
        raise refuse_revoked()
    check_term(member.not_before_ms, member.not_after_ms, now_ms)


def check_delegation(delegation: Delegation, *, node: str, run: str, now_ms: int) -> None:
    """Raise unless a delegation allows this node to act for this run now."""
    grant = delegation.grant
    if grant.node != node:
        raise ApiError(403, "delegation", "the delegation is for another node key")
    if grant.run != run:
        raise ApiError(403, "delegation", f"the delegation is for another run; here is run {run}")
    check_term(grant.not_before_ms, grant.not_after_ms, now_ms)


def check_term(not_before_ms: int, not_after_ms: int, now_ms: int) -> None:
    """Raise outside the term of a delegation."""
    if now_ms < not_before_ms:
        wait_s = -((now_ms - not_before_ms) // 1000)
        raise ApiError(403, "delegation", f"the owner's delegation to this node begins in {wait_s} s")
    if now_ms >= not_after_ms:
        ago_s = (now_ms - not_after_ms) // 1000
        raise ApiError(403, "delegation", f"the owner's delegation to this node ended {ago_s} s ago; make a new one")


def refuse_revoked() -> ApiError:
    """The error for a revoked node."""
    return ApiError(403, "revoked", "the owner revoked this node; make a new node key and delegate to it")


def refuse_left() -> ApiError:
    """The error for a node that left."""
    return ApiError(403, "left", "this node left the run; join again")


def _make_caller(head: RequestHead, member: Member | None) -> Caller:
    return Caller(head.node, member, head.length, head.digest)


def _refuse_clock(skew_ms: int, window_s: int, now_ms: int) -> ApiError:
    way = "ahead of" if skew_ms > 0 else "behind"
    skew_s = round(abs(skew_ms) / 1000)
    text = f"your clock is {skew_s} s {way} this server's, allowed are {window_s} s; set it, or sign by server time"
    return ApiError(401, "clock", text, server_time_ms=now_ms)


def take_token(buckets: Buckets, name: str, now_s: float) -> None:
    """Count a request against a rate, or raise if the rate is exceeded."""
    _refuse_wait(buckets.find_wait(name, now_s))
    buckets.take_tokens(name, now_s)


def _refuse_wait(wait_s: float) -> None:
    if wait_s > 0.0:
        after_s = math.ceil(wait_s)
        raise ApiError(429, "too_many", f"too many requests; try again in {after_s} s", retry_after_s=after_s)


@lru_cache(maxsize=4096)
def name_address(peer_ip: str) -> str:
    """The rate-limit key of a peer; a peer without an IP address (a local socket) uses the server's name for it."""
    try:
        return name_peer(peer_ip)[0]
    except ValueError:
        return peer_ip[:64]
