"""The one forward pass: transformers' values and gradients, packed or not, and no way from one segment to another.

Layers that are recomputed or compiled give the same.
"""

import copy
import shutil
import threading
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.errors import ConfigError
from shoal.policy import decoder
from shoal.policy.attention import PackedAttention, Segment, positions_of
from shoal.policy.decoder import LayerOptions, compute_logits, fuse_layers, is_lean, run_decoder, set_layer_options

MakeModel = Callable[..., PreTrainedModel]

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "llama with biases": {"num_key_value_heads": 1, "attention_bias": True},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8},
    "qwen3 with wide heads": {"num_key_value_heads": 4, "head_dim": 16},
    "qwen3 with tied embeddings": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "llama with scaled rotation": {
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    },
    "llama with biases in the mlp": {"num_key_value_heads": 2, "mlp_bias": True},
    "gpt_neox": {},
    "phi3": {"num_key_value_heads": 2},
    "gemma": {"num_key_value_heads": 1, "head_dim": 8},
}
LEAN = [name for name in ARCHITECTURES if name.startswith(("llama", "qwen")) and "mlp" not in name]


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, make_model: MakeModel) -> PreTrainedModel:
    model = make_model(request.param.split()[0], **ARCHITECTURES[request.param])
    assert is_lean(model) == (request.param in LEAN)
    return model


def draw_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (count,), generator=torch.Generator().manual_seed(seed))


def run_packed(model: PreTrainedModel, token_ids: Tensor, segments: list[Segment]) -> Tensor:
    """Logits of all tokens of a packed batch."""
    hidden = run_decoder(model, token_ids, positions_of(segments), PackedAttention(segments))
    return compute_logits(model, hidden)


def take_gradients(model: PreTrainedModel, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(9))
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True))


def test_logits_and_gradients_are_those_of_transformers(model: PreTrainedModel) -> None:
    token_ids = draw_tokens(11)
    ours, theirs = run_packed(model, token_ids, [Segment(0, 11)]), model(input_ids=token_ids[None]).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    expected = take_gradients(model, theirs)
    for name, gradient in take_gradients(model, ours).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], atol=1e-4 * scale + 1e-6, rtol=1e-3)


def test_packed_sequences_that_share_a_prompt_equal_sequences_alone(model: PreTrainedModel) -> None:
    # Prompt a with completions of 1, 9 and 4 tokens, and b, a separate sequence, in the middle.
    segments = [Segment(0, 6), Segment(6, 7, 0), Segment(7, 20), Segment(20, 29, 0), Segment(29, 33, 0)]
    token_ids = draw_tokens(33)
    packed = run_packed(model, token_ids, segments)
    expected = torch.zeros_like(packed)
    for segment in segments:
        own = token_ids[segment.start : segment.end]
        context = own if segment.prefix is None else torch.cat((token_ids[:6], own))
        expected[segment.start : segment.end] = model(input_ids=context[None]).logits[0, -segment.length :]
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=1e-4)
    wanted = take_gradients(model, expected)
    for name, gradient in take_gradients(model, packed).items():
        scale = wanted[name].abs().max().item()
        torch.testing.assert_close(gradient, wanted[name], atol=1e-4 * scale + 1e-6, rtol=1e-3)


@torch.no_grad()
def test_other_segments_leave_every_bit_as_it_was(model: PreTrainedModel) -> None:
    segments = [Segment(0, 5), Segment(5, 12), Segment(12, 15, 0), Segment(15, 18, 1), Segment(18, 25)]
    token_ids = draw_tokens(25)
    before = run_packed(model, token_ids, segments)
    for changed, readers in ((0, {0, 2}), (1, {1, 3}), (2, {2}), (3, {3}), (4, {4})):
        other = token_ids.clone()
        other[segments[changed].start : segments[changed].end] = draw_tokens(segments[changed].length, seed=1)
        after = run_packed(model, other, segments)
        for index, segment in enumerate(segments):
            rows = slice(segment.start, segment.end)
            assert torch.equal(after[rows], before[rows]) == (index not in readers)


@torch.no_grad()
def test_later_tokens_leave_every_bit_as_it_was(model: PreTrainedModel) -> None:
    token_ids = draw_tokens(12)
    before = run_packed(model, token_ids, [Segment(0, 12)])
    token_ids[7] += 1
    after = run_packed(model, token_ids, [Segment(0, 12)])
    assert torch.equal(after[:7], before[:7]) and not torch.equal(after[7:], before[7:])


@torch.no_grad()
def test_training_and_inference_compute_the_same(model: PreTrainedModel) -> None:
    segments = [Segment(0, 9), Segment(9, 20)]
    token_ids = draw_tokens(20)
    with torch.enable_grad():
        expected = run_packed(model, token_ids, segments).detach()
    torch.testing.assert_close(run_packed(model, token_ids, segments), expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_weights_fused_beforehand_give_the_same(make_model: MakeModel) -> None:
    model = make_model("qwen3", **ARCHITECTURES["qwen3"])
    segments = [Segment(0, 9)]
    attention = PackedAttention(segments)
    plain = run_decoder(model, draw_tokens(9), positions_of(segments), attention)
    fused = run_decoder(model, draw_tokens(9), positions_of(segments), attention, fuse_layers(model))
    assert torch.equal(plain, fused)


def test_a_model_that_ran_packed_runs_by_itself_as_before(model: PreTrainedModel) -> None:
    token_ids = draw_tokens(8)
    before = model(input_ids=token_ids[None]).logits
    run_packed(model, token_ids, [Segment(0, 3), Segment(3, 8)])
    assert torch.equal(model(input_ids=token_ids[None]).logits, before)


SEGMENTS = [Segment(0, 6), Segment(6, 7, 0), Segment(7, 20), Segment(20, 29, 0)]


def copy_with(model: PreTrainedModel, **options: bool) -> PreTrainedModel:
    """A copy whose layers have these options."""
    changed = copy.deepcopy(model)
    set_layer_options(changed, LayerOptions(**options))
    return changed


def count_saved(model: PreTrainedModel) -> int:
    """Bytes that a forward pass keeps for the backward pass, without the model's own."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # referenced, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_packed(model, draw_tokens(29), SEGMENTS)
    return sum(tensor.untyped_storage().nbytes() for at, tensor in kept.items() if at not in own)


def test_recomputed_layers_have_every_bit_of_the_gradients(model: PreTrainedModel) -> None:
    expected = take_gradients(model, run_packed(model, draw_tokens(29), SEGMENTS))
    again = copy_with(model, recompute=True)
    for name, gradient in take_gradients(again, run_packed(again, draw_tokens(29), SEGMENTS)).items():
        assert torch.equal(gradient, expected[name]), name


def test_recomputed_layers_keep_less_for_the_backward_pass(model: PreTrainedModel) -> None:
    assert count_saved(copy_with(model, recompute=True)) < 0.4 * count_saved(model)


def test_a_backward_pass_in_another_thread_recomputes_with_the_same_attention(make_model: MakeModel) -> None:
    """As on a GPU, where autograd has a thread per device, to which no context variable comes along."""
    model = copy_with(make_model("gemma", **ARCHITECTURES["gemma"]), recompute=True)
    expected = take_gradients(model, run_packed(model, draw_tokens(29), SEGMENTS))
    logits = run_packed(model, draw_tokens(29), SEGMENTS)
    found: list[dict[str, Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(take_gradients(model, logits)))
    thread.start()
    thread.join()
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found[0].items())
    assert model.config._attn_implementation != decoder.INTERFACE


def test_a_recomputed_model_runs_by_itself_as_before(model: PreTrainedModel) -> None:
    again, token_ids = copy_with(model, recompute=True), draw_tokens(8)
    run_packed(again, token_ids, [Segment(0, 3), Segment(3, 8)])
    assert torch.equal(again(input_ids=token_ids[None]).logits, model(input_ids=token_ids[None]).logits)


@pytest.mark.skipif(not any(map(shutil.which, decoder._COMPILERS)), reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("llama", "aot_eager"),
        pytest.param("llama", "inductor", marks=pytest.mark.long),
        pytest.param("gemma", "inductor", marks=pytest.mark.long),
    ],
)
def test_compiled_layers_have_the_same_gradients(
    make_model: MakeModel, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`aot_eager` traces forward and backward passes as inductor does, and leaves out the C++ compiler."""
    from torch._inductor import config

    compile_with = partial(torch.compile, backend=backend, dynamic=True)
    monkeypatch.setattr(decoder, "_compile", cache(compile_with))
    model = make_model(name, **ARCHITECTURES[name])
    compiled = copy_with(model, compile=True)
    # Both lengths go through one compilation. Without vector instructions the C++ compiler takes half the time.
    with config.patch("cpp.simdlen", 1):
        for segments in ([Segment(0, 11), Segment(11, 20)], SEGMENTS):
            token_ids = draw_tokens(segments[-1].end)
            ours, theirs = run_packed(compiled, token_ids, segments), run_packed(model, token_ids, segments)
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            expected = take_gradients(model, theirs)
            for key, gradient in take_gradients(compiled, ours).items():
                scale = expected[key].abs().max().item()
                torch.testing.assert_close(gradient, expected[key], atol=1e-5 * scale, rtol=1e-5)


def test_a_missing_compiler_is_an_error_at_the_start(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler found"):
        copy_with(make_model("llama"), compile=True)
