"""One load generator of the coordinator's benchmark. Its task is one line of JSON on standard input:

    {"kind": "flood", "port", "first", "nodes", "count", "connections"}        heartbeats, as fast as they are answered
    {"kind": "pace", "port", "first", "nodes", "rate", "seconds"}              at a fixed rate, one connection per node
    {"kind": "cycle", "port", "first", "nodes", "seconds", "rate"}             lease, commit, upload, claim, verdict
    {"kind": "dribble", "port", "sockets", "seconds"}                          endless request heads, 1 byte per second

Requests of `flood` and `pace` are signed before the clock starts. The process prints `ready`, starts when it reads a
line, and ends with a line of JSON. Latency at a fixed rate counts from when a request was due, so waiting for a server
that is behind is included.
"""

import asyncio
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from coordinator_common import BODY, LOAD_CORE, RUN, derive_key, pin_core
from shoal.identity.signer import RequestSigner
from shoal.protocol.messages import (
    ClaimAnswer,
    CommitAnswer,
    GroupFinding,
    Job,
    LeaseAnswer,
    Manifest,
    RolloutEntry,
    SignedManifest,
    SignedVerdict,
    Verdict,
    VerdictStatement,
    sign_message,
)

BLOB_BYTES = 20_000
COORDINATOR = derive_key("coordinator").public


class Line(asyncio.Protocol):
    """A connection with one request at a time; `done` is called with the status."""

    def __init__(self) -> None:
        self._got = b""
        self._need = -1
        self.due: list[float] = []
        self.waits: list[float] = []
        self.statuses: dict[int, int] = {}
        self.waiter: asyncio.Future[None] | None = None
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def send(self, data: bytes, due: float) -> None:
        self.due.append(due)
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self._got += data
        while self._take_answer():
            self.waits.append(time.perf_counter() - self.due.pop(0))
            if self.waiter is not None and not self.waiter.done():
                self.waiter.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    def _take_answer(self) -> bool:
        if self._need < 0:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return False
            head = self._got[:end].lower()
            status = int(head[9:12])
            self.statuses[status] = self.statuses.get(status, 0) + 1
            place = head.find(b"content-length:")
            self._need = end + 4 + int(head[place + 15 :].split(b"\r\n", 1)[0])
        if len(self._got) < self._need:
            return False
        self._got, self._need = self._got[self._need :], -1
        return True


def sign_beats(first: int, nodes: int, count: int) -> list[bytes]:
    """Heartbeats of these nodes in turn, ready to send."""
    signers = [RequestSigner(derive_key(f"node {index}"), RUN, COORDINATOR) for index in range(first, first + nodes)]
    made = []
    for number in range(count):
        headers = signers[number % nodes].sign_request("POST", "/v1/heartbeat", BODY)
        lines = ["POST /v1/heartbeat HTTP/1.1", "Host: bench", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers]
        made.append("\r\n".join([*lines, "", ""]).encode() + BODY)
    return made


async def open_lines(port: int, count: int) -> list[Line]:
    loop = asyncio.get_running_loop()
    return [(await loop.create_connection(Line, "127.0.0.1", port))[1] for _ in range(count)]


async def run_flood(task: dict[str, Any]) -> dict[str, Any]:
    requests = sign_beats(task["first"], task["nodes"], task["count"])
    lines = await open_lines(task["port"], task["connections"])
    await wait_start()
    left = iter(requests)

    async def drive(line: Line) -> None:
        for data in left:
            line.waiter = asyncio.get_running_loop().create_future()
            line.send(data, time.perf_counter())
            await line.waiter

    began = time.perf_counter()
    await asyncio.gather(*map(drive, lines))
    return sum_lines(lines, time.perf_counter() - began)


async def run_pace(task: dict[str, Any]) -> dict[str, Any]:
    """Nodes in turn, each on its own connection, as in a swarm: each node's heartbeats have their own phase."""
    nodes, rate = task["nodes"], task["rate"]
    requests = sign_beats(task["first"], nodes, round(rate * task["seconds"]))
    lines = [Line() for _ in range(nodes)]
    sending: set[asyncio.Task[None]] = set()
    draw = random.Random(task["first"])
    await wait_start()
    began = time.perf_counter()
    for number, data in enumerate(requests):
        due = began + (number + draw.random()) / rate
        while (early := due - time.perf_counter()) > 0:
            await asyncio.sleep(early)
        line = lines[number % nodes]
        if line.transport is not None and not line.transport.is_closing():
            line.send(data, due)
        else:
            sending.add(asyncio.create_task(connect_line(line, task["port"], data, due)))
    await asyncio.gather(*sending)
    for _ in range(500):
        if not any(line.due for line in lines):
            break
        await asyncio.sleep(0.01)
    found = sum_lines(lines, time.perf_counter() - began)
    return {**found, "unanswered": sum(len(line.due) for line in lines), "connected": len(sending)}


async def connect_line(line: Line, port: int, data: bytes, due: float) -> None:
    """A node's first heartbeat, or the first after its connection was closed."""
    await asyncio.get_running_loop().create_connection(lambda: line, "127.0.0.1", port)
    line.send(data, due)


def sum_lines(lines: list[Line], seconds: float) -> dict[str, Any]:
    statuses: dict[str, int] = {}
    for line in lines:
        for status, count in line.statuses.items():
            statuses[str(status)] = statuses.get(str(status), 0) + count
        if line.transport is not None:
            line.transport.abort()
    waits = [wait for line in lines for wait in line.waits]
    return {"seconds": seconds, "waits": waits, "statuses": statuses}


class Caller:
    """A node that sends one request after another."""

    def __init__(self, name: str, port: int) -> None:
        self.key = derive_key(name)
        self._port = port
        self._signer = RequestSigner(self.key, RUN, COORDINATOR)
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, target: str, body: bytes = b"") -> bytes:
        if self._pair is None:
            self._pair = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._pair
        headers = self._signer.sign_request(method, target, body)
        lines = [f"{method} {target} HTTP/1.1", "Host: bench", *(f"{name}: {value}" for name, value in headers)]
        if not body:
            lines.append("Content-Length: 0")
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head[head.find(b"content-length:") + 15 :].split(b"\r\n", 1)[0])
        answer = await reader.readexactly(length)
        assert head.startswith(b"http/1.1 200"), answer
        return answer


async def run_cycle(task: dict[str, Any]) -> dict[str, Any]:
    """Pairs of a worker and a validator; `rate` 0 means as fast as possible."""
    numbers = range(task["first"], task["first"] + task["nodes"])
    pairs = [(Caller(f"node {number}", task["port"]), Caller(f"judge {number}", task["port"])) for number in numbers]
    await wait_start()
    began = time.perf_counter()
    leases: list[float] = []
    spans: list[float] = []

    async def drive(worker: Caller, judge: Caller) -> None:
        for pause in draw_turns(began + task["seconds"], task["rate"] / task["nodes"]):
            await pause
            start = time.perf_counter()
            leases.append(await hand_in(worker))
            if await judge_one(judge):
                spans.append(time.perf_counter() - start)

    await asyncio.gather(*(drive(*pair) for pair in pairs))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "waits": leases, "spans": spans, "statuses": {}}


async def hand_in(worker: Caller) -> float:
    """Lease, commit and upload; returns how long the lease took."""
    began = time.perf_counter()
    body = json.dumps({"request_key": random.randbytes(16).hex(), "version": 0}).encode()
    lease = LeaseAnswer.model_validate_json(await worker.ask("POST", "/v1/leases", body)).lease
    assert lease is not None, "no lease"
    took_s = time.perf_counter() - began
    blob = random.randbytes(BLOB_BYTES)
    count = lease.count * lease.group_size
    entries = tuple(RolloutEntry(hash=random.randbytes(32).hex(), tokens=100) for _ in range(count))
    manifest = Manifest(
        lease=lease.lease,
        fence=lease.fence,
        blob=hashlib.sha256(blob).hexdigest(),
        size=BLOB_BYTES,
        version=0,
        rollouts=entries,
    )
    signed = SignedManifest(manifest=manifest, signature=sign_message(worker.key, RUN, manifest))
    answer = await worker.ask("POST", "/v1/submissions", signed.model_dump_json().encode())
    submission = CommitAnswer.model_validate_json(answer).submission
    await worker.ask("PUT", f"/v1/submissions/{submission}/blob", blob)
    return took_s


async def judge_one(judge: Caller) -> bool:
    """Claim the next job and accept it; False if there was none."""
    job = ClaimAnswer.model_validate_json(await judge.ask("POST", "/v1/claims", b"{}")).job
    if job is None:
        return False
    verdict = describe_verdict(job)
    signed = SignedVerdict(verdict=verdict, signature=sign_message(judge.key, RUN, verdict))
    await judge.ask("POST", "/v1/verdicts", signed.model_dump_json().encode())
    return True


def draw_turns(end: float, rate: float) -> Iterator[Any]:
    """Yields something to await before each cycle until the end, for `rate` cycles per second."""
    while time.perf_counter() < end:
        pause = random.expovariate(rate) if rate else 0.0
        if time.perf_counter() + pause >= end:
            return
        yield asyncio.sleep(pause)


def describe_verdict(job: Job) -> VerdictStatement:
    groups = tuple(GroupFinding(index=job.first + place, signal=True) for place in range(job.count))
    tokens = sum(entry.tokens for entry in job.manifest.rollouts)
    return VerdictStatement(
        submission=job.submission, round=job.round, verdict=Verdict.ACCEPTED, tokens=tokens, groups=groups
    )


async def run_dribble(task: dict[str, Any]) -> dict[str, Any]:
    """Keep the given number of sockets open; reconnects those that are cut off."""
    await wait_start()
    end = time.perf_counter() + task["seconds"]
    opened = [0]

    async def dribble(number: int) -> None:
        await asyncio.sleep(number / task["sockets"])
        while time.perf_counter() < end:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", task["port"])
                opened[0] += 1
                writer.write(b"POST /v1/heartbeat HTTP/1.1\r\nX-Slow: ")
                while time.perf_counter() < end and not writer.is_closing():
                    writer.write(b"x")
                    await asyncio.sleep(1.0)
                writer.transport.abort()
            except OSError:
                await asyncio.sleep(0.1)

    await asyncio.gather(*map(dribble, range(task["sockets"])))
    return {"seconds": task["seconds"], "waits": [], "opened": opened[0], "statuses": {}}


async def wait_start() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    pin_core(LOAD_CORE)
    task = json.loads(sys.stdin.readline())
    runs = {"flood": run_flood, "pace": run_pace, "cycle": run_cycle, "dribble": run_dribble}
    print(json.dumps(asyncio.run(runs[task["kind"]](task))), flush=True)


if __name__ == "__main__":
    main()
