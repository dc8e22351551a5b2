"""When a round closes, which peers it waits for, and how much a claim counts: rules without sockets."""

import pytest

from shoal.diloco.http.membership import PeerRegistry
from shoal.diloco.http.open_round import OpenRound, ReceivedUpdate, cap_claims
from shoal.diloco.http.settings import ReducerLimits, ReducerTimeouts
from shoal.diloco.round import RoundKey, Update
from shoal.net.api_error import ApiError

KEY = RoundKey("test", 0, 0, "00" * 32)
NAMED = frozenset({"a", "b", "c", "d", "liar"})


def make_round(*delivered: tuple[str, float]) -> OpenRound:
    made = OpenRound(KEY, 0.0)
    for peer, now_s in delivered:
        received = ReceivedUpdate(Update(KEY, peer, 1, 1, b"", "fp32"), b"", "")
        made.deliver(peer, received, now_s, is_named=peer in NAMED)
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
    registry = PeerRegistry(ReducerTimeouts(), ReducerLimits(), NAMED)
    registry.join("a", 0.0)
    registry.note_lost("a", 1.0)
    assert registry.is_here("a", 1.5) and not registry.is_here("a", 1.6)
    registry.note_seen("a", 1.7)
    assert registry.is_here("a", 1.8)


def test_a_silent_peer_is_gone_after_a_while_and_a_leaver_at_once() -> None:
    registry = PeerRegistry(ReducerTimeouts(presence_s=15.0), ReducerLimits(), NAMED)
    registry.join("a", 0.0)
    registry.join("b", 0.0)
    registry.leave("b")
    assert registry.list_here(15.0) == ("a",) and registry.list_here(15.1) == ()
    registry.join("b", 16.0)
    assert registry.list_here(16.0) == ("b",)


def test_two_misses_evict_and_a_delivery_brings_back() -> None:
    registry = PeerRegistry(ReducerTimeouts(max_misses=2), ReducerLimits(), NAMED)
    registry.join("a", 0.0)
    registry.note_miss("a")
    assert registry.is_awaited("a", 1.0)
    registry.note_miss("a")
    assert not registry.is_awaited("a", 1.0) and registry.is_here("a", 1.0)
    registry.note_delivery("a")
    assert registry.is_awaited("a", 1.0)


def test_a_full_registry_accepts_a_new_peer_only_in_place_of_one_that_is_gone() -> None:
    registry = PeerRegistry(ReducerTimeouts(presence_s=10.0), ReducerLimits(max_peers=2), NAMED)
    registry.join("a", 0.0)
    registry.join("b", 5.0)
    with pytest.raises(ApiError):
        registry.join("c", 6.0)
    registry.join("c", 12.0)
    assert "a" not in registry and "b" in registry and len(registry) == 2


def cap(claims: dict[str, int], records: dict[str, list[int]]) -> dict[str, int]:
    return cap_claims(claims, records, 2.0, named=NAMED, full_rounds=4)


def test_a_claim_counts_up_to_twice_the_median_and_twice_its_own_record() -> None:
    claims = {"a": 100, "b": 110, "c": 90, "liar": 10**12}
    assert cap(claims, {}) == {"a": 100, "b": 110, "c": 90, "liar": 200}
    assert cap(claims, {"liar": [20, 20, 30]})["liar"] == 40
    assert cap({"a": 100, "liar": 10**12}, {})["liar"] == 200, "of two the lower claim is the measure"
    assert cap({}, {}) == {}


def test_a_peer_that_is_not_named_counts_in_proportion_to_its_record_and_changes_no_measure() -> None:
    claims = {"a": 100, "b": 110, **{f"sybil-{number}": 10**12 for number in range(16)}}
    first = cap(claims, {})
    assert (first["a"], first["b"]) == (100, 110) and {first[peer] for peer in claims if peer > "s"} == {1}
    assert cap(claims, {"sybil-0": [1, 1]})["sybil-0"] == 100, "half a record: half of twice the lower claim"
    assert cap(claims, {"sybil-0": [1] * 4})["sybil-0"] == 200
    assert cap({"sybil-0": 5}, {}) == {"sybil-0": 1}


def test_no_round_waits_for_an_open_peer_or_closes_with_nothing_else() -> None:
    strangers = [(f"sybil-{number}", 0.5) for number in range(16)]
    assert not is_due(make_round(*strangers), "", 1000.0)
    assert not is_due(make_round(*strangers, ("a", 1.0)), "abcd", 4.0), "they are no quorum"
    assert not is_due(make_round(*strangers, ("a", 90.0)), "abcd", 100.6), "and start no clock"
    assert is_due(make_round(*strangers, ("a", 1.0)), "a", 1.0)


def test_open_peers_have_places_of_their_own() -> None:
    registry = PeerRegistry(ReducerTimeouts(), ReducerLimits(max_peers=2, max_open_peers=3), NAMED)
    for number in range(3):
        registry.join(f"sybil-{number}", 0.0)
    with pytest.raises(ApiError, match="maximum number"):
        registry.join("sybil-3", 0.0)
    registry.join("a", 0.0)
    registry.join("b", 0.0)
    assert not registry.is_awaited("sybil-0", 0.0) and registry.is_here("sybil-0", 0.0)
