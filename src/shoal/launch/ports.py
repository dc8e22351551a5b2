"""Ports of the parts that serve: free ones, kept for the next start, chosen anew where somebody took one."""

import json
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from shoal.files import write_atomic

HOST = "127.0.0.1"


def choose_ports(path: Path, names: Sequence[str]) -> dict[str, int]:
    """A free port for each name, that of last time where it still is; written to `path`."""
    kept = _read_ports(path)
    with ExitStack() as stack:  # all are held until all are chosen, so that no two are the same
        ports = {name: _take_port(stack, kept.get(name, 0)) for name in names}
    if ports != kept:
        write_atomic(path, json.dumps(ports, indent=2).encode() + b"\n")
    return ports


def _take_port(stack: ExitStack, wanted: int) -> int:
    try:
        return _bind(stack, wanted)
    except OSError:  # somebody has it
        return _bind(stack, 0)


def _bind(stack: ExitStack, port: int) -> int:
    server = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of last time may linger
    server.bind((HOST, port))
    server.listen(1)  # from here on nobody else gets it
    return int(server.getsockname()[1])


def _read_ports(path: Path) -> dict[str, int]:
    """Ports of last time; a file that is none is as good as none."""
    try:
        found = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(name): port for name, port in found.items() if isinstance(port, int) and 0 < port < 1 << 16}
