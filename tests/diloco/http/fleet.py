"""A reducer and its peers as real processes on loopback, each a fork of a process that has imported everything.

Peers train a vector towards a point of their own with the package's `Peer`; the duration of a step is a setting. What
happens is written as lines of JSON by each process, and read here.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shoal.diloco.http.averager import HttpAverager
from shoal.diloco.http.client import ReducerClient
from shoal.diloco.http.messages import CHUNK_BYTES, make_offer
from shoal.diloco.http.service import open_reducer
from shoal.diloco.http.settings import ReducerConfig, ReducerTimeouts
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.round import Update
from shoal.diloco.state import start_state
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.net.client import HttpDeadlines, parse_endpoint

PATIENCE_S = 30.0
ALLOWED = ("a", "b", "c", "d", "cut", "late", "slow", "stuck")
"""names of the peers that a reducer knows"""
SIZE = 64
QUICK = ReducerTimeouts(grace_s=1.0, grace_share=0.0, presence_s=6.0, longest_s=20.0)
DEADLINES = HttpDeadlines(connect_s=2.0, answer_s=12.0, rest_s=5.0, window_s=5.0, min_rate=1024)


@dataclass(frozen=True)
class Order:
    """The settings of a peer process."""

    key: str
    url: str
    reducer: str
    out: str
    plan: DilocoPlan
    rounds: int = 4
    stay: int = 0
    """leaves after this many rounds, if not 0"""
    step_s: float = 0.002
    delay: int = 0
    wait_s: float = 20.0
    seed: int = 0


class Fleet:
    """The processes of one test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plan = DilocoPlan("test", (SIZE,), Rules(interval=20, codec="fp32", dynamic=False))
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["fleet", "torch", "shoal.diloco.peer"])
        self._processes: dict[str, Any] = {}
        self._orders: dict[str, Order] = {}
        self.port = find_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start_reducer(self, start_peers: int, folder: str = "reducer", *, rebuild: bool = False, **changes: Any) -> str:
        """Start or restart a reducer; returns its public key."""
        data = self.root / folder
        data.mkdir(exist_ok=True)
        named = {"peers": tuple(self._open_key(name).public for name in ALLOWED)}
        config = ReducerConfig(port=self.port, start_peers=start_peers, patience=QUICK, **named)
        config = config.model_copy(update=changes)
        args = (config.model_dump_json(), str(data), self.plan, rebuild)
        self._start(folder, run_reducer, args)
        self.wait_for(lambda: _can_connect(self.port), "the reducer does not listen")
        return Key.load(data / "reducer.key").public

    def start_peer(self, name: str, reducer: str, *, stuck: bool = False, **changes: Any) -> None:
        """Start or restart a peer, under the same key."""
        assert name in ALLOWED, "the reducer knows its peers"
        made = Order(
            str(self.root / f"{name}.key"),
            self.url,
            reducer,
            str(self.root / f"{name}.jsonl"),
            self.plan,
            seed=len(name + name),
        )
        self._orders[name] = replace(made, **changes)
        self._start(name, run_stuck if stuck else run_peer, (self._orders[name],))

    def _open_key(self, name: str) -> Key:
        return Key.open(self.root / f"{name}.key")

    def find_public(self, name: str) -> str:
        """A peer's id."""
        return Key.load(self.root / f"{name}.key").public

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The lines a peer has written so far."""
        path = self.root / f"{name}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def read_reports(self, name: str) -> list[dict[str, Any]]:
        """The rounds that a peer has completed."""
        return [line for line in self.read_lines(name) if "round" in line]

    def read_end(self, name: str) -> dict[str, Any]:
        """The last line of a peer that ran to its end."""
        self.join(name)
        return self.read_lines(name)[-1]

    def read_status(self) -> dict[str, Any]:
        """The status of the reducer."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=5) as sock:
            sock.sendall(b"GET /v1/diloco/status HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            data = b""
            while piece := sock.recv(1 << 16):
                data += piece
        found: dict[str, Any] = json.loads(data.partition(b"\r\n\r\n")[2])
        return found

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to one process."""
        os.kill(self._processes[name].pid, number)
        if number == signal.SIGKILL:
            self._processes[name].join(5)

    def join(self, name: str) -> None:
        """Wait for a process to exit successfully."""
        process = self._processes[name]
        process.join(PATIENCE_S)
        said = (self.root / f"{name}.log").read_text()[-2000:]
        assert process.exitcode == 0, f"{name}: {process.exitcode}, {self.read_lines(name)[-3:]} {said}"

    def wait_for(self, holds: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> float:
        """Wait until a condition holds; returns how long it took."""
        start = time.monotonic()
        while not holds():
            assert time.monotonic() - start < patience_s, what
            time.sleep(0.06)
        return time.monotonic() - start

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join(5)

    def _start(self, name: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        log = str(self.root / f"{name}.log")
        process = self._context.Process(target=run_logged, args=(log, target, *args), daemon=True)
        process.start()
        self._processes[name] = process


def run_logged(log: str, target: Callable[..., None], *args: Any) -> None:
    """Run the ordered role; errors are written to a file."""
    with Path(log).open("a") as file:
        os.dup2(file.fileno(), 2)
    target(*args)


def run_reducer(config: str, data: str, plan: DilocoPlan, rebuild: bool) -> None:
    """Run a reducer until it is killed."""
    theta = np.linspace(-1.0, 1.0, sum(plan.sizes), dtype=np.float32)
    parts = tuple(np.split(theta, np.cumsum(plan.sizes)[:-1]))
    initial = None if rebuild else start_state(parts, plan.num_lanes)

    async def serve() -> None:
        async with open_reducer(ReducerConfig.model_validate_json(config), Path(data), plan, initial=initial) as made:
            await made.run()

    asyncio.run(serve())


def run_peer(order: Order) -> None:
    """Run a peer to the end of its rounds."""
    import torch

    from shoal.diloco.fragments import map_model
    from shoal.diloco.peer import Peer, PeerOptions

    torch.set_num_threads(1)
    write = _open_lines(order.out)
    key = Key.load(Path(order.key))
    averager = HttpAverager(order.plan, key, [parse_endpoint(order.url)], order.reducer, deadlines=DEADLINES)
    model = _Point(order.plan.sizes[0])
    target = torch.randn(order.plan.sizes[0], generator=torch.Generator().manual_seed(order.seed))
    inner = _make_descent(model.weight, 0.05)
    options = PeerOptions(wait_s=PATIENCE_S, delay=order.delay)  # the others may still be starting
    peer = Peer(key.public, order.plan, map_model(model), inner, averager, options=options)
    peer.options = replace(options, wait_s=order.wait_s)
    averager.hold_state = lambda: peer.state
    write(began=peer.state.fragments[0].round, position=peer.state.step, hash=peer.state.hash)
    steps, last = 0, peer.state.fragments[0].round + order.stay if order.stay else order.rounds
    while peer.state.fragments[0].round < last:
        time.sleep(order.step_s)
        (model.weight - target).square().sum().backward()
        report = peer.step(tokens=8)
        steps += 1
        if report is not None:
            peers = [name[:8] for name in report.peers]
            write(
                round=report.round,
                hash=peer.state.hash,
                peers=peers,
                note=report.note,
                steps=steps,
                waited_s=peer.waited_s,
                compute_s=peer.compute_s,
                time_s=time.monotonic(),
            )
    write(done=True, hash=peer.state.hash, steps=steps, waited_s=peer.waited_s, compute_s=peer.compute_s)
    peer.close()


def run_stuck(order: Order) -> None:
    """A peer that sends half of a chunk and then nothing, with its connection open."""
    key, write = Key.load(Path(order.key)), _open_lines(order.out)
    averager = HttpAverager(order.plan, key, [parse_endpoint(order.url)], order.reducer, deadlines=DEADLINES)
    state = averager.fetch_state(20.0)
    payload = np.ones(order.plan.sizes[0], dtype="<f4").tobytes()
    update = Update(order.plan.name_round(state, 0), key.public, 8, 1, payload, "fp32")
    sock = asyncio.run(_send_half(order, key, update))
    write(half=True)
    time.sleep(60.0)
    sock.close()


async def _send_half(order: Order, key: Key, update: Update) -> socket.socket:
    client = ReducerClient(parse_endpoint(order.url), key, order.plan, order.reducer)
    offer = make_offer(update)
    await client.offer(offer)
    client.close()
    target = f"/v1/diloco/updates/0/{offer.round}/{offer.digest}/0"
    chunk = update.payload[:CHUNK_BYTES]
    headers = RequestSigner(key, order.plan.run, order.reducer).sign_request("PUT", target, chunk)
    lines = [f"PUT {target} HTTP/1.1", "Host: a", *(f"{name}: {value}" for name, value in headers), "", ""]
    sock = socket.create_connection(("127.0.0.1", int(order.url.rpartition(":")[2])))
    sock.sendall("\r\n".join(lines).encode() + chunk[: len(chunk) // 2])
    return sock


class Cut:
    """A path to a port that can be cut and restored: connections through it break, and new ones are refused."""

    def __init__(self, port: int) -> None:
        self._port, self._is_open = port, True
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all."""
        self._is_open = False
        for pair in self._pairs:
            for sock in pair:
                with suppress(OSError):  # already gone
                    sock.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def mend(self) -> None:
        """Let connections through again."""
        self._is_open = True

    def close(self) -> None:
        """End all for good."""
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_open:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._port))
            self._pairs.append((near, far))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=_pump, args=pair, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def find_port() -> int:
    """A free port."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


def _can_connect(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def _open_lines(path: str) -> Callable[..., None]:
    def write(**fields: Any) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps(fields) + "\n")

    return write


def _Point(size: int) -> Any:  # noqa: N802 - a class, made where torch is loaded
    import torch

    class Point(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(size))

    return Point()


def _make_descent(weight: Any, lr: float) -> Any:
    """Gradient descent. The first step of torch's optimizer loads a compiler, which takes seconds in each process."""
    import torch

    class Descent(torch.optim.Optimizer):
        def step(self) -> None:  # type: ignore[override]
            with torch.no_grad():
                weight.sub_(lr * weight.grad)

        def zero_grad(self, set_to_none: bool = True) -> None:
            weight.grad = None

    inner = Descent.__new__(Descent)
    inner.param_groups = [{"params": [weight], "lr": lr}]
    return inner
