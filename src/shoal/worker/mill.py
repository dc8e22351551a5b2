"""The mill: one thread that turns orders into work, with one engine.

    orders waiting -> under way, a few leases side by side -> work

Invariants:
- all rollouts of a lease are of one version: new weights are loaded only when nothing is under way, and while they wait
  nothing is begun;
- an order that no loaded version may write waits; those that may be written go ahead of it;
- rollouts of several leases share the engine, each under the name of its lease; nothing else connects them;
- what this machine could not score, tried twice, is not claimed: its order is given back with the reason;
- what other threads may read, `_drafts` among it, is changed under the lock, and by the thread alone;
- whoever calls `order`, `cancel`, `offer` or `stop` does not wait: they leave a word, and the thread reads it between
  two tokens.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.group import Plan, score_group
from shoal.node.spans import SpanLog
from shoal.policy.model import Policy
from shoal.rollout import Group, Request, Rollout
from shoal.tasks.verify.base import is_fault
from shoal.toploc.stream import ProofBuilder
from shoal.worker.author import Author, Work, bound_prompts, fit_slots
from shoal.worker.intake import Order, WorkLimits


@dataclass(slots=True)
class _Draft:
    """A lease under way."""

    order: Order
    plans: list[Plan]
    begun: float
    rollouts: dict[str, Rollout] = field(default_factory=dict)

    @property
    def num_requests(self) -> int:
        return sum(len(plan.requests) for plan in self.plans)

    def names(self) -> list[str]:
        """Of its rollouts, as the engine knows them."""
        return [_name(self.order, request) for plan in self.plans for request in plan.requests]


class Mill:
    """Generates for a worker. `run` is the thread's body, from which it calls back.

    `deliver` gets finished work, `give_back` an order whose work cannot be scored here, with the reason; without one
    that ends the thread.
    """

    def __init__(
        self,
        author: Author,
        deliver: Callable[[Work], None],
        *,
        limits: WorkLimits,
        give_back: Callable[[Order, str], None] | None = None,
        slots: int = 256,
        spans: SpanLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._author, self._deliver, self._give_back = author, deliver, give_back or _refuse_order
        self._limits, self._slots, self._clock = limits, slots, clock
        self._spans = spans or SpanLog(None, "worker")
        self._news = threading.Condition()
        self._waiting: list[Order] = []
        self._cancelled: set[str] = set()
        self._offered: tuple[int, Path] | None = None
        self._is_stopped = False
        self._engine: TorchEngine | None = None
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._proofs = ProofBuilder()
        self._drafts: dict[str, _Draft] = {}
        self.num_tokens = 0
        """finished so far"""

    @property
    def version(self) -> int:
        """That is loaded; -1 before the first."""
        return -1 if self._engine is None else self._engine.version

    def order(self, order: Order) -> None:
        """Write this too."""
        with self._news:
            self._waiting.append(order)
            self._news.notify()

    def cancel(self, lease: str) -> None:
        """Nobody needs this any more."""
        with self._news:
            self._cancelled.add(lease)
            self._news.notify()

    def offer(self, version: int, folder: Path) -> None:
        """There are newer weights."""
        with self._news:
            if self._offered is None or version > self._offered[0]:
                self._offered = (version, folder)
                self._news.notify()

    def stop(self) -> None:
        """Begin nothing more, and end at the next token."""
        with self._news:
            self._is_stopped = True
            self._news.notify()

    @property
    def has_enough(self) -> bool:
        """Whether the engine is full and more is waiting: asking for work now would keep it from others."""
        with self._news:
            return self._count_under_way() >= self._slots and bool(self._waiting)

    @property
    def is_starved(self) -> bool:
        """Whether there are orders and no version that may write them: asking for more would only hoard."""
        with self._news:
            return bool(self._waiting) and not (self._drafts or self._is_newer() or self._list_ready())

    def count_done(self) -> dict[str, int]:
        """Rollouts finished of each lease that is waiting or under way."""
        with self._news:
            waiting = {order.lease: 0 for order in self._waiting}
            return waiting | {lease: len(draft.rollouts) for lease, draft in self._drafts.items()}

    def run(self) -> None:
        """Generate until `stop`; raises what the engine or the author raised."""
        while self._take_news(patient=True):
            self._load_newest()
            self._begin_orders()
            if self._drafts:
                self._generate()

    def _generate(self) -> None:
        """Step until nothing is under way."""
        with self._spans.span("generate", version=self.version):
            while self._drafts and self._take_news(patient=False):
                self._begin_orders()
                self._step()

    def _take_news(self, *, patient: bool) -> bool:
        """Read what was left for the thread, waiting for it if asked to; whether to go on."""
        with self._news:
            if patient:
                self._news.wait_for(self._has_something)
            dropped, self._cancelled = self._cancelled, set()
            self._waiting = [order for order in self._waiting if order.lease not in dropped]
            go_on = not self._is_stopped
        self._drop(dropped)
        return go_on

    def _has_something(self) -> bool:
        return bool(self._is_stopped or self._cancelled or self._drafts or self._is_newer() or self._list_ready())

    def _count_under_way(self) -> int:
        return sum(draft.num_requests - len(draft.rollouts) for draft in self._drafts.values())

    def _is_newer(self) -> bool:
        return self._offered is not None and self._offered[0] > self.version

    def _list_ready(self) -> list[Order]:
        return [order for order in self._waiting if order.allows(self.version)]

    def _drop(self, leases: set[str]) -> None:
        for lease in leases & self._drafts.keys():
            draft = self._forget_draft(lease)
            assert self._engine is not None, "something is under way"
            self._engine.cancel(draft.names())
            for name in draft.names():
                self._proofs.drop(name)

    def _forget_draft(self, lease: str) -> _Draft:
        with self._news:
            return self._drafts.pop(lease)

    def _load_newest(self) -> None:
        """Load what was offered, once nothing is under way."""
        with self._news:
            if self._drafts or not self._is_newer():
                return
            assert self._offered is not None
            version, folder = self._offered
        with self._spans.span("load", version=version):
            self._load(version, self._author.open_policy(version, folder))

    def _load(self, version: int, policy: Policy) -> None:
        if self._engine is None:
            longest = bound_prompts(self._author.family, policy.tokenizer)
            slots = fit_slots(policy.model.config, self._author.recipe, self._limits, self._slots, longest=longest)
            self._engine = TorchEngine(
                policy.model, eos_id=policy.eos_id, slots=slots, version=version, sink=self._proofs
            )
        else:
            self._engine.swap_weights(version, policy.model.state_dict())
        self._tokenizer = policy.tokenizer

    def _begin_orders(self) -> None:
        """Begin what the loaded version may write, as much as the engine has room for."""
        if self._engine is None or self._tokenizer is None:
            return
        while (order := self._take_order()) is not None:
            plans = self._author.plan(order, self._tokenizer)
            requests = [replace(request, id=_name(order, request)) for plan in plans for request in plan.requests]
            self._engine.submit(requests)
            with self._news:
                self._drafts[order.lease] = _Draft(order, plans, self._clock())

    def _take_order(self) -> Order | None:
        with self._news:
            if self._drafts and (self._is_newer() or self._count_under_way() >= self._slots):
                return None
            ready = self._list_ready()
            if not ready:
                return None
            # The smallest step first: it is the one that training waits for.
            order = min(ready, key=lambda order: (order.step, order.first))
            self._waiting.remove(order)
            return order

    def _step(self) -> None:
        if not self._drafts:
            return
        assert self._engine is not None, "something is under way"
        for rollout in self._engine.step():
            lease, _, name = rollout.id.partition("/")
            draft = self._drafts[lease]
            draft.rollouts[name] = replace(rollout, id=name)
            self.num_tokens += rollout.num_tokens
            if len(draft.rollouts) == draft.num_requests:
                self._forget_draft(lease)
                self._hand_in(draft)

    def _hand_in(self, draft: _Draft) -> None:
        """Deliver what a lease asked for, or give the lease back: a fault of this machine is no reward."""
        work = self._collect(draft)
        if fault := find_fault(work.groups):
            self._give_back(draft.order, fault)
        else:
            self._deliver(self._author.finish(work))

    def _collect(self, draft: _Draft) -> Work:
        names = [request.id for plan in draft.plans for request in plan.requests]
        proofs = dict(zip(names, self._proofs.take_many(draft.names()), strict=True))
        groups = tuple(self._score(plan, draft.rollouts) for plan in draft.plans)
        seconds = self._clock() - draft.begun
        return Work(order=draft.order, version=self.version, groups=groups, proofs=proofs, seconds=seconds)

    def _score(self, plan: Plan, rollouts: Mapping[str, Rollout]) -> Group:
        """A group with its scores; once more where the machine failed, for a box that died is replaced."""
        assert self._tokenizer is not None, "something was under way"
        group = score_group(self._author.family, self._tokenizer, plan, rollouts)
        if not find_fault([group]):
            return group
        return score_group(self._author.family, self._tokenizer, plan, rollouts)


def find_fault(groups: Sequence[Group]) -> str:
    """Why this machine could not score all of them; empty if it could."""
    scores = (score for group in groups for score in group.scores)
    return next((score.reason for score in scores if is_fault(score)), "")


def _refuse_order(order: Order, reason: str) -> None:
    raise ConfigError(f"lease {order.lease}: its work cannot be scored here: {reason}")


def _name(order: Order, request: Request) -> str:
    return f"{order.lease}/{request.id}"
