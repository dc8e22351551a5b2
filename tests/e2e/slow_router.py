"""User-space part of a router: delays every packet between two hosts, and blocks connections to closed hosts.

    python slow_router.py DEVICE DELAY_MS [CLOSED_ADDRESS ...]      in the router's namespace; prints `ready`

A TUN device through which the router's rules send all traffic. A closed host is one behind a firewall or NAT: packets
that do not belong to a connection it opened itself are dropped. This is done in user space because not every kernel has
netem and a packet filter, and so that it is the same on all of them.
"""

import fcntl
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU, _MAX_QUEUED = 1500, 20_000
_TCP, _SYN, _ACK = 6, 0x02, 0x10


def open_device(name: str) -> int:
    """Create a TUN device and bring it up."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    subprocess.run(["ip", "link", "set", name, "mtu", str(_MTU), "up"], check=True)
    return device


def is_refused(packet: bytes, closed: Collection[bytes]) -> bool:
    """Whether an IPv4 packet opens a connection to a closed host."""
    if packet[0] >> 4 != 4 or packet[16:20] not in closed:
        return packet[0] >> 4 != 4
    flags = packet[4 * (packet[0] & 15) + 13]
    return packet[9] != _TCP or flags & (_SYN | _ACK) == _SYN


def pass_packets(device: int, delay_s: float, closed: Collection[bytes]) -> None:
    """Return every packet after the delay, in order, forever."""
    queue: deque[tuple[float, bytes]] = deque()
    while True:
        pause_s = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        if select.select([device], [], [], pause_s)[0]:
            packet = os.read(device, 1 << 16)
            if len(queue) < _MAX_QUEUED and not is_refused(packet, closed):
                queue.append((time.monotonic() + delay_s, packet))
        while queue and queue[0][0] <= time.monotonic():
            os.write(device, queue.popleft()[1])


def main(name: str, delay_ms: str, *addresses: str) -> None:
    device = open_device(name)
    print("ready", flush=True)
    pass_packets(device, int(delay_ms) / 1000, {socket.inet_aton(address) for address in addresses})


if __name__ == "__main__":
    main(*sys.argv[1:])
