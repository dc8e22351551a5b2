"""Modified models deviate as much as stated, and leave the true model unchanged."""

import pytest
import torch

from shoal.policy.altered import add_adapter, map_linears, round_channels, round_groups
from shoal.redteam.behaviours.weights import drop_layers


def draw_weight(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(0))


def test_int8_has_one_scale_per_channel_and_errs_by_half_a_level() -> None:
    weight = draw_weight(8)
    scale = weight.abs().amax(1, keepdim=True) / 127
    levels = round_channels(weight) / scale
    assert torch.allclose(levels, levels.round(), atol=1e-4)
    assert bool(((round_channels(weight) - weight).abs() <= scale * 0.5001).all())


def test_int4_has_at_most_fifteen_levels_per_group() -> None:
    weight = draw_weight(4)
    groups = round_groups(weight).reshape(-1, 32)
    assert all(len(group.unique()) <= 15 for group in groups)
    assert not torch.equal(groups.view(weight.shape), weight)


def test_an_adapter_has_rank_eight_and_a_thousandth_of_the_norm() -> None:
    weight = draw_weight(32)
    update = (add_adapter(weight) - weight).double()
    assert float(update.norm() / weight.norm()) == pytest.approx(1e-3, rel=1e-2)
    values = torch.linalg.svdvals(update)
    assert float(values[8] / values[0]) < 1e-2 < float(values[7] / values[0])


def test_altered_models_leave_the_true_one_alone(make_model) -> None:
    model = make_model("llama", num_key_value_heads=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    map_linears(model, round_groups)
    shorter = drop_layers(model)
    assert len(shorter.model.layers) == shorter.config.num_hidden_layers == 1
    assert model.config.num_hidden_layers == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_of_a_single_layer_the_attention_is_left_out(make_model) -> None:
    model = make_model("llama", num_key_value_heads=2, num_hidden_layers=1)
    shorter = drop_layers(model)
    assert len(shorter.model.layers) == 1
    assert not shorter.model.layers[0].self_attn.o_proj.weight.any()
    assert model.model.layers[0].self_attn.o_proj.weight.any()
