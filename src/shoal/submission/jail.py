"""A pool of readers: strangers' files are read here and nowhere else.

    reader   started -> ready -> (file -> answer)* -> killed
    file     read -> reader died -> read again -> reader died -> a new reader reads our own -> CrashError

Invariants:
- each wait has a deadline, after which the reader's whole process group is killed. A reader that died, was late or
  broke the format is replaced, and so is one whose caller was cancelled;
- `FormError` is the file's fault, `JailError` ours. A file is blamed for the deaths of its readers, or for its want of
  memory, only if a file of our own is read right afterwards within the same limits, with all of that memory taken. What
  somebody else ended (SIGKILL: the kernel when memory runs out) is never held against it;
- a file is read twice at most, and our own once: whatever it does, there is an answer.

Readers are killed with the thread that started them, so a jail belongs in the loop of a thread that stays.
"""

import asyncio
import os
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from shoal.submission.bounds import NO_ROOM, Bounds, CrashError, FormError
from shoal.submission.frame import Columns, FrameError
from shoal.submission.reader import BOOT, LostError, MeansError, Reader, ReaderError

MAX_TRIES = 2
_BURY_S = 10.0


class JailError(Exception):
    """Reading does not work here at the moment; nothing is known about the file."""


class _DeathError(Exception):
    """A reader died of a file, or had to be killed; or was lost, which is no fault of the file."""

    def __init__(self, reason: str, *, lost: bool = False) -> None:
        super().__init__(reason)
        self.lost = lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What reading one file may take; its memory follows from the bounds."""

    cpu_s: int = 10
    wall_s: float = 30.0
    start_s: float = 60.0
    """until a reader is ready"""


class Jail:
    """Readers, each started when it is first needed. Use as `async with Jail() as jail`."""

    def __init__(self, *, size: int = 1, limits: Limits | None = None, boot: str = BOOT) -> None:
        self.limits = limits or Limits()
        self.num_started = 0
        """readers so far; more than `size` tells of files that end them"""
        self._boot = boot
        self._idle: list[Reader] = []
        self._dead: list[Reader] = []
        self._places = asyncio.Semaphore(size)

    async def __aenter__(self) -> "Jail":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def read(self, path: Path, bounds: Bounds) -> Columns:
        """The columns of a file; FormError if it has none, JailError if that could not be found out."""
        file = _open_file(path)
        try:
            _check_file(os.fstat(file), bounds)
            async with self._places:
                return await self._persist(file, bounds)
        finally:
            os.close(file)

    async def find_guards(self) -> tuple[str, ...]:
        """What this machine permits of network, memory, user, parent, privileges, calls; limits are set on any."""
        async with self._places:
            reader = await self._take_reader()
            self._idle.append(reader)
            return reader.guards

    async def close(self) -> None:
        """End all readers, and return when they are gone."""
        while self._idle:
            self._end_reader(self._idle.pop())
        dead, self._dead = self._dead, []
        await asyncio.gather(*(asyncio.to_thread(reader.process.wait, _BURY_S) for reader in dead))

    async def _persist(self, file: int, bounds: Bounds) -> Columns:
        deaths: list[_DeathError] = []
        for _ in range(MAX_TRIES):
            try:
                return await self._read_once(file, bounds)
            except _DeathError as error:
                deaths.append(error)
            except FormError as error:
                if str(error) == NO_ROOM:
                    await self._try_room(file, bounds)
                raise
        reason = str(deaths[-1])
        if any(death.lost for death in deaths):
            raise JailError(f"readers of submissions do not last here: {reason}")
        await self._try_room(file, bounds)
        raise CrashError(len(deaths), reason)

    async def _read_once(self, file: int, bounds: Bounds) -> Columns:
        try:
            async with self._borrow_reader() as reader, asyncio.timeout(self.limits.wall_s):
                return await reader.read(file, bounds, self.limits.cpu_s)
        except TimeoutError:
            raise _DeathError(f"it was killed after {self.limits.wall_s:g} s") from None
        except (ReaderError, FrameError) as error:
            raise _DeathError(str(error)) from None
        except (LostError, OSError) as error:
            raise _DeathError(str(error), lost=True) from None
        except MeansError as error:
            raise JailError(f"a reader of submissions does not work: {error}") from error
        except MemoryError:
            raise JailError("there is no memory here for what a file holds") from None

    async def _try_room(self, file: int, bounds: Bounds) -> None:
        """Read our own file within the limits of a stranger's; JailError if that does not work here either."""
        try:
            async with self._borrow_reader() as reader, asyncio.timeout(self.limits.wall_s):
                await reader.try_room(file, bounds, self.limits.cpu_s)
        except (ReaderError, FrameError, LostError, MeansError, OSError) as error:  # a timeout is an OSError
            raise JailError(f"a reader of submissions cannot read our own file either: {error}") from None

    @asynccontextmanager
    async def _borrow_reader(self) -> AsyncIterator[Reader]:
        """A reader for one job; it serves on if the job was done, be it by refusing a file."""
        reader = await self._take_reader()
        is_sound = False
        try:
            yield reader
            is_sound = True
        except FormError:
            is_sound = True
            raise
        finally:
            if is_sound:
                self._idle.append(reader)
            else:
                self._end_reader(reader)

    async def _take_reader(self) -> Reader:
        while self._idle:
            reader = self._idle.pop()
            if reader.is_alive:
                return reader
            self._end_reader(reader)
        return await self._start_reader()

    async def _start_reader(self) -> Reader:
        self._dead = [reader for reader in self._dead if reader.is_alive]  # asking takes their exit codes
        try:
            reader = Reader(self._boot)
        except OSError as error:
            raise JailError(f"a reader of submissions cannot start: {error}") from error
        self.num_started += 1
        is_ready = False
        try:
            async with asyncio.timeout(self.limits.start_s):
                await reader.wait_ready()
            is_ready = True
            return reader
        except TimeoutError:
            raise JailError(f"a reader of submissions was not ready after {self.limits.start_s:g} s") from None
        except (LostError, FrameError, OSError) as error:
            raise JailError(f"a reader of submissions cannot start: {error} ({reader.read_complaint()})") from error
        finally:
            if not is_ready:
                self._end_reader(reader)

    def _end_reader(self, reader: Reader) -> None:
        reader.kill()
        self._dead.append(reader)


def _open_file(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise  # who asks has not put it there
    except OSError as error:  # no descriptor left, a disk that fails
        raise JailError(f"a file cannot be opened here ({error.strerror})") from error


def _check_file(status: os.stat_result, bounds: Bounds) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise FormError("not a file")
    if status.st_size > bounds.file_bytes:
        raise FormError(f"a file of {status.st_size} bytes, allowed are {bounds.file_bytes}")
