"""The programs that run code written by a model. Standard library only.

    calls    run the source, then call one function of it for each frame of arguments, and send what it returns
    script   run the source as a program: its standard input is given, its standard output is the channel
    judge    run the task's own tests; what they call is in another job, and only plain values pass

Nothing in here is secret and nothing sent from here is trusted: untrusted code shares its process with this program and
may rewrite it. No expected value ever enters a job that runs untrusted code, so it can only forge what its function
returns. Modules that are not in PRELOAD cannot be imported, on any machine.

`seed` of a job decides its random numbers. That of the tests differs from that of the program: otherwise a program
could draw the random arguments of its tests itself, and know the right values without computing them.
"""

import builtins
import os
import random
import re
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

from shoal.sandbox import chance
from shoal.sandbox.forkserver import Program, ProgramSet
from shoal.sandbox.frames import ChannelError, decode_value, encode_value, receive_frame, send_frame
from shoal.sandbox.isolate import RUN_CODE

_NAMES = """
abc argparse array ast base64 binascii bisect calendar cmath codecs collections collections.abc colorsys
concurrent.futures concurrent.futures.thread contextlib copy csv dataclasses datetime decimal difflib encodings.ascii
encodings.idna encodings.latin_1 encodings.utf_16 encodings.utf_8 enum errno fnmatch fractions functools gc glob
graphlib hashlib heapq hmac html inspect io ipaddress itertools json keyword linecache locale logging math numbers
operator os os.path pathlib pprint queue random re reprlib secrets shutil signal statistics string stringprep struct
sys tempfile textwrap threading time timeit token tokenize traceback types typing unicodedata unittest urllib.parse
uuid warnings weakref zlib zoneinfo _strptime
"""
PRELOAD = tuple(_NAMES.split())
"""modules that untrusted code may import. Changing breaks: scores; raise the verifier's version."""
_OWN = "shoal"
_ENDS = (StopIteration, StopAsyncIteration)


def run_calls(channel: int, job: Any) -> None:
    """Serve calls of one function, or of a method of a class `Solution`, until the caller closes the channel."""
    _hide_program(job)
    namespace, name = _run_source(job["source"], "candidate"), job["function"]
    if name not in namespace and isinstance(namespace.get("Solution"), type):
        function = getattr(namespace["Solution"](), name)
    else:
        function = namespace[name]
    send_frame(channel, {"ready": True})
    while (call := receive_frame(channel)) is not None:
        send_frame(channel, _answer_call(function, call))


def _answer_call(function: Callable[..., Any], call: Any) -> dict[str, Any]:
    try:
        value = function(*decode_value(call["args"]), **dict(decode_value(call["kwargs"])))
        return {"value": encode_value(value)}
    except ChannelError as error:
        return {"error": "TypeError", "text": str(error)}
    except BaseException as error:  # noqa: BLE001  # whatever untrusted code raises is a result
        return {"error": type(error).__name__[:80], "text": ""}


def prepare_script(channel: int, job: Any) -> None:
    """Put the standard input where a program reads it, and the channel where it writes."""
    given = os.memfd_create("stdin")
    data = memoryview(job["stdin"].encode())
    while data:
        data = data[os.write(given, data) :]
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    os.close(given)
    os.dup2(channel, 1)


def run_script(channel: int, job: Any) -> None:
    """Run a program to its end, including its threads."""
    _hide_program(job)
    try:
        _run_source(job["source"], "__main__")
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
    finally:
        sys.stdout.flush()


def run_judge(channel: int, job: Any) -> None:
    """Run the task's tests. `candidate`, and the function's own name, call the other job through the caller."""

    def candidate(*args: Any, **kwargs: Any) -> Any:
        send_frame(channel, {"call": {"args": encode_value(args), "kwargs": encode_value(kwargs)}})
        answer = receive_frame(channel)
        if "error" in answer:
            raise _find_error(answer["error"], names)
        return decode_value(answer["value"])

    names = frozenset(re.findall(r"[A-Za-z]+", job["tests"]))
    _hide_program(job)
    namespace = _run_source(job["prefix"] if _is_complete(job["prefix"]) else "", "tests")
    namespace |= {job["function"]: candidate, "candidate": candidate}
    _run_in(job["tests"], namespace)
    if "check" in namespace:
        namespace["check"](candidate)
    send_frame(channel, {"passed": True})


def _find_error(name: str, names: frozenset[str]) -> BaseException:
    """The exception to raise in the tests: one that they name, or a kind of one. Others could mean something to Python
    itself: an IndexError or StopIteration ends a loop, and the tests in it are skipped."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _ENDS):
        kinds = kind.__mro__[: kind.__mro__.index(Exception)]
        if not names.isdisjoint(base.__name__ for base in kinds):
            return kind()
    return RuntimeError(name)


def _is_complete(source: str) -> bool:
    """Whether the start of a program is complete: tests may use its definitions, except the function itself."""
    try:
        compile(source, "<prefix>", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _run_source(source: str, name: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": name}
    _run_in(source, namespace)
    return namespace


def _run_in(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, f"<{namespace['__name__']}>", "exec", dont_inherit=True), namespace)  # noqa: S102  # isolated


def _hide_program(job: Any) -> None:
    """Look like a plain interpreter, identical on every machine."""
    sys.path.clear()
    sys.meta_path[:] = sys.meta_path[:1]  # only built-in modules; there are no files to import others from
    sys.argv[:] = sys.orig_argv[:] = ["candidate"]  # orig_argv names folders of this machine
    for name in [name for name in sys.modules if name == _OWN or name.startswith(_OWN + ".")]:
        del sys.modules[name]
    sys.modules["__main__"] = type(sys)("__main__")
    sys.executable = sys.prefix = sys.exec_prefix = sys.base_prefix = sys.base_exec_prefix = ""
    chance.remove_chance(job["seed"], job["shift"])
    random.seed(job["seed"])


def warm_up() -> None:
    """Import the modules that untrusted code may import."""
    for name in PRELOAD:
        import_module(name)
    chance.find_uses()


PROGRAMS = ProgramSet(
    programs={
        "calls": Program(run_calls),
        "script": Program(run_script, prepare_script),
        "judge": Program(run_judge),
    },
    profile=RUN_CODE,
    warm_up=warm_up,
)
