from pathlib import Path

import pytest
from transformers import AutoConfig

from shoal.config.run import RunConfig, load_config
from shoal.errors import ConfigError
from shoal.plan.shapes import ModelShape, measure_shape, read_shape
from shoal.policy.model import load_policy
from shoal.tasks.open import open_tasks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_model_is_measured_without_weights(shape: ModelShape) -> None:
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert (shape.layers, shape.width, shape.head_dim, shape.feed_forward) == (2, 64, 16, 128)
    assert shape.layer_parameters == layer
    assert shape.parameters == 2 * layer + 2 * 100 * 64 + 64
    assert shape.root_parameters == 2 * 100 * 64 + 64
    assert shape.active_parameters == shape.parameters - 100 * 64
    assert shape.fused_parameters == 64 * 128 + 2 * 128 * 64
    assert shape.count_kv_bytes(2) == 2 * 2 * 2 * 16 * 2
    assert shape.is_lean and not shape.has_qk_norm


def test_adapters_are_counted_by_their_modules(shape: ModelShape) -> None:
    assert shape.count_adapter(4, ("q_proj",)) == 2 * 4 * (64 + 64)
    assert shape.count_adapter(4, ("k_proj", "down_proj")) == 2 * 4 * (64 + 32 + 128 + 64)
    assert shape.count_adapter(4, ("self_attn.q_proj",)) == shape.count_adapter(4, ("q_proj",))
    assert shape.count_adapter(1, ()) == 2 * sum(inputs + outputs for _, inputs, outputs in shape.linears)
    with pytest.raises(ConfigError, match=r"no linear module 'proj' in a layer; it has self_attn\.q_proj"):
        shape.count_adapter(4, ("proj",))


def test_the_tiny_model_of_a_run_has_the_size_that_it_is_built_with() -> None:
    config = RunConfig()
    policy = load_policy(config.policy, alphabet=open_tasks(config).alphabet, seed=0)
    assert read_shape(config).parameters == policy.num_parameters


def test_tied_embeddings_count_once_and_take_part_in_products() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    tied = measure_shape(AutoConfig.for_model("llama", **sizes, num_attention_heads=4, tie_word_embeddings=True))
    assert tied.active_parameters == tied.parameters
    assert tied.root_parameters == 100 * 64 + 64


def test_idle_experts_take_no_part_in_products() -> None:
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
    mixture = measure_shape(AutoConfig.for_model("mixtral", **sizes, **experts, num_attention_heads=4))
    assert mixture.parameters - mixture.active_parameters == 100 * 64 + 6 * 3 * 64 * 128
    assert not mixture.is_lean


def test_a_folder_with_an_architecture_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    shape = read_shape(load_config(EXAMPLES / "intellect2.toml"))
    assert shape.parameters == 32_763_876_352  # as QwQ-32B's model card has it: 32.8 B


def test_a_folder_without_an_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read an architecture from"):
        read_shape(load_config(None, [f"policy.path={tmp_path}"]))
    with pytest.raises(ConfigError, match="no such folder"):
        read_shape(load_config(None, [f"policy.path={tmp_path}/missing"]))
