"""Noticing that a peer has hung up while its answer waits for something else.

Nobody reads from a connection whose request is being answered, so its end would be seen only by the next send. Who
has closed its side of a connection counts as gone: our clients close both or none.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def watch_peer(sock: socket.socket) -> "Iterator[asyncio.Future[None]]":
    """While the block runs: a future that is done when the peer has hung up.

    A peer that has sent its next request already is not watched, since its end is behind that.
    """
    loop = asyncio.get_running_loop()
    left: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        try:
            data = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        loop.remove_reader(sock)
        if not data and not left.done():
            left.set_result(None)

    loop.add_reader(sock, look)
    try:
        yield left
    finally:
        loop.remove_reader(sock)
        left.cancel()
