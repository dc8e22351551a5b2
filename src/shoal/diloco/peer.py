"""One site's part in a DiLoCo run: wrap a model and its inner optimizer, call `step()` after every backward pass.

    >>> import numpy as np, torch
    >>> from shoal.diloco.fragments import map_model
    >>> from shoal.diloco.local import LocalGroup
    >>> from shoal.diloco.outer import DilocoPlan, Rules
    >>> from shoal.diloco.state import start_state
    >>> model = torch.nn.Linear(4, 1)
    >>> fragments = map_model(model)
    >>> plan = DilocoPlan("example", fragments.sizes, Rules(interval=5))
    >>> group = LocalGroup(plan, start_state((fragments.read(0),)))
    >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> peer = Peer("alone", plan, fragments, inner, group.join("alone"))
    >>> for _ in range(10):
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     report = peer.step(tokens=8)
    >>> report.peers, peer.state.fragments[0].round, peer.state.step
    (('alone',), 2, 10)

Invariants:
- the inner optimizer's state is this site's own and kept across rounds; its schedule runs on the step all peers share;
- an update is kept until an outcome names this peer, and steps taken meanwhile stay in the weights. Whatever happens to
  a round, only a peer that falls more than one round behind loses inner steps;
- after a round the outer state has the hash that the outcome names, or it is fetched again;
- no wait is longer than `wait_s`.

    inner steps -> encode -> submit -> (delay inner steps) -> collect -> next outer weights -> apply -> inner steps
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shoal.diloco.background import BackgroundThread
from shoal.diloco.codecs import CodecError, encode_feedback, find_codec
from shoal.diloco.fragments import FragmentMap
from shoal.diloco.outer import DilocoPlan, pseudo_gradient
from shoal.diloco.reduce import StateMismatchError, move_part, settle_part
from shoal.diloco.round import (
    Averager,
    AveragerUnavailableError,
    RefusedUpdateError,
    RoundKey,
    RoundOutcome,
    StaleRoundError,
    Update,
)
from shoal.diloco.state import FragmentState, OuterState

CLIP_NORM = 1.0
MAX_LAG = 1
"""rounds a peer may be behind and still keep its steps"""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """Options of a peer; they may differ between peers."""

    delay: int = 0
    """tau: inner steps between submitting and applying; 0 waits for the outcome"""
    alpha: float = 1.0
    """share of the steps taken meanwhile that is kept: w <- theta + alpha (w - w when submitted)"""
    wait_s: float = 60.0
    """maximum wait for one outcome"""
    clip_norm: float = CLIP_NORM
    """maximum norm of inner gradients; 0: no limit"""
    threaded: bool = False
    """whether a thread encodes updates and computes the next outer weights during the `delay` steps"""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that this peer has completed."""

    fragment: int
    round: int
    peers: tuple[str, ...]
    """peers whose vectors were averaged; empty if the state was fetched instead"""
    state: str
    """hash of the fragment after the round"""
    bytes_up: int
    bytes_down: int
    waited_s: float
    note: str = ""
    """why this peer's own update was not included"""
    is_dropped: bool = False
    """whether all steps that were in no round are dropped, so that their data must be read again"""


@dataclass(slots=True)
class FragmentCounts:
    """The counters of a fragment's next update."""

    tokens: int = 0
    steps: int = 0
    compute_s: float = 0.0
    residual: np.ndarray | None = None
    """what the codec lost so far"""

    def add(self, tokens: int, steps: int, compute_s: float) -> None:
        """Count further steps."""
        self.tokens, self.steps, self.compute_s = self.tokens + tokens, self.steps + steps, self.compute_s + compute_s

    def merge(self, other: "FragmentCounts") -> None:
        """Add back steps that were submitted but are in no round."""
        self.add(other.tokens, other.steps, other.compute_s)


@dataclass(slots=True)
class _SentUpdate:
    """An update in flight, and what is needed when its outcome arrives."""

    key: RoundKey
    made: "Future[tuple[Update, np.ndarray | None]]"
    """the update, and the codec's residual if the update counts"""
    arrived: np.ndarray
    """weights when the update was made"""
    count: FragmentCounts
    """counters when the update was made"""
    outcome: RoundOutcome | None = None
    moved: "Future[FragmentState] | None" = None
    """the fragment after the outcome"""
    steps_since: int = 0
    waited_s: float = 0.0
    is_sent: bool = False
    """whether it may be in a round"""
    is_held: bool = False
    """whether the averager has accepted it"""

    @property
    def update(self) -> Update:
        """The encoded update; raises `CodecError` if the weights cannot be encoded."""
        return self.made.result()[0]

    @property
    def residual(self) -> np.ndarray | None:
        """What the codec lost so far, if the update counts."""
        return self.made.result()[1]


@dataclass
class Peer:
    """One model in training, as one of many peers."""

    name: str
    plan: DilocoPlan
    fragments: FragmentMap
    inner: torch.optim.Optimizer
    averager: Averager
    schedule: Callable[[int], float] | None = None
    """learning rate at a step of the shared schedule; None leaves the optimizer's unchanged"""
    options: PeerOptions = field(default_factory=PeerOptions)
    report_lanes: Callable[[], tuple[tuple[int, int], ...]] = tuple
    """how far this peer has read its data lanes"""
    state: OuterState = field(init=False)
    compute_s: float = field(default=0.0, init=False)
    waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        assert self.plan.sizes == self.fragments.sizes, "the plan does not match this model"
        self.counts = [FragmentCounts() for _ in self.plan.sizes]
        self._pending: dict[int, _SentUpdate] = {}
        self._background = BackgroundThread(is_threaded=self.options.threaded)
        self._pace = 1.0
        self._mark = time.perf_counter()
        self.adopt_state(self.averager.fetch_state(self.options.wait_s))

    @property
    def position(self) -> int:
        """The step of the shared schedule: a peer that takes fewer steps moves along it faster."""
        return min(self._due, self._begun + (self._due - self._begun) * self._taken // self._span)

    @property
    def _span(self) -> int:
        """Inner steps from one turn to the next, at this peer's pace."""
        return max(1, round((self._due - self._begun) * self._pace))

    @property
    def is_settled(self) -> bool:
        """Whether nothing is in flight and no step was taken since: the moment for a checkpoint."""
        return not self._pending and self._taken == 0

    def step(self, tokens: int) -> RoundReport | None:
        """Take one inner step on the current gradients and advance the rounds; returns the report if a round ended."""
        self._step_inner()
        spent_s = time.perf_counter() - self._mark
        self.compute_s += spent_s
        self._taken += 1
        for count in self.counts:
            count.add(tokens, 1, spent_s)
        for pending in self._pending.values():
            pending.steps_since += 1
        return self.poll()

    def poll(self) -> RoundReport | None:
        """Check for outcomes without an inner step: for a loop that drives several peers in turn."""
        report = self._advance_rounds()
        self._mark = time.perf_counter()
        return report

    def adopt_state(self, state: OuterState) -> None:
        """Replace the whole outer state: weights, momentum, schedule and data position."""
        self.state = state
        for fragment, part in enumerate(state.fragments):
            self.fragments.write(fragment, part.theta)
        self._pending.clear()
        self._begin_span(state.step, self.plan.next_turn(state))

    def close(self) -> None:
        """Leave the run."""
        self._background.close()
        self.averager.close()

    def _step_inner(self) -> None:
        if self.options.clip_norm:
            self.fragments.clip_gradients(self.options.clip_norm)
        if self.schedule is not None:
            for group in self.inner.param_groups:
                group["lr"] = self.schedule(self.position)
        self.inner.step()
        self.inner.zero_grad(set_to_none=True)

    def _begin_span(self, begun: int, turn: int) -> None:
        """Count steps from here to the turn of this fragment."""
        self._begun, self._turn, self._taken = begun, turn, 0
        number = self.state.fragments[turn].round + (turn in self._pending)
        self._due = self.plan.find_step(number, turn)

    def _advance_rounds(self) -> RoundReport | None:
        # While the fragment's last round is still open, its next one cannot begin, and inner steps continue.
        if self._taken >= self._span and self._turn not in self._pending:
            self._hand_in(self._turn)
        report = None
        for fragment, pending in list(self._pending.items()):
            if pending is self._pending.get(fragment):  # otherwise all were dropped with the previous one
                report = self._follow_up(fragment, pending) or report
        return report

    def _hand_in(self, fragment: int) -> None:
        count, arrived = self.counts[fragment], self.fragments.read(fragment)
        key, lanes = self.plan.name_round(self.state, fragment), self.report_lanes()
        theta = self.state.fragments[fragment].theta
        made = self._background.start(self._make_update, key, theta, arrived, count, lanes)
        self._pending[fragment] = _SentUpdate(key, made, arrived, count)
        self.counts[fragment] = FragmentCounts(residual=count.residual)
        self._begin_span(self._due, (fragment + 1) % len(self.plan.sizes))

    def _make_update(
        self,
        key: RoundKey,
        theta: np.ndarray,
        arrived: np.ndarray,
        count: FragmentCounts,
        lanes: tuple[tuple[int, int], ...],
    ) -> tuple[Update, np.ndarray | None]:
        codec = find_codec(self.plan.rules.codec)
        payload, residual = encode_feedback(codec, pseudo_gradient(theta, arrived), count.residual)
        update = Update(
            key=key,
            peer=self.name,
            tokens=count.tokens,
            steps=count.steps,
            payload=payload,
            codec=codec.name,
            lanes=lanes,
            compute_ms=max(1, round(1000 * count.compute_s)),
        )
        return update, residual

    def _start_over(self, fragment: int, reason: str) -> RoundReport:
        """Return to the outer weights with an empty inner optimizer: this peer's weights cannot be encoded."""
        part = self.state.fragments[fragment]
        self.adopt_state(self.state)
        self.inner.state.clear()
        self.counts = [FragmentCounts() for _ in self.plan.sizes]
        note = f"restarted from the outer weights: {reason}"
        return RoundReport(fragment, part.round, (), part.hash, 0, 0, 0.0, note, is_dropped=True)

    def _follow_up(self, fragment: int, pending: _SentUpdate) -> RoundReport | None:
        """Send, check for the outcome, apply it. If the averager is unavailable, ask again after the next step."""
        start = time.perf_counter()
        try:
            outcome = self._exchange(fragment, pending)
            if outcome is None or pending.moved is None:
                return None
            state = settle_part(self.state, pending.moved.result(), outcome)
        except AveragerUnavailableError:
            pending.is_held = False
            return None
        except CodecError as error:
            return self._start_over(fragment, str(error))
        except (StaleRoundError, RefusedUpdateError, StateMismatchError) as error:
            # The averager reports an outcome once. If the state is not available now, the update is submitted again.
            pending.is_held = False
            return self._catch_up(fragment, pending, error)
        finally:
            pending.waited_s += time.perf_counter() - start
            self.waited_s += time.perf_counter() - start
        self._apply(fragment, pending, outcome, state)
        note = "" if self.name in outcome.peers else "the round closed without this peer's update"
        return self._report(fragment, pending, outcome.peers, len(outcome.payload), note)

    def _exchange(self, fragment: int, pending: _SentUpdate) -> RoundOutcome | None:
        """Return the outcome once it is to be applied."""
        is_due = pending.steps_since >= self.options.delay
        if not is_due and not pending.made.done():
            return None
        if not pending.is_held:
            self.averager.submit(pending.update)
            pending.is_sent = pending.is_held = True
        if pending.outcome is None and (is_due or self.options.threaded):
            # The only planned wait. A later outcome is checked for after every step and never waited for.
            is_planned = pending.steps_since == self.options.delay
            pending.outcome = self.averager.collect(pending.key, self.options.wait_s if is_planned else 0.0)
            if pending.outcome is not None:
                pending.moved = self._background.start(
                    move_part, self.plan, self.state.fragments[fragment], pending.outcome
                )
        return pending.outcome if is_due else None

    def _apply(self, fragment: int, pending: _SentUpdate, outcome: RoundOutcome, state: OuterState) -> None:
        """Apply new outer weights and add the inner steps that they do not include."""
        weights, old = self.fragments.read(fragment), self.state.fragments[fragment].theta
        del self._pending[fragment]
        self.state = state
        if self.name in outcome.peers:
            carried = (weights - pending.arrived) * np.float32(self.options.alpha)
            self.counts[fragment].residual = pending.residual
            self._set_pace(outcome)
        else:
            carried = weights - old
            self.counts[fragment].merge(pending.count)
            self._slow_down()
        self.fragments.write(fragment, state.fragments[fragment].theta + carried)

    def _set_pace(self, outcome: RoundOutcome) -> None:
        if len(outcome.steps) != len(outcome.peers):
            return
        span = self.plan.span_steps(outcome.key.round, outcome.key.fragment)
        self._pace = min(1.0, max(1, outcome.steps[outcome.peers.index(self.name)]) / span)

    def _slow_down(self) -> None:
        """Take a quarter of the steps: a round without this peer only shows that it was too late, not its speed.

        Once an outcome names this peer, its measured pace is set.
        """
        if self.plan.rules.dynamic:
            self._pace = max(self._pace / 4, 1 / self.plan.rules.interval)

    def _catch_up(self, fragment: int, pending: _SentUpdate, error: Exception) -> RoundReport | None:
        """Continue from the newest state; a peer that is only slightly late keeps its steps."""
        try:
            state = self.averager.fetch_state(self.options.wait_s)
        except AveragerUnavailableError:
            return None
        is_late = isinstance(error, StaleRoundError)
        if is_late and state.fragments[fragment].hash == self.state.fragments[fragment].hash:
            return None  # the server that answered knows less than the fetched state: ask again
        kept = 0
        for index, part in enumerate(state.fragments):
            is_same = part.hash == self.state.fragments[index].hash and index != fragment
            kept += is_same or self._move_fragment(index, part, keep=is_late)
        self.state = state
        if is_late:
            self._slow_down()
        self._begin_span(state.step, self.plan.next_turn(state, self._pending))
        report = self._report(fragment, pending, (), 8 * sum(self.plan.sizes), str(error))
        return replace(report, is_dropped=not kept)

    def _move_fragment(self, index: int, part: FragmentState, *, keep: bool) -> bool:
        """Switch to a fetched fragment; returns whether this peer's steps were kept."""
        old, waiting = self.state.fragments[index], self._pending.pop(index, None)
        if not (keep and 0 <= part.round - old.round <= MAX_LAG):
            self.counts[index] = FragmentCounts()
            self.fragments.write(index, part.theta)
            return False
        # What was sent may be included in the new weights, and must not be added twice.
        base = old.theta
        if waiting is not None and waiting.is_sent:
            base, self.counts[index].residual = waiting.arrived, waiting.residual
        elif waiting is not None:
            self.counts[index].merge(waiting.count)
        self.fragments.write(index, part.theta + (self.fragments.read(index) - base))
        return True

    def _report(
        self, fragment: int, pending: _SentUpdate, peers: tuple[str, ...], bytes_down: int, note: str
    ) -> RoundReport:
        return RoundReport(
            fragment=fragment,
            round=pending.key.round,
            peers=peers,
            state=self.state.fragments[fragment].hash,
            bytes_up=len(pending.update.payload) * pending.is_sent,
            bytes_down=bytes_down,
            waited_s=pending.waited_s,
            note=note,
        )
