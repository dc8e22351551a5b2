"""Attacks on authentication: replays at every age, and floods of forged requests that cost neither signatures nor
memory."""

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.identity.authenticator import MAX_PLACES, Authenticator, AuthLimits, Member
from shoal.identity.delegation import Scope
from shoal.identity.keys import Key, verify_signature
from shoal.identity.nonces import NonceStore
from shoal.identity.proof_of_work import JoinRate, WorkGate, read_challenge, solve_challenge
from shoal.identity.signer import RequestSigner
from shoal.net.api_error import ApiError

NODE, OTHER, SERVER, OWNER = (Key.generate() for _ in range(4))
NOW_MS = 1_800_000_000_000
MEMBER = Member(OWNER.public, frozenset(Scope))
Raw = list[tuple[bytes, bytes]]


class Endpoint:
    """A coordinator's authenticator that counts the signatures it checks."""

    def __init__(self, path: Path, limits: AuthLimits | None = None, run: str = "run-1") -> None:
        self.members = {NODE.public: MEMBER}
        self.num_verified = 0
        self.nonces = NonceStore(path)
        self.gate = WorkGate(b"s" * 32, run, JoinRate(base_work=20))
        self.auth = Authenticator(
            run=run,
            audience=SERVER.public,
            find_member=self.members.get,
            nonces=self.nonces,
            gate=self.gate,
            limits=limits,
            verify=self.verify,
        )

    def verify(self, public: str, message: bytes, signature: bytes) -> bool:
        self.num_verified += 1
        return verify_signature(public, message, signature)

    def call(
        self,
        headers: Raw,
        now_ms: int = NOW_MS,
        *,
        ip: str = "10.0.0.1",
        port: int = 0,
        method: str = "POST",
        target: str = "/v1/a",
    ) -> str:
        """The code of the refusal, empty if there was none."""
        try:
            self.auth.check_head(method, target, headers, ip, now_ms, peer_port=port)
        except ApiError as error:
            return error.code
        return ""


@pytest.fixture
def make_endpoint(tmp_path: Path) -> Iterator[Callable[..., Endpoint]]:
    doors: list[Endpoint] = []

    def make(limits: AuthLimits | None = None, run: str = "run-1") -> Endpoint:
        doors.append(Endpoint(tmp_path / f"nonces{len(doors)}.db", limits, run))
        return doors[-1]

    yield make
    for endpoint in doors:
        endpoint.nonces.close()


def sign(key: Key = NODE, clock_ms: int = NOW_MS, body: bytes = b"x") -> Raw:
    signer = RequestSigner(key, "run-1", SERVER.public, clock_ms=lambda: clock_ms)
    return [(name.encode(), value.encode()) for name, value in signer.sign_request("POST", "/v1/a", body)]


def forge(node: str, headers: Raw) -> Raw:
    """The same request under another node's id."""
    return [(name, value.replace(NODE.public.encode(), node.encode())) for name, value in headers]


def sign_as_node(key: Key, node: Key = NODE) -> Raw:
    """A request under the node's id, signed with another key."""
    return [(name, value.replace(key.public.encode(), node.public.encode())) for name, value in sign(key)]


@pytest.mark.parametrize(
    ("age_s", "code"), [(0, "replay"), (1, "replay"), (59, "replay"), (61, "clock"), (299, "clock"), (86_400, "clock")]
)
def test_a_replay_is_refused_at_every_age(make_endpoint: Callable[..., Endpoint], age_s: int, code: str) -> None:
    endpoint = make_endpoint()
    headers = sign()
    assert endpoint.call(headers) == ""
    assert endpoint.call(headers, NOW_MS + 1000 * age_s) == code


@pytest.mark.parametrize("age_s", [1, 59, 119, 120])
def test_a_request_dated_ahead_is_not_replayed_either(make_endpoint: Callable[..., Endpoint], age_s: int) -> None:
    endpoint = make_endpoint()
    headers = sign(clock_ms=NOW_MS + 60_000)
    assert endpoint.call(headers) == ""
    for second in range(5, age_s, 5):
        endpoint.call(sign(clock_ms=NOW_MS + 1000 * second), NOW_MS + 1000 * second)
    assert endpoint.call(headers, NOW_MS + 1000 * age_s) == "replay"


@pytest.mark.parametrize("age_s", [1, 59, 61, 299, 86_400])
def test_a_restart_lets_no_replay_in(tmp_path: Path, age_s: int) -> None:
    headers = sign()
    endpoint = Endpoint(tmp_path / "nonces.db")
    assert endpoint.call(headers) == ""
    endpoint.nonces.close()
    endpoint = Endpoint(tmp_path / "nonces.db")
    assert endpoint.call(headers, NOW_MS + 1000 * age_s) in ("replay", "clock")
    assert endpoint.call(sign()) == ""
    endpoint.nonces.close()


def test_a_replay_elsewhere_is_refused(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint, other_run = make_endpoint(), make_endpoint(run="run-2")
    headers = sign()
    assert endpoint.call(headers, target="/v1/b") == "signature"
    assert endpoint.call(headers, target="/v1/a?x=1") == "signature"
    assert endpoint.call(headers, method="PUT") == "signature"
    assert other_run.call(headers) == "other_run"
    assert endpoint.call(headers) == ""


def test_a_revoked_node_is_out_with_the_next_request(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint()
    assert endpoint.call(sign()) == ""
    endpoint.members[NODE.public] = replace(MEMBER, is_revoked=True)
    verified = endpoint.num_verified
    assert endpoint.call(sign()) == "revoked"
    assert endpoint.num_verified == verified


def test_cheap_checks_come_before_expensive_ones(make_endpoint: Callable[..., Endpoint]) -> None:
    limits = AuthLimits(node_rate=1.0, burst_s=1.0)
    endpoint = make_endpoint(limits)
    late = NOW_MS + 10**6
    stranger = forge(OTHER.public, sign())
    assert endpoint.call([], late) == "unsigned"  # format, though the clock is off too
    assert endpoint.call(stranger, late) == "clock"  # clock, though the node is unknown too
    assert endpoint.call(sign()) == ""  # takes the only token
    assert endpoint.call(stranger) == "unknown_node"  # standing, though the rate is used up
    assert endpoint.num_verified == 1
    assert endpoint.call(sign()) == "too_many"  # rate, though the signature would be valid
    assert endpoint.num_verified == 1
    assert len(endpoint.nonces) == 1


def test_forged_ids_are_refused_without_a_signature_being_looked_at(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint()
    headers = sign()
    for number in range(2000):
        assert (
            endpoint.call(forge(f"{number:064x}", headers), ip=f"10.1.{number // 250}.{number % 250}") == "unknown_node"
        )
    assert endpoint.num_verified == 0
    assert len(endpoint.nonces) == 0
    assert endpoint.auth.num_tracked == 0
    assert endpoint.call(headers) == ""


def test_one_address_gets_few_signatures_looked_at(make_endpoint: Callable[..., Endpoint]) -> None:
    limits = AuthLimits(address_rate=100.0, burst_s=1.0)
    endpoint = make_endpoint(limits)
    forged = sign_as_node(OTHER)
    codes = [endpoint.call(forged, NOW_MS + number // 10) for number in range(10_000)]  # 10,000 in one second
    assert set(codes) == {"signature", "too_many"}
    assert endpoint.num_verified <= 2 * 100 + 1
    assert endpoint.call(sign(), NOW_MS + 1000, ip="10.0.0.2") == ""


def test_forgeries_do_not_use_up_the_rate_of_the_one_they_name(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint(AuthLimits(owner_rate=1.0, burst_s=10.0))
    forged = sign_as_node(OTHER)
    for number in range(500):
        assert endpoint.call(forged, ip=f"10.2.0.{number % 200}") == "signature"
    for _ in range(10):
        assert endpoint.call(sign()) == ""
    assert endpoint.call(sign()) == "too_many"
    assert endpoint.call(sign(clock_ms=NOW_MS + 2000), NOW_MS + 2000) == ""


def test_a_flood_from_many_addresses_leaves_room_for_those_that_were_here_before(
    make_endpoint: Callable[..., Endpoint],
) -> None:
    endpoint = make_endpoint(AuthLimits(fresh_rate=50.0, burst_s=1.0))
    assert endpoint.call(sign()) == ""
    forged = sign_as_node(OTHER)
    for number in range(3000):
        endpoint.call(forged, ip=f"10.3.{number // 250}.{number % 250}")
    assert endpoint.num_verified <= 51
    assert endpoint.call(forged, ip="10.4.0.1") == "too_many"
    assert endpoint.call(sign()) == ""


def test_an_ipv6_host_is_one_address_whatever_it_calls_itself(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint(AuthLimits(address_rate=1.0, burst_s=5.0))
    forged = sign_as_node(OTHER)
    codes = [endpoint.call(forged, ip=f"2001:db8:1:2::{number:x}") for number in range(1, 20)]
    assert codes.count("signature") == 5
    assert endpoint.call(sign(), ip="2001:db8:1:3::1") == ""
    assert endpoint.call(sign(), ip="unix") == ""


def test_a_refusal_says_when_to_come_back(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint(AuthLimits(node_rate=0.1, burst_s=10.0))
    assert endpoint.call(sign()) == ""
    with pytest.raises(ApiError, match="try again in 10 s") as caught:
        endpoint.auth.check_head("POST", "/v1/a", sign(), "10.0.0.1", NOW_MS)
    assert caught.value.retry_after_s == 10
    assert endpoint.call(sign(clock_ms=NOW_MS + 10_000), NOW_MS + 10_000) == ""


def test_tables_keep_their_size_under_any_number_of_addresses_and_owners(
    make_endpoint: Callable[..., Endpoint],
) -> None:
    limits = AuthLimits(address_rate=1e5, owner_rate=1e5, fresh_rate=1e6, max_tracked=50)
    endpoint = make_endpoint(limits)
    for number in range(300):
        endpoint.members[NODE.public] = replace(MEMBER, owner=f"{number:064x}")
        assert endpoint.call(sign(), ip=f"10.5.{number // 250}.{number % 250}") == ""
    assert endpoint.auth.num_tracked == 50 + 50 + 50 + 1 + MAX_PLACES


def test_memory_is_flat_under_distinct_forged_ids(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint()
    headers = sign()

    def flood(first: int, count: int) -> None:
        for number in range(first, first + count):
            endpoint.call(
                forge(f"{number:064x}", headers), ip=f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            )

    flood(0, 5000)
    tracemalloc.start()
    flood(5000, 100)  # warms up one-time allocations
    before = tracemalloc.get_traced_memory()[0]
    flood(10_000, 5000)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 5000  # less than a byte for each id


def test_forgeries_from_a_shared_address_do_not_silence_a_neighbour(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint()
    neighbours = [Key.generate() for _ in range(50)]
    endpoint.members |= {key.public: replace(MEMBER, owner=key.public) for key in (OTHER, *neighbours)}
    assert endpoint.call(sign()) == ""
    for number in range(3000):  # in the name of one member, then of many
        endpoint.call(sign_as_node(OWNER, OTHER if number < 1000 else neighbours[number % 50]))
    assert endpoint.call(sign_as_node(OWNER, OTHER)) == "too_many"
    for _ in range(50):
        assert endpoint.call(sign()) == ""


def test_valid_requests_of_one_owner_do_not_silence_its_neighbours(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint()
    owners = [Key.generate() for _ in range(8)]
    endpoint.members |= {key.public: replace(MEMBER, owner=key.public) for key in owners}
    for key in owners:
        codes = [endpoint.call(sign(key)) for _ in range(300)]
        assert codes[0] == "" and codes[-1] == "too_many"
    assert endpoint.call(sign()) == ""


def test_forgeries_in_the_name_of_a_neighbour_do_not_end_its_connections(
    make_endpoint: Callable[..., Endpoint],
) -> None:
    endpoint = make_endpoint()
    assert endpoint.call(sign(), port=5001) == ""
    forged = sign_as_node(OTHER)
    codes = [endpoint.call(forged, port=6000 + number % 64) for number in range(2000)]
    assert codes[-1] == "too_many"
    for _ in range(50):
        assert endpoint.call(sign(), port=5001) == ""
    verified = endpoint.num_verified
    assert endpoint.call(sign(), port=5002) == "too_many", "a new connection waits for a token"
    assert endpoint.num_verified == verified
    late = NOW_MS + 1000
    assert endpoint.call(sign(clock_ms=late), late, port=5002) == ""


def test_a_forgery_on_a_connection_of_the_node_ends_its_privilege(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint = make_endpoint(AuthLimits(node_rate=1.0, burst_s=2.0))
    assert endpoint.call(sign(), port=5001) == ""
    forged = sign_as_node(OTHER)
    assert [endpoint.call(forged, port=5001) for _ in range(4)] == ["signature", "signature", "too_many", "too_many"]


def test_a_newcomer_joins_from_an_address_that_others_flood(make_endpoint: Callable[..., Endpoint]) -> None:
    endpoint, newcomer = make_endpoint(), Key.generate()
    others = [Key.generate() for _ in range(50)]
    endpoint.members |= {key.public: replace(MEMBER, owner=key.public) for key in others}
    raw = sign(newcomer)
    for number in range(3000):
        endpoint.call(sign_as_node(OWNER, others[number % 50]))
        with pytest.raises(ApiError, match="proof-of-work"):
            endpoint.auth.check_join("POST", "/v1/a", raw, "10.0.0.1", NOW_MS)
    text = endpoint.gate.make_challenge(newcomer.public, NOW_MS, bytes(8))
    stamp = solve_challenge(read_challenge(text, newcomer.public, 10**6), lambda: False)
    assert stamp is not None
    endpoint.auth.check_join("POST", "/v1/a", [*raw, (b"shoal-work", stamp.encode())], "10.0.0.1", NOW_MS)
    endpoint.members[newcomer.public] = replace(MEMBER, owner=newcomer.public)
    assert endpoint.call(sign(newcomer)) == ""
