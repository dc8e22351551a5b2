"""How a second command asks the origin that already serves a folder to publish one more version.

    <data>/inbox/<token>.json     the request, written by whoever asks
    <data>/inbox/<token>.taken    the same, under way: renamed by the origin
    <data>/inbox/<token>.done     the answer, written by the origin
    <data>/inbox/alive            touched by the origin every second

Both sides are the folder's owner: what is in there is trusted as the folder is.

Invariants:
- a request is taken by a rename, so it is withdrawn or carried out, never both; who asked and was interrupted knows
  which;
- what was asked before the origin had the folder is not carried out: nobody waits for it;
- whatever goes wrong with a request is its answer, and the origin goes on. An answer that cannot be written ends the
  request with nothing, which whoever asked sees;
- who asks does not wait for an origin that shows no life for `SILENCE_S`.
"""

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from shoal.errors import ConfigError, DiskError
from shoal.files import write_atomic
from shoal.shardcast.lock import LOCK
from shoal.shardcast.pool import run_blocking

POLL_S = 0.1
BEAT_S = 1.0
SILENCE_S = 30.0
_ALIVE = "alive"
_TAKEN = ".taken"
_DONE = ".done"


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be published."""

    path: Path
    version: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    """what the command said about how the origin works, by the names of its flags; the origin has to work so"""

    def to_bytes(self) -> bytes:
        return json.dumps({**asdict(self), "path": os.fspath(self.path)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Request":
        """What `to_bytes` wrote; ValueError for anything else."""
        try:
            fields = json.loads(data)
            path, version, flags = fields["path"], fields["version"], fields["flags"]
        except (KeyError, TypeError, RecursionError):
            raise ValueError("not a request") from None
        if type(path) is not str or type(version) is not int or type(flags) is not dict:
            raise ValueError("not a request")
        return cls(Path(path), version, flags)


Publish = Callable[[Request], Awaitable[str]]
"""Carries out a request and returns the digest; its ConfigError, DiskError or OSError is the answer"""


class Inbox:
    """The origin's side. From `async with` on it shows that it lives; `serve` answers."""

    def __init__(self, folder: Path, note: Callable[[str], None] = lambda _: None) -> None:
        self._folder = folder
        self._note = note
        self._beating: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Inbox":
        inbox = await run_blocking(None, _open_inbox, self._folder)
        await run_blocking(None, _clear_inbox, inbox, self._folder)
        self._beating = asyncio.create_task(self._beat(inbox / _ALIVE))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._beating is not None, "entered before"
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def serve(self, publish: Publish) -> None:
        """Answer requests one after the other, for ever."""
        inbox = self._folder / "inbox"
        while True:
            for request in await run_blocking(None, _list_requests, inbox):
                taken = request.with_suffix(_TAKEN)
                try:
                    request.rename(taken)
                except FileNotFoundError:
                    continue  # withdrawn
                await self._answer(taken, await _carry_out(taken, publish))
            await asyncio.sleep(POLL_S)

    async def _answer(self, taken: Path, answer: dict[str, str]) -> None:
        try:
            await run_blocking(None, write_atomic, taken.with_suffix(_DONE), json.dumps(answer).encode())
        except OSError as error:
            self._note(f"a request to publish cannot be answered ({error.strerror})")
        taken.unlink(missing_ok=True)

    async def _beat(self, path: Path) -> None:
        failing = False
        while True:
            try:
                await run_blocking(None, path.touch)
                failing = False
            except OSError as error:
                if not failing:
                    self._note(
                        f"{path}: cannot be touched ({error.strerror}); who asks to publish will give up waiting"
                    )
                failing = True
            await asyncio.sleep(BEAT_S)


def ask_publish(folder: Path, request: Request) -> Path:
    """Leave a request; where it is."""
    path = _open_inbox(folder) / f"{uuid.uuid4().hex}.json"
    write_atomic(path, request.to_bytes())
    return path


async def wait_answer(request: Path, is_served: Callable[[], bool], silence_s: float = SILENCE_S) -> str:
    """The digest of the published version. An origin that ends or falls silent is an error too.

    Who stops waiting withdraws the request, or it is carried out all the same.
    """
    answer = await _await_answer(request, is_served, silence_s)
    if "error" in answer:
        raise (DiskError if answer.get("kind") == "disk" else ConfigError)(answer["error"])
    return answer["digest"]


def withdraw_request(request: Path) -> bool:
    """Take a request back; False if the origin has it."""
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True


async def _await_answer(request: Path, is_served: Callable[[], bool], silence_s: float) -> dict[str, str]:
    folder, answer = request.parent.parent, request.with_suffix(_DONE)
    loop = asyncio.get_running_loop()
    beat, beat_at = -1, loop.time()
    while True:
        served, pending = is_served(), request.exists() or request.with_suffix(_TAKEN).exists()
        if answer.exists():  # looked for last: what is answered is pending no more
            data: dict[str, str] = json.loads(answer.read_bytes())
            answer.unlink()
            return data
        if not served:
            withdraw_request(request)
            raise ConfigError(f"{folder}: the origin that served it ended before it published")
        if not pending:
            raise DiskError(f"{folder}: the origin could not answer; it says why where it runs")
        if (latest := _read_beat(request.parent)) != beat:
            beat, beat_at = latest, loop.time()
        elif loop.time() - beat_at > silence_s:
            withdraw_request(request)
            raise ConfigError(f"{folder}: the origin that serves it has shown no life for {silence_s:.0f} s")
        await asyncio.sleep(POLL_S)


async def _carry_out(taken: Path, publish: Publish) -> dict[str, str]:
    try:
        request = Request.from_bytes(await run_blocking(None, taken.read_bytes))
    except (ValueError, FileNotFoundError):
        return {"error": f"{taken.stem}: is no request to publish"}
    try:
        return {"digest": await publish(request)}
    except ConfigError as error:
        return {"error": str(error)}
    except DiskError as error:
        return {"error": str(error), "kind": "disk"}
    except OSError as error:
        return {"error": f"{request.path}: not published ({error.strerror or error})", "kind": "disk"}


def _open_inbox(folder: Path) -> Path:
    inbox = folder / "inbox"
    inbox.mkdir(exist_ok=True)
    inbox.chmod(0o700)  # a request names a path to read: nobody else may leave one
    return inbox


def _clear_inbox(inbox: Path, folder: Path) -> None:
    """Remove what is left from before this process had the folder: it wrote its lock then."""
    try:
        since = (folder / LOCK).stat().st_mtime_ns
    except FileNotFoundError:
        return
    for path in inbox.iterdir():
        with contextlib.suppress(FileNotFoundError):  # withdrawn
            if path.stat().st_mtime_ns < since:
                path.unlink()


def _list_requests(inbox: Path) -> list[Path]:
    """Requests in the order in which they came."""
    found = []
    for path in inbox.glob("[!.]*.json"):
        with contextlib.suppress(FileNotFoundError):  # withdrawn
            found.append((path.stat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def _read_beat(inbox: Path) -> int:
    try:
        return (inbox / _ALIVE).stat().st_mtime_ns
    except FileNotFoundError:
        return 0
