"""Parts that are forks: children of ours under their own names, ended as others are; and parts without a server."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shoal.identity.keys import Key
from shoal.launch.process import ForkedProcess, ForkServer, ForkServerError, Part, Process, open_log
from shoal.launch.supervisor import Supervisor

PATIENCE_S = 60.0
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands over children")


def use_fork_server(work: Callable[[ForkServer], Awaitable[Any]], *modules: str) -> Any:
    async def go() -> Any:
        server = ForkServer(os.environ, modules)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work(server)
        finally:
            await server.close()

    return asyncio.run(go())


def list_origin(tmp_path: Path) -> tuple[str, ...]:
    """A command that runs until it is stopped."""
    place = ("--data", str(tmp_path / "origin"), "--key", str(tmp_path / "key"), "--listen", "127.0.0.1:0")
    return ("origin", "--run", "demo", *place)


def test_a_fork_is_our_child_under_its_own_name_and_leaves_its_words_and_its_code(tmp_path: Path) -> None:
    async def work(server: ForkServer) -> tuple[int, int, bytes, int, int]:
        await server.wait_ready()
        with open_log(tmp_path, "key") as log:
            assert await ForkedProcess(server.fork(("keygen", str(tmp_path / "key")), log)).wait() == 0
        with open_log(tmp_path, "origin") as log:
            part = ForkedProcess(server.fork(list_origin(tmp_path), log))
            wrong = ForkedProcess(server.fork(("nonsense",), log))
        while not (tmp_path / "origin").exists():
            await asyncio.sleep(0.02)
        fields = Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()
        name = Path(f"/proc/{part.pid}/cmdline").read_bytes()
        session = os.getsid(part.pid)
        os.kill(part.pid, signal.SIGKILL)
        assert session == part.pid
        return int(fields[1]), await part.wait(), name, await wrong.wait(), part.pid

    parent, code, name, wrong, pid = use_fork_server(work)
    assert parent == os.getpid() and (code, wrong) == (-signal.SIGKILL, 2)
    assert name.rstrip(b"\0").split(b"\0")[1:4] == [b"-m", b"shoal", b"origin"]
    assert "unknown command" in (tmp_path / "origin.log").read_text()
    assert not Path(f"/proc/{pid}").exists()


def test_parts_outlive_their_server(tmp_path: Path) -> None:
    async def work(server: ForkServer) -> int:
        await server.wait_ready()
        with open_log(tmp_path, "all") as log:
            await ForkedProcess(server.fork(("keygen", str(tmp_path / "key")), log)).wait()
            part = ForkedProcess(server.fork(list_origin(tmp_path), log))
            while not (tmp_path / "origin").exists():
                await asyncio.sleep(0.02)
            await server.close()
            await asyncio.sleep(0.2)
            assert part.returncode is None
            with pytest.raises(ForkServerError):
                server.fork(("keygen",), log)
        os.kill(part.pid, signal.SIGTERM)
        return await part.wait()

    assert use_fork_server(work) == 0


def test_a_server_that_cannot_import_says_so() -> None:
    async def work(server: ForkServer) -> None:
        with pytest.raises(ForkServerError, match="imports"):
            await server.wait_ready()

    use_fork_server(work, "no_such_module")


def test_without_a_server_a_part_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(server: ForkServer) -> None:
        raise ForkServerError("none today")

    monkeypatch.setattr(ForkServer, "wait_ready", refuse)
    path = tmp_path / "key"
    part = Part(name="key", arguments=("keygen", str(path)), rank=0, ends=True, has_model=True)

    async def go() -> bool:
        return await Supervisor([part], tmp_path / "logs", os.environ).run(lambda: True, asyncio.Event())

    assert asyncio.run(go()) and path.exists()


def test_what_needs_a_model_is_a_fork_and_is_started_again_when_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*args: object) -> None:
        raise AssertionError("executed")

    monkeypatch.setattr("shoal.launch.supervisor.ForkServer", partial(ForkServer, modules=()))
    monkeypatch.setattr(Process, "start", refuse)
    Key.generate().save(tmp_path / "key")
    part = Part(name="origin", arguments=list_origin(tmp_path), rank=0, has_model=True)

    async def go() -> int | None:
        supervisor, stop = Supervisor([part], tmp_path / "logs", os.environ), asyncio.Event()
        running = asyncio.create_task(supervisor.run(lambda: False, stop))
        state = supervisor.states["origin"]
        async with asyncio.timeout(PATIENCE_S):
            while state.process is None or not (tmp_path / "origin").exists():
                await asyncio.sleep(0.02)
            state.process.signal(signal.SIGKILL)
            while not state.num_deaths or state.process is None:
                await asyncio.sleep(0.02)
            first, again = state.last_code, state.process.pid
            stop.set()
            await running
        assert not Path(f"/proc/{again}").exists()
        return first

    assert asyncio.run(go()) == -signal.SIGKILL
