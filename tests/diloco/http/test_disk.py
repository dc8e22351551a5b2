"""What a reducer stores: its state after a kill at any point, its log, and the state it takes from its peers."""

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.diloco.http import snapshots, state_recovery
from shoal.diloco.http.messages import HeldState, Payload, encode_outcome
from shoal.diloco.http.round_log import REBUILT, ROUND, RoundLog, RoundLogError, read_log
from shoal.diloco.http.service import open_reducer
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.http.snapshots import SnapshotStore
from shoal.diloco.http.state_recovery import STALL_S, WINDOW_S, StateRecovery
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.reduce import FinishedRound, apply_outcome, close_round
from shoal.diloco.round import Update
from shoal.diloco.state import OuterState, encode_state, start_state
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.net.api_error import ApiError

PLAN = DilocoPlan("test", (50, 30), Rules(codec="int8"))
KEY = Key.generate()


def make_state() -> OuterState:
    return start_state(tuple(np.linspace(0.0, 1.0, size, dtype=np.float32) for size in PLAN.sizes))


def close_next(state: OuterState, fragment: int, *members: str) -> FinishedRound:
    from shoal.diloco.codecs import find_codec

    key = PLAN.name_round(state, fragment)
    values = np.full(PLAN.sizes[fragment], 0.1 * (key.round + 1), dtype=np.float32)
    update = Update(key, KEY.public, 10, 5, find_codec("int8").encode(values), "int8")
    closed = close_round(PLAN, state, key, [update], members=members)
    assert isinstance(closed, FinishedRound)
    return closed


def open_shelf(folder: Path, every: int = 4) -> SnapshotStore:
    return SnapshotStore(folder, PLAN, KEY.public, keep=2, snapshot_every=every)


def test_rounds_of_two_fragments_lead_to_one_state_in_whichever_order_they_are_applied() -> None:
    plan, start = PLAN, make_state()
    first = close_next(start, 1)
    second = close_next(first.state, 0, "newcomer")
    assert first.outcome.members != second.outcome.members
    one, other = start, start
    for outcome in (first.outcome, second.outcome):
        one = apply_outcome(plan, one, outcome)
    for outcome in (second.outcome, first.outcome):
        other = apply_outcome(plan, other, outcome)
    assert one.hash == other.hash == second.state.hash


def test_a_shelf_gives_back_the_state_after_the_last_outcome_whenever_it_was_left(tmp_path) -> None:
    store, state = open_shelf(tmp_path), make_state()
    assert store.load() is None
    store.begin(state)
    for number in range(11):
        closed = close_next(state, number % 2)
        store.add_outcome(closed.outcome, encode_outcome(KEY, closed.outcome))
        state = closed.state
        found = open_shelf(tmp_path).load()
        assert found is not None and found.hash == state.hash
        if store.is_snap_due():
            store.snap(state)
    kept = [outcome.key.round for outcome in store.list_outcomes() if outcome.key.fragment == 0]
    assert kept[-1] == 5 and kept[0] >= 2, "old outcomes went"


def test_a_shelf_whose_files_do_not_fit_together_is_refused(tmp_path) -> None:
    store, state = open_shelf(tmp_path), make_state()
    store.begin(state)
    first = close_next(state, 0)
    second = close_next(first.state, 0)
    store.add_outcome(second.outcome, encode_outcome(KEY, second.outcome))
    with pytest.raises(ConfigError, match="outcome does not follow from the state"):
        open_shelf(tmp_path).load()


def test_a_state_is_exported_once_and_read_in_parts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "CHUNK_BYTES", 100)
    store, state = open_shelf(tmp_path), make_state()
    size, digest = store.export(state)
    data = encode_state(state)
    assert (size, digest) == (len(data), hashlib.sha256(data).hexdigest())
    last = size // 100
    assert store.read_state(state.hash, 0) == data[:100] and store.read_state(state.hash, last) == data[100 * last :]
    assert store.read_state("ab" * 32, 0) is None


def test_a_chain_is_read_back_and_every_change_to_it_is_found(tmp_path) -> None:
    chain = RoundLog(tmp_path, "test", KEY)
    for number in range(3):
        chain.append(ROUND, f"round/{number}", {"state": "ab" * 32, "peers": [KEY.public]})
    path, head = tmp_path / "rounds.jsonl", tmp_path / "head.json"
    assert [event.kind for event in read_log(path, "test", KEY.public, head)] == ["genesis"] + 3 * [ROUND]
    lines = path.read_text().splitlines()
    value = json.loads(lines[2])
    value["body"]["state"] = "cd" * 32
    changed = json.dumps(value, sort_keys=True, separators=(",", ":"))
    for bad in ([*lines[:2], changed, lines[3]], lines[:-1], [lines[0], *lines[2:]], [*lines, lines[-1]]):
        path.write_text("\n".join(bad) + "\n")
        with pytest.raises(RoundLogError):
            list(read_log(path, "test", KEY.public, head))
    with pytest.raises(RoundLogError):
        list(read_log(path, "test", Key.generate().public))


def test_a_torn_line_is_cut_off_and_the_chain_goes_on(tmp_path) -> None:
    RoundLog(tmp_path, "test", KEY)
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"actor":"torn')
    chain = RoundLog(tmp_path, "test", KEY)
    chain.append(ROUND, "round/0", {})
    assert len(list(read_log(tmp_path / "rounds.jsonl", "test", KEY.public))) == 2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def hold(state: OuterState) -> tuple[HeldState, bytes]:
    data = encode_state(state)
    rounds = tuple(part.round for part in state.fragments)
    return HeldState(hash=state.hash, size=len(data), digest=hashlib.sha256(data).hexdigest(), rounds=rounds), data


def test_the_state_that_most_peers_hold_is_chosen_and_a_liar_is_passed_over() -> None:
    clock, state = Clock(), make_state()
    newer = close_next(state, 0).state
    search = StateRecovery(PLAN, 4, clock)
    (good, data), (lie, _) = hold(newer), hold(close_next(newer, 1).state)
    assert search.take_holding("d", lie).status == "waiting"
    for peer in ("c", "b"):
        assert search.take_holding(peer, good).status == "waiting", "not all have been heard"
    search.take_holding("a", good)
    answers = {peer: search.take_holding(peer, good).status for peer in "abc"}
    assert answers == {"a": "wanted", "b": "waiting", "c": "waiting"}
    with pytest.raises(ApiError):
        search.find_payload("b", good.hash)
    payload = search.find_payload("a", good.hash)
    payload.put_chunk(0, b"\0" * len(data))
    assert search.open_state(payload) is None, "what it sent is not what it said"
    assert search.take_holding("b", good).status == "wanted"
    clock.now_s += STALL_S + 0.1
    assert search.take_holding("c", good).status == "wanted", "b stands still"
    payload = search.find_payload("c", good.hash)
    payload.put_chunk(0, data)
    found = search.open_state(payload)
    assert found is not None and found.hash == newer.hash and search.list_holders() == ["a", "b", "c"]


def test_half_of_the_peers_decide_after_the_window_and_the_state_with_more_rounds_wins() -> None:
    clock, state = Clock(), make_state()
    newer = close_next(state, 0).state
    search = StateRecovery(PLAN, 2, clock)
    search.take_holding("a", hold(state)[0])
    assert search.take_holding("b", hold(newer)[0]).status == "waiting"
    clock.now_s = 2 * WINDOW_S
    assert search.take_holding("b", hold(newer)[0]).status == "wanted"
    assert search.take_holding("a", hold(state)[0]).status == "waiting"


def test_the_first_to_speak_does_not_decide_where_no_number_of_peers_was_named() -> None:
    clock, state = Clock(), make_state()
    search = StateRecovery(PLAN, 1, clock)
    assert search.take_holding("liar", hold(close_next(state, 1).state)[0]).status == "waiting"
    good, _ = hold(state)
    for peer in "ab":
        search.take_holding(peer, good)
    clock.now_s = WINDOW_S
    assert search.take_holding("a", good).status == "wanted"


def test_a_chosen_state_that_nobody_holds_any_more_is_not_waited_for() -> None:
    """For example when the only peer applies the last outcome of the old reducer while the new one asks."""
    clock, state = Clock(), make_state()
    search = StateRecovery(PLAN, 1, clock)
    search.take_holding("a", hold(state)[0])
    clock.now_s = WINDOW_S
    assert search.take_holding("a", hold(state)[0]).status == "wanted"
    newer, data = hold(close_next(state, 0).state)
    assert search.take_holding("a", newer).status == "wanted"
    payload = search.find_payload("a", newer.hash)
    payload.put_chunk(0, data)
    assert search.open_state(payload) is not None


def test_a_state_that_its_holders_cannot_show_does_not_stand_in_the_way_of_the_others() -> None:
    clock, state = Clock(), make_state()
    search = StateRecovery(PLAN, 3, clock)
    (lie, data), (good, whole) = hold(close_next(state, 1).state), hold(state)
    for peer, holding in (("x", lie), ("y", lie), ("a", good)):
        search.take_holding(peer, holding)
    for peer in "xy":
        search.find_payload(peer, lie.hash).put_chunk(0, b"\0" * len(data))
        assert search._payload is not None and search.open_state(search._payload) is None
    assert search.take_holding("x", lie).status == "waiting"
    assert search.take_holding("a", good).status == "wanted"
    payload = search.find_payload("a", good.hash)
    payload.put_chunk(0, whole)
    assert search.open_state(payload) is not None


@pytest.mark.parametrize("changes", [{"members": ("nobody's key",)}, {"step": 1 << 60}, {"lanes": (1, 2)}])
def test_a_state_that_no_outcome_could_follow_is_not_accepted(changes: dict[str, Any]) -> None:
    clock = Clock()
    search = StateRecovery(PLAN, 1, clock)
    holding, data = hold(replace(make_state(), **changes))
    search.take_holding("a", holding)
    clock.now_s = WINDOW_S
    assert search.take_holding("a", holding).status == "wanted"
    payload = search.find_payload("a", holding.hash)
    payload.put_chunk(0, data)
    assert search.open_state(payload) is None


def test_a_last_chunk_that_comes_twice_makes_one_reducer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_recovery, "WINDOW_S", 0.0)

    async def run() -> None:
        async with open_reducer(ReducerConfig(port=0, peers=(KEY.public,)), tmp_path, PLAN) as service:
            context, (holding, data) = service.context, hold(make_state())
            assert context.recovery.take_holding(KEY.public, holding).status == "wanted"
            payload = context.recovery.find_payload(KEY.public, holding.hash)
            payload.put_chunk(0, data)
            await asyncio.gather(context.finish_recovery(payload), context.finish_recovery(payload))
            events = list(read_log(tmp_path / "rounds.jsonl", "test", service.public))
            assert [event.kind for event in events].count(REBUILT) == 1

    asyncio.run(run())


def test_a_holder_on_a_slow_link_is_not_skipped_while_bytes_arrive() -> None:
    clock = Clock()
    search = StateRecovery(PLAN, 2, clock)
    holding, _ = hold(make_state())
    for peer in "ab":
        search.take_holding(peer, holding)
    payload = search.find_payload("a", holding.hash)
    for _ in range(5):
        clock.now_s += 0.9 * STALL_S
        search.note_progress()
        assert search.take_holding("b", holding).status == "waiting"
    assert search.find_payload("a", holding.hash) is payload


def test_a_chunk_rewritten_while_the_whole_is_hashed_is_not_returned(monkeypatch) -> None:
    data = b"good" * 10
    payload = Payload(len(data), hashlib.sha256(data).hexdigest())
    payload.put_chunk(0, data)

    def hash_late(value: bytes) -> object:
        found = hashlib.new("sha256", value)
        payload.put_chunk(0, b"evil" * 10)
        return found

    monkeypatch.setattr("shoal.diloco.http.messages.hashlib.sha256", hash_late)
    assert payload.open() == data


def test_a_state_of_another_size_is_not_looked_at() -> None:
    search = StateRecovery(PLAN, 1, Clock())
    holding, _ = hold(make_state())
    with pytest.raises(ApiError):
        search.take_holding("a", holding.model_copy(update={"size": 10**12}))
