"""Requests at another temperature than the lease's, stated as if they had been at that."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from shoal.group import Plan
from shoal.redteam.forge import RetellingAuthor, Retold, list_rollouts, list_tokens
from shoal.worker.author import Work
from shoal.worker.intake import Order


class TemperedAuthor(RetellingAuthor):
    """Draws at `factor` times the temperature; at 0 the likeliest token is taken."""

    factor: ClassVar[float]

    def plan(self, order: Order, tokenizer: PreTrainedTokenizerBase) -> list[Plan]:
        """Plans at that temperature."""
        return [self._temper(plan) for plan in super().plan(order, tokenizer)]

    def retell(self, plans: Sequence[Plan], work: Work) -> Retold:
        """What was written."""
        return list_tokens(list_rollouts(work))

    def _temper(self, plan: Plan) -> Plan:
        requests = (replace(request, temperature=self.factor * request.temperature) for request in plan.requests)
        return replace(plan, requests=tuple(requests))
