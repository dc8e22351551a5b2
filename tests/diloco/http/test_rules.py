"""When a round closes, which peers it waits for, and how much a claim counts: rules without sockets."""

import pytest

from shoal.diloco.http.membership import PeerRegistry
from shoal.diloco.http.open_round import OpenRound, ReceivedUpdate, cap_claims
from shoal.diloco.http.settings import ReducerLimits, ReducerTimeouts
from shoal.diloco.round import RoundKey, Update
from shoal.net.api_error import ApiError

KEY = RoundKey("test", 0, 0, "00" * 32)


def make_round(*delivered: tuple[str, float]) -> OpenRound:
    made = OpenRound(KEY, 0.0)
    for peer, now_s in delivered:
        made.deliver(peer, ReceivedUpdate(Update(KEY, peer, 1, 1, b"", "fp32"), b"", ""), now_s)
    return made


def is_due(made: OpenRound, awaited: str, now_s: float) -> bool:
    return made.is_due(set(awaited), now_s, 2.0, 100.0)


def test_a_round_closes_at_once_when_all_that_are_here_have_delivered() -> None:
    made = make_round(("a", 1.0), ("b", 1.0))
    assert is_due(made, "ab", 1.0) and is_due(made, "a", 1.0)
    assert not is_due(make_round(), "", 1.0), "but never without an update"


def test_a_quorum_waits_for_the_others_as_long_as_the_grace() -> None:
    made = make_round(("a", 1.0), ("b", 1.5))
    assert not is_due(made, "abcd", 1.5), "two of four are a quorum"
    assert not is_due(made, "abcd", 3.4) and is_due(made, "abcd", 3.5)


def test_less_than_a_quorum_waits_until_the_longest_wait() -> None:
    made = make_round(("a", 1.0))
    assert not is_due(made, "abcd", 50.0) and is_due(made, "abcd", 101.0)


def test_a_refused_update_is_not_waited_for_and_does_not_count_for_the_quorum() -> None:
    made = make_round(("a", 1.0))
    made.refuse("b", "not finite")
    assert is_due(made, "ab", 1.0)


def test_a_broken_connection_counts_after_half_a_second_unless_the_peer_is_heard_again() -> None:
    registry = PeerRegistry(ReducerTimeouts(), ReducerLimits())
    registry.join("a", 0.0)
    registry.note_lost("a", 1.0)
    assert registry.is_here("a", 1.5) and not registry.is_here("a", 1.6)
    registry.note_seen("a", 1.7)
    assert registry.is_here("a", 1.8)


def test_a_silent_peer_is_gone_after_a_while_and_a_leaver_at_once() -> None:
    registry = PeerRegistry(ReducerTimeouts(presence_s=15.0), ReducerLimits())
    registry.join("a", 0.0)
    registry.join("b", 0.0)
    registry.leave("b")
    assert registry.list_here(15.0) == ("a",) and registry.list_here(15.1) == ()
    registry.join("b", 16.0)
    assert registry.list_here(16.0) == ("b",)


def test_two_misses_evict_and_a_delivery_brings_back() -> None:
    registry = PeerRegistry(ReducerTimeouts(max_misses=2), ReducerLimits())
    registry.join("a", 0.0)
    registry.note_miss("a")
    assert registry.is_awaited("a", 1.0)
    registry.note_miss("a")
    assert not registry.is_awaited("a", 1.0) and registry.is_here("a", 1.0)
    registry.note_delivery("a")
    assert registry.is_awaited("a", 1.0)


def test_a_full_registry_accepts_a_new_peer_only_in_place_of_one_that_is_gone() -> None:
    registry = PeerRegistry(ReducerTimeouts(presence_s=10.0), ReducerLimits(max_peers=2))
    registry.join("a", 0.0)
    registry.join("b", 5.0)
    with pytest.raises(ApiError):
        registry.join("c", 6.0)
    registry.join("c", 12.0)
    assert "a" not in registry and "b" in registry and len(registry) == 2


def test_a_claim_counts_up_to_twice_the_median_and_twice_its_own_record() -> None:
    claims = {"a": 100, "b": 110, "c": 90, "liar": 10**12}
    assert cap_claims(claims, {}, 2.0) == {"a": 100, "b": 110, "c": 90, "liar": 200}
    assert cap_claims(claims, {"liar": [20, 20, 30]}, 2.0)["liar"] == 40
    assert cap_claims({"a": 100, "liar": 10**12}, {}, 2.0)["liar"] == 200, "of two the lower claim is the measure"
    assert cap_claims({}, {}, 2.0) == {}
