"""Generation: one thread that turns leases into finished work, with one engine.

    HELD leases -> RUNNING, several at once -> finished work, or a lease that is returned

Invariants:
- all rollouts of a lease use its version: other weights are loaded only when nothing is running and no lease of the
  loaded version is held, those of the held lease with the smallest step first;
- a lease whose version is not here waits; one whose version will not come any more is returned;
- rollouts of several leases share the engine, under the name of their lease, and are otherwise independent;
- work that this machine failed to score twice is not submitted: the lease is returned with the reason;
- a lease that is no longer RUNNING in the table is dropped at the next token;
- only the thread changes the rollouts of running leases, under the table's lock, because other threads read them;
- `update_weights` and `stop` do not block: the thread acts on them between two tokens.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from shoal.config.run import EngineConfig
from shoal.engine import open_engine
from shoal.engine.base import Engine
from shoal.errors import ConfigError
from shoal.group import GroupPlan, score_group
from shoal.policy.model import Policy
from shoal.rollout import Group, Request, Rollout
from shoal.tasks.verify.base import is_fault
from shoal.toploc.build import ProofBuilder
from shoal.util.spans import SpanLog
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour, bound_prompts, fit_slots
from shoal.worker.leases import LeaseState, LeaseTable
from shoal.worker.orders import LeaseOrder, WorkLimits

MAX_KNOWN = 4
"""versions that can be loaded; older ones may be gone from disk"""


@dataclass(slots=True)
class _OpenLease:
    """The state of a running lease."""

    order: LeaseOrder
    plans: list[GroupPlan]
    begun: float
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(len(plan.requests) for plan in self.plans)

    def names(self) -> list[str]:
        """Ids of its rollouts in the engine."""
        return [_name(self.order, request) for plan in self.plans for request in plan.requests]


class Generator:
    """Generates for a worker. `run` is the thread's body and makes the callbacks.

    `deliver` receives finished work, `give_back` a lease whose work cannot be scored here, with the reason. Without
    `give_back` such a lease ends the thread.
    """

    def __init__(
        self,
        behaviour: WorkerBehaviour,
        leases: LeaseTable,
        deliver: Callable[[FinishedWork], None],
        *,
        limits: WorkLimits,
        give_back: Callable[[LeaseOrder, str], None] | None = None,
        slots: int = 256,
        device: torch.device | None = None,
        spans: SpanLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._behaviour, self._leases = behaviour, leases
        self._deliver, self._give_back = deliver, give_back or _refuse_order
        self._limits, self._slots, self._clock = limits, slots, clock
        self._device = device or torch.device("cpu")
        self._spans = spans or SpanLog(None, "worker")
        self._changed = leases.changed
        self._known: dict[int, Path] = {}
        """versions that can be loaded; the newest few"""
        self._is_stopped = False
        self._engine: Engine | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._proofs = ProofBuilder()
        self._open: dict[str, _OpenLease] = {}
        """state of the RUNNING leases"""
        self.num_tokens = 0
        """tokens finished so far"""

    @property
    def version(self) -> int:
        """The loaded version; -1 before the first."""
        return -1 if self._engine is None else self._engine.version

    @property
    def newest(self) -> int:
        """The newest version that can be loaded, for which leases are requested; -1 before the first."""
        with self._changed:
            return max(self._known, default=-1)

    def update_weights(self, version: int, folder: Path) -> None:
        """Switch to newer weights when all leases of the loaded ones are done."""
        with self._changed:
            if version > max(self._known, default=-1):
                self._known[version] = folder
                for old in sorted(self._known)[:-MAX_KNOWN]:
                    del self._known[old]
                self._changed.notify_all()

    def stop(self) -> None:
        """Start no more leases, and end at the next token."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    @property
    def has_enough(self) -> bool:
        """Whether the engine is full and more is queued: requesting more would take work from other workers."""
        with self._changed:
            return self._count_unfinished() >= self._slots and bool(self._leases.list_records(LeaseState.HELD))

    @property
    def lacks_weights(self) -> bool:
        """Whether there are leases but not their version: requesting more would only hoard leases."""
        with self._changed:
            is_waiting = bool(self._leases.list_records(LeaseState.HELD))
            is_idle = self._find_switch() is None and not self._leases.has_ready(self.version)
            return is_waiting and not self._open and is_idle

    def list_unusable(self) -> list[LeaseOrder]:
        """Held leases whose version is older than all that can be loaded: it will not come any more."""
        with self._changed:
            held = [record.order for record in self._leases.list_records(LeaseState.HELD)]
            old = [order for order in held if order.version < max(self._known, default=-1)]
            return [order for order in old if order.version != self.version and not self._can_load(order.version)]

    def count_done(self) -> dict[str, int]:
        """Number of finished rollouts per running lease."""
        with self._changed:
            return {lease: len(running.rollouts) for lease, running in self._open.items()}

    def run(self) -> None:
        """Generate until `stop`; re-raises errors of the engine or the behaviour."""
        while self._take_changes(wait=True):
            self._switch_weights()
            self._start_leases()
            if self._open:
                self._generate()

    def _generate(self) -> None:
        """Step until nothing is running."""
        with self._spans.span("generate", version=self.version):
            while self._open and self._take_changes(wait=False):
                self._start_leases()
                self._step()

    def _take_changes(self, *, wait: bool) -> bool:
        """Drop leases that have ended, after waiting for something to do if `wait`; False once stopped."""
        with self._changed:
            if wait:
                self._changed.wait_for(self._has_something)
            ended = self._list_ended()
            stopped = self._is_stopped
        for lease in ended:
            self._drop(lease)
        return not stopped

    def _has_something(self) -> bool:
        is_idle = self._find_switch() is None and not self._leases.has_ready(self.version)
        return bool(self._is_stopped or self._open or not is_idle)

    def _list_ended(self) -> set[str]:
        running = {record.order.lease for record in self._leases.list_records(LeaseState.RUNNING)}
        return self._open.keys() - running

    def _count_unfinished(self) -> int:
        return sum(running.num_requests - len(running.rollouts) for running in self._open.values())

    def _find_switch(self) -> int | None:
        """The version to load next, once nothing is running; None to stay with the loaded one."""
        if self._leases.has_ready(self.version):
            return None
        held = [record.order for record in self._leases.list_records(LeaseState.HELD)]
        ready = [order for order in held if self._can_load(order.version)]
        if ready:
            return min(ready, key=lambda order: (order.step, order.first)).version
        newest = max(self._known, default=-1)
        return newest if newest > self.version else None

    def _drop(self, lease: str) -> None:
        running = self._forget(lease)
        assert self._engine is not None, "something was running"
        self._engine.cancel(running.names())
        for name in running.names():
            self._proofs.drop(name)

    def _forget(self, lease: str) -> _OpenLease:
        with self._changed:
            return self._open.pop(lease)

    def _can_load(self, version: int) -> bool:
        """Whether a version is still on disk."""
        return version in self._known and self._known[version].exists()

    def _switch_weights(self) -> None:
        """Load the weights of the next lease, or the newest ones, once nothing is running."""
        with self._changed:
            version = None if self._open else self._find_switch()
            if version is None:
                return
            folder = self._known[version]
        with self._spans.span("load", version=version):
            self._load(version, self._behaviour.open_policy(version, folder))

    def _load(self, version: int, policy: Policy) -> None:
        if self._engine is None:
            longest = bound_prompts(self._behaviour.family, policy.tokenizer)
            slots = fit_slots(policy.model.config, self._behaviour.recipe, self._limits, self._slots, longest=longest)
            self._engine = open_engine(
                EngineConfig(slots=slots),
                policy.model.to(self._device),  # type: ignore[arg-type]
                eos_id=policy.eos_id,
                version=version,
                sink=self._proofs,
            )
        else:
            self._engine.swap_weights(version, policy.model.state_dict())
        self._tokenizer = policy.tokenizer

    def _start_leases(self) -> None:
        """Start leases of the loaded version, while the engine has room."""
        if self._engine is None or self._tokenizer is None:
            return
        while (order := self._take_order()) is not None:
            plans = self._behaviour.plan(order, self._tokenizer)
            requests = [replace(request, id=_name(order, request)) for plan in plans for request in plan.requests]
            self._engine.submit(requests)
            with self._changed:
                self._open[order.lease] = _OpenLease(order, plans, self._clock())

    def _take_order(self) -> LeaseOrder | None:
        with self._changed:
            if self._open and self._count_unfinished() >= self._slots:
                return None
            order = self._leases.start_next(self.version)
        if order is not None and order.lease in self._open:
            self._drop(order.lease)  # it ended and was granted again
        return order

    def _step(self) -> None:
        if not self._open:
            return
        assert self._engine is not None, "something is running"
        for rollout in self._engine.step():
            lease, _, name = rollout.id.partition("/")
            running = self._open[lease]
            running.rollouts[name] = replace(rollout, id=name)
            self.num_tokens += rollout.num_tokens
            if len(running.rollouts) == running.num_requests:
                self._forget(lease)
                self._hand_in(running)

    def _hand_in(self, running: _OpenLease) -> None:
        """Deliver a lease's work, or return it: a local verifier failure is not submitted as a reward of 0."""
        work = self._collect(running)
        if fault := find_fault(work.groups):
            self._give_back(running.order, fault)
        else:
            self._deliver(self._behaviour.finish(work))

    def _collect(self, running: _OpenLease) -> FinishedWork:
        names = [request.id for plan in running.plans for request in plan.requests]
        proofs = dict(zip(names, self._proofs.take_many(running.names()), strict=True))
        groups = tuple(self._score(plan, running.rollouts) for plan in running.plans)
        seconds = self._clock() - running.begun
        return FinishedWork(order=running.order, version=self.version, groups=groups, proofs=proofs, seconds=seconds)

    def _score(self, plan: GroupPlan, rollouts: Mapping[str, Rollout]) -> Group:
        """A group with its scores; a local failure is retried once, because a dead sandbox is replaced."""
        assert self._tokenizer is not None, "something was running"
        group = score_group(self._behaviour.family, self._tokenizer, plan, rollouts)
        if not find_fault([group]):
            return group
        return score_group(self._behaviour.family, self._tokenizer, plan, rollouts)


def find_fault(groups: Sequence[Group]) -> str:
    """Why this machine could not score all groups; empty if it could."""
    scores = (score for group in groups for score in group.scores)
    return next((score.reason for score in scores if is_fault(score)), "")


def _refuse_order(order: LeaseOrder, reason: str) -> None:
    raise ConfigError(f"lease {order.lease}: its work cannot be scored on this machine: {reason}")


def _name(order: LeaseOrder, request: Request) -> str:
    return f"{order.lease}/{request.id}"
