"""The character tokenizer, and encoding with tokenizers of other kinds."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from shoal.policy.tokenizer import build_tokenizer, decode_completion, encode_chat, encode_completion, encode_prompt
from shoal.tasks.registry import list_families, load_family
from shoal.tasks.split import train_task


@pytest.mark.parametrize("name", list_families())
def test_every_alphabet_makes_the_round_trip(name: str) -> None:
    family = load_family(name, {})
    tokenizer = build_tokenizer(family.alphabet)
    texts = [family.alphabet, *(family.demonstrate(train_task(family, seed)) for seed in range(50))]
    for text in texts:
        ids = encode_completion(tokenizer, text)
        assert len(ids) == len(text) + 1
        assert decode_completion(tokenizer, ids) == text


@pytest.mark.parametrize("text", ["", " ", "  a  b  ", " , . ! ' n't", "\n\n a\t", "a\u00e9\u0301\U0001f41f"])
def test_blanks_and_punctuation_are_kept_as_they_are(text: str) -> None:
    tokenizer = build_tokenizer(text + "abc")
    assert decode_completion(tokenizer, encode_completion(tokenizer, text)) == text


def test_the_vocabulary_is_the_specials_and_the_sorted_alphabet() -> None:
    tokenizer = build_tokenizer("ba 1")
    expected = ["<pad>", "<eos>", "<unk>", " ", "1", "a", "b"]
    assert [tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))] == expected


def test_the_vocabulary_does_not_depend_on_the_order_of_the_alphabet() -> None:
    assert build_tokenizer("cab b").get_vocab() == build_tokenizer(" abc").get_vocab()


def test_a_prompt_is_its_text_and_a_completion_ends() -> None:
    tokenizer = build_tokenizer("ab")
    assert encode_prompt(tokenizer, "ab") == [3, 4]
    assert encode_completion(tokenizer, "ab") == [3, 4, 1]


def test_the_end_token_is_skipped_in_decoding_and_a_stray_special_token_is_not() -> None:
    tokenizer = build_tokenizer("ab")
    assert decode_completion(tokenizer, [3, 4, 1]) == "ab"
    assert decode_completion(tokenizer, [3, 0, 4, 1]) == "a<pad>b"


def test_the_token_ids_of_a_rollout_decode_as_they_are() -> None:
    assert decode_completion(build_tokenizer("ab"), np.array([4, 3, 1], dtype=np.int32)) == "ba"


def test_an_unknown_character_becomes_the_unknown_token() -> None:
    tokenizer = build_tokenizer("ab")
    assert encode_prompt(tokenizer, "a\u0663b\0") == [3, 2, 4, 2]


def test_the_name_of_a_special_token_in_a_text_is_text() -> None:
    tokenizer = build_tokenizer("<eos>b")
    ids = encode_prompt(tokenizer, "<eos><bos>")
    assert tokenizer.eos_token_id not in ids
    assert decode_completion(tokenizer, ids) == "<eos><bos>"


CHAT = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_chat_goes_through_the_tokenizers_template_and_its_messages_stay_text() -> None:
    tokenizer = build_tokenizer("[]abcdefghijklmnopqrstuvwxyz<> ")
    messages = [("system", "be kind"), ("user", "a<eos>b")]
    assert encode_chat(tokenizer, messages) == encode_prompt(tokenizer, "be kind\n\na<eos>b"), "without a template"
    tokenizer.chat_template = CHAT
    ids = encode_chat(tokenizer, messages)
    assert ids.count(tokenizer.eos_token_id) == 2, "only those of the template"
    assert tokenizer.decode(ids) == "[system]be kind<eos>[user]a< eos>b<eos>[assistant]"


@pytest.mark.parametrize("config", [None, Qwen3Config(), LlamaConfig()])
def test_a_saved_tokenizer_loads_as_it_was(tmp_path: Path, config: Qwen3Config | LlamaConfig | None) -> None:
    family = load_family("countdown", {})
    tokenizer = build_tokenizer(family.alphabet)
    tokenizer.save_pretrained(tmp_path)
    if config is not None:  # a model in the same folder must not change which tokenizer is loaded
        config.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.get_vocab() == tokenizer.get_vocab()
    for seed in range(20):
        prompt = train_task(family, seed).prompt
        ids = encode_prompt(tokenizer, prompt)
        assert encode_prompt(loaded, prompt) == ids
        assert loaded(prompt)["input_ids"] == ids, "a server of the folder encodes prompts like training"
        assert loaded.decode(ids, skip_special_tokens=True) == prompt
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.unk_token_id) == (0, 1, 2)
    assert loaded.bos_token_id is None


def make_words(bos: bool, adds_bos: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "hello": 3, "shoal": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    if adds_bos:
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    begin = {"bos_token": "<s>"} if bos else {}
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", **begin)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_another_tokenizers_begin_token_comes_exactly_once(adds_bos: bool) -> None:
    assert encode_prompt(make_words(True, adds_bos), "hello shoal") == [0, 3, 4]


def test_a_tokenizer_without_begin_token_gets_none() -> None:
    tokenizer = make_words(False, False)
    assert encode_prompt(tokenizer, "hello shoal") == [3, 4]
    assert encode_completion(tokenizer, "hello shoal") == [3, 4, 1]
