"""A hostile client as a separate process: python evil_client.py URL NUM_IDLE NUM_DEAF TARGET

It opens many connections on which it sends nothing, or starts a request and does not finish it, and some on which it
requests TARGET and then never reads. It prints `ready` once all of them are open, then waits until it is killed.
"""

import contextlib
import resource
import socket
import sys
import time
from urllib.parse import urlsplit


def main(url: str, num_idle: int, num_deaf: int, target: str) -> None:
    parts = urlsplit(url)
    address = (parts.hostname or "", parts.port or 0)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    socks = []
    for index in range(num_idle):
        socks.append(sock := socket.create_connection(address))
        if index % 2:
            with contextlib.suppress(OSError):  # evicted already
                sock.send(b"GET /v")
    socks += [open_deaf(address, target) for _ in range(num_deaf)]
    print("ready", flush=True)
    while True:
        time.sleep(3600)


def open_deaf(address: tuple[str, int], target: str) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(address)
    sock.sendall(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return sock


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
