"""Adapters and the checks: merged and unmerged weights agree within the calibrated thresholds, the base does not."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from transformers import PreTrainedModel

from shoal.config.run import LoraConfig
from shoal.policy.lora import attach_adapters, copy_merged, find_adapted
from shoal.policy.model import Policy
from shoal.rollout import Request
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import RolloutReport, check_rollouts


@pytest.fixture(scope="module")
def adapted(speaker: Policy) -> PreTrainedModel:
    """The speaker with adapters that change each weight by about a hundredth of its size."""
    model = deepcopy(speaker.model)
    attach_adapters(model, LoraConfig(rank=4), seed=0)
    rng = torch.Generator().manual_seed(1)
    for module in find_adapted(model).values():
        module.lora_B.data.copy_(0.01 * torch.randn(module.lora_B.shape, generator=rng))
    return model


@pytest.mark.parametrize("worker", ["merged", "unmerged"])
@pytest.mark.parametrize("validator", ["merged", "unmerged", "base"])
def test_a_worker_passes_with_the_adapter_merged_or_not_and_fails_without(
    worker: str,
    validator: str,
    adapted: PreTrainedModel,
    speaker: Policy,
    calibration: Calibration,
    requests_16: list[Request],
    work: Callable,
) -> None:
    models = {"merged": copy_merged(adapted), "unmerged": adapted, "base": speaker.model}
    done = work(deepcopy(models[worker]), requests_16)
    reports: list[RolloutReport] = check_rollouts(
        {0: models[validator]}, requests_16, done.rollouts, done.proofs, calibration, eos_id=speaker.eos_id
    )
    assert len(reports) == 16
    assert [report.passed for report in reports] == [validator != "base"] * 16
