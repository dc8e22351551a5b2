"""Text to token ids and back: a character tokenizer in Hugging Face format, and one encoding for any tokenizer.

- A prompt is the begin token (if the tokenizer has one) and the text; a completion is the text and the end token.
- The character tokenizer has no begin token. With one, a tiny model derives absolute positions from it and never sorts
  more digits than it was shown; without, its success on unseen lengths starts above zero (docs/log.md).
- Text is data: `<eos>` inside a prompt is five characters, never the end token.
- A prompt in chat form uses the tokenizer's own chat template; without a template it is the text of its messages. Names
  of special tokens in a message are broken up by a space, because templates are parsed after they are filled.

Changing the order of the vocabulary breaks: every saved model, rollout and proof.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, EOS, UNK = SPECIALS = ("<pad>", "<eos>", "<unk>")
"""Ids 0 to 2. Changing breaks: every saved tiny model."""


def build_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One token per character, in sorted order after the specials; other characters become `<unk>`."""
    vocabulary = {token: index for index, token in enumerate((*SPECIALS, *sorted(set(alphabet))))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The begin token, exactly once and only if there is one, and the text."""
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return begin + _encode_text(tokenizer, text)


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[tuple[str, str]]) -> list[int]:
    """A prompt of (role, content) messages, up to where the answer begins."""
    if not tokenizer.chat_template:
        return encode_prompt(tokenizer, "\n\n".join(content for _, content in messages))
    chat = [{"role": role, "content": _break_specials(tokenizer, content)} for role, content in messages]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert isinstance(text, str), "one chat makes one text"
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def encode_completion(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The text and the end token."""
    assert tokenizer.eos_token_id is not None, "a policy's tokenizer has an end token"
    return [*_encode_text(tokenizer, text), tokenizer.eos_token_id]


def decode_completion(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | np.ndarray) -> str:
    """The text of a completion without its end token, with spaces preserved.

    Any other special token stays visible as its name: a stray `<pad>` is not part of an answer and makes it wrong.
    """
    kept: list[int] = np.asarray(ids).tolist()
    if kept and kept[-1] == tokenizer.eos_token_id:
        kept.pop()
    text = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str), "one sequence decodes to one text"
    return text


def _break_specials(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    for token in sorted({*tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token)):
        if len(token) > 1:
            text = text.replace(token, f"{token[0]} {token[1:]}")
    return text


def _encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    return ids
