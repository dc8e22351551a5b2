"""Adapters: peft's values, gradients and files, packed or not, merged or not."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import LoraConfig
from shoal.errors import ConfigError
from shoal.learner.parallel import ONE
from shoal.learner.sharded import gather_weights, write_trained
from shoal.policy.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_adapter, merge_adapter, read_adapter, save_adapter
from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import compute_logits, fuse_layers, is_lean, run_decoder
from shoal.policy.lora import (
    adapter_weights,
    attach_adapters,
    base_weights,
    copy_merged,
    disable_adapters,
    find_adapted,
    find_targets,
    load_adapters,
)
from shoal.policy.model import Policy, open_policy, save_policy

MakeModel = Callable[..., PreTrainedModel]

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama with biases": {"num_key_value_heads": 1, "attention_bias": True},
    "qwen3 with tied embeddings": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "phi3": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
}
SEGMENTS = [Segment(0, 9), Segment(9, 14)]


@pytest.fixture(params=MODELS)
def base(request: pytest.FixtureRequest, make_model: MakeModel) -> PreTrainedModel:
    """A model without adapters: some run lean, some by their own forward."""
    return make_model(request.param.split()[0], **MODELS[request.param])


def adapt(base: PreTrainedModel, *, noise: float = 0.05, **settings: Any) -> PreTrainedModel:
    """A copy with adapters whose B is not zero."""
    model = deepcopy(base)
    attach_adapters(model, LoraConfig(**{"rank": 4, "alpha": 6.0} | settings), seed=1)
    rng = torch.Generator().manual_seed(2)
    for module in find_adapted(model).values():
        module.lora_B.data.copy_(noise * torch.randn(module.lora_B.shape, generator=rng))
    return model


def draw_tokens() -> Tensor:
    return torch.randint(3, 40, (SEGMENTS[-1].end,), generator=torch.Generator().manual_seed(0))


def score(model: PreTrainedModel, *, fused: bool = False) -> Tensor:
    """Logits of a packed batch."""
    layers = fuse_layers(model) if fused and is_lean(model) else None
    hidden = run_decoder(model, draw_tokens(), positions_of(SEGMENTS), PackedAttention(SEGMENTS), layers)
    return compute_logits(model, hidden)


def take_gradients(model: torch.nn.Module, logits: Tensor) -> dict[str, Tensor]:
    """Gradients of what is trained, by peft's names without its prefix and the name of the adapter."""
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    gradients = torch.autograd.grad((logits * weights).sum(), list(trained.values()))
    names = [name.removeprefix("base_model.model.").removesuffix(".default.weight") for name in trained]
    return dict(zip(names, gradients, strict=True))


def load_in_peft(base: PreTrainedModel, folder: Path, *, train: bool = False) -> Any:
    peft = pytest.importorskip("peft")
    return peft.PeftModel.from_pretrained(deepcopy(base), folder, is_trainable=train)


def run_peft(model: Any) -> Tensor:
    ids = draw_tokens()
    return torch.cat([model(input_ids=ids[None, each.start : each.end]).logits[0] for each in SEGMENTS])


def merge(base: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """A model that held other weights, with the adapter in a folder over the base model on disk."""
    base.save_pretrained(folder / "base")
    model = deepcopy(base)
    for module in find_targets(model, []).values():
        module.weight.data.normal_()
    merge_adapter(model, read_adapter(folder), folder / "base")
    return model


def test_peft_loads_our_folder_with_equal_logits_and_gradients(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapt(base)
    save_adapter(model, tmp_path)
    other = load_in_peft(base, tmp_path, train=True).eval()
    ours, theirs = score(model), run_peft(other)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(ours, score(base), atol=1e-2)  # the adapters matter
    own, expected = take_gradients(model, ours), take_gradients(other, theirs)
    assert own.keys() == expected.keys() == adapter_weights(model).keys()
    for name, gradient in own.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


def test_an_adapter_of_peft_loads_here(base: PreTrainedModel, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(5)
    theirs = peft.get_peft_model(deepcopy(base), config).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "README.md").unlink(missing_ok=True)
    assert is_adapter(tmp_path)
    merged = merge(base, tmp_path)
    torch.testing.assert_close(score(merged), run_peft(theirs), rtol=1e-4, atol=1e-4)
    ours = adapt(base, rank=3, alpha=5.0)
    load_adapters(ours, read_adapter(tmp_path).weights)
    torch.testing.assert_close(score(ours), run_peft(theirs), rtol=1e-4, atol=1e-4)


def test_adapters_start_as_pefts_do_and_the_policy_as_its_base(base: PreTrainedModel) -> None:
    model = deepcopy(base)
    attach_adapters(model, LoraConfig(rank=8), seed=7)
    assert torch.equal(score(model), score(base))
    for module in find_adapted(model).values():
        bound = module.in_features**-0.5
        assert not module.lora_B.any() and module.scale == 2.0
        assert 0.8 * bound < module.lora_A.abs().max() <= bound and abs(module.lora_A.mean()) < 0.2 * bound
    twin, other = deepcopy(base), deepcopy(base)
    attach_adapters(twin, LoraConfig(rank=8), seed=7)
    attach_adapters(other, LoraConfig(rank=8), seed=8)
    first, second, third = (adapter_weights(each) for each in (model, twin, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], third[name]) for name in first if name.endswith("lora_A"))


def test_only_adapters_are_trained_and_the_base_keeps_its_names(base: PreTrainedModel) -> None:
    model = adapt(base)
    assert {name for name, each in model.named_parameters() if each.requires_grad} == adapter_weights(model).keys()
    own, before = base_weights(model), base.state_dict()
    assert own.keys() == before.keys() and all(torch.equal(own[name], before[name]) for name in own)


def test_the_folder_of_v0_does_not_depend_on_adapters(qwen: Policy, tmp_path: Path) -> None:
    """The recipe names v0 by its hash, before adapters exist."""
    save_policy(qwen, tmp_path / "plain")
    save_policy(Policy(adapt(qwen.model), qwen.tokenizer), tmp_path / "adapted")
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("plain", "adapted")]
    assert files[0] == files[1] and "model.safetensors" in files[0]


def test_an_adapter_is_opened_as_a_whole_model(qwen: Policy, tmp_path: Path) -> None:
    """Beside its base, as a trainer's versions, or beside the folder that holds it, as in checkpoints."""
    model = adapt(qwen.model)
    save_policy(qwen, tmp_path / "v000000")
    for place in (tmp_path / "v000003", tmp_path / "step-000003" / "policy"):
        write_trained(Policy(model, qwen.tokenizer), place, ONE)
        policy = open_policy(place)
        expected, found = gather_weights(model, ONE), policy.model.state_dict()
        assert not find_adapted(policy.model) and all(torch.equal(found[name], expected[name]) for name in expected)
    (tmp_path / "v000000").rename(tmp_path / "base")
    with pytest.raises(ConfigError, match="its base model is not beside it, as v0 or v000000"):
        open_policy(tmp_path / "v000003")


def test_merged_and_unmerged_compute_the_same(base: PreTrainedModel, tmp_path: Path) -> None:
    model = adapt(base)
    save_adapter(model, tmp_path)
    merged, plain = copy_merged(model), merge(base, tmp_path)
    assert not find_adapted(merged)
    weights, state, loaded = gather_weights(model, ONE), merged.state_dict(), plain.state_dict()
    assert weights.keys() == state.keys() == loaded.keys() == base.state_dict().keys()
    for name in weights:  # in memory and through files: the same bits
        assert torch.equal(weights[name], state[name]) and torch.equal(weights[name], loaded[name])
    torch.testing.assert_close(score(merged), score(model), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(score(model, fused=True), score(model), rtol=1e-6, atol=1e-6)


def test_merging_has_the_same_bits_with_any_number_of_threads(make_model: MakeModel) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_key_value_heads": 2}
    model = adapt(make_model("llama", **sizes), rank=16)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(gather_weights(model, ONE))
    torch.set_num_threads(before)
    assert all(torch.equal(found[0][name], each[name]) for each in found for name in each)


def test_disabled_adapters_give_the_base_model(base: PreTrainedModel) -> None:
    model = adapt(base)
    with disable_adapters(model):
        assert torch.equal(score(model), score(base))
    assert not torch.allclose(score(model), score(base), atol=1e-2)


@pytest.mark.parametrize("targets", [["q_proj"], ["v_proj", "up_proj"], ["layers.1.self_attn.k_proj", "down_proj"]])
def test_some_layers_can_be_chosen(make_model: MakeModel, tmp_path: Path, targets: list[str]) -> None:
    base = make_model("llama", num_key_value_heads=2)
    model = adapt(base, targets=targets)
    assert all(any(name.endswith(target) for target in targets) for name in find_adapted(model))
    assert len(find_adapted(model)) == sum(1 if "." in target else 2 for target in targets)
    save_adapter(model, tmp_path)
    other = load_in_peft(base, tmp_path)
    torch.testing.assert_close(score(model), run_peft(other), rtol=1e-4, atol=1e-4)


def test_an_unknown_layer_is_refused_with_those_that_exist(make_model: MakeModel) -> None:
    with pytest.raises(ConfigError, match=r"no linear layer is called query; there are down_proj, gate_proj, k_proj"):
        adapt(make_model("llama"), targets=["q_proj", "query"])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"use_dora": True}, "use_dora = true is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern = .* is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = .* is not supported"),
        ({"peft_type": "VERA"}, "is not the configuration of a LoRA adapter"),
        ({"r": 0}, "is not the configuration of a LoRA adapter"),
        ({"r": 5}, "does not fit the model: .* has"),
    ],
)
def test_other_adapters_are_refused(make_model: MakeModel, tmp_path: Path, change: Any, sentence: str) -> None:
    base = make_model("llama")
    save_adapter(adapt(base), tmp_path)
    path = tmp_path / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=sentence):
        merge(base, tmp_path)


def test_an_adapter_of_another_model_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    save_adapter(adapt(make_model("llama")), tmp_path)
    with pytest.raises(ConfigError, match="does not fit the model"):
        merge(make_model("llama", hidden_size=64), tmp_path)
    with pytest.raises(ConfigError, match="does not fit the model: 14 names differ"):
        merge(make_model("llama", num_hidden_layers=1), tmp_path)
    weights = tmp_path / ADAPTER_WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter(tmp_path)


def test_a_folder_has_the_same_bytes_whenever_it_is_written(make_model: MakeModel, tmp_path: Path) -> None:
    model = adapt(make_model("llama"))
    for name in ("first", "second"):
        save_adapter(model, tmp_path / name)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
