"""A hostile relay as a separate process: python evil_relay.py UPSTREAM NAME,MODE[,ARGUMENT] ...

Each NAME gets a port. It is honest and forwards requests to UPSTREAM, except for the one thing that its mode is named
after: some part of the requests gets a response that no relay should send. It prints `NAME URL` once it listens, and
`hit NAME TARGET` for each request of that part.
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

FULL, LIST, MANIFEST = "/full/", "/versions", "/manifest"
PIECE = 1 << 16


@dataclass
class Call:
    """A request that will get a bad response."""

    target: str
    argument: str
    upstream: tuple[str, int]
    writer: asyncio.StreamWriter

    async def ask(self, target: str = "") -> bytes:
        """The body of the honest response, without chunked encoding."""
        reader, writer = await asyncio.open_connection(*self.upstream)
        try:
            writer.write(f"GET {target or self.target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.read(-1)
        finally:
            writer.close()
        return join_chunks(body) if b"chunked" in head.lower() else body

    async def ask_lines(self) -> list[bytes]:
        return (await self.ask()).splitlines(keepends=True)

    async def say(self, status: str, *headers: str, body: bytes = b"") -> None:
        self.writer.write("\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode() + body)
        await self.writer.drain()

    async def send(self, body: bytes) -> None:
        """A well-formed response."""
        await self.say("200 OK", f"Content-Length: {len(body)}", body=body)

    async def repeat(self, piece: bytes, *headers: str) -> None:
        """The same bytes forever."""
        await self.say("200 OK", *headers)
        while True:
            self.writer.write(piece)
            await self.writer.drain()


Act = Callable[[Call], Awaitable[None]]
MODES: dict[str, tuple[str, Act]] = {}


def does(part: str) -> Callable[[Act], Act]:
    """Declares a mode, and the part of the targets that it affects."""

    def enter(act: Act) -> Act:
        MODES[act.__name__] = (part, act)
        return act

    return enter


# Shards.


@does(FULL)
async def corrupt(call: Call) -> None:
    body = await call.ask()
    await call.send(body[:-1] + bytes([body[-1] ^ 1]))


@does(FULL)
async def swapped(call: Call) -> None:
    start, _, number = call.target.rpartition("/")
    await call.send(await call.ask(f"{start}/{int(number) % 16 + 1}"))


@does(FULL)
async def shorter(call: Call) -> None:
    await call.send((await call.ask())[:-1])


@does(FULL)
async def longer(call: Call) -> None:
    await call.send(await call.ask() + b"x")


@does(FULL)
async def excess(call: Call) -> None:
    body = await call.ask()
    await call.say("200 OK", f"Content-Length: {len(body)}", body=body + body)


@does(FULL)
async def huge(call: Call) -> None:
    await call.repeat(bytes(PIECE), f"Content-Length: {1 << 62}")


@does(FULL)
async def shifted(call: Call) -> None:
    size = len(await call.ask())
    ranged = f"Content-Range: bytes 1-{size}/{size}"
    await call.say("206 Partial Content", ranged, f"Content-Length: {size}", body=bytes(size))


@does(FULL)
async def one_byte(call: Call) -> None:
    await call.say("200 OK", f"Content-Length: {len(await call.ask())}", body=b"x")
    await asyncio.sleep(3600)


@does(FULL)
async def silent(call: Call) -> None:
    await asyncio.sleep(3600)


@does(FULL)
async def half(call: Call) -> None:
    body = await call.ask()
    await call.say("200 OK", f"Content-Length: {len(body)}", body=body[: len(body) // 2])


@does(FULL)
async def reset(call: Call) -> None:
    body = await call.ask()
    await call.say("200 OK", f"Content-Length: {len(body)}", body=bytes(len(body) // 2))
    sock = call.writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


@does(FULL)
async def endless(call: Call) -> None:
    await call.repeat(b"1000\r\n" + bytes(4096) + b"\r\n", "Transfer-Encoding: chunked")


@does(FULL)
async def endless_head(call: Call) -> None:
    call.writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        call.writer.write(b"X-More: " + b"x" * 1000 + b"\r\n")
        await call.writer.drain()


@does(FULL)
async def tiny(call: Call) -> None:
    await call.repeat(b"1\r\nx\r\n" * 4096, "Transfer-Encoding: chunked")


@does(FULL)
async def gone(call: Call) -> None:
    await call.say("410 Gone", "Content-Length: 0")


@does(FULL)
async def busy(call: Call) -> None:
    await call.say("503 Service Unavailable", "Retry-After: 999999", "Content-Length: 0")


# Redirects to a witness that must never get a request.

_statuses = itertools.cycle(["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent Redirect"])


@does(FULL)
async def redirect(call: Call) -> None:
    await call.say(next(_statuses), f"Location: {call.argument}{call.target}", "Content-Length: 0")


@does(LIST)
async def redirect_list(call: Call) -> None:
    await redirect(call)


@does(MANIFEST)
async def redirect_manifest(call: Call) -> None:
    await redirect(call)


@does("/probe")
async def redirect_probe(call: Call) -> None:
    await redirect(call)


@does("/")
async def witness(call: Call) -> None:
    await call.send(b"")


# Lists of versions.


@does(LIST)
async def listed(call: Call) -> None:
    """The content of a file."""
    await call.send(Path(call.argument).read_bytes())


@does(LIST)
async def forged_size(call: Call) -> None:
    await call.send(b"".join([change_line(line, lambda body: resize_file(body, 1)) for line in await call.ask_lines()]))


@does(LIST)
async def forged_version(call: Call) -> None:
    lines = await call.ask_lines()
    await call.send(b"".join([change_line(line, lambda body: body | {"version": 999}) for line in lines]))


@does(LIST)
async def endless_list(call: Call) -> None:
    line = (await call.ask("/versions")).splitlines(keepends=True)[0]
    await call.repeat(b"%x\r\n%s\r\n" % (len(line), line), "Transfer-Encoding: chunked")


@does(LIST)
async def tiny_list(call: Call) -> None:
    await call.repeat(b"1\r\nx\r\n" * 4096, "Transfer-Encoding: chunked")


@does(LIST)
async def tiny_gaps(call: Call) -> None:
    await call.repeat(b"1\r\n\n\r\n" * 4096, "Transfer-Encoding: chunked")


# Manifests.


@does(MANIFEST)
async def lined(call: Call) -> None:
    """The content of a file."""
    await call.send(Path(call.argument).read_bytes())


@does(MANIFEST)
async def forged_hash(call: Call) -> None:
    lines = await call.ask_lines()
    await call.send(b"".join([change_line(line, swap_hashes) for line in lines]))


@does(MANIFEST)
async def shuffled(call: Call) -> None:
    await call.send(b"".join(reversed(await call.ask_lines())))


@does(MANIFEST)
async def cut(call: Call) -> None:
    await call.send(b"")


@does(MANIFEST)
async def endless_line(call: Call) -> None:
    await call.repeat(b"10000\r\n" + b"x" * 65536 + b"\r\n", "Transfer-Encoding: chunked")


@does(MANIFEST)
async def tiny_manifest(call: Call) -> None:
    await call.repeat(b"1\r\nx\r\n" * 4096, "Transfer-Encoding: chunked")


def change_line(line: bytes, change: Callable[[dict[str, object]], dict[str, object]]) -> bytes:
    """A modified line with its old signature."""
    data = json.loads(line)
    data["body"] = change(data["body"])
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode() + b"\n"


def resize_file(body: dict[str, object], change: int) -> dict[str, object]:
    files = [file | {"size": file["size"] + change} for file in body["files"]]
    return body | {"files": files}


def swap_hashes(body: dict[str, object]) -> dict[str, object]:
    hashes = body.get("hashes")
    return body | {"hashes": [*hashes[1:], hashes[0]]} if isinstance(hashes, list) else body


def join_chunks(body: bytes) -> bytes:
    data = b""
    while match := re.match(rb"([0-9a-f]+)\r\n", body):
        size = int(match[1], 16)
        data += body[match.end() : match.end() + size]
        body = body[match.end() + size + 2 :]
    return data


# The server.


class HostilePort:
    """One port and its mode."""

    def __init__(self, spec: str, upstream: tuple[str, int]) -> None:
        self.name, mode, self.argument = [*spec.split(",", 2), ""][:3]
        self.part, self.act = MODES[mode]
        self.upstream = upstream

    async def start(self) -> None:
        server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        print(f"{self.name} http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
                target = head.split()[1].decode()
                if self.part in target:
                    print(f"hit {self.name} {target}", flush=True)
                    await self.act(Call(target, self.argument, self.upstream, writer))
                else:
                    await self.pass_on(head, writer)
            finally:
                writer.close()

    async def pass_on(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        reader, upstream = await asyncio.open_connection(*self.upstream)
        try:
            upstream.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
            while data := await reader.read(PIECE):
                writer.write(data)
                await writer.drain()
        finally:
            upstream.close()


async def main(url: str, specs: list[str]) -> None:
    parts = urlsplit(url)
    assert parts.hostname and parts.port, url
    await asyncio.gather(*(HostilePort(spec, (parts.hostname, parts.port)).start() for spec in specs))


if __name__ == "__main__":
    os.nice(5)  # endless senders must not take the CPU from the processes under test
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
