"""Where a completion's answer stands: after its thoughts, in the last of its code blocks."""

import re

_OPEN, _CLOSE = "<think>", "</think>"
_FENCE = re.compile(r"^[ \t]*```([^\n`]*)$", re.MULTILINE)


def drop_thoughts(completion: str) -> str:
    """What follows the thoughts; nothing if they never end, all if there are none."""
    after = completion.rpartition(_CLOSE)[2]
    return "" if _OPEN in after else after


def find_block(text: str) -> str | None:
    """The contents of the last fenced block that is closed; None without one."""
    fences = list(_FENCE.finditer(text))
    if len(fences) < 2:
        return None
    # Fences come in pairs from the start: a last one without a partner opened a block that never ended.
    opening, closing = fences[(len(fences) // 2) * 2 - 2 :][:2]
    return text[opening.end() + 1 : closing.start()]
