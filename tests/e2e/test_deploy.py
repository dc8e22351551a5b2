"""A swarm with each role on its own machine, with the commands shown in docs/deploy.md and printed by `shoal prepare`.

The machines are network namespaces behind slow links, each with its own files; one worker cannot be connected to.
"""

import re
import shutil
import signal
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.fixtures.paths import TINY, WIDE

from shoal.coordinator.state.run import VERSION
from shoal.identity.keys import Key
from shoal.launch.report import collect_evidence
from shoal.ledger.db import open_database, read_snapshot

sys.path.insert(0, str(Path(__file__).parent))

from netns import DELAY_MS, Net, explain_lack
from warm import Warm

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
PATIENCE_S = 120.0
STEPS = 3
QUICK = f"name=deploy {WIDE} steps={STEPS} async_level=2 swarm.calibration=64 swarm.join_work=4096 swarm.heartbeat_s=1"
QUICK += " swarm.groups_per_lease=1"  # both workers get some of the few groups
URL = "http://run.example.org:8700"
HOSTS = {"run": "run.example.org", "trainer": "trainer.example.org", "relay": "relay.example.org"}
HOSTS |= dict.fromkeys(["validator", "worker-1", "worker-2", "runner"], "")
WORKERS = ("worker-1", "worker-2")
CLOSED = "worker-2"
SERVING = {"run": "00000000:21FC", "trainer": "00000000:2198", "relay": "00000000:2198"}
"""listening hosts, and their addresses in the kernel's notation: ports 8700 and 8600"""
KEYS = {
    "runner": {"operator.key"},
    "run": {"coordinator/data/coordinator.key"},
    "trainer": {"launch/publisher.key", "trainer/node.key", "trainer/owner.key"},
    "relay": set(),
    "validator": {"owner.key", "validator/node.key"},
    "worker-1": {"worker/node.key", "worker/owner.key"},
    "worker-2": {"worker/node.key", "worker/owner.key"},
}
WaitUntil = Callable[[Callable[[], bool], Callable[[], str]], None]

_LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 9000))
print("up", flush=True)
while True:
    server.accept()
"""
_CALL = """
import socket, sys, time
took = []
for _ in range(5):
    begun = time.monotonic()
    socket.create_connection((sys.argv[1], 9000), float(sys.argv[2])).close()
    took.append(time.monotonic() - begun)
print(min(took))
"""
"""the fastest of several connections: delays by a busy machine do not count"""


@pytest.fixture
def net(tmp_path: Path, warm: Warm) -> Iterator[Net]:
    if reason := explain_lack():
        pytest.skip(reason)
    with Net(tmp_path, warm, HOSTS, closed=frozenset({CLOSED})) as net:
        yield net
        for log in sorted(tmp_path.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}")  # shown if the test failed


def test_each_role_has_a_machine_of_its_own(net: Net, wait_until: WaitUntil) -> None:
    hosts = net.hosts
    check_links(net)
    stations = prepare(net)
    bundle = hosts["trainer"].folder / "runs" / "deploy-seed0" / "launch" / "coordinator"
    shutil.copytree(bundle, hosts["run"].folder / "coordinator")

    coordinator = hosts["run"].start(stations["coordinator (run.example.org)"][0], folder="coordinator")
    log = hosts["run"].find_log(stations["coordinator (run.example.org)"][0])
    await_text(wait_until, log, "shoal node join")
    found = re.search(rf"(shoal worker {URL}) --coordinator ([0-9a-f]{{64}})\n", log.read_text())
    assert found is not None and stations["each worker"] == [found[1]]
    hosts["relay"].start(stations["relay (relay.example.org)"][0])
    # The evaluator uses no network, and has its own tests.
    origin, trainer, _ = stations["trainer (trainer.example.org)"]
    hosts["trainer"].start(origin)
    nodes = [hosts["trainer"].start(trainer)]
    nodes += [hosts[name].start(found[0]) for name in WORKERS]
    # A worker with eight files to be judged gets no further leases, and the run needs twelve: both must submit.
    wait_until(lambda: count_owners(net) == 2, lambda: "two workers that submitted")
    nodes.append(hosts["validator"].start(f"{stations['each validator'][0]} --coordinator {found[2]}"))
    await_text(wait_until, hosts["validator"].folder / "validator" / "joined", "")
    check_sockets(net)

    for process in nodes:  # they end when the run is finished
        assert process.wait(PATIENCE_S) == 0
    assert "holds" in hosts["runner"].type(f"shoal ledger verify {URL} --coordinator {found[2]}")
    coordinator.send_signal(signal.SIGTERM)
    assert coordinator.wait(PATIENCE_S) == 0
    check_ledger(net)
    check_keys(net)


def prepare(net: Net) -> dict[str, list[str]]:
    """Prepare the run on the trainer's machine; returns the printed commands by machine."""
    operator = net.hosts["runner"].type("shoal keygen operator.key").strip()
    validator = net.hosts["validator"].type("shoal keygen owner.key").strip()
    page = PAGE.read_text()
    shown = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    # One machine validates here: a second opinion would wait for a validator that is named and never starts.
    settings = shown[1].replace("OPERATOR", operator).replace('"VALIDATOR_1", "VALIDATOR_2"', f'"{validator}"')
    (net.hosts["trainer"].folder / "deploy.toml").write_text(TINY.read_text() + settings)
    printed = net.hosts["trainer"].type(f"shoal prepare deploy.toml {QUICK}")
    commands = printed[printed.index("# coordinator (") :]
    general = re.sub("[0-9a-f]{64}", "PUBLISHER", commands).replace(str(net.root / "here"), "/srv/shoal")
    assert general in page, f"the page shows other commands than\n{general}"
    stations: dict[str, list[str]] = {}
    for line in commands.replace("\\\n", "").splitlines():
        if line.startswith("# "):
            stations[line[2:].partition(":")[0]] = lines = []
        else:
            lines.append(line)
    return stations


def await_text(wait_until: WaitUntil, path: Path, text: str) -> None:
    """Wait until a file exists and contains the text."""
    wait_until(lambda: path.exists() and text in path.read_text(), lambda: f"{text!r} in {path}")


def check_links(net: Net) -> None:
    """Connections between machines take time, and the closed one cannot be connected to, although it listens."""
    hosts = net.hosts
    listening = [hosts[name].run(sys.executable, "-c", _LISTEN) for name in ("run", CLOSED)]
    for process in listening:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
    answered, _ = hosts[CLOSED].run(sys.executable, "-c", _CALL, hosts["run"].address, "10").communicate()
    assert float(answered) >= 2 * DELAY_MS / 1000
    refused, _ = hosts["runner"].run(sys.executable, "-c", _CALL, hosts[CLOSED].address, "0.5").communicate()
    assert b"TimeoutError" in refused
    for process in listening:
        process.kill()


def check_sockets(net: Net) -> None:
    """Only servers listen, each at one address."""
    found = {name: host.list_listening() for name, host in net.hosts.items()}
    assert found == {name: [SERVING[name]] if name in SERVING else [] for name in HOSTS}


def count_owners(net: Net) -> int:
    """Number of owners that have submitted something."""
    with closing(sqlite3.connect(f"file:{find_ledger(net)}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(DISTINCT owner) FROM submission").fetchone()[0])


def find_ledger(net: Net) -> Path:
    return net.hosts["run"].folder / "coordinator" / "data" / "ledger.db"


def check_ledger(net: Net) -> None:
    """It holds, both workers were paid, and the weights in it are those that trainer and workers have."""
    evidence = collect_evidence(find_ledger(net))
    assert evidence.holds, evidence.summary
    earned = {line.owner: line.earned for line in evidence.leaders}
    owners = {name: Key.load(net.hosts[name].folder / "worker" / "owner.key").public for name in WORKERS}
    assert all(earned[owner] > 0 for owner in owners.values()), (owners, earned)
    assert len(set(owners.values())) == 2

    from shoal.launch.prepare import find_root

    engine = open_database(str(find_ledger(net)))
    with read_snapshot(engine) as connection:
        roots = {row.version: row.root for row in connection.execute(VERSION.select())}
    engine.dispose()
    last = net.hosts["trainer"].folder / "runs" / "deploy-seed0" / "versions" / f"v{STEPS:06d}"
    assert max(roots) == STEPS and find_root(last) == roots[STEPS]
    for name in owners:
        pulled = list((net.hosts[name].folder / "worker" / "weights").glob("v*"))
        assert pulled and all(find_root(folder) == roots[int(folder.name[1:])] for folder in pulled)


def check_keys(net: Net) -> None:
    """Each secret is on one machine only."""
    for name, expected in KEYS.items():
        root = net.hosts[name].folder
        found = {str(path.relative_to(root)) for path in root.rglob("*.key")}
        assert {path.removeprefix("runs/deploy-seed0/") for path in found} == expected, name
    secrets = list(net.root.glob("hosts/**/beacon.secret"))
    assert secrets == [net.hosts["run"].folder / "coordinator" / "data" / "beacon.secret"]
