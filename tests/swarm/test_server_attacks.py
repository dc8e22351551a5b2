"""Attacks on the door: replays at every age, and floods of forged requests that cost neither signatures nor memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.keys import Key, verify_signature
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.delegation import Scope
from shoal.swarm.nonces import NonceBook
from shoal.swarm.refusal import AuthError
from shoal.swarm.server_auth import FORGERY_TOKENS, Authenticator, AuthLimits, Member
from shoal.swarm.work import JoinRate, WorkGate

NODE, OTHER, SERVER, OWNER = (Key.generate() for _ in range(4))
NOW_MS = 1_800_000_000_000
MEMBER = Member(OWNER.public, frozenset(Scope))
Raw = list[tuple[bytes, bytes]]


class Door:
    """A coordinator's door that counts the signatures it looks at."""

    def __init__(self, path: Path, limits: AuthLimits | None = None, run: str = "run-1") -> None:
        self.members = {NODE.public: MEMBER}
        self.num_verified = 0
        self.book = NonceBook(path)
        self.auth = Authenticator(
            run=run,
            audience=SERVER.public,
            find_member=self.members.get,
            nonces=self.book,
            gate=WorkGate(b"s" * 32, run, JoinRate()),
            limits=limits,
            verify=self.verify,
        )

    def verify(self, public: str, message: bytes, signature: bytes) -> bool:
        self.num_verified += 1
        return verify_signature(public, message, signature)

    def call(
        self, headers: Raw, now_ms: int = NOW_MS, *, ip: str = "10.0.0.1", method: str = "POST", target: str = "/v1/a"
    ) -> str:
        """The code of the refusal, empty if there was none."""
        try:
            self.auth.check_head(method, target, headers, ip, now_ms)
        except AuthError as error:
            return error.code
        return ""


@pytest.fixture
def make_door(tmp_path: Path) -> Iterator[Callable[..., Door]]:
    doors: list[Door] = []

    def make(limits: AuthLimits | None = None, run: str = "run-1") -> Door:
        doors.append(Door(tmp_path / f"nonces{len(doors)}.db", limits, run))
        return doors[-1]

    yield make
    for door in doors:
        door.book.close()


def sign(key: Key = NODE, clock_ms: int = NOW_MS, body: bytes = b"x") -> Raw:
    signer = RequestSigner(key, "run-1", SERVER.public, clock_ms=lambda: clock_ms)
    return [(name.encode(), value.encode()) for name, value in signer.sign_request("POST", "/v1/a", body)]


def forge(node: str, headers: Raw) -> Raw:
    """The same request in another node's name."""
    return [(name, value.replace(NODE.public.encode(), node.encode())) for name, value in headers]


def sign_as_node(key: Key) -> Raw:
    """A request in the node's name, signed with another key."""
    return [(name, value.replace(key.public.encode(), NODE.public.encode())) for name, value in sign(key)]


@pytest.mark.parametrize(
    ("age_s", "code"), [(0, "replay"), (1, "replay"), (59, "replay"), (61, "clock"), (299, "clock"), (86_400, "clock")]
)
def test_a_replay_is_refused_at_every_age(make_door: Callable[..., Door], age_s: int, code: str) -> None:
    door = make_door()
    headers = sign()
    assert door.call(headers) == ""
    assert door.call(headers, NOW_MS + 1000 * age_s) == code


@pytest.mark.parametrize("age_s", [1, 59, 119, 120])
def test_a_request_dated_ahead_is_not_replayed_either(make_door: Callable[..., Door], age_s: int) -> None:
    door = make_door()
    headers = sign(clock_ms=NOW_MS + 60_000)
    assert door.call(headers) == ""
    for second in range(5, age_s, 5):
        door.call(sign(clock_ms=NOW_MS + 1000 * second), NOW_MS + 1000 * second)
    assert door.call(headers, NOW_MS + 1000 * age_s) == "replay"


@pytest.mark.parametrize("age_s", [1, 59, 61, 299, 86_400])
def test_a_restart_lets_no_replay_in(tmp_path: Path, age_s: int) -> None:
    headers = sign()
    door = Door(tmp_path / "nonces.db")
    assert door.call(headers) == ""
    door.book.close()
    door = Door(tmp_path / "nonces.db")
    assert door.call(headers, NOW_MS + 1000 * age_s) in ("replay", "clock")
    assert door.call(sign()) == ""
    door.book.close()


def test_a_replay_elsewhere_is_refused(make_door: Callable[..., Door]) -> None:
    door, other_run = make_door(), make_door(run="run-2")
    headers = sign()
    assert door.call(headers, target="/v1/b") == "signature"
    assert door.call(headers, target="/v1/a?x=1") == "signature"
    assert door.call(headers, method="PUT") == "signature"
    assert other_run.call(headers) == "other_run"
    assert door.call(headers) == ""


def test_a_revoked_node_is_out_with_the_next_request(make_door: Callable[..., Door]) -> None:
    door = make_door()
    assert door.call(sign()) == ""
    door.members[NODE.public] = replace(MEMBER, is_revoked=True)
    verified = door.num_verified
    assert door.call(sign()) == "revoked"
    assert door.num_verified == verified


def test_each_check_comes_before_the_dearer_ones(make_door: Callable[..., Door]) -> None:
    limits = AuthLimits(address_rate=1.0, burst_s=1.0)
    door = make_door(limits)
    late = NOW_MS + 10**6
    stranger = forge(OTHER.public, sign())
    assert door.call([], late) == "unsigned"  # format, though the clock is off too
    assert door.call(stranger, late) == "clock"  # clock, though the node is unknown too
    assert door.call(sign()) == ""  # takes the only token
    assert door.call(stranger) == "unknown_node"  # standing, though the rate is used up
    assert door.num_verified == 1
    assert door.call(sign()) == "too_many"  # rate, though the signature would hold
    assert door.num_verified == 1
    assert len(door.book) == 1


def test_forged_ids_are_refused_without_a_signature_being_looked_at(make_door: Callable[..., Door]) -> None:
    door = make_door()
    headers = sign()
    for number in range(2000):
        assert door.call(forge(f"{number:064x}", headers), ip=f"10.1.{number // 250}.{number % 250}") == "unknown_node"
    assert door.num_verified == 0
    assert len(door.book) == 0
    assert door.auth.num_tracked == 0
    assert door.call(headers) == ""


def test_one_address_gets_few_signatures_looked_at(make_door: Callable[..., Door]) -> None:
    limits = AuthLimits(address_rate=100.0, burst_s=1.0)
    door = make_door(limits)
    forged = sign_as_node(OTHER)
    codes = [door.call(forged, NOW_MS + number // 10) for number in range(10_000)]  # 10,000 in one second
    assert set(codes) == {"signature", "too_many"}
    assert door.num_verified <= 2 * 100 / FORGERY_TOKENS + 1
    assert door.call(sign(), NOW_MS + 1000, ip="10.0.0.2") == ""


def test_forgeries_do_not_use_up_the_rate_of_the_one_they_name(make_door: Callable[..., Door]) -> None:
    door = make_door(AuthLimits(owner_rate=1.0, burst_s=10.0))
    forged = sign_as_node(OTHER)
    for number in range(500):
        assert door.call(forged, ip=f"10.2.0.{number % 200}") == "signature"
    for _ in range(10):
        assert door.call(sign()) == ""
    assert door.call(sign()) == "too_many"
    assert door.call(sign(clock_ms=NOW_MS + 2000), NOW_MS + 2000) == ""


def test_a_flood_from_many_addresses_leaves_room_for_those_that_were_here_before(
    make_door: Callable[..., Door],
) -> None:
    door = make_door(AuthLimits(fresh_rate=50.0, burst_s=1.0))
    assert door.call(sign()) == ""
    forged = sign_as_node(OTHER)
    for number in range(3000):
        door.call(forged, ip=f"10.3.{number // 250}.{number % 250}")
    assert door.num_verified <= 51
    assert door.call(forged, ip="10.4.0.1") == "too_many"
    assert door.call(sign()) == ""


def test_an_ipv6_host_is_one_address_whatever_it_calls_itself(make_door: Callable[..., Door]) -> None:
    door = make_door(AuthLimits(address_rate=1.0, burst_s=5.0))
    codes = [door.call(sign(), ip=f"2001:db8:1:2::{number:x}") for number in range(1, 20)]
    assert codes.count("") == 5
    assert door.call(sign(), ip="2001:db8:1:3::1") == ""
    assert door.call(sign(), ip="unix") == ""


def test_a_refusal_says_when_to_come_back(make_door: Callable[..., Door]) -> None:
    door = make_door(AuthLimits(address_rate=0.1, burst_s=10.0))
    assert door.call(sign()) == ""
    with pytest.raises(AuthError, match="try again in 10 s") as caught:
        door.auth.check_head("POST", "/v1/a", sign(), "10.0.0.1", NOW_MS)
    assert caught.value.retry_after_s == 10
    assert door.call(sign(clock_ms=NOW_MS + 10_000), NOW_MS + 10_000) == ""


def test_tables_keep_their_size_under_any_number_of_addresses_and_owners(make_door: Callable[..., Door]) -> None:
    limits = AuthLimits(address_rate=1e5, owner_rate=1e5, fresh_rate=1e6, max_tracked=50)
    door = make_door(limits)
    for number in range(300):
        door.members[NODE.public] = replace(MEMBER, owner=f"{number:064x}")
        assert door.call(sign(), ip=f"10.5.{number // 250}.{number % 250}") == ""
    assert door.auth.num_tracked == 50 + 50 + 1 + 50


def test_memory_is_flat_under_distinct_forged_ids(make_door: Callable[..., Door]) -> None:
    door = make_door()
    headers = sign()

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            door.call(
                forge(f"{number:064x}", headers), ip=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            )

    flood(0, 5000)
    tracemalloc.start()
    flood(5000, 100)  # warms what is allocated once
    before = tracemalloc.get_traced_memory()[0]
    flood(10_000, 5000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 5000  # less than a byte for each id
