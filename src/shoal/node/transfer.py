"""Blob stores as a node uses them: files go to and come from a bucket directly, bypassing the coordinator.

    commit -> URL -> put there -> ask for the receipt          link -> URL -> read from there, hashed as it comes

The coordinator hands out the URLs, and without TLS its answers may be forged; the descriptor is signed.

Invariants:
- a node connects only to the stores that the run's descriptor names. A URL is used only if it is exactly a named store
  plus the path that follows from the file's hash (and size), and then a query: host, port, bucket and object cannot be
  chosen by anyone else. Redirects are never followed;
- stores use https with a valid certificate. A store on this machine is used only if the coordinator is on this machine
  too: no run can make its nodes connect to other local services;
- a store sees the URL, the length and the file: no key, name or signature of the node;
- a download is cut at the requested size and becomes a file only if its hash is right; a broken read resumes where it
  stopped. Putting the same bytes to the same place again is harmless;
- every failure is a `StoreError`, within the caller's timeout: the caller then falls back to the coordinator's own
  routes, and a store that failed is not used for `COOLDOWN_S`.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shoal.errors import UnreachableError
from shoal.net.client import Download, Endpoint, HttpClient, HttpDeadlines, HttpResponse, parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.net.sockets import is_loopback
from shoal.protocol.descriptor import blob_path, incoming_path, split_store
from shoal.protocol.messages import BlobLink, CommitAnswer, Manifest

logger = logging.getLogger(__name__)

COOLDOWN_S = 60.0
MIN_STORE_S = 1.0
"""with less time than this left the store is skipped: a timeout would not be its fault"""
FETCH_S, FETCH_RATE = 10.0, 1 << 20
"""time limit for a file from a store: this many seconds, plus size / rate. Then the coordinator is asked"""
MAX_URL_CHARS = 4096
MAX_PAGE_BYTES = 1 << 16
"""limit for an error page that a store sends instead of a file"""
RETRY_POLICY = RetryPolicy(tries=3, first_s=0.2, longest_s=2.0)
DEADLINES = HttpDeadlines(connect_s=5.0, answer_s=20.0, rest_s=5.0, window_s=10.0, min_rate=16 * 1024)
_QUERY = re.compile(r"\?[A-Za-z0-9%&=._~+/-]*")


class StoreError(Exception):
    """A store that cannot be used now, or a URL that does not belong to a store; the reason in a few words."""


class _StoreConnection:
    """One store, with its connections."""

    def __init__(self, name: str, deadlines: HttpDeadlines) -> None:
        self.name = name
        self.origin, _ = split_store(name)
        self.link = HttpClient(parse_endpoint(self.origin), deadlines)
        self.cooldown_until_s = 0.0


class BlobStores:
    """The stores that a descriptor names, for a node of that run."""

    def __init__(
        self,
        names: Sequence[str],
        coordinator: Endpoint,
        *,
        asker: RetryingClient | None = None,
        deadlines: HttpDeadlines | None = None,
    ) -> None:
        is_here = is_loopback(coordinator.url.host)
        used = [name for name in names if is_here or not is_loopback(split_store(name)[1])]
        self._stores = [_StoreConnection(name, deadlines or DEADLINES) for name in used]
        self._asker = asker or RetryingClient(RETRY_POLICY)
        self.num_used = self.num_failed = self.num_refused = 0
        """files transferred directly, store failures, and URLs refused because no store has them"""

    @property
    def is_ready(self) -> bool:
        """Whether it is worth requesting a URL."""
        now_s = asyncio.get_running_loop().time()
        return any(now_s >= store.cooldown_until_s for store in self._stores)

    async def try_put(self, committed: CommitAnswer, manifest: Manifest, path: Path, *, left_s: float) -> bool:
        """Put a file where a commitment says, with `left_s` to its deadline; False if the coordinator must take it."""
        timeout_s = left_s / 2  # leaves time for the fallback
        if not committed.upload_url or not self.is_ready or timeout_s < MIN_STORE_S:
            return False
        try:
            await self.put(committed.upload_url, path, blob=manifest.blob, size=manifest.size, timeout_s=timeout_s)
        except StoreError:
            return False  # recorded where it was raised
        return True

    async def try_fetch(self, link: BlobLink, download: Download) -> bool:
        """Read a file from the place in a link; False if the coordinator must send it."""
        if not link.url:
            return False
        try:
            timeout_s = min(FETCH_S + download.size / FETCH_RATE, link.expires_s)
            await self.fetch(link.url, download, timeout_s=timeout_s)
        except StoreError:
            return False  # recorded where it was raised
        return True

    async def put(self, url: str, path: Path, *, blob: str, size: int, timeout_s: float) -> None:
        """Put a file to a URL."""
        store, target = self._find(url, incoming_path(blob, size))
        headers = [("Content-Length", str(size))]
        await self._use(
            store, lambda: store.link.send_file(target, headers, path, MAX_PAGE_BYTES, waits=False), timeout_s
        )

    async def fetch(self, url: str, download: Download, *, timeout_s: float) -> None:
        """Read a file from a URL; `download` is complete afterwards."""
        store, target = self._find(url, blob_path(download.blob))

        async def attempt() -> HttpResponse:
            headers = [("Range", f"bytes={download.received}-")] if download.received else []
            answer = await store.link.fetch(target, headers, download, MAX_PAGE_BYTES)
            if answer.status == 200 and not download.is_whole:
                raise StoreError("sent a file with the wrong hash")
            return answer

        await self._use(store, attempt, timeout_s)

    def close(self) -> None:
        """Close idle connections."""
        for store in self._stores:
            store.link.close()

    def _find(self, url: str, place: str) -> tuple[_StoreConnection, str]:
        """The store of a URL, and the request target there."""
        now_s = asyncio.get_running_loop().time()
        for store in self._stores:
            start = f"{store.name}{place}"
            if url.startswith(start) and len(url) <= MAX_URL_CHARS and _QUERY.fullmatch(url, len(start)):
                if now_s < store.cooldown_until_s:
                    raise StoreError("in cool-down after a recent failure")
                return store, url.removeprefix(store.origin)
        if not self.num_refused:
            logger.warning("the coordinator named a URL outside the run's stores; it is not used")
        self.num_refused += 1
        raise StoreError("URL outside the run's stores")

    async def _use(
        self, store: _StoreConnection, attempt: Callable[[], Awaitable[HttpResponse]], timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._asker.call_with_retry(attempt)
        except (RefusedError, UnreachableError, StoreError, TimeoutError) as error:
            text = _clean_text(str(error)) or f"took more than {timeout_s:.0f} s"
            self.num_failed += 1
            store.cooldown_until_s = asyncio.get_running_loop().time() + COOLDOWN_S
            logger.warning(f"store {store.origin}: {text}; files go through the coordinator for {COOLDOWN_S:.0f} s")
            raise StoreError(text) from None
        self.num_used += 1


def _clean_text(text: str) -> str:
    """The beginning of a text that the store may have written, without control characters."""
    return "".join(char if " " <= char <= "~" else "?" for char in text[:200])
