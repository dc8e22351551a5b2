"""TOML as this package needs it: read a file, read one flag's value, write nested tables of plain values.

Whatever is wrong with the user's file is a `ConfigError` of one sentence that begins with its path.
"""

import datetime
import re
import tomllib
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError

VARIABLE_PREFIX = "SHOAL_"
"""of the environment variables that hold settings"""
_TASK_SUFFIXES = (".jsonl", ".parquet")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {code: f"\\u{code:04x}" for code in (*range(0x20), 0x7F)} | str.maketrans(
    {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}
)


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file."""
    if path.suffix in _TASK_SUFFIXES:
        raise ConfigError(f"{path}: expected a TOML file of settings; a file of tasks is a setting: tasks.set={path}")
    text = _read_text(path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not valid TOML: nested too deeply") from None
    except ValueError as error:
        last_line = text.count("\n") + (not text.endswith("\n"))
        reason = str(error).replace("at end of document", f"at line {last_line}, the end of the file")
        raise ConfigError(f"{path}: not valid TOML: {reason}") from None


def parse_value(text: str) -> Any:
    """The value of a flag: as TOML where it is TOML, otherwise the text itself, so strings need no quotes."""
    text = text.strip()
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    value = parsed.pop("value")
    # A date has no place in our settings, and more than one key means the text held a line break.
    is_text = bool(parsed) or isinstance(value, datetime.date | datetime.time)
    return text if is_text else value


def is_utf8(text: str) -> bool:
    """Whether the text can be written as UTF-8; arguments of a command may hold stray bytes, which no TOML can."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dump_toml(data: dict[str, Any]) -> str:
    """Nested dicts of str, int, float, bool and lists of them as TOML text, values before tables, in order."""
    return "\n".join(_dump_table(data, ())).lstrip("\n") + "\n"


def _read_text(path: Path) -> str:
    try:
        # Editors on some systems begin a UTF-8 file with a byte-order mark, which TOML itself refuses.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a directory, expected a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def _dump_table(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    lines = ["", f"[{'.'.join(map(_dump_key, path))}]"] if path else []
    lines += [f"{_dump_key(k)} = {_dump_value(v)}" for k, v in table.items() if not isinstance(v, dict)]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += _dump_table(value, (*path, key))
    return lines


def _dump_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _dump_text(key)


def _dump_value(value: Any) -> str:
    if isinstance(value, str):
        return _dump_text(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_dump_value(item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


def _dump_text(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'
