"""Stores of blobs as a node uses them: its files go to a bucket, and others come from it, past the coordinator.

    commit -> URL -> put there -> ask for the receipt          link -> URL -> read from there, hashed as it comes

The coordinator hands out the URLs, and its answers may be anybody's where there is no TLS; the descriptor is signed.

Invariants:
- a node speaks with the stores that the run's descriptor names and with nobody else. A URL is used only if it is, to
  the letter, a named store and the place that follows from the file's hash (and size), and then a query: no host, no
  port, no bucket and no object of somebody's choice. Redirects are never followed;
- stores speak https, with a certificate that holds. A store on this machine is used only where the coordinator is on
  this machine too: no run makes its nodes speak with what else listens there;
- a store is shown the URL, the length and the file: no key, no name and no signature of the node;
- what comes is cut at the size that was asked for and is a file only if its hash is right; a broken read goes on where
  it broke off. Putting the same bytes to the same place again is harmless;
- whatever goes wrong is a `StoreError`, within a time that the caller gives: the coordinator's own routes serve as
  well, so the caller takes those, and a store that failed is let alone for `REST_S`.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.blobs.direct import place_blob, place_incoming
from shoal.swarm.descriptor import split_store
from shoal.swarm.hosts import is_loopback
from shoal.swarm.intake import Intake
from shoal.swarm.link import Answer, Deadlines, Link, Place, parse_place

REST_S = 60.0
MAX_URL_CHARS = 4096
MAX_PAGE_BYTES = 1 << 16
"""of what a store says instead of a file"""
PATIENCE = Patience(tries=3, first_s=0.2, longest_s=2.0)
DEADLINES = Deadlines(connect_s=5.0, answer_s=20.0, rest_s=5.0, window_s=10.0, min_rate=16 * 1024)
_QUERY = re.compile(r"\?[A-Za-z0-9%&=._~+/-]*")


class StoreError(Exception):
    """A store that cannot be used now, or a URL that is none of a store's; why, in a few words."""


class _Store:
    """One store, with its connections."""

    def __init__(self, name: str, deadlines: Deadlines) -> None:
        self.name = name
        self.origin, _ = split_store(name)
        self.link = Link(parse_place(self.origin), deadlines)
        self.rests_until_s = 0.0


class Stores:
    """The stores that a descriptor names, for a node of that run."""

    def __init__(
        self,
        names: Sequence[str],
        coordinator: Place,
        *,
        asker: Asker | None = None,
        deadlines: Deadlines | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        is_here = is_loopback(coordinator.url.host)
        used = [name for name in names if is_here or not is_loopback(split_store(name)[1])]
        self._stores = [_Store(name, deadlines or DEADLINES) for name in used]
        self._asker = asker or Asker(PATIENCE)
        self._note = note
        self.num_used = self.num_failed = self.num_refused = 0
        """files that went past the coordinator, those with which a store failed, and URLs that are none of a store's"""

    @property
    def is_ready(self) -> bool:
        """Whether it is worth asking for a URL."""
        now_s = asyncio.get_running_loop().time()
        return any(now_s >= store.rests_until_s for store in self._stores)

    async def put(self, url: str, path: Path, *, blob: str, size: int, within_s: float) -> None:
        """Put a file where a URL says."""
        store, target = self._find(url, place_incoming(blob, size))
        headers = [("Content-Length", str(size))]
        await self._use(
            store, lambda: store.link.send_file(target, headers, path, MAX_PAGE_BYTES, waits=False), within_s
        )

    async def fetch(self, url: str, intake: Intake, *, within_s: float) -> None:
        """Read a file from where a URL says; `intake` is whole afterwards."""
        store, target = self._find(url, place_blob(intake.blob))

        async def attempt() -> Answer:
            headers = [("Range", f"bytes={intake.received}-")] if intake.received else []
            answer = await store.link.fetch(target, headers, intake, MAX_PAGE_BYTES)
            if answer.status == 200 and not intake.is_whole:
                raise StoreError("sent other bytes than those of the file")
            return answer

        await self._use(store, attempt, within_s)

    def close(self) -> None:
        """Close what is idle."""
        for store in self._stores:
            store.link.close()

    def _find(self, url: str, place: str) -> tuple[_Store, str]:
        """The store of a URL, and what to ask it for."""
        now_s = asyncio.get_running_loop().time()
        for store in self._stores:
            start = f"{store.name}{place}"
            if url.startswith(start) and len(url) <= MAX_URL_CHARS and _QUERY.fullmatch(url, len(start)):
                if now_s < store.rests_until_s:
                    raise StoreError("is let alone, for it failed not long ago")
                return store, url.removeprefix(store.origin)
        if not self.num_refused:
            self._note("the coordinator named a place for a file that is in no store of the run; it is not used")
        self.num_refused += 1
        raise StoreError("a place that is in no store of the run")

    async def _use(self, store: _Store, attempt: Callable[[], Awaitable[Answer]], within_s: float) -> None:
        try:
            async with asyncio.timeout(within_s):
                await self._asker.persist(attempt)
        except (RefusedError, UnreachableError, StoreError, TimeoutError) as error:
            text = _clean_text(str(error)) or f"took more than {within_s:.0f} s"
            self.num_failed += 1
            store.rests_until_s = asyncio.get_running_loop().time() + REST_S
            self._note(f"store {store.origin}: {text}; files go through the coordinator for {REST_S:.0f} s")
            raise StoreError(text) from None
        self.num_used += 1


def _clean_text(text: str) -> str:
    """The beginning of what may be the store's own words, fit for a terminal."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:200])
