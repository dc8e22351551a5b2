"""What a run may be called: the name stands in signatures, folders and requests alike."""

import re

RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


def check_run(text: str) -> str:
    """The name of a run; ValueError for what is none."""
    if RUN.fullmatch(text) is None:
        raise ValueError(
            f"{text[:80]!r}: a run's name is 1 to 64 of the characters a-z 0-9 -, and does not begin with -"
        )
    return text
