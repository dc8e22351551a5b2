"""One site's part in a DiLoCo run: wrap a model and its inner optimizer, call `step()` after every backward pass.

    >>> import numpy as np, torch
    >>> from shoal.diloco.fragments import map_model
    >>> from shoal.diloco.local import LocalGroup
    >>> from shoal.diloco.plan import Plan, Rules
    >>> from shoal.diloco.state import start_state
    >>> model = torch.nn.Linear(4, 1)
    >>> fragments = map_model(model)
    >>> plan = Plan("example", fragments.sizes, Rules(interval=5))
    >>> group = LocalGroup(plan, start_state((fragments.read(0),)))
    >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    >>> peer = Peer("alone", plan, fragments, inner, group.seat("alone"))
    >>> for _ in range(10):
    ...     model(torch.randn(8, 4)).square().mean().backward()
    ...     report = peer.step(tokens=8)
    >>> report.peers, peer.state.fragments[0].round, peer.state.step
    (('alone',), 2, 10)

Invariants:
- the inner optimizer's state is this site's own and kept across rounds; its schedule runs on the step all peers share;
- an update is kept until an outcome names this peer, and steps taken meanwhile stay in the weights: whatever becomes of
  a round, no inner step is lost but those of a peer that fell more than one round behind;
- after a round the outer state has the hash that the outcome names, or it is fetched anew;
- no wait is longer than `wait_s`.

    inner steps -> encode -> submit -> (delay inner steps) -> collect -> next outer weights -> apply -> inner steps
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from shoal.diloco.aside import Aside
from shoal.diloco.averager import Averager, AveragerAwayError, RefusedUpdateError, StaleRoundError
from shoal.diloco.codecs import CodecError, encode_feedback, find_codec
from shoal.diloco.fragments import FragmentMap
from shoal.diloco.outer import pseudo_gradient
from shoal.diloco.plan import Plan
from shoal.diloco.reduce import StateMismatchError, move_part, settle_part
from shoal.diloco.round import Outcome, RoundKey, Update
from shoal.diloco.state import FragmentState, OuterState

CLIP_NORM = 1.0
MAX_LAG = 1
"""rounds a peer may be behind and still bring its steps along"""


@dataclass(frozen=True, slots=True)
class Habits:
    """How a peer goes about its rounds; no two peers need to agree on it."""

    delay: int = 0
    """tau: inner steps between handing in and applying; 0 waits for the outcome"""
    alpha: float = 1.0
    """share of the steps taken meanwhile that is kept: w <- theta + alpha (w - w at hand-in)"""
    wait_s: float = 60.0
    """longest wait for one outcome"""
    clip_norm: float = CLIP_NORM
    """of inner gradients; 0: none"""
    aside: bool = False
    """whether a thread encodes updates and makes the next outer weights during the `delay` steps"""


@dataclass(frozen=True, slots=True)
class RoundReport:
    """A round that this peer has behind it."""

    fragment: int
    round: int
    peers: tuple[str, ...]
    """whose vectors were averaged; empty if the state was fetched instead"""
    state: str
    """hash of the fragment after it"""
    bytes_up: int
    bytes_down: int
    waited_s: float
    note: str = ""
    """why this peer's own update was not in it"""
    is_dropped: bool = False
    """whether all steps that were in no round are given up: what they read is to be read again"""


@dataclass(slots=True)
class Tally:
    """What a fragment's next update will say."""

    tokens: int = 0
    steps: int = 0
    compute_s: float = 0.0
    residual: np.ndarray | None = None
    """what the codec lost so far"""

    def add(self, tokens: int, steps: int, compute_s: float) -> None:
        """Count further steps."""
        self.tokens, self.steps, self.compute_s = self.tokens + tokens, self.steps + steps, self.compute_s + compute_s

    def merge(self, other: "Tally") -> None:
        """Count steps that were handed in and are not in any round."""
        self.add(other.tokens, other.steps, other.compute_s)


@dataclass(slots=True)
class _Pending:
    """An update on its way, and what is needed once its outcome comes."""

    key: RoundKey
    made: "Future[tuple[Update, np.ndarray | None]]"
    """the update, and the residual of the codec if it counts"""
    arrived: np.ndarray
    """weights when it was made"""
    tally: Tally
    """as it was"""
    outcome: Outcome | None = None
    moved: "Future[FragmentState] | None" = None
    """the fragment that the outcome leads to"""
    steps_since: int = 0
    waited_s: float = 0.0
    is_sent: bool = False
    """whether it may be in a round"""
    is_held: bool = False
    """whether the averager has it in hand"""

    @property
    def update(self) -> Update:
        """What is handed in; raises `CodecError` if the weights cannot be brought to anybody."""
        return self.made.result()[0]

    @property
    def residual(self) -> np.ndarray | None:
        """What the codec lost so far, if the update counts."""
        return self.made.result()[1]


@dataclass
class Peer:
    """A model in training as one of many."""

    name: str
    plan: Plan
    fragments: FragmentMap
    inner: torch.optim.Optimizer
    averager: Averager
    schedule: Callable[[int], float] | None = None
    """learning rate at a step of the shared schedule; None leaves the optimizer's as it is"""
    habits: Habits = field(default_factory=Habits)
    report_lanes: Callable[[], tuple[tuple[int, int], ...]] = tuple
    """how far this peer has read its data lanes"""
    state: OuterState = field(init=False)
    compute_s: float = field(default=0.0, init=False)
    waited_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        assert self.plan.sizes == self.fragments.sizes, "the plan was made for this model"
        self.tallies = [Tally() for _ in self.plan.sizes]
        self._pending: dict[int, _Pending] = {}
        self._aside = Aside(is_threaded=self.habits.aside)
        self._pace = 1.0
        self._mark = time.perf_counter()
        self.adopt_state(self.averager.fetch_state(self.habits.wait_s))

    @property
    def position(self) -> int:
        """The step of the shared schedule: a peer that takes fewer steps moves along it faster."""
        return min(self._due, self._begun + (self._due - self._begun) * self._taken // self._span)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is on its way and no step was taken since: the moment for a checkpoint."""
        return not self._pending and self._taken == 0

    def step(self, tokens: int) -> RoundReport | None:
        """One inner step on the gradients at hand, and what is due of a round; the report if one ended."""
        self._step_inner()
        spent_s = time.perf_counter() - self._mark
        self.compute_s += spent_s
        self._taken += 1
        for tally in self.tallies:
            tally.add(tokens, 1, spent_s)
        for pending in self._pending.values():
            pending.steps_since += 1
        report = self._advance_rounds()
        self._mark = time.perf_counter()
        return report

    def poll(self) -> RoundReport | None:
        """Look for outcomes without an inner step: for a loop that drives several peers in turn."""
        report = self._advance_rounds()
        self._mark = time.perf_counter()
        return report

    def adopt_state(self, state: OuterState) -> None:
        """Take over an outer state whole: weights, momentum, schedule and data position."""
        self.state = state
        for fragment, part in enumerate(state.fragments):
            self.fragments.write(fragment, part.theta)
        self._pending.clear()
        self._begin_span(state.step, self.plan.next_turn(state))

    def close(self) -> None:
        """Leave the run."""
        self._aside.close()
        self.averager.close()

    def _step_inner(self) -> None:
        if self.habits.clip_norm:
            parameters = [tensor for part in self.fragments.parts for _, tensor in part]
            torch.nn.utils.clip_grad_norm_(parameters, self.habits.clip_norm)
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
        self._span = max(1, round((self._due - begun) * self._pace))

    def _advance_rounds(self) -> RoundReport | None:
        # Where the fragment's last round is still open its next one cannot begin, and inner steps go on.
        if self._taken >= self._span and self._turn not in self._pending:
            self._hand_in(self._turn)
        report = None
        for fragment, pending in list(self._pending.items()):
            if pending is self._pending.get(fragment):  # or else all were given up with the one before
                report = self._follow_up(fragment, pending) or report
        return report

    def _hand_in(self, fragment: int) -> None:
        tally, arrived = self.tallies[fragment], self.fragments.read(fragment)
        key, lanes = self.plan.name_round(self.state, fragment), self.report_lanes()
        theta = self.state.fragments[fragment].theta
        made = self._aside.start(self._make_update, key, theta, arrived, tally, lanes)
        self._pending[fragment] = _Pending(key, made, arrived, tally)
        self.tallies[fragment] = Tally(residual=tally.residual)
        self._begin_span(self._due, (fragment + 1) % len(self.plan.sizes))

    def _make_update(
        self, key: RoundKey, theta: np.ndarray, arrived: np.ndarray, tally: Tally, lanes: tuple[tuple[int, int], ...]
    ) -> tuple[Update, np.ndarray | None]:
        codec = find_codec(self.plan.rules.codec)
        payload, residual = encode_feedback(codec, pseudo_gradient(theta, arrived), tally.residual)
        update = Update(
            key=key,
            peer=self.name,
            tokens=tally.tokens,
            steps=tally.steps,
            payload=payload,
            codec=codec.name,
            lanes=lanes,
            compute_ms=max(1, round(1000 * tally.compute_s)),
        )
        return update, residual

    def _start_over(self, fragment: int, reason: str) -> RoundReport:
        """Back to the outer weights with an empty inner optimizer: what this peer has cannot be brought to anybody."""
        part = self.state.fragments[fragment]
        self.adopt_state(self.state)
        self.inner.state.clear()
        self.tallies = [Tally() for _ in self.plan.sizes]
        note = f"started over from the outer weights: {reason}"
        return RoundReport(fragment, part.round, (), part.hash, 0, 0, 0.0, note, is_dropped=True)

    def _follow_up(self, fragment: int, pending: _Pending) -> RoundReport | None:
        """Send, look for the outcome, apply it. An averager that is away is asked again after the next step."""
        start = time.perf_counter()
        try:
            outcome = self._exchange(fragment, pending)
            part = None if outcome is None or pending.moved is None else pending.moved.result()
            state = None if outcome is None or part is None else settle_part(self.state, part, outcome)
        except AveragerAwayError:
            pending.is_held = False
            return None
        except CodecError as error:
            return self._start_over(fragment, str(error))
        except (StaleRoundError, RefusedUpdateError, StateMismatchError) as error:
            # Told once, it is over for the averager; should the state not be at hand now, it is submitted anew.
            pending.is_held = False
            return self._catch_up(fragment, pending, error)
        finally:
            pending.waited_s += time.perf_counter() - start
            self.waited_s += time.perf_counter() - start
        if outcome is None or state is None:
            return None
        self._apply(fragment, pending, outcome, state)
        note = "" if self.name in outcome.peers else "the round closed without this peer's update"
        return self._report(fragment, pending, outcome.peers, len(outcome.payload), note)

    def _exchange(self, fragment: int, pending: _Pending) -> Outcome | None:
        """The outcome once it is to be applied."""
        is_due = pending.steps_since >= self.habits.delay
        if not is_due and not pending.made.done():
            return None
        if not pending.is_held:
            self.averager.submit(pending.update)
            pending.is_sent = pending.is_held = True
        if pending.outcome is None and (is_due or self.habits.aside):
            # The one planned wait; who is later than that is looked for after every step and never waited for.
            is_planned = pending.steps_since == self.habits.delay
            pending.outcome = self.averager.collect(pending.key, self.habits.wait_s if is_planned else 0.0)
            if pending.outcome is not None:
                pending.moved = self._aside.start(move_part, self.plan, self.state.fragments[fragment], pending.outcome)
        return pending.outcome if is_due else None

    def _apply(self, fragment: int, pending: _Pending, outcome: Outcome, state: OuterState) -> None:
        """New outer weights, with the inner steps that are not in them on top."""
        weights, old = self.fragments.read(fragment), self.state.fragments[fragment].theta
        del self._pending[fragment]
        self.state = state
        if self.name in outcome.peers:
            carried = (weights - pending.arrived) * np.float32(self.habits.alpha)
            self.tallies[fragment].residual = pending.residual
            self._set_pace(outcome)
        else:
            carried = weights - old
            self.tallies[fragment].merge(pending.tally)
            self._slow_down()
        self.fragments.write(fragment, state.fragments[fragment].theta + carried)

    def _set_pace(self, outcome: Outcome) -> None:
        if len(outcome.steps) != len(outcome.peers):
            return
        span = self.plan.span_steps(outcome.key.round, outcome.key.fragment)
        self._pace = min(1.0, max(1, outcome.steps[outcome.peers.index(self.name)]) / span)
        self._span = max(1, round((self._due - self._begun) * self._pace))

    def _slow_down(self) -> None:
        """Take a quarter of the steps: all that a round without this peer says of its speed is that it was too late.

        Once an outcome names it, the measured pace is set.
        """
        if self.plan.rules.dynamic:
            self._pace = max(self._pace / 4, 1 / self.plan.rules.interval)
            self._span = max(1, round((self._due - self._begun) * self._pace))

    def _catch_up(self, fragment: int, pending: _Pending, error: Exception) -> RoundReport | None:
        """Go on from the newest state; steps of a peer that is only late, and not by much, come along."""
        try:
            state = self.averager.fetch_state(self.habits.wait_s)
        except AveragerAwayError:
            return None
        is_late = isinstance(error, StaleRoundError)
        if is_late and state.fragments[fragment].hash == self.state.fragments[fragment].hash:
            return None  # whoever answered knows less than the fetched state: ask again
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
        """Go over to a fetched fragment; whether this peer's steps came along."""
        old, waiting = self.state.fragments[index], self._pending.pop(index, None)
        if not (keep and 0 <= part.round - old.round <= MAX_LAG):
            self.tallies[index] = Tally()
            self.fragments.write(index, part.theta)
            return False
        # What was sent may be in the new weights, and is not brought a second time.
        base = old.theta
        if waiting is not None and waiting.is_sent:
            base, self.tallies[index].residual = waiting.arrived, waiting.residual
        elif waiting is not None:
            self.tallies[index].merge(waiting.tally)
        self.fragments.write(index, part.theta + (self.fragments.read(index) - base))
        return True

    def _report(
        self, fragment: int, pending: _Pending, peers: tuple[str, ...], bytes_down: int, note: str
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
