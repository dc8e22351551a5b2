"""Weights other than the stated ones: cheaper to run, older, or modified."""

from copy import deepcopy
from pathlib import Path

from transformers import PreTrainedModel

from shoal.policy import altered
from shoal.policy.model import Policy
from shoal.redteam.behaviours import weights
from shoal.redteam.behaviours.weights import AlteredBehaviour
from shoal.redteam.registry import Expected, attack
from shoal.toploc.calibration import hash_weights
from shoal.worker.behaviour import WorkerBehaviour


@attack("small", expect=Expected.HARD, text="half of the layers generate and prove")
class SmallBehaviour(AlteredBehaviour):
    """Omits every second layer, for half the cost."""

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """The shorter model."""
        return weights.drop_layers(model)


@attack("int8", expect=Expected.HARD, text="weights rounded to 255 levels per row")
class Int8Behaviour(AlteredBehaviour):
    """Rounds the matrices of all layers to 255 levels per row, as low-cost inference servers do."""

    change = staticmethod(altered.round_channels)


@attack("int8_groups", expect=Expected.HARD, text="weights rounded to 255 levels per 32 values")
class Int8GroupsBehaviour(AlteredBehaviour):
    """Rounds the matrices of all layers to 255 levels per 32 values, which is closer to the true weights."""

    change = staticmethod(altered.round_bytes)


@attack("int4", expect=Expected.HARD, text="weights rounded to 15 levels per 32 values")
class Int4Behaviour(AlteredBehaviour):
    """Rounds the matrices of all layers to 15 levels per 32 values, as inference on small machines does."""

    change = staticmethod(altered.round_groups)


@attack("stale", expect=Expected.HARD, text="the first version it fetched generates for all later ones")
class StaleBehaviour(WorkerBehaviour):
    """Keeps the first version it fetched, which saves all later downloads."""

    is_honest = True
    _first: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The first version, whatever is requested; honest as long as no training has happened since."""
        newest = super().open_policy(version, folder)
        self._first = self._first or copy_weights(newest)
        self.is_honest = hash_weights(newest.model) == hash_weights(self._first.model)
        return self._first


@attack("previous", expect=Expected.HARD, text="the version before the stated one generates")
class PreviousBehaviour(WorkerBehaviour):
    """Generates with the second newest version, so that no download delays it. Honest until it has two that differ."""

    is_honest = True
    _last: Policy | None = None

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The version before the requested one."""
        newest = copy_weights(super().open_policy(version, folder))
        before, self._last = self._last or newest, newest
        self.is_honest = hash_weights(newest.model) == hash_weights(before.model)
        return before


@attack("adapter", expect=Expected.HARD, text="a low-rank adapter is merged into the weights")
class AdapterBehaviour(AlteredBehaviour):
    """Adds a rank-8 update with a thousandth of their norm to the matrices of all layers."""

    change = staticmethod(altered.add_adapter)


def copy_weights(policy: Policy) -> Policy:
    """A copy that the next version does not overwrite."""
    return Policy(deepcopy(policy.model), policy.tokenizer)
