"""Remove chance from a process that is about to run untrusted code, so that it gives the same result everywhere.
Standard library only.

    random bytes   a stream that follows from a seed: os.urandom, secrets, uuid, SystemRandom, unseeded Random
    clocks         start within `_MAX_DELAY_NS` after `EPOCH_S`, as the seed says; advance by `TICK_NS` with every
                   reading, and by what is slept
    this machine   process id, user, host name, processors, file times and numbers: the same constants everywhere

Addresses cannot be made equal on different machines. Within one machine the fork server turns off their randomisation
(linux.fix_addresses). `shift` moves the objects that are allocated from here on: a program whose result depends on
addresses (the order of a set of objects, `id`, `hash`) shows it by different results for different shifts.

Untrusted code could undo all of this in its own process. It gains nothing by that but a score that may not repeat.
"""

import ctypes
import datetime
import gc
import hashlib
import os
import random
import resource
import sys
import threading
import time
import timeit
import uuid
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]

EPOCH_S = 1_600_000_000
TICK_NS = 1_000_000
"""so that a loop that waits for a second ends after a thousand readings. Changing breaks: scores"""
_NS = 1_000_000_000
_MAX_DELAY_NS = 1_800 * _NS
"""both sides have the same date and hour"""
_NOBODY = 65534
_SIZES = range(1, 1024, 16)
_HIDDEN = ("ctypes", "_ctypes", "_random")
"""imported by the fork server or by PRELOAD, and able to reach real chance; their importers keep them"""
_WAITING = ("threading", "queue")
"""modules that wait for real time, and would wait for ever with a clock that does not run"""
_held: list[object] = []
_uses: list[tuple[dict[str, Any], str, Function]] = []


class _Clock:
    """A clock that only its readers advance. Its start follows from the seed: tests that take their arguments from the
    clock must not read the same time as the program."""

    def __init__(self, seed: str) -> None:
        digest = hashlib.sha256(f"clock {seed}".encode()).digest()
        self.passed_ns = int.from_bytes(digest[:8], "big") % _MAX_DELAY_NS

    def read(self) -> int:
        """Nanoseconds since the start."""
        self.passed_ns += TICK_NS
        return self.passed_ns

    def read_date(self) -> int:
        """Nanoseconds since 1970."""
        return EPOCH_S * _NS + self.read()


class _Stream:
    """Bytes that follow from a seed."""

    def __init__(self, seed: str) -> None:
        self._seed, self._place = seed, 0

    def read(self, size: int, flags: int = 0) -> bytes:
        self._place += 1
        return hashlib.shake_256(f"{self._seed} {self._place}".encode()).digest(size)


def remove_chance(seed: str, shift: int = 0) -> None:
    """Replace every source of chance in this process."""
    clock, stream = _Clock(seed), _Stream(seed)
    new = _list_replacements(clock, stream)
    find_uses()
    for names, name, old in _uses:
        names[name] = new[old]
    for function in (timeit.Timer.__init__, timeit.timeit, timeit.repeat):
        function.__defaults__ = tuple(new.get(value, value) for value in function.__defaults__ or ())
    _replace_dates(clock)
    _replace_seeding(stream)
    uuid._generate_time_safe = None  # type: ignore[attr-defined]  # it reads the clock itself
    for name in _HIDDEN:
        sys.modules[name] = None  # type: ignore[assignment]  # an ImportError for whoever imports it
    for number in range(shift):  # one more object of every size
        _held.extend((object(), complex(number, 1), *(bytes(size) for size in _SIZES)))


def find_uses() -> None:
    """Find where modules hold the functions to replace. Done once, before a process is forked for each program."""
    if _uses:
        return
    wanted = {id(function): function for function in _list_replacements(_Clock(""), _Stream(""))}
    for name, module in list(sys.modules.items()):
        if isinstance(module, type(sys)) and name not in (__name__, *_WAITING):
            names = vars(module)
            _uses.extend((names, key, wanted[id(value)]) for key, value in names.items() if id(value) in wanted)


def _list_replacements(clock: _Clock, stream: _Stream) -> dict[Function, Function]:
    bytes_ = dict.fromkeys((os.urandom, os.getrandom), stream.read)
    return {**_replace_clocks(clock), **_replace_machine(), **bytes_}


def _replace_clocks(clock: _Clock) -> dict[Function, Function]:
    sleep, gmtime, localtime, strftime = time.sleep, time.gmtime, time.localtime, time.strftime
    asctime = time.asctime

    def pause(seconds: float) -> None:
        sleep(seconds)
        clock.passed_ns += int(seconds * _NS)

    def now_or(seconds: float | None) -> float:
        return clock.read_date() / _NS if seconds is None else seconds

    def read(*_: Any) -> float:
        return clock.read() / _NS

    def read_ns(*_: Any) -> int:
        return clock.read()

    def get_time(which: int) -> float:
        return (clock.read_date() if which == time.CLOCK_REALTIME else clock.read()) / _NS

    def get_time_ns(which: int) -> int:
        return clock.read_date() if which == time.CLOCK_REALTIME else clock.read()

    return {
        time.time: lambda: clock.read_date() / _NS,
        time.time_ns: clock.read_date,
        **dict.fromkeys((time.monotonic, time.perf_counter, time.process_time, time.thread_time), read),
        **dict.fromkeys((time.monotonic_ns, time.perf_counter_ns, time.process_time_ns, time.thread_time_ns), read_ns),
        time.clock_gettime: get_time,
        time.clock_gettime_ns: get_time_ns,
        sleep: pause,
        gmtime: lambda seconds=None: gmtime(now_or(seconds)),
        localtime: lambda seconds=None: localtime(now_or(seconds)),
        time.ctime: lambda seconds=None: asctime(localtime(now_or(seconds))),
        asctime: lambda moment=None: asctime(localtime(now_or(None)) if moment is None else moment),
        strftime: lambda form, moment=None: strftime(form, localtime(now_or(None)) if moment is None else moment),
        os.times: lambda: os.times_result((read(), 0.0, 0.0, 0.0, read())),
    }


def _replace_machine() -> dict[Function, Function]:
    stat, lstat, fstat = os.stat, os.lstat, os.fstat

    def hide(found: os.stat_result) -> os.stat_result:
        return os.stat_result((found.st_mode, 0, 0, found.st_nlink, _NOBODY, _NOBODY, found.st_size, 0, 0, 0))

    return {
        os.getpid: lambda: 1,
        os.getppid: lambda: 0,
        **dict.fromkeys((os.getuid, os.geteuid, os.getgid, os.getegid), lambda: _NOBODY),
        os.uname: lambda: os.uname_result(("Linux", "sandbox", "0", "0", "sandbox")),
        os.cpu_count: lambda: 1,
        os.sysconf: lambda _: 1,
        resource.getrusage: lambda _: resource.struct_rusage((0.0, 0.0, *[0] * 14)),
        threading.get_native_id: lambda: 1,
        os.sched_getaffinity: lambda _: {0},
        stat: lambda *args, **kwargs: hide(stat(*args, **kwargs)),
        lstat: lambda *args, **kwargs: hide(lstat(*args, **kwargs)),
        fstat: lambda *args, **kwargs: hide(fstat(*args, **kwargs)),
    }


def _replace_dates(clock: _Clock) -> None:
    """`datetime` reads the clock in C and its class cannot be assigned to; a subclass would be a different type."""

    def now(cls: Any, tz: Any = None) -> Any:
        return cls.fromtimestamp(clock.read_date() / _NS, tz)

    def utcnow(cls: Any) -> Any:
        return cls.utcfromtimestamp(clock.read_date() / _NS)

    (names,) = gc.get_referents(datetime.datetime.__dict__)
    names |= {"now": classmethod(now), "utcnow": classmethod(utcnow)}
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))  # drop the methods that were looked up before


def _replace_seeding(stream: _Stream) -> None:
    seed = random.Random.seed

    def seed_random(self: random.Random, a: Any = None, version: int = 2) -> None:
        seed(self, int.from_bytes(stream.read(32), "big") if a is None else a, version)

    random.Random.seed = seed_random  # type: ignore[method-assign]
    random.seed = random._inst.seed  # type: ignore[attr-defined]
