"""Proof of work: the cost of a join, who can use a stamp, and the server's cost of checking one."""

import hashlib
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.identity.keys import Key
from shoal.identity.proof_of_work import JoinRate, WorkGate, is_solution, read_challenge, solve_challenge
from shoal.net.api_error import ApiError

NODE, OTHER = Key.generate().public, Key.generate().public
NOW_MS = 1_800_000_000_000
SALT = bytes(range(8))
MAX_WORK = 1 << 40


def make_gate(base_work: int = 50, run: str = "run-1", secret: bytes = b"s" * 32) -> WorkGate:
    return WorkGate(secret, run, JoinRate(base_work=base_work))


def solve(gate: WorkGate, node: str = NODE, now_ms: int = NOW_MS, salt: bytes = SALT) -> str:
    stamp = solve_challenge(read_challenge(gate.make_challenge(node, now_ms, salt), node, MAX_WORK), lambda: False)
    assert stamp is not None
    return stamp


def refuse(gate: WorkGate, stamp: str, node: str = NODE, now_ms: int = NOW_MS) -> str:
    with pytest.raises(ApiError) as caught:
        gate.check_stamp(stamp, node, now_ms)
    assert (caught.value.status, caught.value.code) == (401, "work")
    return caught.value.text


def test_a_solved_challenge_opens_the_gate_until_it_expires() -> None:
    gate = make_gate()
    stamp = solve(gate)
    gate.check_stamp(stamp, NODE, NOW_MS)
    gate.check_stamp(stamp, NODE, NOW_MS + 899_999)
    assert "expired" in refuse(gate, stamp, now_ms=NOW_MS + 900_000)


def test_a_stamp_is_for_one_node_one_run_and_one_server() -> None:
    stamp = solve(make_gate())
    assert "another node" in refuse(make_gate(), stamp, node=OTHER)
    assert "not for a challenge of this server" in refuse(make_gate(run="run-2"), stamp)
    assert "not for a challenge of this server" in refuse(make_gate(secret=b"t" * 32), stamp)


def test_a_counter_that_solves_nothing_is_refused() -> None:
    gate = make_gate(base_work=1 << 40)
    assert "does not solve" in refuse(gate, f"{gate.make_challenge(NODE, NOW_MS, SALT)}.0")


def test_a_challenge_cannot_be_made_easier() -> None:
    gate = make_gate(base_work=1 << 40)
    parts = gate.make_challenge(NODE, NOW_MS, SALT).split(".")
    for place, value in ((2, "1"), (3, str(10**12)), (4, "0" * 16)):
        easier = ".".join([*parts[:place], value, *parts[place + 1 :]])
        assert "not for a challenge of this server" in refuse(gate, f"{easier}.0")


@given(st.text(max_size=300) | st.text("0123456789abcdef.", max_size=300))
def test_whatever_else_comes_is_refused(stamp: str) -> None:
    refuse(make_gate(), stamp)


def test_two_challenges_differ_by_their_salt() -> None:
    gate = make_gate()
    assert gate.make_challenge(NODE, NOW_MS, SALT) != gate.make_challenge(NODE, NOW_MS, SALT[::-1])


def test_solutions_are_as_rare_as_the_work_says() -> None:
    gate = make_gate(base_work=20)
    challenge = read_challenge(gate.make_challenge(NODE, NOW_MS, SALT), NODE, MAX_WORK)
    found = sum(is_solution(challenge, counter) for counter in range(20_000))
    assert abs(found - 1000) < 160  # five standard deviations


def test_a_client_is_not_made_to_work_without_end() -> None:
    text = make_gate(base_work=1 << 30).make_challenge(NODE, NOW_MS, SALT)
    with pytest.raises(ValueError, match="more than the limit of 1000"):
        read_challenge(text, NODE, 1000)
    with pytest.raises(ValueError, match="no valid challenge for this node"):
        read_challenge(text, OTHER, MAX_WORK)
    with pytest.raises(ValueError, match="no valid challenge for this node"):
        read_challenge(text + "0" * 1000, NODE, MAX_WORK)


def test_solving_stops_when_told() -> None:
    challenge = read_challenge(make_gate(base_work=1 << 50).make_challenge(NODE, NOW_MS, SALT), NODE, 1 << 50)
    assert solve_challenge(challenge, lambda: True) is None


def count_hashes(monkeypatch: pytest.MonkeyPatch, call: Callable[[], object]) -> int:
    """How many times SHA-256 is started, by itself or in a MAC."""
    count = 0
    sha256 = hashlib.sha256

    def counted(data: bytes = b"") -> "hashlib._Hash":
        nonlocal count
        count += 1
        return sha256(data)

    with monkeypatch.context() as patch:
        patch.setattr("shoal.identity.proof_of_work.hashlib.sha256", counted)
        with pytest.raises(ApiError):
            call()
    return count


def test_a_stamp_costs_the_server_one_hash_however_much_work_it_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    dear, forged = make_gate(base_work=1 << 50), make_gate(base_work=1 << 50, secret=b"t" * 32)
    stamp = f"{dear.make_challenge(NODE, NOW_MS, SALT)}.7"
    assert count_hashes(monkeypatch, lambda: dear.check_stamp(stamp, NODE, NOW_MS)) == 1
    assert count_hashes(monkeypatch, lambda: forged.check_stamp(stamp, NODE, NOW_MS)) == 0


def run_joins(rate: JoinRate, per_minute: float, minutes: int, start_s: float = 0.0) -> float:
    now_s = start_s
    for _ in range(int(per_minute * minutes)):
        now_s += 60.0 / per_minute
        rate.note_join(now_s)
    return now_s


def test_work_is_at_rest_below_the_target_rate() -> None:
    rate = JoinRate(base_work=1000)
    assert rate.find_work(0.0) == 1000
    now_s = run_joins(rate, per_minute=5.0, minutes=60)
    assert rate.find_work(now_s) == 1000


def test_work_doubles_with_the_join_rate_and_falls_again() -> None:
    works = []
    for per_minute in (12.0, 24.0, 48.0):
        rate = JoinRate(base_work=1000)
        now_s = run_joins(rate, per_minute, minutes=60)
        works.append(rate.find_work(now_s))
        assert rate.find_work(now_s + 120.0) == pytest.approx(works[-1] / 2, rel=0.01)
        assert rate.find_work(now_s + 3600.0) == 1000
    assert works == pytest.approx([2000, 4000, 8000], rel=0.05)


def test_work_has_an_end_so_that_a_flood_shuts_nobody_out_for_good() -> None:
    rate = JoinRate(base_work=1000)
    now_s = run_joins(rate, per_minute=60_000.0, minutes=1)
    assert rate.find_work(now_s) == 64_000


def test_no_join_is_taken_above_the_rate_at_which_work_is_highest() -> None:
    gate = make_gate(base_work=1)
    stamps = [solve(gate, salt=number.to_bytes(8, "big")) for number in range(2000)]
    taken = 0
    for stamp in stamps:  # all in one second
        with suppress(ApiError):
            gate.check_stamp(stamp, NODE, NOW_MS)
            taken += 1
            gate.find_rate(NODE).note_join(NOW_MS / 1000)
    assert taken < 100, "a challenge from before the flood is refused when the work is 4 times as much"
    while not gate.rate.find_wait(NOW_MS / 1000):
        gate.rate.note_join(NOW_MS / 1000)
    assert gate.rate.find_work(NOW_MS / 1000) == 64
    expensive = solve(gate)
    with pytest.raises(ApiError, match="too many nodes") as caught:
        gate.check_stamp(expensive, NODE, NOW_MS)
    assert caught.value.status == 429 and caught.value.retry_after_s == 1
    gate.check_stamp(expensive, NODE, NOW_MS + 2000)


def test_a_stamp_pays_once() -> None:
    gate = make_gate()
    stamp, other = solve(gate), solve(gate, salt=b"othersal")
    assert [gate.spend_stamp(stamp, NOW_MS), gate.spend_stamp(stamp, NOW_MS)] == [True, False]
    assert not gate.spend_stamp(stamp.rpartition(".")[0] + ".123456", NOW_MS), "another solution of the same challenge"
    assert gate.spend_stamp(other, NOW_MS)
    gate.return_stamp(stamp)
    assert gate.spend_stamp(stamp, NOW_MS)


def test_spent_stamps_are_forgotten_when_they_have_expired() -> None:
    gate = make_gate(base_work=1)
    for number in range(100):
        gate.spend_stamp(solve(gate, salt=number.to_bytes(8, "big")), NOW_MS)
    late_ms = NOW_MS + 3_600_000
    assert gate.spend_stamp(solve(gate, now_ms=late_ms), late_ms)
    assert len(gate._spent) == 1


def test_a_flood_of_strangers_costs_an_owner_with_a_record_nothing_and_its_own_joins_cost_it() -> None:
    other = "b" * 64
    gate = WorkGate(b"s" * 32, "run-1", JoinRate(base_work=1000), find_payer=lambda node: "ann" if node == NODE else "")
    now_s = run_joins(gate.rate, per_minute=600.0, minutes=30)
    assert gate.find_rate(other).find_work(now_s) == 64_000
    assert gate.find_rate(NODE).find_work(now_s) == 1000
    run_joins(gate.find_rate(NODE), per_minute=60.0, minutes=10, start_s=now_s)
    assert gate.find_rate(NODE).find_work(now_s + 600) > 9000


def test_a_clock_set_back_changes_no_price() -> None:
    rate = JoinRate(base_work=1000)
    now_s = run_joins(rate, per_minute=60.0, minutes=30)
    assert rate.find_work(now_s - 10_000.0) == rate.find_work(now_s)


def test_requesting_challenges_does_not_make_joining_more_expensive() -> None:
    gate = make_gate(base_work=1000)
    for number in range(1000):
        gate.make_challenge(NODE, NOW_MS, number.to_bytes(8, "big"))
    assert gate.rate.find_work(NOW_MS / 1000) == 1000


def test_cheap_challenges_cannot_be_hoarded() -> None:
    gate = make_gate()
    hoarded = [solve(gate, salt=number.to_bytes(8, "big")) for number in range(20)]
    run_joins(gate.rate, per_minute=60.0, minutes=10, start_s=NOW_MS / 1000 - 600)
    assert gate.rate.find_work(NOW_MS / 1000) > 4 * 50
    for stamp in hoarded:
        assert "more work than" in refuse(gate, stamp)


def test_a_gate_needs_a_secret() -> None:
    with pytest.raises(ValueError, match="16 random bytes"):
        make_gate(secret=b"short")
