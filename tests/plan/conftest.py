"""A small model, the settings of a small run, and a device of round numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from shoal.plan.devices import Device
from shoal.plan.settings import PlanSettings, TrainerOptions
from shoal.plan.shapes import ModelShape, measure_shape

MakeSettings = Callable[..., PlanSettings]


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    """Llama: W 64, L 2, H 4, K 2, D 16, F 128, V 100."""
    return measure_shape(
        AutoConfig.for_model(
            "llama",
            vocab_size=100,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )


@pytest.fixture
def make_settings() -> MakeSettings:
    """Settings of one update of four groups of eight; keywords change them, those of the trainer its options."""
    plain = PlanSettings(
        trainer=TrainerOptions(),
        groups=4,
        group_size=8,
        updates=1,
        micro_tokens=4096,
        prompt_tokens=8,
        completion_tokens=17,
        max_tokens=17,
        kept=1.0,
        slots=64,
        async_level=2,
        lr=1e-6,
        has_reference=False,
        recomputes_old=True,
        checked_share=0.125,
        submission_rollouts=8,
        price=1,
    )

    def make(trainer: TrainerOptions | None = None, **changes: Any) -> PlanSettings:
        return replace(plain, trainer=trainer or plain.trainer, **changes)

    return make


@pytest.fixture
def device() -> Device:
    """1 TFLOP/s and 1000 GB/s."""
    return Device("unit", 100.0, 1.0, 1000.0, 10.0)
