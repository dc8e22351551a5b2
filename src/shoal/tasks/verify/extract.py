"""Extract a completion's answer: after its thoughts, in the last of its code blocks; and the limit of its nesting."""

import re
from typing import Any

MAX_NESTING = 64
"""Deepest JSON in a completion. How deep a parser can go depends on the Python version and on its own stack depth; all
reach this depth, and anything deeper is wrong whether it was parsed or not. Changing breaks: scores."""
_OPEN, _CLOSE = "<think>", "</think>"
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


def drop_thoughts(completion: str) -> str:
    """The text after the thoughts; empty if they never end, everything if there are none."""
    after = completion.rpartition(_CLOSE)[2]
    return "" if _OPEN in after else after


def find_block(text: str, *languages: str) -> str | None:
    """The contents of the last closed fenced block, preferably of one that names one of the languages: the output of a
    program is often shown after it. None without a block."""
    fences = list(_FENCE.finditer(text))
    # Fences come in pairs from the start: an unpaired last one opened a block that never ended.
    pairs = list(zip(fences[::2], fences[1::2], strict=False))
    named = [pair for pair in pairs if pair[0].group(1).strip().lower() in languages]
    if not pairs:
        return None
    opening, closing = (named or pairs)[-1]
    return text[opening.end() + 1 : closing.start()]


def is_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than `MAX_NESTING`."""
    level = [value]
    for _ in range(MAX_NESTING):
        level = [part for one in level for part in _list_parts(one)]
        if not level:
            return False
    return True


def _list_parts(value: Any) -> list[Any]:
    return value if isinstance(value, list) else list(value.values()) if isinstance(value, dict) else []
