"""The tests of a code task, as its verification info states them.

    {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [arguments], "output": value}, ...]}
    {"test_cases": [{"type": "stdin_stdout", "input": "text", "output": "text"}, ...]}
    {"tests": "source with asserts, or with check(candidate)", "entry_point": "f"}

`"prefix"`, optional, is source that stands before the completion (a signature, imports); `"language"`, optional, is
`"python"`. All cases of a task are of one type, and all must pass: partial credit would pay for guessing.
"""

from dataclasses import dataclass
from typing import Any

from shoal.box.wire import WireError, encode_value
from shoal.errors import ConfigError
from shoal.tasks.verify.base import Info

MAX_CASES = 256
MAX_SOURCE_CHARS = 65_536
MAX_TEXT_CHARS = 1 << 18
CALL, SCRIPT = "function_call", "stdin_stdout"


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of one function: encoded arguments and what must be returned."""

    function: str
    cases: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class ScriptTests:
    """Runs of a program: standard input and what must be printed."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class JudgeTests:
    """Tests in the words of their author, who calls the function."""

    function: str
    source: str
    prefix: str


Tests = CallTests | ScriptTests | JudgeTests


def read_tests(info: Info) -> Tests:
    """The tests of a task; ConfigError if there are none that can be run."""
    if info.get("language", "python") != "python":
        raise ConfigError(f"language {info['language']!r}: only Python is run")
    prefix = info.get("prefix", "")
    if not isinstance(prefix, str) or len(prefix) > MAX_SOURCE_CHARS:
        raise ConfigError(f"prefix: must be a text of at most {MAX_SOURCE_CHARS} characters")
    match info:
        case {"tests": str(source), "entry_point": str(function)} if function.isidentifier():
            if len(source) > MAX_TEXT_CHARS:
                raise ConfigError(f"tests: longer than {MAX_TEXT_CHARS} characters")
            return JudgeTests(function, source, prefix)
        case {"test_cases": list(cases)} if 0 < len(cases) <= MAX_CASES:
            return _read_cases(cases)
    raise ConfigError(f"verification info of code: needs tests and entry_point, or 1 to {MAX_CASES} test_cases")


def _read_cases(cases: list[Any]) -> Tests:
    kinds = {case.get("type") if isinstance(case, dict) else None for case in cases}
    if kinds == {CALL}:
        names = {case.get("fn_name") for case in cases}
        name = names.pop()
        if names or not isinstance(name, str) or not name.isidentifier():
            raise ConfigError("test_cases: one fn_name for all, the name of a function")
        return CallTests(name, tuple(_read_call(case) for case in cases))
    if kinds == {SCRIPT}:
        return ScriptTests(tuple(_read_script(case) for case in cases))
    raise ConfigError(f"test_cases: all of type {CALL}, or all of type {SCRIPT}")


def _read_call(case: dict[str, Any]) -> tuple[Any, Any]:
    arguments = case.get("input")
    if not isinstance(arguments, list) or "output" not in case:
        raise ConfigError("test_cases: a call needs input, a list of arguments, and output")
    try:
        return encode_value(arguments), encode_value(case["output"])
    except WireError as error:
        raise ConfigError(f"test_cases: {error}") from None


def _read_script(case: dict[str, Any]) -> tuple[str, str]:
    given, wanted = case.get("input"), case.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str) or max(len(given), len(wanted)) > MAX_TEXT_CHARS:
        raise ConfigError(f"test_cases: input and output must be texts of at most {MAX_TEXT_CHARS} characters")
    return given, wanted
