"""Trees of shoal's nodes as real processes, timed from `publish` to the verified folder at the last client."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen

from shardcast_processes import Processes, Reading, find_port
from shardcast_sample import Runs, Sample
from shoal.identity.keys import Key

_HERE = Path(__file__).parent
_NODE = (sys.executable, _HERE / "shardcast_node.py")
_LINK = (sys.executable, _HERE / "shardcast_link.py")
ALONE, EVEN, WEIGHED = "best relay alone", "all three, drawn evenly", "all three, drawn by weight"


class Tree:
    """The nodes of one measurement."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.clients: list[Path] = []
        key = Key.generate()
        self._key_path = processes.folder / "key"
        key.save(self._key_path)
        self._publisher = key.public
        self._origin: Popen[bytes] | None = None

    def add_origin(self) -> str:
        port = find_port()
        self._origin = self._start("origin", "origin", self.processes.folder / "origin", str(port), self._key_path)
        return _url(port)

    def add_relay(self, name: str, urls: Sequence[str]) -> str:
        port = find_port()
        self._start(name, "relay", self.processes.folder / name, str(port), self._publisher, *urls)
        return _url(port)

    def add_client(self, name: str, urls: Sequence[str], *, role: str = "client") -> Path:
        """Start a client; returns where its versions will appear."""
        out = self.processes.folder / name
        self._start(name, role, out, self._publisher, *urls)
        self.clients.append(out)
        return out

    def add_link(self, name: str, url: str, *, rate: float, delay_s: float = 0.0, fail: float = 0.0) -> str:
        """Start a link to that server; returns the address of its near end."""
        port, target = find_port(), url.rpartition(":")[2]
        options = ("--rate", str(rate), "--delay", str(delay_s), "--fail", str(fail))
        self.processes.start(name, (*_LINK, str(port), target, *options))
        self.processes.wait_port(port)
        return _url(port)

    def drop_client(self, out: Path) -> None:
        """Stop a client and remove its files."""
        self.clients.remove(out)
        self.processes.stop(out.name)
        (out.parent / f"{out.name}.ready").unlink()
        shutil.rmtree(out)

    def publish(self, file: Path) -> None:
        """Tell the origin to publish version 1."""
        assert self._origin is not None and self._origin.stdin is not None
        self._origin.stdin.write(f"1 {file}\n".encode())
        self._origin.stdin.flush()

    def wait_clients(self) -> None:
        """Wait until every client has version 1."""
        for out in self.clients:
            self.processes.wait_until((out / "v1").exists, f"version 1 was at {out.name}", 300.0)

    def run(self, sample: Sample) -> Reading:
        """Publish, wait for all clients, and check what they received."""
        with self.processes.measure() as reading:
            self.publish(sample.file)
            self.wait_clients()
        for out in self.clients:
            sample.check(out / "v1" / sample.file.name)
        return reading

    def _start(self, name: str, role: str, *arguments: str | Path) -> Popen[bytes]:
        ready = self.processes.folder / f"{name}.ready"
        process = self.processes.start(name, (*_NODE, role, ready, *arguments))
        self.processes.wait_until(ready.exists, f"{name} was live", 30.0)
        return process


def run_tree(sample: Sample, folder: Path, *, relays: int, clients: int) -> Reading:
    """Clients below relays below one origin; each client knows all relays, or the origin if there are none."""
    with Processes(folder, (relays + clients) * sample.num_bytes) as processes:
        tree = Tree(processes)
        origin = tree.add_origin()
        urls = [tree.add_relay(f"relay{i}", [origin]) for i in range(relays)] or [origin]
        for i in range(clients):
            tree.add_client(f"client{i}", urls)
        return tree.run(sample)


def run_chain(sample: Sample, folder: Path, *, depth: int, rate: float, delay_s: float) -> Reading:
    """One client behind `depth` links and the relays between them."""
    with Processes(folder, depth * sample.num_bytes) as processes:
        tree = Tree(processes)
        url = tree.add_origin()
        for level in range(1, depth):
            url = tree.add_relay(f"relay{level}", [tree.add_link(f"link{level}", url, rate=rate, delay_s=delay_s)])
        tree.add_client("client", [tree.add_link("link", url, rate=rate, delay_s=delay_s)])
        return tree.run(sample)


def run_mixed(sample: Sample, *, rounds: int, rate: float) -> Runs:
    """A client that joins when three unequal relays have the version: with the best one alone, and with all of them."""
    with Processes(sample.scratch) as processes:
        tree = Tree(processes)
        origin = tree.add_origin()
        relays = [tree.add_relay(f"relay{i}", [origin]) for i in range(3)]
        for i, relay in enumerate(relays):
            tree.add_client(f"first{i}", [relay])
        tree.run(sample)
        for out in list(tree.clients):
            tree.drop_client(out)
        traits = ({"rate": rate}, {"rate": rate / 4}, {"rate": rate, "fail": 0.5})
        links = [tree.add_link(f"link{i}", url, **traits[i]) for i, url in enumerate(relays)]
        cases = {ALONE: ("client", links[:1]), EVEN: ("even", links), WEIGHED: ("client", links)}
        runs: Runs = {name: [] for name in cases}
        for _ in range(rounds):
            for name, (role, urls) in cases.items():
                runs[name].append(_join_late(tree, sample, role, urls))
    return runs


def _join_late(tree: Tree, sample: Sample, role: str, urls: Sequence[str]) -> Reading:
    """A client that joins when the version is available; timed from the moment it knows its sources."""
    os.sync()
    out = tree.add_client("client", urls, role=role)
    with tree.processes.measure() as reading:
        tree.processes.wait_until((out / "v1").exists, "the late client was done", 300.0)
    sample.check(out / "v1" / sample.file.name)
    tree.drop_client(out)
    return reading


def _url(port: int) -> str:
    return f"http://127.0.0.1:{port}"
