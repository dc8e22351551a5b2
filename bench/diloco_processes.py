"""The processes of `diloco_net.py`: a reducer, its peers, the slow links between them, and workers of other engines.

Each is a fork of a process that has imported everything, so that imports are not timed.
"""

import asyncio
import hashlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco_link import serve_links
from shoal.diloco.codecs import find_codec
from shoal.diloco.http.averager import HttpAverager
from shoal.diloco.http.service import open_reducer
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.round import Update
from shoal.diloco.state import start_state
from shoal.identity.keys import Key
from shoal.net.client import parse_endpoint

PATIENCE_S = 300.0
START_S = 60.0


@dataclass(frozen=True)
class Work:
    """The work of one peer in the utilisation run."""

    rounds: int
    step_s: float
    delay: int


def make_context() -> Any:
    """A context whose processes are forks of one that has imported what they need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["diloco_processes", "torch", "shoal.diloco.peer"])
    return context


def find_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def run_workers(context: Any, target: Callable[..., Any], count: int, *args: Any) -> list[Any]:
    """What `count` processes return from target(rank, count, barrier, *args)."""
    barrier, results = context.Barrier(count), context.Queue()
    processes = [
        context.Process(target=_report, args=(results, target, rank, count, barrier, *args), daemon=True)
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=PATIENCE_S) for _ in processes]
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    failures = [value for is_good, value in found if not is_good]
    if failures:
        raise RuntimeError(failures[0])
    return [value for _, value in found]


def _report(results: Any, target: Callable[..., Any], *args: Any) -> None:
    try:
        results.put((True, target(*args)))
    except Exception as error:
        results.put((False, f"{type(error).__name__}: {error}"))
        raise


@contextmanager
def serve_reducer(context: Any, plan: DilocoPlan, num_peers: int) -> Iterator[tuple[int, str]]:
    """A reducer in its own process: its port and key."""
    with tempfile.TemporaryDirectory() as folder:
        port = find_ports(1)[0]
        Key.generate().save(Path(folder) / "reducer.key")
        process = context.Process(target=_run_reducer, args=(plan, folder, port, num_peers), daemon=True)
        process.start()
        try:
            _wait_port(port)
            yield port, Key.load(Path(folder) / "reducer.key").public
        finally:
            process.kill()
            process.join(10)


@contextmanager
def serve_slow(context: Any, port: int, count: int, rate: float, delay_s: float) -> Iterator[list[int]]:
    """Links to a port, one per peer: their ports."""
    ports = find_ports(count)
    process = context.Process(target=_run_links, args=(port, ports, rate, delay_s), daemon=True)
    process.start()
    try:
        _wait_port(ports[-1])
        yield ports
    finally:
        process.kill()
        process.join(10)


def _run_reducer(plan: DilocoPlan, folder: str, port: int, num_peers: int) -> None:
    async def serve() -> None:
        peers = tuple(derive_key(rank).public for rank in range(num_peers))
        config = ReducerConfig(port=port, start_peers=num_peers, peers=peers)
        initial = start_state(tuple(np.zeros(size, dtype=np.float32) for size in plan.sizes))
        async with open_reducer(config, Path(folder), plan, initial=initial) as service:
            await service.run()

    asyncio.run(serve())


def derive_key(rank: int) -> Key:
    """The key of a peer, which the reducer knows."""
    return Key(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"peer {rank}".encode()).digest()))


def _run_links(port: int, ports: list[int], rate: float, delay_s: float) -> None:
    asyncio.run(serve_links(port, ports, rate, delay_s))


def sync_http(
    rank: int, count: int, barrier: Any, plan: DilocoPlan, port: int, reducer: str, repeats: int
) -> list[float]:
    """Seconds from submitting an update to having the outcome, for every round."""
    key = derive_key(rank)
    averager = HttpAverager(plan, key, [parse_endpoint(f"http://127.0.0.1:{port}")], reducer)
    state = averager.fetch_state(START_S)
    values = np.random.default_rng(rank).standard_normal(plan.sizes[0], dtype=np.float32)
    payload = find_codec(plan.rules.codec).encode(values)
    from shoal.diloco.reduce import apply_outcome

    times = []
    for _ in range(repeats):
        name = plan.name_round(state, 0)
        barrier.wait(PATIENCE_S)
        start = time.perf_counter()
        averager.submit(Update(name, key.public, 1, 1, payload, plan.rules.codec))
        outcome = averager.collect(name, PATIENCE_S)
        times.append(time.perf_counter() - start)
        assert outcome is not None and len(outcome.peers) == count, "a peer is missing from the round"
        state = apply_outcome(plan, state, outcome)
    barrier.wait(PATIENCE_S)
    averager.close()
    return times


def sync_gloo(rank: int, count: int, barrier: Any, size: int, port: int, repeats: int) -> list[float]:
    """Seconds per all-reduce."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=count)
    values = torch.randn(size)
    times = []
    for _ in range(repeats):
        barrier.wait(PATIENCE_S)
        start = time.perf_counter()
        distributed.all_reduce(values)
        times.append(time.perf_counter() - start)
        values /= count
    barrier.wait(PATIENCE_S)
    distributed.destroy_process_group()
    return times


def sync_torchft(rank: int, count: int, barrier: Any, size: int, lighthouse: str, repeats: int) -> list[float]:
    """Seconds per managed all-reduce with its quorum and its commit."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager: Any = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=count,
        use_async_quorum=False,
        init_sync=False,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"peer_{rank}",
        hostname="127.0.0.1",
    )
    values = torch.randn(size)
    times = []
    for _ in range(repeats):
        barrier.wait(PATIENCE_S)
        start = time.perf_counter()
        manager.start_quorum()
        manager.allreduce(values).wait()
        assert manager.should_commit(), "the round was rolled back"
        times.append(time.perf_counter() - start)
    barrier.wait(PATIENCE_S)
    manager.shutdown()
    return times


def train_peer(
    rank: int, count: int, barrier: Any, plan: DilocoPlan, ports: list[int], reducer: str, work: Work
) -> tuple[float, float]:
    """Share of time that a peer behind a slow link computes, and the bytes it sent."""
    import torch

    from shoal.diloco.fragments import map_model
    from shoal.diloco.peer import Peer, PeerOptions

    torch.set_num_threads(1)
    key = derive_key(rank)
    averager = HttpAverager(plan, key, [parse_endpoint(f"http://127.0.0.1:{ports[rank]}")], reducer)
    model = torch.nn.Linear(plan.sizes[0], 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options = PeerOptions(work.delay, wait_s=PATIENCE_S, clip_norm=0.0, threaded=work.delay > 0)
    peer = Peer(key.public, plan, map_model(model), inner, averager, options=options)
    gradient = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(rank))
    model.weight.grad = gradient
    inner.step()  # the first step loads libraries
    peer.adopt_state(peer.state)
    barrier.wait(PATIENCE_S)
    sent, start, before_s = 0, time.perf_counter(), peer.compute_s
    peer._mark = start
    while peer.state.fragments[0].round < work.rounds:
        time.sleep(work.step_s)  # simulates a step on an accelerator; the cores here are for the engine
        model.weight.grad = gradient
        if (report := peer.step(tokens=1)) is not None:
            sent += report.bytes_up
    share = (peer.compute_s - before_s) / (time.perf_counter() - start)
    barrier.wait(PATIENCE_S)
    averager.close()
    return share, float(sent)


def make_plan(size: int, codec: str, interval: int = 50) -> DilocoPlan:
    """A plan of one fragment."""
    return DilocoPlan("bench", (size,), Rules.model_validate({"codec": codec, "interval": interval, "dynamic": False}))


def _wait_port(port: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError("a process did not start")
