"""How a second command asks the origin that already serves a folder to publish one more version.

    <data>/inbox/<token>.json    {"path": ..., "version": ...}, written by whoever asks
    <data>/inbox/<token>.done    {"digest": ...} or {"error": ...}, written by the origin

Both sides are the folder's owner: what is in there is trusted as the folder is. An answer that nobody fetched is
removed with the next start of the origin.
"""

import asyncio
import fcntl
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic

POLL_S = 0.1


def find_server(folder: Path) -> int | None:
    """The process that has the folder open as its store; None: nobody has."""
    try:
        lock = os.open(folder / "store.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return int(os.pread(lock, 32, 0) or 0)
    finally:
        os.close(lock)
    return None


def ask_publish(folder: Path, path: Path, version: int) -> Path:
    """Leave a request; returns where its answer will be."""
    inbox = _open_inbox(folder)
    request = inbox / f"{uuid.uuid4().hex}.json"
    write_atomic(request, json.dumps({"path": str(path.resolve()), "version": version}).encode())
    return request.with_suffix(".done")


async def wait_answer(answer: Path, is_served: Callable[[], bool]) -> str:
    """The digest of the published version. An origin that ends without answering is an error too."""
    while not answer.exists():
        if not is_served() and not answer.exists():
            answer.with_suffix(".json").unlink(missing_ok=True)
            raise ConfigError(f"{answer.parent.parent}: the origin that served it ended before it published")
        await asyncio.sleep(POLL_S)
    data = json.loads(answer.read_bytes())
    answer.unlink()
    if "error" in data:
        raise ConfigError(data["error"])
    return str(data["digest"])


async def serve_inbox(folder: Path, publish: Callable[[Path, int], Awaitable[str]]) -> None:
    """Answer requests one after the other, for ever. `publish` returns the digest; its ConfigError is the answer."""
    inbox = _open_inbox(folder)
    for old in inbox.glob("*.done"):
        old.unlink()
    while True:
        for request in sorted(inbox.glob("[!.]*.json"), key=lambda path: path.stat().st_mtime_ns):
            answer = await _answer_request(request, publish)
            write_atomic(request.with_suffix(".done"), json.dumps(answer).encode())
            request.unlink()
        await asyncio.sleep(POLL_S)


async def _answer_request(request: Path, publish: Callable[[Path, int], Awaitable[str]]) -> dict[str, str]:
    try:
        data = json.loads(request.read_bytes())
        path, version = Path(data["path"]), int(data["version"])
    except (ValueError, KeyError, TypeError):
        return {"error": f"{request.name}: is no request to publish"}
    try:
        return {"digest": await publish(path, version)}
    except ConfigError as error:
        return {"error": str(error)}


def _open_inbox(folder: Path) -> Path:
    inbox = folder / "inbox"
    inbox.mkdir(exist_ok=True)
    inbox.chmod(0o700)  # a request names a path to read: nobody else may leave one
    return inbox
