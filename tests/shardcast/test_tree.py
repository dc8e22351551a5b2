"""The drawing of a swarm's servers: the place and versions of each, and that no server can spoil the output."""

import asyncio
import json

import pytest

from shoal.shardcast.tree import ServerInfo, ServerStatus, ask_node, draw_tree, show_tree

TOP, A, B, C = (f"http://127.0.0.1:{port}" for port in (8600, 8601, 8602, 8603))


def entry(version: int, have: int, total: int = 1000, **changes: object) -> dict[str, object]:
    plain = {
        "version": version,
        "have_bytes": have,
        "total_bytes": total,
        "delta_bytes": None,
        "have_delta_bytes": None,
    }
    return {**plain, **changes}


def node(
    url: str, *versions: dict[str, object], role: str = "relay", up: tuple[str, ...] = (), **more: object
) -> ServerInfo:
    fields = {
        "role": role,
        "sent_bytes": 5_000_000,
        "sent_rate": 2000,
        "versions": list(versions),
        "upstreams": list(up),
    }
    return ServerInfo(url, ServerStatus(**{**fields, **more}))


def test_relays_stand_below_what_they_fetch_from() -> None:
    nodes = [
        node(C, entry(6, 1000), up=(B,)),
        node(TOP, entry(7, 1000), role="origin"),
        node(B, entry(7, 450), up=(A,)),
        node(A, entry(7, 1000), up=(TOP,), peers=[{"address": "10.0.0.9", "sent_bytes": 3000, "version": 7}]),
    ]
    assert draw_tree(nodes).splitlines() == [
        f"origin {TOP}  v7 100% of 1 kB  sent 5 MB, 2 kB/s",
        f"  relay {A}  v7 100% of 1 kB  sent 5 MB, 2 kB/s",
        "    peer 10.0.0.9  fetching v7  took 3 kB",
        f"    relay {B}  v7 45% of 1 kB  sent 5 MB, 2 kB/s",
        f"      relay {C}  v6 100% of 1 kB, 1 behind  sent 5 MB, 2 kB/s",
    ]


def test_a_version_held_as_a_delta_is_shown_as_one() -> None:
    text = draw_tree([node(A, entry(9, 0, delta_bytes=50, have_delta_bytes=25))])
    assert "v9 delta 50% of 50 B" in text


def test_every_server_is_drawn_once_even_if_relays_name_each_other() -> None:
    nodes = [node(A, up=(B, C)), node(B, up=(A, C)), node(C, up=(A, B))]
    lines = draw_tree(nodes).splitlines()
    assert sorted(line.split()[1] for line in lines) == [A, B, C] and all("no version" in line for line in lines)


def test_control_characters_of_a_server_do_not_reach_the_terminal() -> None:
    text = draw_tree([node(A, peers=[{"address": "\x1b[2J\x07\n1.2.3.4", "sent_bytes": 0}])])
    assert "\x1b" not in text and "\x07" not in text and len(text.splitlines()) == 2


def answer_with(body: bytes, head: str = "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n") -> ServerInfo:
    """The status of a server that responds with this."""

    async def run() -> ServerInfo:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head.format(len(body)).encode() + body)
            writer.close()

        async with asyncio.timeout(20), await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await ask_node(f"http://127.0.0.1:{port}")

    return asyncio.run(run())


GOOD = node(A, entry(1, 2)).status.model_dump()


def test_a_good_answer_is_taken() -> None:
    assert answer_with(json.dumps(GOOD).encode()).status == ServerStatus(**GOOD)


@pytest.mark.parametrize(
    "status",
    [
        [],
        None,
        {},
        GOOD | {"sent_bytes": -1},
        GOOD | {"sent_bytes": "many"},
        GOOD | {"sent_rate": 1e300},
        GOOD | {"versions": [3]},
        GOOD | {"versions": "v1"},
        GOOD | {"versions": [entry(1, 2, total="x")]},
        GOOD | {"versions": [entry(1, 2, delta_bytes=[])]},
        GOOD | {"role": 3},
        GOOD | {"peers": [{}]},
        GOOD | {"role": "relay\norigin http://127.0.0.1:1  v9 100% of 62 GB  sent 1 TB, 1 GB/s"},
        GOOD | {"role": "client"},
        GOOD | {"role": []},
        GOOD | {"role": "\x1b[2Jrelay"},
        GOOD | {"peers": [{"address": "1.2.3.4", "sent_bytes": 0, "version": "\x1b]0;own\x07\x1b[2J"}]},
        GOOD | {"peers": [{"address": "1.2.3.4", "sent_bytes": 0, "version": True}]},
        GOOD | {"peers": [{"address": "1.2.3.4", "sent_bytes": 0, "version": -1}]},
        GOOD | {"peers": [{"address": "1" * 65, "sent_bytes": 0, "version": None}]},
        GOOD | {"peers": [{"address": "1.2.3.4", "sent_bytes": 0}] * 4097},
        GOOD | {"upstreams": 5},
    ],
)
def test_an_answer_of_another_shape_is_not_a_shoal_server(status: object) -> None:
    found = answer_with(json.dumps(status).encode())
    assert found.error == "responds, but is not a shoal server" and not found.status
    assert draw_tree([found]).startswith("silent ")


@pytest.mark.parametrize(
    ("body", "head"),
    [
        (b"{", "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"),
        (b"", "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: {}\r\n\r\n"),
        (b"", "SSH-2.0\r\n\r\n"),
        (b" " * (2 << 20), "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"),
        (b"[" * 500_000, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n"),
        (b"1\r\n \r\n" * 5000, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"),
    ],
)
def test_an_invalid_status_is_reported_as_an_error(body: bytes, head: str) -> None:
    assert answer_with(body, head).error == "responds, but is not a shoal server"


def test_a_server_that_does_not_respond_is_shown_as_silent() -> None:
    text, reached = asyncio.run(show_tree(["http://127.0.0.1:1"]))
    assert text.startswith("silent http://127.0.0.1:1  ") and not reached
