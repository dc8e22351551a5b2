"""Processes of the coordinator's benchmark: a server, load generators and PostgreSQL; stopped with the block."""

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from coordinator_common import LOAD_CORE

FOLDER = Path(__file__).resolve().parent
START_S = 120.0


class Process:
    """A process that reads lines and answers with lines."""

    def __init__(self, command: Sequence[str]) -> None:
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        self._popen = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def tell(self, line: str = "") -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def hear(self) -> str:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            raise SystemExit(f"{' '.join(map(str, self._popen.args[1:3]))} ended with {self._popen.wait()}")  # type: ignore[index]
        return line.strip()

    def ask(self) -> dict[str, Any]:
        self.tell()
        return json.loads(self.hear())

    def end(self) -> None:
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        try:
            self._popen.wait(20)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


@contextmanager
def start_server(*flags: str) -> Iterator[tuple[Process, int]]:
    """A running server, and its port."""
    process = Process([str(FOLDER / "coordinator_server.py"), *flags])
    try:
        yield process, int(process.hear().split()[1])
    finally:
        process.end()


def run_load(*tasks: dict[str, Any], server: Process | None = None) -> tuple[list[dict[str, Any]], float]:
    """Run tasks concurrently; returns their results, and the CPU seconds of the server meanwhile."""
    with ExitStack() as stack:
        processes = []
        for task in tasks:
            process = Process([str(FOLDER / "coordinator_load.py")])
            stack.callback(process.end)
            process.tell(json.dumps(task))
            processes.append(process)
        for process in processes:
            assert process.hear() == "ready"
        before = server.ask()["cpu_s"] if server is not None else 0.0
        for process in processes:
            process.tell()
        found = [json.loads(process.hear()) for process in processes]
        used = server.ask()["cpu_s"] - before if server is not None else 0.0
    return found, used


def find_postgres() -> Path | None:
    """Folder of PostgreSQL's programs."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    path = found[-1] if found else shutil.which("initdb")
    return None if path is None else Path(path).parent


@contextmanager
def start_postgres(tools: Path) -> Iterator[str]:
    """The URL of an empty database in its own cluster, on the core of the load."""
    user = next((pwd.getpwnam(name) for name in ("postgres", "nobody") if _has_user(name)), None)
    owner: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="shoal-pg-"))
    try:
        if os.geteuid() == 0 and user is not None:
            os.chown(folder, user.pw_uid, user.pw_gid)
            owner = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        data = folder / "data"
        flags = ["-D", str(data), "-U", "shoal", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
        subprocess.run([tools / "initdb", *flags], check=True, stdout=subprocess.DEVNULL, cwd=folder, **owner)
        settings = ["-c", "listen_addresses=", "-c", f"unix_socket_directories={folder}"]
        pin = ["taskset", "-c", str(LOAD_CORE)] if shutil.which("taskset") else []
        command = [*pin, str(tools / "postgres"), "-D", str(data), *settings]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, **owner)
        try:
            _make_database(folder)
            yield f"postgresql://shoal@/bench?host={folder}"
        finally:
            server.terminate()
            server.wait(30)
    finally:
        shutil.rmtree(folder)


def _make_database(folder: Path) -> None:
    import sqlalchemy as sa

    engine = sa.create_engine(f"postgresql+psycopg://shoal@/postgres?host={folder}", isolation_level="AUTOCOMMIT")
    deadline = time.monotonic() + START_S
    while True:
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("CREATE DATABASE bench")
        except sa.exc.OperationalError:
            if time.monotonic() > deadline:
                raise SystemExit(f"PostgreSQL did not start: {(folder / 'log').read_text()[-500:]}") from None
            time.sleep(0.05)
        else:
            engine.dispose()
            return


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
