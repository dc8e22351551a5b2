"""One task of a set as stored, in its canonical encoding.

Invariants:
- a record is data: texts, JSON values, numbers. Its verifier is named by its task type and looked up in our own list;
- a record has one encoding: JSON in ASCII, keys sorted, no whitespace, numbers in their shortest form. Equal records
  have equal bytes, and `parse_record(dump_record(record)) == record`;
- a task type and a source are short names; an id is up to `MAX_ID_CHARS` printable ASCII characters without `@`, which
  marks a target length (tasks/length.py);
- pass rates are numbers from 0 to 1, by the name of the model they were measured with.

Changing breaks: the hash of every task set, and with it the recipe of every run on one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.tasks.base import ChatMessage

MAX_ID_CHARS = 96
MAX_LINE_BYTES = 4 << 20
"""longest record; a longer one is rejected before it is parsed"""
MAX_MESSAGES = 64
MAX_DEPTH = 32
"""deepest nesting in a record"""
ROLES = ("system", "user", "assistant")
_NAME = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,63}", "1 to 64 letters, digits, dots, dashes, underscores, slashes"
_SPELLINGS = {
    "id": (rf"[!-?A-~]{{1,{MAX_ID_CHARS}}}", f"a text of 1 to {MAX_ID_CHARS} ASCII characters without spaces and @"),
    "task_type": (r"[a-z][a-z0-9_]{0,31}", "1 to 32 lower-case letters, digits or underscores"),
}
KEYS = frozenset({"difficulty", "id", "info", "metadata", "prompt", "source", "task_type"})
_NEEDED = frozenset({"id", "info", "prompt", "task_type"})


class RecordError(ValueError):
    """A row that is not a valid task, in a few words; the caller adds where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """One problem of a task set."""

    id: str
    source: str
    task_type: str
    """names the verifier"""
    prompt: str | tuple[ChatMessage, ...]
    """text, or chat messages, to which the tokenizer's chat template is applied"""
    info: Mapping[str, Any] = field(hash=False)
    """what the verifier needs to know, including gold answers"""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """any other data; `solution` is a completion to train on in SFT"""
    difficulty: Mapping[str, float] = field(default_factory=dict, hash=False)
    """pass rates by model"""

    @property
    def messages(self) -> tuple[ChatMessage, ...]:
        """The messages of a prompt in chat form; empty for a text."""
        return self.prompt if isinstance(self.prompt, tuple) else ()

    @property
    def text(self) -> str:
        """The prompt as text: for a chat the contents of its messages, separated by blank lines."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message.content for message in self.prompt)


def dump_record(record: TaskRecord) -> bytes:
    """The canonical encoding of a record, without a line end."""
    prompt: Any = record.prompt
    if not isinstance(prompt, str):
        prompt = [{"content": message.content, "role": message.role} for message in prompt]
    body = {
        "difficulty": {model: float(rate) for model, rate in record.difficulty.items()},
        "id": record.id,
        "info": record.info,
        "metadata": record.metadata,
        "prompt": prompt,
        "source": record.source,
        "task_type": record.task_type,
    }
    return _ENCODER.encode(body).encode("ascii")


def parse_record(line: bytes) -> TaskRecord:
    """Parse a line in our own format, in any JSON encoding."""
    return build_record(parse_row(line))


def parse_row(line: bytes) -> dict[str, Any]:
    """A JSON object from one line of untrusted bytes."""
    if len(line) > MAX_LINE_BYTES:
        raise RecordError(f"line of {len(line)} bytes, allowed are {MAX_LINE_BYTES}")
    try:
        row = json.loads(line, parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)
    except UnicodeDecodeError:
        raise RecordError("not UTF-8") from None
    except RecursionError:
        raise RecordError(f"nested more than {MAX_DEPTH} deep") from None
    except RecordError:
        raise
    except ValueError as error:  # also for whole numbers with thousands of digits
        raise RecordError(f"not JSON ({str(error)[:80]})") from None
    if not isinstance(row, dict):
        raise RecordError("not a JSON object")
    return row


def build_record(row: Mapping[str, Any]) -> TaskRecord:
    """A record from a row with our own columns; difficulty, metadata and source may be missing."""
    if unknown := sorted(set(row) - KEYS):
        raise RecordError(f"unknown columns: {', '.join(map(_show, unknown))}; known are {', '.join(sorted(KEYS))}")
    if missing := sorted(_NEEDED - set(row)):
        raise RecordError(f"missing columns: {', '.join(missing)}")
    return TaskRecord(
        id=_check_name("id", row["id"]),
        source=_check_name("source", row.get("source") or "unknown"),
        task_type=_check_name("task_type", row["task_type"]),
        prompt=read_prompt(row["prompt"]),
        info=_check_table("info", row["info"]),
        metadata=_check_table("metadata", row.get("metadata") or {}),
        difficulty=_check_rates(row.get("difficulty") or {}),
    )


def read_prompt(value: Any) -> str | tuple[ChatMessage, ...]:
    """A prompt in either form."""
    if isinstance(value, str):
        return _check_text("prompt", value, empty=False)
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise RecordError(f"prompt: must be a text or a list of 1 to {MAX_MESSAGES} messages")
    for item in value:
        if not isinstance(item, dict) or set(item) != {"role", "content"} or item["role"] not in ROLES:
            raise RecordError(f"prompt: a message must have exactly a role ({', '.join(ROLES)}) and a content")
    return tuple(ChatMessage(item["role"], _check_text("prompt", item["content"], empty=True)) for item in value)


def _check_name(key: str, value: Any) -> str:
    pattern, allowed = _SPELLINGS.get(key, _NAME)
    if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
        raise RecordError(f"{key} {_show(value)}: must be {allowed}")
    return value


def _check_text(key: str, value: Any, *, empty: bool) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise RecordError(f"{key}: must be a text, got {_show(value)}")
    _refuse_surrogates(key, value)
    return value


def _check_table(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RecordError(f"{key}: must be a JSON object, got {_show(value)}")
    _check_json(key, value, MAX_DEPTH)
    return value


def _check_json(key: str, value: Any, depth: int) -> None:
    """Reject values that JSON cannot represent, or that would not survive a round trip."""
    match value:
        case None | bool() | int():
            pass
        case float():
            if not math.isfinite(value):
                raise RecordError(f"{key}: contains a number that is not finite")
        case str():
            _refuse_surrogates(key, value)
        case list():
            _check_items(key, value, depth)
        case dict():
            if not all(isinstance(name, str) for name in value):
                raise RecordError(f"{key}: contains a key that is not a text")
            _check_items(key, [*value, *value.values()], depth)
        case _:
            raise RecordError(f"{key}: contains a value of type {type(value).__name__}, which JSON does not support")


def _check_items(key: str, items: list[Any], depth: int) -> None:
    if depth == 0:
        raise RecordError(f"{key}: nested more than {MAX_DEPTH} deep")
    for item in items:
        _check_json(key, item, depth - 1)


def _check_rates(value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise RecordError("difficulty: must be a table of pass rates by model")
    for model, rate in value.items():
        _check_name("difficulty", model)
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0.0 <= rate <= 1.0:
            raise RecordError(f"difficulty of {_show(model)}: must be a rate from 0 to 1, got {_show(rate)}")
    return {model: float(rate) for model, rate in value.items()}


def _refuse_surrogates(key: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RecordError(f"{key}: contains a lone surrogate") from None


def _refuse_constant(text: str) -> Any:
    raise RecordError(f"contains {text}, which is not a valid number")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        raise RecordError("an object has a duplicate key")
    return table


def _show(value: Any) -> str:
    return ascii(value if isinstance(value, str | int | float | bool) else type(value).__name__)[:60]


_ENCODER = json.JSONEncoder(ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))
