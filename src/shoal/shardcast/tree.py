"""Overview of which server has which version: the status of an origin and relays, drawn as a tree.

Only the addresses that the user names are queried. The upstreams that a server reports only decide its position in the
drawing; nothing is fetched from them.

Invariant: a server cannot manipulate the terminal. Its numbers are bounded integers, its role is one of two, and the
remaining texts are printed as parts of one line, without control characters.
"""

import asyncio
import os
import ssl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from shoal.errors import ConfigError
from shoal.net.client import HttpClient, HttpClientError, HttpDeadlines, parse_endpoint
from shoal.net.http import HttpError, parse_url
from shoal.net.sockets import phrase_error
from shoal.util.logs import clean_text
from shoal.util.units import format_bytes

TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20
MAX_ROWS = 4096
MAX_TEXT = 64
"""maximum length of a peer's address"""
Count = Annotated[int, Field(ge=0, lt=2**63)]


class VersionStatus(BaseModel, strict=True):
    """How much of a version a server has."""

    version: Count
    total_bytes: Count
    have_bytes: Count
    delta_bytes: Count | None = None
    have_delta_bytes: Count | None = None


class PeerStatus(BaseModel, strict=True):
    """What a server sent to one address."""

    address: Annotated[str, Field(max_length=MAX_TEXT)]
    sent_bytes: Count
    version: Count | None = None


class ServerStatus(BaseModel, strict=True):
    """The status that a server reports, as far as it is drawn."""

    role: Literal["origin", "relay"]
    sent_bytes: Count
    sent_rate: Count
    versions: Annotated[list[VersionStatus], Field(max_length=MAX_ROWS)] = []
    peers: Annotated[list[PeerStatus], Field(max_length=MAX_ROWS)] = []
    upstreams: list[str] = []


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """One server with its status, or the error that prevented it."""

    url: str
    status: ServerStatus | None = None
    error: str = ""

    @property
    def upstreams(self) -> list[str]:
        return [] if self.status is None else self.status.upstreams

    @property
    def newest(self) -> VersionStatus | None:
        return self.status.versions[-1] if self.status is not None and self.status.versions else None


async def show_tree(urls: Sequence[str], authority: Path | None = None) -> tuple[str, bool]:
    """The drawing, and whether every server responded."""
    nodes = await asyncio.gather(*(ask_node(str(parse_url(url)), authority) for url in urls))
    return draw_tree(nodes), not any(node.error for node in nodes)


async def ask_node(url: str, authority: Path | None = None) -> ServerInfo:
    """Query a server's status."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return ServerInfo(url, status=await _fetch_status(url, authority))
    except TimeoutError:
        return ServerInfo(url, error=f"no response within {TIMEOUT_S:.0f} s")
    except ssl.SSLError as error:
        return ServerInfo(url, error=phrase_error(error))
    except OSError as error:
        return ServerInfo(url, error=os.strerror(error.errno) if error.errno else "unreachable")
    except (HttpError, ValueError, ConfigError):
        return ServerInfo(url, error="responds, but is not a shoal server")


def draw_tree(nodes: Sequence[ServerInfo]) -> str:
    """Origins at the left, and below each what fetches from it. Lag is relative to the newest version of all.

    A relay with several upstreams is drawn below the first of them.
    """
    newest = max((node.newest.version for node in nodes if node.newest), default=None)
    known = {node.url for node in nodes}
    roots = [node for node in nodes if known.isdisjoint(node.upstreams)]
    drawn: set[str] = set()
    # Relays that name each other but no origin are drawn as roots.
    lines = [line for node in (*roots, *nodes) for line in _draw_node(node, nodes, newest, 0, drawn)]
    return "\n".join(lines)


def _draw_node(
    node: ServerInfo, nodes: Sequence[ServerInfo], newest: int | None, depth: int, drawn: set[str]
) -> Iterator[str]:
    if node.url in drawn:
        return
    drawn.add(node.url)
    yield from _describe_node(node, newest, depth)
    for other in nodes:
        if node.url in other.upstreams:
            yield from _draw_node(other, nodes, newest, depth + 1, drawn)


def _describe_node(node: ServerInfo, newest: int | None, depth: int) -> Iterator[str]:
    pad = "  " * depth
    status = node.status
    if status is None:
        yield f"{pad}silent {node.url}  {node.error}"
        return
    sent = f"sent {format_bytes(status.sent_bytes)}, {format_bytes(status.sent_rate)}/s"
    yield f"{pad}{status.role} {node.url}  {_describe_version(node.newest, newest)}  {sent}"
    for peer in status.peers:
        have = "" if peer.version is None else f"  fetching v{peer.version}"
        yield f"{pad}  peer {_clean_line(peer.address)}{have}  took {format_bytes(peer.sent_bytes)}"


def _describe_version(entry: VersionStatus | None, newest: int | None) -> str:
    if entry is None:
        return "no version"
    use_delta = entry.delta_bytes and entry.have_bytes < entry.total_bytes
    have, total = (entry.have_delta_bytes, entry.delta_bytes) if use_delta else (entry.have_bytes, entry.total_bytes)
    share = (have or 0) / max(1, total or 0)
    text = f"v{entry.version}{' delta' if use_delta else ''} {share:.0%} of {format_bytes(total or 0)}"
    behind = 0 if newest is None else newest - entry.version
    return f"{text}, {behind} behind" if behind else text


async def _fetch_status(url: str, authority: Path | None) -> ServerStatus:
    client = HttpClient(parse_endpoint(url, authority), HttpDeadlines(connect_s=TIMEOUT_S, rest_s=TIMEOUT_S))
    try:
        answer = await client.ask("GET", "/status", [], b"", MAX_BYTES)
    except HttpClientError as error:
        raise (error.__cause__ or error) from None
    finally:
        client.close()
    if answer.status != 200:
        raise ValueError("no status")
    return ServerStatus.model_validate_json(answer.body)


def _clean_line(text: str) -> str:
    return clean_text(text).replace("\n", "?")
