"""One server of the coordinator's benchmark, on one core, until its standard input ends.

    python bench/coordinator_server.py shoal --data FOLDER [--database URL] --nodes N
    python bench/coordinator_server.py fastapi
    python bench/coordinator_server.py verify

It prints `ready PORT` once it accepts requests. For each line it then reads, it prints a line of JSON: the CPU seconds
used so far, and the peak memory in MB. `fastapi` is a bare app behind uvicorn with the same messages and no checks;
`verify` measures Ed25519 alone and answers a line with verifications per second.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from coordinator_common import BODY, RUN, SERVER_CORE, derive_key, pin_core

MANY = 1e6
NUM_JUDGES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("shoal", "fastapi", "verify"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--database", default="")
    parser.add_argument("--nodes", type=int, default=0)
    flags = parser.parse_args()
    pin_core(SERVER_CORE)
    if flags.kind == "verify":
        run_verify()
    elif flags.kind == "fastapi":
        asyncio.run(run_fastapi())
    else:
        asyncio.run(run_shoal(flags.data, flags.database, flags.nodes))


async def run_shoal(data: Path, database: str, num_nodes: int) -> None:
    from shoal.coordinator.service import open_service

    data.mkdir(mode=0o700, parents=True)
    derive_key("coordinator").save(data / "coordinator.key")
    async with open_service(make_config(database), data) as service:
        await fill_run(service.coordinator, num_nodes)
        chores = asyncio.create_task(service.run())
        await answer_lines(service.server.address[1])
        chores.cancel()
        await asyncio.gather(chores, return_exceptions=True)


def make_config(database: str) -> Any:
    from shoal.coordinator.api.context import ApiLimits
    from shoal.coordinator.service import ServiceConfig
    from shoal.identity.authenticator import AuthLimits
    from shoal.net.limits import HttpLimits
    from shoal.protocol.params import RunParams

    judges = tuple(derive_key(f"judge {number}").public for number in range(NUM_JUDGES))
    params = RunParams(
        steps=3,
        groups_per_batch=20_000,
        groups_per_lease=1,
        max_queue=100_000,
        max_pending_per_owner=1000,
        probation_leases=1000,
        max_width=1000,
        validators=judges,
        trainers=judges[:1],
    )
    return ServiceConfig(
        run=RUN,
        operator=derive_key("operator").public,
        port=0,
        database=database,
        params=params,
        # The whole load comes from one address.
        auth=AuthLimits(address_rate=MANY, node_rate=MANY, owner_rate=MANY, fresh_rate=MANY),
        api=ApiLimits(read_rate=MANY),
        http=HttpLimits(max_connections=16_384),
    )


async def fill_run(coordinator: Any, num_nodes: int) -> None:
    """Let all nodes join, and publish v0."""
    from shoal.identity.delegation import Grant, Scope, sign_delegation
    from shoal.protocol.messages import SignedVersion, VersionStatement, sign_message
    from shoal.util.clock import read_clock

    now_ms = read_clock()

    async def join(name: str, *scopes: Scope) -> None:
        node = derive_key(name)
        grant = Grant(node.public, RUN, now_ms - 1000, now_ms + 10**8, frozenset(scopes), 64)
        await coordinator.join(node.public, sign_delegation(node, grant))

    for number in range(NUM_JUDGES):
        await join(f"judge {number}", Scope.WORK, Scope.VALIDATE, Scope.TRAIN)
    for first in range(0, num_nodes, 256):
        names = [f"node {index}" for index in range(first, min(first + 256, num_nodes))]
        await asyncio.gather(*(join(name, Scope.WORK) for name in names))
    judge, version = derive_key("judge 0"), VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch="")
    signed = SignedVersion(version=version, signature=sign_message(judge, RUN, version))
    await coordinator.publish_version(judge.public, signed)


async def run_fastapi() -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import ConfigDict

    from shoal.protocol.messages import Heartbeat, HeartbeatAnswer, Standing

    app = FastAPI()

    class Beat(Heartbeat):
        """FastAPI validates parsed lists, not JSON."""

        model_config = ConfigDict(strict=False)

    @app.post("/v1/heartbeat")
    async def beat(message: Beat) -> HeartbeatAnswer:
        return HeartbeatAnswer(
            cancelled=(),
            newest_version=0,
            oldest_version=0,
            head=None,
            server_time_ms=int(time.time() * 1000),
            next_s=10,
            standing=Standing.PROBATION,
            finished=False,
            reasons=(),
        )

    config = uvicorn.Config(app, port=0, log_level="critical", access_log=False, loop="asyncio", http="h11")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    await answer_lines(server.servers[0].sockets[0].getsockname()[1])
    server.should_exit = True
    await serving


def run_verify() -> None:
    from shoal.identity.keys import verify_signature

    key, message = derive_key("node 0"), BODY * 8
    signature = key.sign(message)
    tell("ready 0")
    for _ in sys.stdin:
        began, count = time.process_time(), 2000
        for _ in range(count):
            assert verify_signature(key.public, message, signature)
        tell(json.dumps({"per_s": count / (time.process_time() - began)}))


async def answer_lines(port: int) -> None:
    """Print the port, then the usage for each line, until stdin ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    tell(f"ready {port}")
    while await reader.readline():
        used = resource.getrusage(resource.RUSAGE_SELF)
        tell(json.dumps({"cpu_s": used.ru_utime + used.ru_stime, "rss_mb": used.ru_maxrss / 1024}))


def tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
