import doctest
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.diloco.members import Net, build_group, build_peer, draw_batch, measure_loss, train_members, train_peer

import shoal.diloco.peer as peer_module
from shoal.diloco.local import LocalAverager, LocalGroup
from shoal.diloco.outer import OuterRule, Rules
from shoal.diloco.peer import Peer, PeerOptions, RoundReport
from shoal.diloco.reduce import StateMismatchError, apply_outcome, share_steps
from shoal.diloco.round import (
    AveragerUnavailableError,
    RefusedUpdateError,
    RoundKey,
    RoundOutcome,
    StaleRoundError,
    Update,
)
from shoal.diloco.state import FragmentState, OuterState

FAST = Rules(interval=5, dynamic=False)


def flat_weights(model: Net) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])


def train_in_turn(pairs: list[tuple[Peer, Net]], num_steps: int, start: int = 0) -> list[RoundReport]:
    """Peers with wait_s = 0: one step each, then a poll for outcomes."""
    reports: list[RoundReport | None] = []
    for step in range(start, start + num_steps):
        for peer, model in pairs:
            x, y = draw_batch(peer.name, step)
            (model(x) - y).square().mean().backward()
            reports.append(peer.step(tokens=8))
        reports += [peer.poll() for peer, _ in pairs]
    return [report for report in reports if report]


def build_peers(group: LocalGroup, names: str, **options: float) -> list[tuple[Peer, Net]]:
    wanted = PeerOptions(wait_s=0.0, **options)  # type: ignore[arg-type]
    return [build_peer(group, name, options=wanted) for name in names]


def test_the_example_in_the_docstring_works() -> None:
    assert doctest.testmod(peer_module).failed == 0


def test_a_run_learns_and_everyone_ends_with_the_outer_weights() -> None:
    group = build_group(FAST)
    before = measure_loss(group.state)
    pairs = build_peers(group, "abc")
    train_in_turn(pairs, 60)
    assert measure_loss(group.state) < 0.5 * before
    for peer, model in pairs:
        assert (flat_weights(model) == group.state.fragments[0].theta).all()
        assert peer.is_settled and peer.position == peer.state.step == 60


def test_inner_moments_are_kept_across_rounds_and_the_schedule_runs_on_the_shared_step() -> None:
    group = build_group(FAST)
    (peer, model), *_ = build_peers(group, "a")
    rates: list[float] = []
    peer.schedule = lambda step: 1e-3 / (1 + step)
    train_peer(peer, model, 12, lambda _: rates.append(peer.inner.param_groups[0]["lr"]))
    assert rates == pytest.approx([1e-3 / (1 + step) for step in range(12)])
    moments = [state["step"].item() for state in peer.inner.state.values()]
    assert set(moments) == {12.0}


@pytest.mark.parametrize("num_fragments", [2, 3])
def test_fragments_take_turns_and_hold_every_parameter_once(num_fragments: int) -> None:
    group = build_group(Rules(interval=6, dynamic=False), num_fragments)
    pairs = build_peers(group, "ab")
    assert sum(group.plan.sizes) == flat_weights(pairs[0][1]).size
    reports = train_in_turn(pairs, 12)
    turns = [(report.round, report.fragment) for report in reports[::2]]
    assert turns == [(number, index) for number in range(2) for index in range(num_fragments)]
    assert [part.round for part in group.state.fragments] == [2] * num_fragments and group.state.step == 12
    assert {peer.state.hash for peer, _ in pairs} == {group.state.hash}


def test_overlap_applies_the_outcome_later_and_loses_no_inner_step() -> None:
    """With alpha 1, weights after the delay are the new outer weights plus the steps taken meanwhile."""
    group = build_group(FAST)
    pairs = build_peers(group, "ab", delay=3, alpha=1.0)
    train_in_turn(pairs, 5)
    arrived = [flat_weights(model) for _, model in pairs]
    assert group.state.fragments[0].round == 1, "closed while inner steps continue"
    assert all(peer.state.fragments[0].round == 0 for peer, _ in pairs)
    train_in_turn(pairs, 2, start=5)
    for (_, model), then in zip(pairs, arrived, strict=True):
        assert np.abs(flat_weights(model) - then).max() > 0
    ends = []
    for peer, model in pairs:  # the third step, checked right before it is applied
        x, y = draw_batch(peer.name, 7)
        (model(x) - y).square().mean().backward()
        peer._step_inner()
        ends.append(flat_weights(model))
        for pending in peer._pending.values():
            pending.steps_since += 1
        assert peer.poll() is not None
    for (_, model), then, end in zip(pairs, arrived, ends, strict=True):
        assert (flat_weights(model) == group.state.fragments[0].theta + (end - then)).all()


def test_alpha_zero_takes_the_outer_weights_as_they_are() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab", delay=2, alpha=0.0)
    train_in_turn(pairs, 7)
    assert all((flat_weights(model) == group.state.fragments[0].theta).all() for _, model in pairs)


def test_overlapped_runs_learn_too() -> None:
    group = build_group(Rules(interval=6, dynamic=False), 2)
    before = measure_loss(group.state)
    reports = train_members(group, "abcd", 60, options=PeerOptions(delay=2, wait_s=20.0))
    assert measure_loss(group.state) < 0.6 * before
    assert all([r.state for r in reports[name]] == [r.state for r in reports["a"]] for name in "bcd")


def test_a_peer_that_leaves_is_not_waited_for_and_a_newcomer_counts_from_the_next_round() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "abc")
    train_in_turn(pairs, 5)
    pairs.pop()[0].close()
    assert {report.peers for report in train_in_turn(pairs, 5)} == {("a", "b")}
    pairs += build_peers(group, "d")
    newcomer, model = pairs[-1]
    assert (flat_weights(model) == group.state.fragments[0].theta).all() and newcomer.position == 10
    assert newcomer.state.fragments[0].momentum.any()
    assert {report.peers for report in train_in_turn(pairs, 5)} == {("a", "b", "d")}
    assert group.state.members == ("a", "b", "d")


class FailingAverager:
    """An averager that raises each of the given exceptions once."""

    def __init__(self, inner: LocalAverager, on_submit: list[Exception], on_collect: list[Exception]) -> None:
        self.inner, self.on_submit, self.on_collect = inner, on_submit, on_collect

    def submit(self, update: Update) -> None:
        if self.on_submit:
            raise self.on_submit.pop(0)
        self.inner.submit(update)

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        if self.on_collect:
            raise self.on_collect.pop(0)
        return self.inner.collect(key, timeout_s)

    def fetch_state(self, timeout_s: float) -> OuterState:
        return self.inner.fetch_state(timeout_s)

    def close(self) -> None:
        self.inner.close()


def make_failing(peer: Peer, *, on_submit: tuple[Exception, ...] = (), on_collect: tuple[Exception, ...] = ()) -> None:
    assert isinstance(peer.averager, LocalAverager)
    peer.averager = FailingAverager(peer.averager, list(on_submit), list(on_collect))


class ForgetfulAverager(FailingAverager):
    """Forgets an update after reporting its outcome, as network engines do; its state is unavailable once."""

    is_away = True

    def __init__(self, inner: LocalAverager, on_collect: list[Exception]) -> None:
        super().__init__(inner, [], on_collect)
        self.held: set[RoundKey] = set()

    def submit(self, update: Update) -> None:
        self.held.add(update.key)
        super().submit(update)

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        assert key in self.held, "only what was submitted can be collected"
        if self.on_collect:
            self.held.discard(key)
        return super().collect(key, timeout_s)

    def fetch_state(self, timeout_s: float) -> OuterState:
        if self.is_away:
            self.is_away = False
            raise AveragerUnavailableError("died in this moment")
        return super().fetch_state(timeout_s)


@pytest.mark.parametrize("kind", [StaleRoundError, RefusedUpdateError, None])
def test_an_averager_that_dies_after_its_answer_is_asked_again_and_ends_no_training(kind) -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    peer, _ = pairs[0]
    key = group.plan.name_round(group.state, 0)
    told = AveragerUnavailableError("no quorum") if kind is None else kind(key, "so it is")
    assert isinstance(peer.averager, LocalAverager)
    peer.averager = ForgetfulAverager(peer.averager, [told])
    train_in_turn(pairs, 11)
    assert peer.state.fragments[0].round == 2 and peer.state.hash == group.state.hash


def test_while_the_averager_is_unavailable_inner_steps_continue_and_none_is_lost() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    peer, model = pairs[0]
    make_failing(peer, on_submit=(AveragerUnavailableError(),) * 4, on_collect=(AveragerUnavailableError(),) * 3)
    assert train_in_turn(pairs, 5) == []
    assert group.state.fragments[0].round == 0 and peer._pending[0].update.steps == 5
    arrived = peer._pending[0].arrived
    reports = train_in_turn(pairs, 3, start=5)
    assert {report.peers for report in reports} == {("a", "b")}
    walked = flat_weights(model) - group.state.fragments[0].theta
    assert np.abs(walked).max() > 0 and np.abs(arrived).max() > 0
    assert peer.counts[0].steps == 3, "steps since handing in are for the next round"


@pytest.mark.parametrize("is_told", [True, False])
def test_a_peer_that_missed_a_round_keeps_its_steps(is_told: bool) -> None:
    """Whether it gets the outcome or has to fetch the state, its steps count in the next round."""
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    late, model = pairs[1]
    if is_told:
        make_failing(late, on_submit=(StaleRoundError(group.plan.name_round(group.state, 0), "it is over"),))
    train_in_turn(pairs[1:], 4)
    LocalAverager(group, "b").close()
    walked = flat_weights(model) - group.state.fragments[0].theta
    train_in_turn(pairs[:1], 5)
    group.members.add("b")
    (report,) = train_in_turn(pairs[1:], 1, start=4)
    assert report.peers == (() if is_told else ("a",)) and report.note and not report.is_dropped
    assert late.state.hash == group.state.hash and late.position == 5
    moved = flat_weights(model) - group.state.fragments[0].theta
    assert float(walked @ moved / np.linalg.norm(walked) / np.linalg.norm(moved)) > 0.9
    assert late.counts[0].steps == 5 and late.counts[0].tokens == 40


def test_what_was_sent_is_not_added_twice_nor_is_what_its_codec_had_lost_before() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab", delay=1)
    peer, _ = pairs[0]
    train_in_turn(pairs, 10)
    make_failing(peer, on_collect=(StaleRoundError(group.plan.name_round(group.state, 0), "its outcome is gone"),))
    (pending,) = peer._pending.values()
    (report,) = [report for report in train_in_turn(pairs, 1, start=10) if not report.peers]
    assert peer.state.hash == group.state.hash and not report.is_dropped
    assert peer.counts[0].residual is pending.residual and peer.counts[0].steps == 1


def test_a_submitted_fragment_is_not_the_next_to_take_its_turn() -> None:
    group = build_group(Rules(interval=6, dynamic=False), 3)
    assert group.plan.next_turn(group.state) == 0
    assert group.plan.next_turn(group.state, {0}) == 1 and group.plan.next_turn(group.state, {0, 1, 2}) == 0


def test_a_peer_two_rounds_late_starts_from_the_outer_weights() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    train_in_turn(pairs[1:], 4)
    LocalAverager(group, "b").close()
    train_in_turn(pairs[:1], 15)
    group.members.add("b")
    (report,) = train_in_turn(pairs[1:], 1, start=4)
    late, model = pairs[1]
    assert report.peers == () and late.position == 15 and late.counts[0].steps == 0 and report.is_dropped
    assert (flat_weights(model) == group.state.fragments[0].theta).all()


def test_a_refused_peer_continues_from_the_outer_weights() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    peer, model = pairs[0]
    make_failing(peer, on_collect=(RefusedUpdateError(group.plan.name_round(group.state, 0), "not finite"),))
    reports = train_in_turn(pairs, 5)
    refused = next(report for report in reports if not report.peers)
    assert "not finite" in refused.note and peer.counts[0].steps == 0 and refused.is_dropped
    assert (flat_weights(model) == peer.state.fragments[0].theta).all()


def test_a_peer_whose_weights_broke_restarts_and_spoils_nothing() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    train_in_turn(pairs, 5)
    peer, model = pairs[0]
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    (report,) = train_in_turn(pairs[:1], 5, start=5)
    assert report.peers == () and "not finite" in report.note
    assert (flat_weights(model) == peer.state.fragments[0].theta).all() and not peer.inner.state
    assert {report.peers for report in train_in_turn(pairs, 5, start=5)} == {("a", "b")}
    assert np.isfinite(group.state.fragments[0].theta).all()


def test_a_peer_with_different_bits_notices_at_once_and_fetches_the_state() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "ab")
    train_in_turn(pairs, 5)
    peer, _ = pairs[0]
    part = peer.state.fragments[0]
    flipped = np.array(part.theta)
    flipped[3] = np.nextafter(flipped[3], np.float32(np.inf))
    peer.state = replace(peer.state, fragments=(FragmentState(0, part.round, flipped, part.momentum),))
    reports = train_in_turn(pairs, 5, start=5)
    assert any(report.note and not report.peers for report in reports)
    assert peer.state.fragments[0].hash == part.hash, "the true one again"
    LocalAverager(group, "b").close()
    train_in_turn(pairs[:1], 5, start=10)
    assert peer.state.fragments[0].hash == group.state.fragments[0].hash


def test_an_outcome_that_leads_to_a_different_state_than_it_names_is_not_applied() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "a")
    start = group.state
    train_in_turn(pairs, 5)
    outcome = group.outcomes[group.plan.name_round(start, 0)]
    assert apply_outcome(group.plan, start, outcome).hash == group.state.hash
    for bad in (
        replace(outcome, state="00" * 32),
        replace(outcome, payload=outcome.payload[:-1]),
        replace(outcome, payload=bytes(len(outcome.payload))),
        replace(outcome, key=replace(outcome.key, base="00" * 32)),
        replace(outcome, key=replace(outcome.key, fragment=7)),
        replace(outcome, lanes=(1, 2)),
    ):
        with pytest.raises(StateMismatchError):
            apply_outcome(group.plan, start, bad)


def test_an_update_for_a_round_that_is_over_is_stale() -> None:
    group = build_group(FAST)
    pairs = build_peers(group, "a")
    key = group.plan.name_round(group.state, 0)
    train_in_turn(pairs, 15)
    with pytest.raises(StaleRoundError):
        LocalAverager(group, "z").submit(Update(key, "z", 1, 1, b"", "int4"))


def test_slow_peers_take_fewer_steps() -> None:
    key = RoundKey("run", 0, 0, "")

    def update(peer: str, steps: int, compute_ms: int) -> Update:
        return Update(key, peer, 1, steps, b"", "fp32", compute_ms=compute_ms)

    def share_all(updates: list[Update]) -> tuple[int, ...]:
        return share_steps(updates, 50, updates)

    fast = [update(name, 50, 1000) for name in "abc"]
    assert share_all([*fast, update("slow", 50, 5000)]) == (50, 50, 50, 10)
    assert share_all([*fast, update("slow", 10, 1000)]) == (50, 50, 50, 10)
    assert share_all([*fast, update("liar", 50, 1)]) == (50,) * 4
    assert share_all([update("a", 50, 1000), update("b", 50, 5000)]) == (50, 10)
    assert share_all([*fast, update("x", 50, 0)]) == (50,) * 4
    slow, *unmeasured = update("slow", 50, 5000), update("x", 50, 0), update("y", 0, 1000)
    assert share_all([*fast, slow, *unmeasured]) == (50, 50, 50, 10, 50, 50), "nobody else's measure is undone"
    assert share_all(unmeasured) == (50, 50)
    assert share_all([*fast, update("very slow", 1, 10**9)]) == (50, 50, 50, 1)


def test_a_peer_follows_its_pace_and_still_ends_each_round_on_the_shared_step() -> None:
    group = build_group(Rules(interval=10))
    (peer, model), *_ = build_peers(group, "a")
    outcome = RoundOutcome(group.plan.name_round(group.state, 0), ("a", "b"), b"", "", 10, steps=(4, 10))
    peer._set_pace(outcome)
    positions: list[int] = []
    reports = train_peer(peer, model, 4, lambda _: positions.append(peer.position))
    assert positions == [2, 5, 7, 10] and [report.round for report in reports] == [0]


def test_plain_averaging_leaves_a_lone_peer_where_it_arrived() -> None:
    group = build_group(Rules(interval=1, dynamic=False, codec="fp32", outer=OuterRule(name="average")))
    pairs = build_peers(group, "a")
    (peer, model), *_ = pairs
    for step in range(3):
        x, y = draw_batch("a", step)
        (model(x) - y).square().mean().backward()
        peer._step_inner()
        alone = flat_weights(model)
        peer._taken += 1
        peer.counts[0].add(8, 1, 0.1)
        peer.poll()
        assert flat_weights(model) == pytest.approx(alone, abs=1e-6)


def test_a_background_thread_gives_the_same_bits() -> None:
    """A background thread for encoding and outer steps changes when the work is done, not the result."""
    ends = []
    for aside in (False, True):
        group = build_group(Rules(interval=6, dynamic=False), 2)
        reports = train_members(group, "abc", 36, options=PeerOptions(delay=2, wait_s=20.0, threaded=aside))
        assert all(r.peers == ("a", "b", "c") for found in reports.values() for r in found)
        ends.append([r.state for r in reports["a"]])
    assert len(ends[0]) == 11 and ends[0] == ends[1]


def test_weights_that_cannot_be_encoded_are_given_up_when_a_thread_finds_out() -> None:
    group = build_group(FAST)
    peer, model = build_peer(group, "a", options=PeerOptions(delay=3, wait_s=20.0, threaded=True))
    train_peer(peer, model, 4)
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    reports = train_peer(peer, model, 4)
    assert reports and "restarted from the outer weights" in reports[0].note and reports[0].is_dropped
    assert (flat_weights(model) != flat_weights(model)).sum() == 0
