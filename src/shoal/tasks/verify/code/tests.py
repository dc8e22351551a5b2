"""The tests of a code task, parsed from its verification info.

    {"test_cases": [{"type": "function_call", "fn_name": "f", "input": [arguments], "output": value}, ...]}
    {"test_cases": [{"type": "stdin_stdout", "input": "text", "output": "text"}, ...]}
    {"inputs": [...], "outputs": [...], "fn_name": "f"}       the same in columns; without fn_name, stdin and stdout
    {"test": "source with asserts, or with check(candidate)", "entry_point": "f"}

`"prompt"`, optional, is source that precedes the completion (a signature, imports); `"language"`, optional, is
`"python"`. All cases of a task have one type, and all must pass: partial credit would reward guessing. In columns the
output of a call may be wrapped in a list, as is common in the datasets that use them. Then there are two readings, and
all cases must pass in the same one.
"""

from dataclasses import dataclass
from typing import Any

from shoal.errors import ConfigError
from shoal.sandbox.frames import ChannelError, encode_value, pack_frame
from shoal.tasks.verify.base import Info

MAX_CASES = 256
MAX_SOURCE_CHARS = 65_536
MAX_TEXT_CHARS = 1 << 18
CALL, SCRIPT = "function_call", "stdin_stdout"


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of one function: encoded arguments, and the return values of all calls in each reading."""

    function: str
    arguments: tuple[Any, ...]
    readings: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True, slots=True)
class ScriptTests:
    """Runs of a program: standard input and expected output."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Tests as source, which call the function."""

    function: str
    source: str
    prefix: str


Tests = CallTests | ScriptTests | AssertTests


def read_tests(info: Info) -> Tests:
    """The tests of a task; ConfigError if none can be run."""
    if info.get("language", "python") != "python":
        raise ConfigError(f"language {info['language']!r}: only Python is supported")
    prefix = info.get("prompt", "")
    if not isinstance(prefix, str) or len(prefix) > MAX_SOURCE_CHARS:
        raise ConfigError(f"prompt: must be a text of at most {MAX_SOURCE_CHARS} characters")
    match info:
        case {"test": str(source), "entry_point": str(function)} if function.isidentifier():
            if len(source) > MAX_TEXT_CHARS:
                raise ConfigError(f"test: longer than {MAX_TEXT_CHARS} characters")
            return AssertTests(function, source, prefix)
        case {"test_cases": list(cases)} if 0 < len(cases) <= MAX_CASES:
            return _read_cases(cases)
        case {"inputs": list(given), "outputs": list(wanted)} if 0 < len(given) == len(wanted) <= MAX_CASES:
            return _read_columns(given, wanted, info.get("fn_name"))
    raise ConfigError(f"info of a code task: needs test and entry_point, or 1 to {MAX_CASES} test_cases")


def _read_columns(given: list[Any], wanted: list[Any], name: Any) -> Tests:
    kind = {"type": SCRIPT} if name is None else {"type": CALL, "fn_name": name}
    tests = _read_cases([{**kind, "input": one, "output": other} for one, other in zip(given, wanted, strict=True)])
    if not isinstance(tests, CallTests):
        return tests
    (plain,) = tests.readings
    opened = tuple(value[0] if isinstance(value, list) and len(value) == 1 else value for value in plain)
    return CallTests(tests.function, tests.arguments, (plain,) if opened == plain else (plain, opened))


def _read_cases(cases: list[Any]) -> Tests:
    kinds = {case.get("type") if isinstance(case, dict) else None for case in cases}
    if kinds == {CALL}:
        names = {case.get("fn_name") for case in cases}
        name = names.pop()
        if names or not isinstance(name, str) or not name.isidentifier():
            raise ConfigError("test_cases: all need the same fn_name, the name of a function")
        arguments, values = zip(*map(_read_call, cases), strict=True)
        return CallTests(name, arguments, (values,))
    if kinds == {SCRIPT}:
        return ScriptTests(tuple(_read_script(case) for case in cases))
    raise ConfigError(f"test_cases: all must be of type {CALL}, or all of type {SCRIPT}")


def _read_call(case: dict[str, Any]) -> tuple[Any, Any]:
    arguments = case.get("input")
    if not isinstance(arguments, list) or "output" not in case:
        raise ConfigError("test_cases: a call needs input, a list of arguments, and output")
    try:
        pack_frame(encode_value(arguments))  # raises if it does not fit
        return encode_value(arguments), encode_value(case["output"])
    except ChannelError as error:
        raise ConfigError(f"test_cases: {error}") from None


def _read_script(case: dict[str, Any]) -> tuple[str, str]:
    given, wanted = case.get("input"), case.get("output")
    if not isinstance(given, str) or not isinstance(wanted, str) or max(len(given), len(wanted)) > MAX_TEXT_CHARS:
        raise ConfigError(f"test_cases: input and output must be texts of at most {MAX_TEXT_CHARS} characters")
    return given, wanted
