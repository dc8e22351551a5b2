"""Which names a file of a checkpoint may have, wherever the name came from.

A name is one plain part of a path: no separator, no leading dot, nothing but ASCII letters, digits, dot, underscore and
hyphen, at most 128 of them. So joining it to a folder always stays right inside that folder.
"""

import re

MAX_NAME_CHARS = 128
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def check_name(name: object) -> str:
    """The name itself, if it is one that may be written to disk; a `ValueError` otherwise."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        shown = repr(name if not isinstance(name, str) else name[:MAX_NAME_CHARS])[:200]
        raise ValueError(
            f"{shown} cannot name a file: 1 to {MAX_NAME_CHARS} of A-Z a-z 0-9 . _ -, first a letter or digit"
        )
    return name
