"""Peers that shoal.shardcast is compared with: the published package, nginx with curl, and a copy on the same disk.

Each takes a sample and an empty folder and returns a `Reading` of one run that ended with the right hash. nginx, curl
and cp get the expected hash for free; a real publisher must compute it first.
"""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardcast_processes import Processes, Reading, find_port
from shardcast_sample import Sample, hash_sha256

_ROLES = Path(__file__).with_name("shardcast_reference.py")
_CURL = ("curl", "--silent", "--fail", "--noproxy", "*", "--output")


def find_missing(reference: str | None) -> dict[str, str]:
    """Peers that cannot run here, each with the reason."""
    missing = {}
    if reference is None:
        missing["shardcast"] = "no Python that has the published package: give one with --reference"
    elif subprocess.run([reference, "-I", "-c", "import shardcast"], capture_output=True, check=False).returncode:
        missing["shardcast"] = f"{reference} cannot import the published package"
    elif shutil.which("wget") is None:
        missing["shardcast"] = "the published package needs wget"
    if _find_nginx() is None or shutil.which("curl") is None:
        missing["nginx"] = "nginx or curl is not installed"
    return missing


def run_reference(python: str, sample: Sample, folder: Path) -> Reading:
    """Origin, middle and client of the published package, all live, from `broadcast` to the verified file."""
    up, down = find_port(), find_port()
    node = (python, "-I", _ROLES)
    with Processes(folder, 4 * sample.num_bytes) as processes:  # shards twice, shards and a file at the client
        origin = processes.start("origin", (*node, "origin", str(up), folder / "up", sample.file))
        processes.wait_port(up)
        processes.start("relay", (*node, "middle", str(down), folder / "down", f"http://127.0.0.1:{up}"))
        processes.wait_until((folder / "down" / "distribution.txt").exists, "the middle node had a list")
        processes.start("client", (*node, "client", folder / "out", f"http://127.0.0.1:{down}"))
        processes.wait_until((folder / "out" / "ready").exists, "the client was ready")
        with processes.measure() as reading:
            assert origin.stdin is not None
            origin.stdin.write(b"go\n")
            origin.stdin.flush()
            processes.wait_until((folder / "out" / "done").exists, "the client was done", 600.0)
        sample.check(folder / "out" / "file")
    return reading


def run_nginx(sample: Sample, folder: Path, *, hops: int = 1, clients: int = 1) -> Reading:
    """nginx, for two hops with a second, caching one, and curl to a file that is then hashed; the same per client."""
    with Processes(folder, (hops - 1 + clients) * sample.num_bytes) as processes:
        port = _start_nginx(processes, "origin", f"root {sample.file.parent};")
        if hops == 2:
            cache = f"proxy_cache_path {folder}/cache keys_zone=cache:1m use_temp_path=off;"
            port = _start_nginx(processes, "relay", f"proxy_pass http://127.0.0.1:{port}; proxy_cache cache;", cache)
        outs = [folder / f"client{i}" for i in range(clients)]
        with processes.measure() as reading, _add_own(reading):
            fetches = [subprocess.Popen([*_CURL, out, f"http://127.0.0.1:{port}/{sample.file.name}"]) for out in outs]
            for out, fetch in zip(outs, fetches, strict=True):
                if fetch.wait():
                    raise SystemExit(f"curl failed with {fetch.returncode}\n{processes.read_log('origin')}")
                sample.check(out)
    return reading


def run_copy(sample: Sample, folder: Path, *, sha256: bool = False) -> Reading:
    """`cp` on the same disk, then one hash of the copy, BLAKE3 or SHA-256."""
    copy = folder / "copy"
    with Processes(folder, sample.num_bytes) as processes, processes.measure() as reading, _add_own(reading):
        subprocess.run(["cp", sample.file, copy], check=True)
        if not sha256:
            sample.check(copy)
        elif hash_sha256(copy) != sample.sha256:
            raise SystemExit(f"{copy}: wrong bytes")
    return reading


def _start_nginx(processes: Processes, name: str, location: str, extra: str = "") -> int:
    """Start an nginx with two workers on a free port, contained in its own folder; returns the port."""
    port, prefix = find_port(), processes.folder / name
    prefix.mkdir()
    temporary = " ".join(
        f"{kind}_temp_path {prefix}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;" if os.geteuid() == 0 else ""  # otherwise its workers cannot read a private folder
    (prefix / "nginx.conf").write_text(
        f"daemon off; {user} worker_processes 2; pid {prefix}/pid; error_log stderr;\n"
        "events { worker_connections 256; }\n"
        f"http {{ access_log off; sendfile on; tcp_nopush on; {temporary} {extra}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ {location} }} }} }}\n"
    )
    processes.start(name, (_find_nginx() or "nginx", "-e", "stderr", "-p", prefix, "-c", prefix / "nginx.conf"))
    processes.wait_port(port)
    return port


def _find_nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@contextmanager
def _add_own(reading: Reading) -> Iterator[None]:
    """Add the CPU time of this process and of the children it waited for."""
    before = _read_own()
    yield
    reading.cpu_s["client"] = _read_own() - before


def _read_own() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
