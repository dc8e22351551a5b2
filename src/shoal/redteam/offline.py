"""The work of leases with an author, without a run: what the worker's mill does, one lease at a time."""

from pathlib import Path

from shoal.engine.torch import TorchEngine
from shoal.group import score_group
from shoal.policy.model import Policy
from shoal.toploc.stream import ProofBuilder
from shoal.worker.author import Author, Work
from shoal.worker.intake import Order


class Scribe:
    """Writes for an author. Versions are loaded in order, as a worker meets them."""

    def __init__(self, author: Author, *, slots: int = 64) -> None:
        self.author = author
        self._slots = slots
        self._proofs = ProofBuilder()
        self._policy: Policy | None = None
        self._engine: TorchEngine | None = None

    def load(self, version: int, folder: Path) -> None:
        """Go on with a version that was pulled into a folder."""
        policy = self.author.open_policy(version, folder)
        if self._engine is None:
            self._engine = TorchEngine(
                policy.model, eos_id=policy.eos_id, slots=self._slots, version=version, sink=self._proofs
            )
        else:
            self._engine.swap_weights(version, policy.model.state_dict())
        self._policy = policy

    def write(self, order: Order) -> Work:
        """What is handed in for an order."""
        assert self._engine is not None and self._policy is not None, "a version was loaded"
        plans = self.author.plan(order, self._policy.tokenizer)
        requests = [request for plan in plans for request in plan.requests]
        rollouts = {rollout.id: rollout for rollout in self._engine.generate(requests)}
        groups = tuple(score_group(self.author.family, self._policy.tokenizer, plan, rollouts) for plan in plans)
        names = [request.id for request in requests]
        proofs = dict(zip(names, self._proofs.take_many(names), strict=True))
        version = self._engine.version
        return self.author.finish(Work(order=order, version=version, groups=groups, proofs=proofs, seconds=0.0))
