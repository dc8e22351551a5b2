"""Authentication: every part of a request is bound, refusals state what to do, and bodies must match their heads."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.identity.authenticator import Authenticator, AuthLimits, BanNotice, Caller, Member
from shoal.identity.delegation import Scope
from shoal.identity.keys import Key, verify_signature
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate, read_challenge, solve_challenge
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError

NODE, OTHER, SERVER, OWNER = (Key.generate() for _ in range(4))
NOW_MS = 1_800_000_000_000
MEMBER = Member(OWNER.public, frozenset({Scope.WORK}))
WIDE = AuthLimits(address_rate=1e5, node_rate=1e5, owner_rate=1e5, fresh_rate=1e5)


@dataclass(frozen=True)
class Request:
    method: str = "POST"
    target: str = "/v1/leases?n=2"
    body: bytes = b'{"n":2}'
    run: str = "run-1"
    audience: str = SERVER.public
    key: Key = NODE
    clock_ms: int = NOW_MS

    def sign(self) -> list[tuple[bytes, bytes]]:
        signer = RequestSigner(self.key, self.run, self.audience, clock_ms=lambda: self.clock_ms)
        headers = signer.sign_request(self.method, self.target, self.body)
        return [(name.encode(), value.encode()) for name, value in headers]


class Endpoint:
    """A coordinator's authenticator, with its known members."""

    def __init__(self, path: Path) -> None:
        self.members = {NODE.public: MEMBER, OTHER.public: MEMBER}
        self.nonces = NonceStore(path)
        self.gate = WorkGate(b"s" * 32, "run-1", JoinRate(base_work=20))
        self.auth = Authenticator(
            run="run-1",
            audience=SERVER.public,
            find_member=self.members.get,
            nonces=self.nonces,
            gate=self.gate,
            limits=WIDE,
        )

    def call(self, request: Request, headers: list[tuple[bytes, bytes]], **changes: Any) -> Caller:
        """Send a request with these headers, and its body after it."""
        now_ms = changes.pop("now_ms", NOW_MS)
        caller = self.auth.check_head(request.method, request.target, headers, "10.0.0.1", now_ms, **changes)
        checker = caller.open_body()
        checker.feed(request.body)
        checker.finish()
        return caller

    def refuse(self, call: Callable[[], object], status: int, code: str) -> ApiError:
        with pytest.raises(ApiError) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (status, code)
        return caught.value


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    opened = Endpoint(tmp_path / "nonces.db")
    yield opened
    opened.nonces.close()


def test_a_signed_request_gives_its_node(endpoint: Endpoint) -> None:
    caller = endpoint.call(Request(), Request().sign())
    assert (caller.node, caller.member, caller.length) == (NODE.public, MEMBER, 7)


requests = st.builds(
    Request,
    method=st.sampled_from(["GET", "PUT", "DELETE"]),
    target=st.from_regex(r"\A/[a-z0-9%./-]{1,12}(\?[a-z=&%]{1,8})?\Z"),
    body=st.binary(max_size=9),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(other=requests)
def test_no_part_of_a_request_can_be_changed(endpoint: Endpoint, other: Request) -> None:
    request = Request()
    headers = request.sign()
    for name in ("method", "target", "body"):
        changed = replace(request, **{name: getattr(other, name)})
        if changed != request:
            with pytest.raises(ApiError):
                endpoint.call(changed, headers)
    assert len(endpoint.nonces) <= 60  # a changed body is detected after the head, whose nonce is then used up


@pytest.mark.parametrize(
    ("header", "old", "new"),
    [
        ("shoal-run", b"run-1", b"run-2"),
        ("shoal-audience", SERVER.public.encode(), OTHER.public.encode()),
        ("content-length", b"7", b"8"),
        ("content-digest", b"sha-256=:", b"sha-256=:A"),
        ("signature-input", b"created=1800000000", b"created=1800000001"),
        ("signature-input", NODE.public.encode(), OTHER.public.encode()),
        ("signature-input", b'"@method" "@path"', b'"@path" "@method"'),
        ("signature-input", b";alg", b';alg="ed25519";alg'),
    ],
    ids=["run", "audience", "length", "digest", "created", "key", "order", "parameter"],
)
def test_no_header_of_a_request_can_be_changed(endpoint: Endpoint, header: str, old: bytes, new: bytes) -> None:
    headers = Request().sign()
    changed = [
        (name, value.replace(old, new)[: len(value) if header == "content-digest" else None])
        if name.decode().lower() == header
        else (name, value)
        for name, value in headers
    ]
    assert changed != headers
    with pytest.raises(ApiError):
        endpoint.call(Request(), changed)
    endpoint.call(Request(), headers)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(place=st.integers(0, 10**4), bit=st.integers(0, 7), which=st.integers(0, 5))
def test_no_bit_of_a_signed_header_can_be_changed(endpoint: Endpoint, place: int, bit: int, which: int) -> None:
    headers = Request().sign()
    name, value = headers[which % len(headers)]
    changed = bytearray(value)
    changed[place % len(value)] ^= 1 << bit
    headers[which % len(headers)] = (name, bytes(changed))
    with pytest.raises(ApiError):
        endpoint.auth.check_head("POST", Request().target, headers, "10.0.0.1", NOW_MS)


@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"run": "run-2"}, 421, "other_run"),
        ({"audience": OTHER.public}, 421, "other_audience"),
        ({"key": Key.generate()}, 401, "unknown_node"),
    ],
)
def test_what_is_signed_for_elsewhere_is_refused(
    endpoint: Endpoint, change: dict[str, Any], status: int, code: str
) -> None:
    request = Request(**change)
    endpoint.refuse(lambda: endpoint.call(request, request.sign()), status, code)


@pytest.mark.parametrize("skew_s", [-60, -50, -1, 0, 1, 50, 60])
def test_a_clock_that_is_off_a_little_is_fine(endpoint: Endpoint, skew_s: int) -> None:
    request = Request(clock_ms=NOW_MS + 1000 * skew_s)
    endpoint.call(request, request.sign())


@pytest.mark.parametrize(
    ("skew_s", "words"), [(300, "300 s ahead of"), (-300, "300 s behind"), (61, "61 s ahead of"), (-61, "61 s behind")]
)
def test_a_wrong_clock_is_reported_with_its_offset_and_corrected_once(
    endpoint: Endpoint, skew_s: int, words: str
) -> None:
    signer = RequestSigner(NODE, "run-1", SERVER.public, clock_ms=lambda: NOW_MS + 1000 * skew_s)

    def call() -> None:
        headers = [(name.encode(), value.encode()) for name, value in signer.sign_request("GET", "/v1/status")]
        endpoint.auth.check_head("GET", "/v1/status", headers, "10.0.0.1", NOW_MS)

    refusal = endpoint.refuse(call, 401, "clock")
    assert words in refusal.text
    assert "allowed are 60 s" in refusal.text
    assert refusal.server_time_ms == NOW_MS
    received = ApiError.from_bytes(401, refusal.to_bytes())
    assert received is not None
    assert signer.correct_clock(received)
    call()


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (
            {"ban": BanNotice(7, "hard verdict on s3")},
            "banned",
            "by event 7: hard verdict on s3",
        ),
        ({"is_revoked": True}, "revoked", "new node key"),
        ({"not_after_ms": NOW_MS}, "delegation", "ended 0 s ago"),
        ({"not_before_ms": NOW_MS + 5000}, "delegation", "begins in 5 s"),
    ],
)
def test_a_node_without_good_standing_is_refused_with_the_reason(
    endpoint: Endpoint, change: dict[str, Any], code: str, words: str
) -> None:
    endpoint.call(Request(), Request().sign())
    endpoint.members[NODE.public] = replace(MEMBER, **change)
    refusal = endpoint.refuse(lambda: endpoint.call(Request(), Request().sign()), 403, code)
    assert words in refusal.text
    endpoint.members[NODE.public] = MEMBER
    endpoint.call(Request(), Request().sign())


def test_the_identity_comes_from_the_signature_alone(endpoint: Endpoint) -> None:
    assert endpoint.call(Request(), Request().sign()).node == NODE.public


def test_a_node_does_what_its_owner_allowed(endpoint: Endpoint) -> None:
    caller = endpoint.call(Request(), Request().sign())
    caller.check_scope(Scope.WORK)
    endpoint.refuse(lambda: caller.check_scope(Scope.VALIDATE), 403, "scope")
    stranger = replace(caller, member=None)
    endpoint.refuse(lambda: stranger.check_scope(Scope.WORK), 403, "scope")


def test_a_body_larger_than_the_route_takes_is_refused_by_its_head(endpoint: Endpoint) -> None:
    request = Request(body=b"x" * 65_537)
    endpoint.refuse(lambda: endpoint.call(request, request.sign()), 413, "too_large")
    endpoint.call(request, request.sign(), max_body_bytes=65_537)


def test_a_forger_learns_nothing_but_that_it_failed(endpoint: Endpoint) -> None:
    request = Request()
    forged = Request(key=OTHER).sign()
    other_key = [(name, value.replace(OTHER.public.encode(), NODE.public.encode())) for name, value in forged]
    other_path = request.sign()
    texts = {
        endpoint.refuse(lambda: endpoint.call(request, other_key), 401, "signature").text,
        endpoint.refuse(lambda: endpoint.call(replace(request, target="/v1/x"), other_path), 401, "signature").text,
    }
    assert texts == {"invalid signature"}


def join(endpoint: Endpoint, key: Key, stamp: str, now_ms: int = NOW_MS) -> Caller:
    headers = [*Request(key=key, target="/v1/join").sign(), (b"shoal-work", stamp.encode())]
    return endpoint.auth.check_join("POST", "/v1/join", headers, "10.0.0.9", now_ms)


def make_stamp(endpoint: Endpoint, key: Key) -> str:
    text = endpoint.gate.make_challenge(key.public, NOW_MS, bytes(8))
    stamp = solve_challenge(read_challenge(text, key.public, 10**6), lambda: False)
    assert stamp is not None
    return stamp


def test_a_stranger_joins_with_a_stamp_of_work(endpoint: Endpoint) -> None:
    stranger = Key.generate()
    caller = join(endpoint, stranger, make_stamp(endpoint, stranger))
    assert (caller.node, caller.member) == (stranger.public, None)
    endpoint.refuse(lambda: join(endpoint, stranger, ""), 401, "work")
    endpoint.refuse(lambda: join(endpoint, Key.generate(), make_stamp(endpoint, stranger)), 401, "work")


def test_a_banned_node_does_not_join_again(endpoint: Endpoint) -> None:
    endpoint.members[NODE.public] = replace(MEMBER, ban=BanNotice(7, "hard verdict on s3"))
    endpoint.refuse(lambda: join(endpoint, NODE, make_stamp(endpoint, NODE)), 403, "banned")


def test_a_stamp_does_not_stand_for_a_signature(endpoint: Endpoint) -> None:
    stranger = Key.generate()
    headers = Request(key=OTHER, target="/v1/join").sign()
    forged = [(name, value.replace(OTHER.public.encode(), stranger.public.encode())) for name, value in headers]
    forged.append((b"shoal-work", make_stamp(endpoint, stranger).encode()))
    endpoint.refuse(lambda: endpoint.auth.check_join("POST", "/v1/join", forged, "10.0.0.9", NOW_MS), 401, "signature")
    assert len(endpoint.nonces) == 0


def test_a_key_that_is_kept_ready_checks_as_one_that_is_not(endpoint: Endpoint) -> None:
    signature = NODE.sign(b"message")
    for _ in range(2):
        assert verify_signature(NODE.public, b"message", signature)
        assert not verify_signature(OTHER.public, b"message", signature)
        assert not verify_signature(NODE.public, b"other", signature)
        assert not verify_signature(NODE.public, b"message", signature + b"x")
        assert not verify_signature("no key", b"message", signature)
        # The neutral point, under which this signature fits every message.
        assert not verify_signature("01" + "00" * 31, b"message", bytes([1, *bytes(63)]))
