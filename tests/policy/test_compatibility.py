"""Which models are rejected, and that the others give the right logits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from shoal.errors import ConfigError
from shoal.policy.compatibility import check_model

MakeModel = Callable[..., PreTrainedModel]
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mistral": ({**GROUPED, "sliding_window": 16}, "mistral with sliding-window layers is not supported"),
    "gemma2": (GROUPED, "gemma2 with sliding_attention layers is not supported"),
    "gemma3_text": (GROUPED, "with sliding_attention layers is not supported"),
    "qwen2": (
        {**GROUPED, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        "qwen2 with sliding_attention layers",
    ),
    "llama": (
        {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        "llama with dynamic rotation is not supported",
    ),
    "bloom": ({}, "bloom is not supported: it has no pluggable attention"),
    "gptj": ({"rotary_dim": 4}, "gptj is not supported: it has no pluggable attention"),
    "cohere": (GROUPED, "cohere is not supported: packed sequences give different logits than separate ones"),
    "granite": (
        {**GROUPED, "logits_scaling": 8.0},
        "granite is not supported: packed sequences give different logits than separate ones",
    ),
    "deepseek_v2": (
        {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 16},
        "its attention heads differ from its config",
    ),
    "diffllama": ({"num_key_value_heads": 2}, "it has attention in layers"),
    "recurrent_gemma": (GROUPED, "recurrent_gemma is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_refused_in_one_sentence(make_model: MakeModel, name: str) -> None:
    changes, reason = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        check_model(make_model(name, **changes))
    text = str(caught.value)
    assert text.startswith(f"policy.path: {name} ") and reason in text and "\n" not in text


def test_capped_logits_are_refused_though_small_ones_do_not_show_it(make_model: MakeModel) -> None:
    changes = {**GROUPED, "layer_types": ["full_attention"] * 2}
    with pytest.raises(ConfigError, match="gemma2 with capped logits is not supported"):
        check_model(make_model("gemma2", **changes))
    with pytest.raises(ConfigError, match="gemma2 is not supported: its attention uses softcap"):
        check_model(make_model("gemma2", **changes, final_logit_softcapping=None))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "phi3", "gemma", "granite", "mistral", "olmo2", "smollm3"])
def test_plain_decoders_are_taken(make_model: MakeModel, name: str) -> None:
    check_model(
        make_model(
            name, **({} if name in ("llama", "qwen2", "phi3", "olmo2") else {"head_dim": 8}), num_key_value_heads=2
        )
    )


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2", "opt", "phi"])
def test_decoders_of_equal_heads_are_taken(make_model: MakeModel, name: str) -> None:
    check_model(make_model(name))


def test_weights_that_are_not_numbers_are_refused(make_model: MakeModel) -> None:
    model = make_model("llama", num_key_value_heads=2)
    with torch.no_grad():
        model.lm_head.weight[0] = float("nan")
    with pytest.raises(ConfigError, match="different logits"):
        check_model(model)
