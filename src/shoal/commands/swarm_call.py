"""What all commands around a coordinator share: how they reach it, how they end, and how they print.

Invariants:
- a no of the coordinator, or none of its answers, is one sentence on stderr and exit code 1;
- nothing of what a server sends reaches a terminal uncleaned.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shoal.console import clean_text
from shoal.errors import ConfigError
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.descriptor import MAX_DESCRIPTOR_BYTES, Descriptor, open_descriptor
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import Deadlines, Link, Place, parse_place
from shoal.swarm.open_client import OpenClient
from shoal.swarm.tags import DocumentError

EXIT_REFUSED = 1
QUICK = Patience(tries=3, first_s=0.3, longest_s=5.0)
"""for a person who waits; nodes have more"""

T = TypeVar("T")
Failures = (RefusedError, UnreachableError, KeepError, ForkError)


class Outcome(NamedTuple):
    """How a command ends: its exit code, what it says, and the same for a program."""

    code: int
    text: str
    data: Any = None


def finish(outcome: Outcome, *, as_json: bool = False) -> int:
    """Print an outcome and return its exit code."""
    print(json.dumps(outcome.data) if as_json else clean_text(outcome.text))
    return outcome.code


def run_work(work: Coroutine[None, None, Outcome], *, as_json: bool = False) -> int:
    """Run a command that asks a coordinator, and print what came of it."""
    try:
        return finish(asyncio.run(work), as_json=as_json)
    except Failures as error:
        print(f"shoal: {clean_text(explain_failure(error))}", file=sys.stderr)
        return EXIT_REFUSED


def explain_failure(error: Exception) -> str:
    """A failure in one sentence, on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, UnreachableError):
        return f"the coordinator does not answer: {text}"
    if not isinstance(error, ForkError):
        return text
    end = "this node works for it no more" if error.fork.convicts else "this node stops, and asks again at its start"
    return f"fork: {text}; {end}"


def run_until_stopped(work: Callable[[], Coroutine[None, None, int]]) -> int:
    """Run until done. SIGINT and SIGTERM end it in order, which for what serves is how it ends."""

    async def run() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        return await work()

    try:
        return asyncio.run(run())
    except asyncio.CancelledError:
        return 0


def find_place(source: str, authority: Path | None) -> Place:
    """Where a coordinator is: its address, or the first one in a descriptor's file."""
    if source.startswith(("http://", "https://")):
        return parse_place(source, authority)
    descriptor, _ = read_descriptor(Path(source))
    return parse_place(descriptor.urls[0], authority)


@asynccontextmanager
async def open_client(
    source: str, authority: Path | None, *, deadlines: Deadlines | None = None
) -> AsyncIterator[OpenClient]:
    """A client for what everybody may ask."""
    place = find_place(source, authority)
    client = OpenClient(place, link=Link(place, deadlines), asker=Asker(QUICK))
    try:
        yield client
    finally:
        client.close()


async def fetch_descriptor(client: OpenClient) -> tuple[Descriptor, bytes]:
    """The descriptor that a coordinator shows, and its bytes."""
    data = await client.read_descriptor()
    try:
        return open_descriptor(data), data
    except DocumentError as error:
        raise UnreachableError(f"the server gives no descriptor of a run ({error})") from None


def read_descriptor(path: Path) -> tuple[Descriptor, bytes]:
    """The descriptor in a file, and its bytes."""
    data = read_file(path, MAX_DESCRIPTOR_BYTES + 1).rstrip(b"\n")
    try:
        descriptor = open_descriptor(data)
    except DocumentError as error:
        raise ConfigError(f"{path}: no descriptor of a run ({error})") from None
    if not descriptor.urls:
        raise ConfigError(f"{path}: the descriptor names no address of a coordinator")
    return descriptor, data


def read_file(path: Path, max_bytes: int = 1 << 22) -> bytes:
    """What is in a file of the user's."""
    try:
        with path.open("rb") as file:
            return file.read(max_bytes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
