"""Authentication of requests: the checks that every request passes before its body is read, cheapest first.

    format and sizes -> clock -> node known, in good standing -> rates -> signature -> nonce -> body, as it arrives

Rates, by what is known about the caller before its signature is checked:

    a connection on which the node's last request was valid     the rate of its owner
    an address from which the node sent a valid request         and the rate of the node at this address
    an address new for the node                                 and those of the address and of all such addresses
    a join                                                      proof of work, and the rate of the node at this address

Invariants:
- the identity comes from the signature: no body states who sends it;
- a signature is not checked for an unknown id or above a rate, and no nonce is stored for an invalid signature: a flood
  of forged requests costs microseconds each, and no memory;
- only requests that an owner signed use up its tokens: forging an id cannot exhaust its owner's rate;
- what others send from a shared address does not affect a node that was heard from there: forged requests use up the
  rate of the id that they name, at this address, and of nodes that were never heard from there. If they name the node
  itself, its open connections still work, and a new one is served as soon as one of its requests is looked at;
- addresses that are new for their nodes share one rate, so a flood from many of them leaves most of a core to the
  others;
- a join is open to unknown nodes, which present a proof of work before their signature is checked. It needs no token of
  its address, so a newcomer can join from an address that others flood.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
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

MAX_PLACES = 8
"""connections that are remembered for each node"""
_FRESH = "fresh"

PerSecond = Annotated[float, Field(gt=0.0, le=1e6)]


class AuthLimits(Settings):
    """Limits for callers."""

    window_s: Annotated[int, Field(ge=5, le=600)] = 60
    """largest offset of a caller's clock from ours, both ways"""
    max_body_bytes: Annotated[int, Field(ge=0)] = 64 * 1024
    """largest body of a route without a limit of its own"""
    address_rate: PerSecond = 200.0
    """requests per second from one address (one /64 network in IPv6) by nodes that were not heard from there before"""
    node_rate: PerSecond = 100.0
    """requests per second in the name of one node from one address, valid or not"""
    owner_rate: PerSecond = 100.0
    """requests per second of all nodes of one owner"""
    fresh_rate: PerSecond = 1000.0
    """requests per second of all addresses together that are new for their nodes"""
    burst_s: Annotated[float, Field(gt=0.0, le=60.0)] = 2.0
    """burst: how many seconds' worth of a rate may arrive at once"""
    max_tracked: Annotated[int, Field(ge=1, le=2**22)] = 32768
    """addresses, nodes and owners whose rate is tracked; the least recently used is dropped"""


class BanNotice(NamedTuple):
    """The refusal that a banned caller gets."""

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
    stamp: str = ""
    """its proof of work, if it joins"""

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
        self._nodes = self._make_buckets(self._limits.node_rate)
        self._owners = self._make_buckets(self._limits.owner_rate)
        self._fresh = self._make_buckets(self._limits.fresh_rate)
        self._places: dict[str, dict[tuple[str, int], None]] = {}
        """where each node sent valid requests: address and port, least recent first"""

    @property
    def num_tracked(self) -> int:
        """Entries of all tables here: what unknown callers can make grow."""
        buckets = (self._addresses, self._nodes, self._owners, self._fresh)
        return sum(map(len, buckets)) + sum(map(len, self._places.values()))

    def check_head(
        self,
        method: str,
        target: str,
        headers: RawHeaders,
        peer_ip: str,
        now_ms: int,
        *,
        peer_port: int = 0,
        max_body_bytes: int | None = None,
    ) -> Caller:
        """The caller, if it is a node of this run that may call now; `ApiError` otherwise.

        `peer_port` identifies the connection; 0 if it is not known."""
        head = self._read_head(method, target, headers, now_ms, max_body_bytes)
        member = self._find_member(head.node)
        if member is None:
            raise ApiError(401, "unknown_node", "this node is not known to this run; join it first")
        _check_member(member, now_ms)
        self._check_signed(head, member.owner, (name_address(peer_ip), peer_port), now_ms)
        return _make_caller(head, member)

    def check_join(
        self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int, *, peer_port: int = 0
    ) -> Caller:
        """The same for a node that wants to join, known or not: it sends a proof of work in `Shoal-Work`."""
        head = self._read_head(method, target, headers, now_ms, None)
        member = self._find_member(head.node)
        if member is not None and member.ban is not None:
            raise refuse_banned(*member.ban)
        self._gate.check_stamp(head.work, head.node, now_ms)
        place = name_address(peer_ip), peer_port
        take_token(self._nodes, _name_pair(head.node, place), now_ms / 1000)
        self._check_signature(head, place, now_ms)
        return _make_caller(head, None)

    def check_accused(
        self, method: str, target: str, headers: RawHeaders, peer_ip: str, now_ms: int, *, peer_port: int = 0
    ) -> Caller:
        """The same for evidence about an owner: allowed for the owner and its nodes, banned or not."""
        head = self._read_head(method, target, headers, now_ms, 0)
        owner = self._find_owner(head.node)
        if owner is None:
            raise ApiError(401, "unknown_key", "this key belongs to no owner and no node of this run, or was revoked")
        self._check_signed(head, owner, (name_address(peer_ip), peer_port), now_ms)
        return _make_caller(head, None)

    def _check_signed(self, head: RequestHead, owner: str, place: tuple[str, int], now_ms: int) -> None:
        """Check rates and signature of an owner's request."""
        now_s = now_ms / 1000
        self._check_rates(head.node, owner, place, now_s)
        self._check_signature(head, place, now_ms)
        self._owners.take_tokens(owner, now_s)

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

    def _check_rates(self, node: str, owner: str, place: tuple[str, int], now_s: float) -> None:
        """Raise if a rate is exceeded; otherwise count the request, except against its owner."""
        _refuse_wait(self._owners.find_wait(owner, now_s))
        places, address = self._places.get(node, {}), place[0]
        if place[1] and place in places:
            return
        # The node's own rate comes first: many requests in one name cost its address no more than that.
        take_token(self._nodes, _name_pair(node, place), now_s)
        if any(known == address for known, _ in places):
            return
        _refuse_wait(max(self._addresses.find_wait(address, now_s), self._fresh.find_wait(_FRESH, now_s)))
        self._addresses.take_tokens(address, now_s)
        self._fresh.take_tokens(_FRESH, now_s)

    def _check_signature(self, head: RequestHead, place: tuple[str, int], now_ms: int) -> None:
        if not self._verify(head.node, head.base, head.signature):
            if place[1]:  # no longer a connection of this node; its address stays known
                known = self._places.get(head.node, {})
                if place in known:
                    del known[place]
                    known[place[0], 0] = None
            raise ApiError(401, "signature", "invalid signature")
        self._nonces.add_nonce(head.node, head.nonce, head.created_s, now_ms)
        self._note_place(head.node, place)

    def _note_place(self, node: str, place: tuple[str, int]) -> None:
        """Remember where a node sent a valid request: the last few places of the last nodes."""
        places = self._places.pop(node, {})
        places.pop(place, None)
        places[place] = None
        if len(places) > MAX_PLACES:
            del places[next(iter(places))]
        self._places[node] = places
        if len(self._places) > self._limits.max_tracked:
            del self._places[next(iter(self._places))]

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
    return Caller(head.node, member, head.length, head.digest, head.work)


def _name_pair(node: str, place: tuple[str, int]) -> str:
    """The name of a node at an address."""
    return f"{place[0]} {node}"


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


def name_address(peer_ip: str) -> str:
    """The rate-limit key of a peer; a peer without an IP address (a local socket) uses the server's name for it."""
    try:
        return name_peer(peer_ip)[0]
    except ValueError:
        return peer_ip[:64]
