"""Measures a role from inside: Python imports this module at the start of each process with this folder on its path.

Each stage's calls are wrapped when their module is imported, before other modules can import names from it. The measure
is CPU time of the thread (`time.thread_time`), and for a coroutine that of its own steps. When stages are nested, each
gets its time without the others.
"""

import functools
import importlib.abc
import importlib.machinery
import inspect
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from loop_stages import COUNTERS, FOLDER, NUM_DOUBLES, STAGES

SERVERS = ("coordinator", "origin", "relay")
"""commands whose sockets are counted: one of them is part of every connection"""
_DOUBLE = 8


class Meter:
    """The numbers of this process, in a file that others can read at any time."""

    def __init__(self, path: Path) -> None:
        self.move(path)

    def move(self, path: Path) -> None:
        """Start again in a new file, as after a fork."""
        with path.open("w+b") as file:
            file.truncate(_DOUBLE * NUM_DOUBLES)
            self._doubles = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self._lock, self._local = threading.Lock(), threading.local()

    def enter(self) -> None:
        stack = self._local.__dict__.setdefault("stack", [])
        stack.append([time.thread_time(), 0.0])

    def leave(self, stage: int, *, calls: int = 1) -> None:
        stack = self._local.stack
        begun, inner = stack.pop()
        spent = time.thread_time() - begun
        if stack:
            stack[-1][1] += spent
        with self._lock:
            self._doubles[2 * stage] += spent - inner
            self._doubles[2 * stage + 1] += calls

    def count(self, name: str, amount: float) -> None:
        with self._lock:
            self._doubles[2 * len(STAGES) + COUNTERS.index(name)] += amount


def wrap_call(meter: Meter, stage: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, measured."""
    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def measured_steps(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(meter, stage, call(*args, **kwargs))

        return measured_steps

    @functools.wraps(call)
    def measured(*args: Any, **kwargs: Any) -> Any:
        meter.enter()
        try:
            return call(*args, **kwargs)
        finally:
            meter.leave(stage)

    return measured


class _Steps:
    """Awaits a coroutine and measures each of its steps, but not the time in between."""

    def __init__(self, meter: Meter, stage: int, coroutine: Any) -> None:
        self._meter, self._stage, self._coroutine, self._is_begun = meter, stage, coroutine, False

    def __await__(self) -> "_Steps":
        return self

    def __iter__(self) -> "_Steps":
        return self

    def __next__(self) -> Any:
        return self._step(self._coroutine.send, None)

    def send(self, value: Any) -> Any:
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def _step(self, call: Callable[..., Any], *args: Any) -> Any:
        self._meter.enter()
        try:
            return call(*args)
        finally:
            self._meter.leave(self._stage, calls=0 if self._is_begun else 1)
            self._is_begun = True


class Wrapper(importlib.abc.MetaPathFinder):
    """Wraps the stages of a module when it is imported."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._targets: dict[str, list[tuple[int, str]]] = {}
        for number, stage in enumerate(STAGES):
            for target in stage.targets:
                module, _, name = target.partition(":")
                self._targets.setdefault(module, []).append((number, name))

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = self._targets.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if wanted else None
        if spec is None or spec.loader is None or wanted is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            for number, name in wanted:
                self._wrap(module, number, name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType, number: int, name: str) -> None:
        *outer, last = name.split(".")
        place: Any = functools.reduce(getattr, outer, module)
        call = getattr(place, last)
        if name == "pack_work":
            call = _count_parcels(self._meter, call)
        setattr(place, last, wrap_call(self._meter, number, call))


def _count_parcels(meter: Meter, pack: Callable[..., Any]) -> Callable[..., Any]:
    """Count what a worker submits."""

    @functools.wraps(pack)
    def counted(*args: Any, **kwargs: Any) -> Any:
        parcel = pack(*args, **kwargs)
        entries = parcel.manifest.rollouts
        meter.count("rollouts", len(entries))
        meter.count("tokens", sum(entry.tokens for entry in entries))
        meter.count("file_bytes", parcel.manifest.size)
        return parcel

    return counted


def count_sockets(meter: Meter) -> None:
    """Count the bytes of all sockets of this process."""
    for name, counter in (("recv", "received"), ("recv_into", "received"), ("send", "sent"), ("sendmsg", "sent")):
        setattr(socket.socket, name, _count_bytes(meter, getattr(socket.socket, name), f"{counter}_bytes"))
    os.sendfile = _count_bytes(meter, os.sendfile, "sent_bytes")


def _count_bytes(meter: Meter, call: Callable[..., Any], counter: str) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        meter.count(counter, result if isinstance(result, int) else len(result))
        return result

    return counted


def _is_server() -> bool:
    """Whether this process is one of the servers; `sys.argv` is not set yet."""
    return any(name in sys.orig_argv[:5] for name in SERVERS)


if folder := os.environ.get(FOLDER):
    own = Meter(Path(folder) / str(os.getpid()))
    os.register_at_fork(after_in_child=lambda: own.move(Path(folder) / str(os.getpid())))
    sys.meta_path.insert(0, Wrapper(own))
    if _is_server():
        count_sockets(own)
