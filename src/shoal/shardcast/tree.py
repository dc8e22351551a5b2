"""Who has which version: the status of an origin and relays, drawn as the tree that they form.

Only the addresses the user names are asked: what a server says of its upstreams decides where it stands in the drawing,
nothing is fetched from there.
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
    except (HttpError, ValueError, ConfigError):
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
    yield f"{pad}{clean_text(node.status['role'])} {node.url}  {_describe_version(node.newest, newest)}  {sent}"
    for peer in node.status.get("peers", ()):
        have = "" if peer.get("version") is None else f"  fetching v{peer['version']}"
        yield f"{pad}  peer {clean_text(peer['address'])}{have}  took {format_bytes(peer['sent_bytes'])}"


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
        body = b""
        while piece := await read_data(sock, conn):
            body += piece
            if len(body) > MAX_BYTES:
                raise ValueError("too long a status")
    return json.loads(body)


def _check_status(status: object) -> Mapping[str, Any]:
    """A status whose parts are what the drawing expects; ValueError for anything else."""
    if not isinstance(status, dict):
        raise ValueError("no object")
    numbers = [status.get("sent_bytes"), status.get("sent_rate")]
    rows = [*_take_rows(status, "versions"), *_take_rows(status, "peers")]
    for entry in _take_rows(status, "versions"):
        numbers += [entry.get("version"), entry.get("total_bytes"), entry.get("have_bytes")]
        numbers += [entry[name] for name in ("delta_bytes", "have_delta_bytes") if entry.get(name) is not None]
    numbers += [peer.get("sent_bytes") for peer in _take_rows(status, "peers")]
    texts = [status.get("role"), *(peer.get("address") for peer in _take_rows(status, "peers"))]
    if len(rows) > 4096 or not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise ValueError("numbers out of range")
    if not all(isinstance(text, str) for text in texts) or not isinstance(status.get("upstreams", []), list):
        raise ValueError("no text")
    return status


def _take_rows(status: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = status.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{name} is no list of objects")
    return rows
