"""Models that are cut down, and the behaviour that runs a modified model in place of the true one."""

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from shoal.policy.altered import map_linears, round_channels
from shoal.policy.model import Policy
from shoal.worker.behaviour import WorkerBehaviour


class AlteredBehaviour(WorkerBehaviour):
    """A modified model generates and proves; its output is claimed to be the true model's."""

    change = staticmethod(round_channels)
    """applied to every matrix of its layers"""

    def open_policy(self, version: int, folder: Path) -> Policy:
        """The altered policy."""
        policy = super().open_policy(version, folder)
        return Policy(self.alter(policy.model).eval(), policy.tokenizer)

    def alter(self, model: PreTrainedModel) -> PreTrainedModel:
        """A modified copy; the true model is unchanged."""
        return map_linears(model, self.change)


def drop_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Omit every second layer; if there is only one, omit its attention."""
    shorter = copy.deepcopy(model)
    if len(shorter.model.layers) == 1:
        with torch.no_grad():
            shorter.model.layers[0].self_attn.o_proj.weight.zero_()
    shorter.model.layers = shorter.model.layers[::2]
    shorter.config.num_hidden_layers = len(shorter.model.layers)
    return shorter


def shrink_policy(policy: Policy) -> Policy:
    """The policy with half of its layers."""
    return Policy(drop_layers(policy.model).eval(), policy.tokenizer)
