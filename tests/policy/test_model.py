"""Policies: built from a seed, saved and loaded as ordinary Hugging Face folders, and what is rejected."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from shoal.config.run import SHARD_BYTES, PolicyConfig, TinyConfig
from shoal.errors import ConfigError
from shoal.policy.model import Policy, cast_weights, copy_policy, load_policy, open_policy, save_policy, saved_tensors
from shoal.policy.tokenizer import build_tokenizer, encode_prompt
from shoal.policy.weights import INDEX, WEIGHTS, WeightsReader, hash_weights
from shoal.util.files import hash_file

SMALL = TinyConfig(layers=1, width=16, heads=2, kv_heads=1, context=64)


def make_tiny(seed: int = 0, tiny: TinyConfig = SMALL) -> Policy:
    return load_policy(PolicyConfig(tiny=tiny), alphabet="abc", seed=seed)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved policy that tests may damage."""
    save_policy(make_tiny(), tmp_path / "policy")
    return tmp_path / "policy"


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_seed_makes_the_same_weights_again() -> None:
    torch.manual_seed(1)
    first = make_tiny(7).model.state_dict()
    torch.manual_seed(2)
    again, other = make_tiny(7).model.state_dict(), make_tiny(8).model.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_making_a_policy_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_a_tiny_model_is_what_its_settings_say(arch: str) -> None:
    tiny = TinyConfig(arch=arch, layers=3, width=48, heads=6, kv_heads=2, context=77)
    policy = make_tiny(0, tiny)
    config = policy.model.config
    assert config.model_type == arch and config.num_hidden_layers == 3 and config.hidden_size == 48
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (6, 2, 8)
    assert config.max_position_embeddings == 77 and config.vocab_size == len(policy.tokenizer) == 6
    assert policy.eos_id == config.eos_token_id == policy.tokenizer.eos_token_id
    assert policy.num_parameters == sum(p.numel() for p in policy.model.parameters())


def test_embeddings_are_not_tied() -> None:
    model = make_tiny().model
    assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_transformers_loads_what_was_saved(tmp_path: Path, arch: str) -> None:
    policy = make_tiny(3, SMALL.model_copy(update={"arch": arch}))
    save_policy(policy, tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer("abcab", return_tensors="pt")["input_ids"]
    assert ids[0].tolist() == encode_prompt(policy.tokenizer, "abcab")
    with torch.no_grad():
        assert torch.equal(model(ids).logits, policy.model(ids).logits)


def test_a_saved_policy_opens_as_it_was(folder: Path) -> None:
    opened, made = open_policy(folder), make_tiny()
    assert opened.tokenizer.get_vocab() == made.tokenizer.get_vocab() and opened.eos_id == made.eos_id
    expected = made.model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.model.state_dict().items())


def test_settings_may_name_a_folder(folder: Path) -> None:
    policy = load_policy(PolicyConfig(path=str(folder)), alphabet="does not matter", seed=99)
    assert len(policy.tokenizer) == 6


def drop_weights_for_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def drop_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def drop_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def grow_tokenizer(folder: Path) -> None:
    build_tokenizer("abcdefgh").save_pretrained(folder)


def drop_end_token(folder: Path) -> None:
    tokenizer = build_tokenizer("abc")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (shutil.rmtree, "no such folder"),
    "emptied": (lambda folder: [path.unlink() for path in folder.iterdir()], "cannot load a causal LM"),
    "pickle": (drop_weights_for_pickle, "no file named model.safetensors"),
    "cut": (cut_weights, "cannot load a causal LM"),
    "garbage": (lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 99), "cannot load a causal LM"),
    "tensor missing": (drop_tensor, "are incomplete, 1 missing, first 'model.norm.weight'"),
    "other shapes": (lambda folder: change_config(folder, intermediate_size=128), "cannot load a causal LM"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "cannot load a causal LM"),
    "bad json": (lambda folder: (folder / "config.json").write_text('{"model'), "not a valid JSON file"),
    "wrong type": (lambda folder: change_config(folder, hidden_size="16"), "cannot load a causal LM"),
    "not a decoder": (lambda folder: change_config(folder, model_type="t5"), "cannot load a causal LM"),
    "unknown": (lambda folder: change_config(folder, model_type="nosuch"), "cannot load a causal LM"),
    "no tokenizer": (drop_tokenizer, "has no tokenizer"),
    "large tokenizer": (grow_tokenizer, "has 11 tokens, the model 6"),
    "no end": (drop_end_token, "has no end token"),
}


@pytest.mark.parametrize("fault", SPOILED)
def test_a_folder_that_cannot_be_used_is_named_in_one_sentence(folder: Path, fault: str) -> None:
    spoil, reason = SPOILED[fault]
    spoil(folder)
    with pytest.raises(ConfigError) as caught:
        open_policy(folder)
    text = str(caught.value)
    assert text.startswith("policy.path: ") and reason in text and str(folder) in text and "\n" not in text


@pytest.mark.parametrize("path", ["./no/such", "no/such/folder", "/no/such", "a b"])
def test_a_path_that_is_no_hub_id_is_not_looked_up_there(path: str) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        open_policy(path)


def test_code_of_a_folder_is_never_run(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (folder / "own.py").write_text(
        f"open({str(mark)!r}, 'w').close()\n"
        "from transformers import Qwen3Config as OwnConfig, Qwen3ForCausalLM as OwnModel\n"
        "from transformers import PreTrainedTokenizerFast as OwnTokenizer\n"
    )
    change_config(
        folder, model_type="own", auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    )
    path = folder / "tokenizer_config.json"
    names = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    with pytest.raises(ConfigError, match="cannot load a causal LM"):
        open_policy(folder)
    assert not mark.exists()


def test_a_folder_that_does_not_exist_is_named_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with caplog.at_level("INFO"), pytest.raises(ConfigError, match="no such folder, and from the hub: "):
        open_policy("models/nosuch")
    assert caplog.messages[0].startswith("policy.path: there is no folder 'models/nosuch', so it is loaded from the")
    assert logging.getLogger("huggingface_hub").handlers == [], "a warning that the root prints as well"


def make_tied(seed: int) -> Policy:
    """A policy like most small models of the hub: one matrix for the first layer and the last."""
    tokenizer = build_tokenizer("abc")
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return Policy(model=AutoModelForCausalLM.from_config(config), tokenizer=tokenizer)


@pytest.mark.parametrize("make", [make_tiny, make_tied])
def test_a_copy_has_the_weights_of_the_file_and_leaves_the_other_alone(
    make: Callable[[int], Policy], tmp_path: Path
) -> None:
    first, second = make(1), make(2)
    before = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
    save_policy(second, tmp_path / "second")
    copied = copy_policy(first, tmp_path / "second")
    assert copied is not None
    wanted = second.model.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in copied.model.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in first.model.state_dict().items())


def test_a_copy_of_tied_weights_is_tied(tmp_path: Path) -> None:
    save_policy(make_tied(2), tmp_path / "second")
    copied = copy_policy(make_tied(1), tmp_path / "second")
    assert copied is not None
    model = copied.model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_file_that_lacks_a_tensor_is_no_copy(tmp_path: Path) -> None:
    for make in (make_tiny, make_tied):
        save_policy(make(2), tmp_path / "second")
        weights = load_file(tmp_path / "second" / WEIGHTS)
        weights.pop("model.embed_tokens.weight")
        (tmp_path / "less").mkdir(exist_ok=True)
        save_file(weights, tmp_path / "less" / WEIGHTS, metadata={"format": "pt"})
        assert copy_policy(make(1), tmp_path / "less") is None


@pytest.mark.parametrize("make", [make_tiny, make_tied])
@pytest.mark.parametrize("shard_bytes", [SHARD_BYTES, 2000])
def test_a_folder_has_the_bytes_that_transformers_writes(
    make: Callable[[int], Policy], shard_bytes: int, tmp_path: Path
) -> None:
    policy = make(1)
    policy.model.save_pretrained(tmp_path / "theirs", max_shard_size=shard_bytes)
    policy.tokenizer.save_pretrained(tmp_path / "theirs")
    save_policy(policy, tmp_path / "ours", shard_bytes=shard_bytes)
    ours, theirs = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("ours", "theirs")
    )
    assert ours == theirs and (INDEX in ours) == (shard_bytes == 2000)


@pytest.mark.parametrize("make", [make_tiny, make_tied])
def test_a_model_that_was_opened_is_divided_into_the_files_it_was_opened_from(
    make: Callable[[int], Policy], tmp_path: Path
) -> None:
    save_policy(make(1), tmp_path / "first", shard_bytes=9000)
    save_policy(open_policy(tmp_path / "first"), tmp_path / "second", shard_bytes=9000)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).glob("*.safetensors*")}
        for name in ("first", "second")
    )
    assert first == second and len(first) > 2


@pytest.mark.parametrize("make", [make_tiny, make_tied])
def test_saving_copies_no_tensor(make: Callable[[int], Policy]) -> None:
    model = make(1).model
    own = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    saved = saved_tensors(model)
    places = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert len(saved) == len(own) and {tensor.data_ptr() for tensor in saved.values()} == places


@pytest.mark.parametrize("make", [make_tiny, make_tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_policy_in_several_files_opens_and_is_copied(
    make: Callable[[int], Policy], dtype: torch.dtype, tmp_path: Path
) -> None:
    policy = make(1)
    save_policy(policy, tmp_path, dtype=dtype, shard_bytes=2000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    wanted = {name: tensor.to(dtype) for name, tensor in policy.model.state_dict().items()}
    opened = open_policy(tmp_path, dtype=dtype)
    copied = copy_policy(make(2), tmp_path)
    assert copied is not None and opened.model.dtype == dtype and opened.model.config.dtype == dtype
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in opened.model.state_dict().items())
    assert all(torch.equal(tensor, wanted[name].float()) for name, tensor in copied.model.state_dict().items())


@pytest.mark.parametrize("make", [make_tiny, make_tied])
def test_rounded_weights_compute_like_a_folder_opened_in_that_type(
    make: Callable[[int], Policy], tmp_path: Path
) -> None:
    policy = make(1)
    save_policy(policy, tmp_path, dtype=torch.bfloat16)
    rounded, opened = cast_weights(policy.model, torch.bfloat16), open_policy(tmp_path, dtype=torch.bfloat16).model
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(rounded(ids).logits, opened(ids).logits)


def test_a_policy_whose_index_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    save_policy(make_tiny(), tmp_path / "policy", shard_bytes=2000)
    index = tmp_path / "policy" / INDEX
    file = WeightsReader(tmp_path / "policy").tensors["lm_head.weight"].file
    (tmp_path / "policy" / file).rename(tmp_path / file)
    index.write_text(index.read_text().replace(file, f"../{file}"))
    with pytest.raises(ConfigError, match="is not the plain name of a safetensors file"):
        open_policy(tmp_path / "policy")


def test_the_hash_of_weights_covers_every_file(tmp_path: Path) -> None:
    save_policy(make_tiny(), tmp_path / "one")
    assert hash_weights(tmp_path / "one") == hash_file(tmp_path / "one" / WEIGHTS)
    save_policy(make_tiny(), tmp_path / "several", shard_bytes=2000)
    files = sorted(path for path in (tmp_path / "several").iterdir() if "safetensors" in path.name)
    hashes = {hash_weights(tmp_path / "several")}
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b" " if path.name == INDEX else path.read_bytes()[:-1] + b"!")
        hashes.add(hash_weights(tmp_path / "several"))
    assert len(hashes) == len(files) + 1
