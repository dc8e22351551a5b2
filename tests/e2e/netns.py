"""Machines for a test: network namespaces around a router, each with its own files, connected by slow links.

    host eth0 == veth, a rate each way == router -> delay and firewall (slow_router.py) -> router == veth == eth0 host

A host sees its own folder and none of the others' (mount namespace), and finds the others by name. It can be closed: it
can connect to others, but not be connected to. Everything that was created, and every process in it, is removed when a
`Net` is closed.
"""

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from warm import Running, Warm

HERE = Path(__file__).parent
RATE, DELAY_MS = "20mbit", 25
"""rate of each link, and delay from one host to another"""
_TABLE = "100"
_WAIT_S = 20.0
_NEWNS, _NEWNET = 0x20000, 0x40000000
_BIND, _REC, _SLAVE = 1 << 12, 1 << 14, 1 << 19
_LISTENS = "0A"
"""state of a listening socket in /proc/net/tcp"""


def explain_lack() -> str:
    """Why network namespaces cannot be used here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [name for name in ("ip", "tc", "mount") if shutil.which(name) is None]:
        return f"network namespaces need the command {missing[0]}"
    name = f"shoal-{os.getpid()}-probe"
    tries = [
        f"ip netns add {name}",
        f"ip -n {name} link add eth0 type veth peer name eth1",
        f"ip netns exec {name} tc qdisc add dev eth0 root tbf rate {RATE} burst 32kb latency 400ms",
        f"ip -n {name} rule add iif eth0 lookup {_TABLE}",
        f"ip -n {name} tuntap add dev delay0 mode tun",
        f"ip netns exec {name} mount -t tmpfs none /mnt",
    ]
    try:
        for command in tries:
            done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
            if done.returncode:
                return f"no network namespaces here: {command}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return ""


class Host:
    """One machine."""

    def __init__(self, net: "Net", name: str, address: str) -> None:
        self.name, self.address = name, address
        self.folder = net.root / "hosts" / name
        self.folder.mkdir()
        self.space = f"{net.tag}-{name}"
        self._net = net

    def start(self, command: str, folder: str = ".") -> Running:
        """Run a command `shoal ...` on this host, in one of its folders."""
        shoal, *words = shlex.split(command)
        assert shoal == "shoal"
        log, machine = self.find_log(command), [self.space, self.name, str(self._net.root), folder]
        return self._net.warm.start(*words, out=log, err=log, machine=machine)

    def type(self, command: str) -> str:
        """The output of a command that must succeed."""
        code = self.start(command).wait()
        said = self.find_log(command).read_text()
        assert code == 0, f"{self.name}: {command}: {said}"
        return said

    def find_log(self, command: str) -> Path:
        """The log with the output of all commands of one kind, outside of their view."""
        return self._net.root / f"{self.name}-{command.split()[1]}.log"

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """Run another program, with a pipe from its output."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._net.processes.append(process)
        return process

    def list_listening(self) -> list[str]:
        """Listening addresses, in the kernel's notation."""
        tables, _ = self.run("cat", "/proc/net/tcp", "/proc/net/tcp6").communicate()
        rows = [line.split() for line in tables.decode().splitlines()]
        return [row[1] for row in rows if len(row) > 3 and row[3] == _LISTENS]


class Net:
    """A router and its hosts; use `with Net(...) as net`."""

    def __init__(self, root: Path, warm: Warm, names: Mapping[str, str], *, closed: frozenset[str]) -> None:
        """Hosts by their name in the test, each with its host name on the network (empty: none)."""
        self.root, self.warm, self.tag = root, warm, f"shoal-{os.getpid()}"
        self.processes: list[subprocess.Popen[bytes]] = []
        for folder in ("hosts", "here"):
            (root / folder).mkdir()
        self._addresses = {name: f"10.77.{number}.2" for number, name in enumerate(names, start=1)}
        self.hosts = {name: Host(self, name, address) for name, address in self._addresses.items()}
        known = [f"{self._addresses[name]} {shown}" for name, shown in names.items() if shown]
        (root / "names").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self._closed = [self._addresses[name] for name in sorted(closed)]

    def __enter__(self) -> "Net":
        try:
            self._add_space("router")
            self._write_proc("ip_forward", "1")
            for name in ("all", "default"):
                self._write_proc(f"conf/{name}/rp_filter", "0")
            self._start_delay()
            for number, host in enumerate(self.hosts.values(), start=1):
                self._join_host(host, number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop every process left in the namespaces, and remove them."""
        spaces = [f"{self.tag}-{name}" for name in (*self.hosts, "router")]
        for space in spaces:
            listed = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False)
            for pid in listed.stdout.split():
                _kill(int(pid))
        for process in self.processes:
            process.wait(_WAIT_S)
            if process.stdout is not None:
                process.stdout.close()
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _add_space(self, name: str) -> None:
        _run(f"ip netns add {self.tag}-{name}")
        _run(f"ip -n {self.tag}-{name} link set lo up")

    def _write_proc(self, key: str, value: str) -> None:
        line = ["sh", "-c", 'echo "$2" > "/proc/sys/net/ipv4/$1"', "sh", key, value]
        subprocess.run(["ip", "netns", "exec", f"{self.tag}-router", *line], check=True)

    def _start_delay(self) -> None:
        line = [sys.executable, str(HERE / "slow_router.py"), "delay0", str(DELAY_MS), *self._closed]
        process = subprocess.Popen(
            ["ip", "netns", "exec", f"{self.tag}-router", *line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        self.processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the router did not start"
        _run(f"ip -n {self.tag}-router route add default dev delay0 table {_TABLE}")

    def _join_host(self, host: Host, number: int) -> None:
        """The two ends of a link, each of which limits its send rate."""
        router, end = f"{self.tag}-router", f"to{number}"
        self._add_space(host.name)
        _run(f"ip -n {router} link add {end} type veth peer name eth0 netns {host.space}")
        for space, device, address in ((router, end, f"10.77.{number}.1"), (host.space, "eth0", host.address)):
            _run(f"ip -n {space} address add {address}/24 dev {device}")
            _run(f"ip -n {space} link set {device} up")
            _run(f"ip netns exec {space} tc qdisc add dev {device} root tbf rate {RATE} burst 32kb latency 400ms")
        _run(f"ip -n {host.space} route add default via 10.77.{number}.1")
        _run(f"ip -n {router} rule add iif {end} lookup {_TABLE}")


def enter_machine(space: str, name: str, root: str, folder: str) -> None:
    """Called in a new process with privileges: move to a host and into one of its folders."""
    libc, here = ctypes.CDLL(None, use_errno=True), f"{root}/here"
    with Path(f"/run/netns/{space}").open() as file:
        _check(libc.setns(file.fileno(), _NEWNET))
    _check(libc.unshare(_NEWNS))
    _mount(libc, "none", "/", "", _SLAVE | _REC)  # the following mounts are not visible to others
    _mount(libc, f"{root}/hosts/{name}", here, "", _BIND)
    _mount(libc, "none", f"{root}/hosts", "tmpfs", 0)
    _mount(libc, f"{root}/names", "/etc/hosts", "", _BIND)
    os.chdir(f"{here}/{folder}")


def _mount(libc: ctypes.CDLL, source: str, target: str, kind: str, flags: int) -> None:
    _check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
