"""Who has which version: the status of an origin and relays, drawn as the tree that they form.

Only the addresses the user names are asked: what a server says of its upstreams decides where it stands in the drawing,
nothing is fetched from there.

Invariant: a server has no hold on the terminal. Its numbers are whole and bounded, its role is one of `ROLES`, and the
texts left are printed as parts of one line, without control characters.
"""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11

from shoal.console import clean_text
from shoal.errors import ConfigError
from shoal.shardcast.http import (
    HttpError,
    build_request,
    connect,
    new_client,
    parse_reply,
    parse_url,
    read_data,
    read_head,
    send_event,
)
from shoal.units import format_bytes

TIMEOUT_S = 10.0
MAX_BYTES = 1 << 20
MAX_ROWS = 4096
MAX_TEXT = 64
"""longest address of a peer"""
ROLES = ("origin", "relay")


@dataclass(frozen=True, slots=True)
class Node:
    """One server, as it describes itself; `error` says why it could not."""

    url: str
    status: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def upstreams(self) -> list[str]:
        return [str(url) for url in self.status.get("upstreams", ())]

    @property
    def newest(self) -> Mapping[str, Any] | None:
        versions = self.status.get("versions") or [None]
        return versions[-1]


async def show_tree(urls: Sequence[str]) -> tuple[str, bool]:
    """The drawing, and whether every server answered."""
    nodes = await asyncio.gather(*(ask_node(str(parse_url(url))) for url in urls))
    return draw_tree(nodes), not any(node.error for node in nodes)


async def ask_node(url: str) -> Node:
    """A server's status."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return Node(url, status=_check_status(await _fetch_status(url)))
    except TimeoutError:
        return Node(url, error=f"no answer within {TIMEOUT_S:.0f} s")
    except OSError as error:
        return Node(url, error=os.strerror(error.errno) if error.errno else "cannot be reached")
    except (HttpError, ValueError, RecursionError, ConfigError):
        return Node(url, error="answers, but not as a server of shoal")


def draw_tree(nodes: Sequence[Node]) -> str:
    """Origins at the left, below each what fetches from it; the newest version of all is what others lag behind.

    A relay with several upstreams stands below the first of them.
    """
    newest = max((node.newest["version"] for node in nodes if node.newest), default=None)
    known = {node.url for node in nodes}
    roots = [node for node in nodes if known.isdisjoint(node.upstreams)]
    drawn: set[str] = set()
    # relays that name each other and no origin are roots by default
    lines = [line for node in (*roots, *nodes) for line in _draw_node(node, nodes, newest, 0, drawn)]
    return "\n".join(lines)


def _draw_node(node: Node, nodes: Sequence[Node], newest: int | None, depth: int, drawn: set[str]) -> Iterator[str]:
    if node.url in drawn:
        return
    drawn.add(node.url)
    yield from _describe_node(node, newest, depth)
    for other in nodes:
        if node.url in other.upstreams:
            yield from _draw_node(other, nodes, newest, depth + 1, drawn)


def _describe_node(node: Node, newest: int | None, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if node.error:
        yield f"{pad}silent {node.url}  {node.error}"
        return
    sent = f"sent {format_bytes(node.status['sent_bytes'])}, {format_bytes(node.status['sent_rate'])}/s"
    yield f"{pad}{_clean_line(node.status['role'])} {node.url}  {_describe_version(node.newest, newest)}  {sent}"
    for peer in node.status.get("peers", ()):
        have = "" if peer.get("version") is None else f"  fetching v{peer['version']:d}"
        yield f"{pad}  peer {_clean_line(peer['address'])}{have}  took {format_bytes(peer['sent_bytes'])}"


def _describe_version(entry: Mapping[str, Any] | None, newest: int | None) -> str:
    if entry is None:
        return "no version"
    use_delta = entry["delta_bytes"] and entry["have_bytes"] < entry["total_bytes"]
    kinds = ("have_delta_bytes", "delta_bytes") if use_delta else ("have_bytes", "total_bytes")
    have, total = (entry[kind] for kind in kinds)
    text = f"v{entry['version']}{' delta' if use_delta else ''} {have / max(1, total):.0%} of {format_bytes(total)}"
    behind = 0 if newest is None else newest - entry["version"]
    return f"{text}, {behind} behind" if behind else text


async def _fetch_status(url: str) -> object:
    target = parse_url(url)
    sock = await connect(target, TIMEOUT_S)
    with sock:
        conn = new_client()
        await send_event(sock, conn, build_request(target, "/status"), h11.EndOfMessage())
        response = await read_head(sock, conn, first_s=TIMEOUT_S, rest_s=TIMEOUT_S)
        if not isinstance(response, h11.Response) or parse_reply(response).status != 200:
            raise ValueError("no status")
        body = bytearray()
        while piece := await read_data(sock, conn):
            body += piece
            if len(body) > MAX_BYTES:
                raise ValueError("too long a status")
    return json.loads(body)


def _check_status(status: object) -> Mapping[str, Any]:
    """A status whose parts are what the drawing expects; ValueError for anything else."""
    if not isinstance(status, dict):
        raise ValueError("no object")
    versions, peers = _take_rows(status, "versions"), _take_rows(status, "peers")
    numbers = [status.get("sent_bytes"), status.get("sent_rate"), *(peer.get("sent_bytes") for peer in peers)]
    numbers += [entry.get(name) for entry in versions for name in ("version", "total_bytes", "have_bytes")]
    optional = [entry.get(name) for entry in versions for name in ("delta_bytes", "have_delta_bytes")]
    optional += [peer.get("version") for peer in peers]
    if not all(_is_count(number) for number in numbers + [number for number in optional if number is not None]):
        raise ValueError("numbers out of range")
    if status.get("role") not in ROLES or not all(_is_text(peer.get("address")) for peer in peers):
        raise ValueError("no text that a server of ours says")
    if not isinstance(status.get("upstreams", []), list):
        raise ValueError("upstreams is no list")
    return status


def _take_rows(status: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = status.get(name, [])
    if not isinstance(rows, list) or len(rows) > MAX_ROWS or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} is no list of objects")
    return rows


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _clean_line(text: str) -> str:
    return clean_text(text).replace("\n", "?")
