"""`shoal coordinator` in one process: what it creates at the first start, keeps later, prints, and logs."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands.admin import find_target
from shoal.commands.query import ask_key
from shoal.coordinator import service as services
from shoal.coordinator.cache import RunCache
from shoal.coordinator.run import describe_service, serve_run
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.errors import ConfigError, DiskError, UnavailableError
from shoal.identity.keys import Key
from shoal.net.client import parse_endpoint
from shoal.node.public_client import PublicClient
from shoal.node.session import Role, open_session
from shoal.protocol.params import RunParams
from shoal.util.metrics import render_metrics

Work = Callable[[CoordinatorService], Awaitable[None]]


def make_config(**changes: Any) -> ServiceConfig:
    return ServiceConfig(**{"run": "demo", "port": 0, **changes})


def open_once(config: ServiceConfig, data: Path, work: Work | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), open_service(config, data) as service:
            if work is not None:
                await work(service)

    asyncio.run(run())


def serve_while(config: ServiceConfig, data: Path, log, work: Callable[[], Awaitable[None]] | None = None) -> str:
    """Serve as the command does until `work` is done; returns what was shown to the user."""
    shown: list[str] = []

    async def run() -> None:
        task = asyncio.create_task(serve_run(config, data, show=shown.append))
        async with asyncio.timeout(60):
            while not shown:
                await asyncio.sleep(0.01)
                assert not task.done(), task.exception()
            assert log.messages[0] == "started"
            if work is not None:
                await work()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert log.messages[-2:] == ["stopping", "stopped"]
    log.messages.clear()
    return shown[0]


def test_the_first_start_creates_keys_and_prints_where_everything_is(tmp_path: Path, log) -> None:
    data = tmp_path / "data"
    shown = serve_while(make_config(), data, log)
    operator, coordinator = (Key.load(data / f"{name}.key").public for name in ("operator", "coordinator"))
    assert f"operator     {operator} (its key is {data}/operator.key; move it to a safe place)" in shown
    assert shown.splitlines()[0] == "run demo: begun, 2 events" and str(data / "descriptor.json") in shown
    assert f"--coordinator {coordinator} --owner OWNER.key" in shown
    assert data.stat().st_mode & 0o077 == 0
    for name in ("operator.key", "coordinator.key", "beacon.secret"):
        assert (data / name).stat().st_mode & 0o077 == 0
    (data / "operator.key").rename(tmp_path / "safe.key")
    shown = serve_while(make_config(), data, log)
    assert "run demo: resumed, " in shown and f"operator     {operator}\n" in shown
    assert not (data / "operator.key").exists(), "a second key would belong to no run"


def test_the_operator_is_fixed_by_the_first_event(tmp_path: Path) -> None:
    first, second = Key.generate().public, Key.generate().public
    open_once(make_config(operator=first), tmp_path)
    assert not (tmp_path / "operator.key").exists()
    open_once(make_config(operator=first), tmp_path)
    with pytest.raises(ConfigError, match=f"operator: fixed by the genesis of this run as {first}"):
        open_once(make_config(operator=second), tmp_path)
    open_once(make_config(), tmp_path)  # the ledger was released


def test_an_operators_key_that_is_lost_before_the_run_began_is_not_made_again(tmp_path: Path) -> None:
    """The key was moved away between two failed starts: a new one must not silently replace it."""
    with pytest.raises(UnavailableError, match="cannot open the ledger's database"):
        open_once(make_config(database="postgresql+psycopg://nobody@127.0.0.1:1/x"), tmp_path)
    (tmp_path / "operator.key").unlink()
    with pytest.raises(ConfigError, match=r"operator\.key: missing; restore it, or set"):
        open_once(make_config(), tmp_path)


def test_a_store_that_cannot_be_used_leaves_no_ledger_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a blob store"):
        open_once(make_config(blob_store="ftp://bucket"), tmp_path)
    assert not (tmp_path / "ledger.db").exists()


def test_a_run_keeps_its_parameters_and_the_log_says_so(tmp_path: Path, log) -> None:
    open_once(make_config(params=RunParams(steps=3, price=2)), tmp_path)
    seen: list[str] = []
    log.on_message = seen.append
    serve_while(make_config(params=RunParams(steps=3, price=5)), tmp_path, log)
    text = "the settings give another price (5), ignored; the run has 2 (`shoal admin params` changes it)"
    assert seen.count(text) == 1


def test_a_public_address_with_tls_that_nothing_provides_is_warned_about(tmp_path: Path, log) -> None:
    seen: list[str] = []
    log.on_message = seen.append
    shown = serve_while(make_config(urls=("https://run.example.org",)), tmp_path, log)
    assert re.search(r"listening    127\.0\.0\.1:\d+ \(http\)\n  address      https://run\.example\.org\n", shown)
    assert any(text.startswith("serving plain HTTP for an https:// address") for text in seen)
    seen.clear()
    config = make_config(urls=("https://run.example.org",), http={"behind_proxy": True}, ca="cert.pem")
    shown = serve_while(config, tmp_path, log)
    assert not any("plain HTTP" in text for text in seen)
    assert re.search(r"to join      shoal node join \S+ --coordinator \S+ --owner OWNER.key --ca cert\.pem\n", shown)


def test_a_store_that_the_disk_made_smaller_is_not_called_ignored(tmp_path: Path, log) -> None:
    seen: list[str] = []
    log.on_message = seen.append
    serve_while(make_config(params=RunParams(store_bytes=1 << 36), blobs={"max_bytes": 1 << 33}), tmp_path, log)
    assert any(text.startswith("store_bytes is 8589934592, not 68719476736 as in the settings: ") for text in seen)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[CoordinatorService]:
    """The services that were started."""
    services_found: list[CoordinatorService] = []
    real = services.CoordinatorService.run

    async def run(service: CoordinatorService) -> None:
        services_found.append(service)
        await real(service)

    monkeypatch.setattr(services.CoordinatorService, "run", run)
    return services_found


async def await_true(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_an_overdue_wait_is_logged_once_and_once_when_it_ends(
    tmp_path: Path, found: list[CoordinatorService], monkeypatch: pytest.MonkeyPatch, log
) -> None:
    monkeypatch.setattr(services, "WATCH_S", 0.01)

    async def check() -> None:
        await await_true(lambda: found)
        with found[0].coordinator.waits.wait("weights", owner="relay b", waiting_for="v3", timeout_s=0.001):
            await await_true(lambda: [text for text in log.messages if text.startswith("alarm: ")])
            await asyncio.sleep(0.1)
            metrics = render_metrics(found[0].context.registry).decode()
            assert "\nshoal_overdue_waits 1.0\n" in metrics and "\nshoal_alarms_total 1.0\n" in metrics
        await await_true(lambda: [text for text in log.messages if text.startswith("alarm over: ")])
        await await_true(lambda: b"\nshoal_overdue_waits 0.0\n" in render_metrics(found[0].context.registry))
        text = "overdue: relay b waits for v3"
        alarms = [text for text in log.messages if text.startswith("alarm")]
        assert alarms == [f"alarm: {text}", f"alarm over: {text}"]

    serve_while(make_config(), tmp_path, log, check)


def test_a_stopped_ledger_ends_the_coordinator_with_a_one_line_error(
    tmp_path: Path, found: list[CoordinatorService], log
) -> None:
    async def check() -> None:
        task = asyncio.create_task(serve_run(make_config(), tmp_path))
        async with asyncio.timeout(60):
            await await_true(lambda: found)
            found[0].coordinator.ledger._writer.close()
            with pytest.raises(DiskError, match=r"the ledger stopped: .*restart the coordinator"):
                await task
        assert log.messages[-1] == "stopped"

    asyncio.run(check())


def test_a_stop_is_recorded_and_signed(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def note(service: CoordinatorService) -> None:
        sizes.append(service.coordinator.ledger.size)

    open_once(make_config(), tmp_path, note)
    open_once(make_config(), tmp_path, note)
    assert sizes == [2, 4]  # genesis, up; down, up
    from shoal.audit.database import prove_event
    from shoal.commands.ledger import verify_database

    assert prove_event(str(tmp_path / "ledger.db"), "4").event.kind == "coordinator.down"
    assert verify_database(str(tmp_path / "ledger.db")).code == 0


def test_a_finished_run_is_reported_as_finished_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    async def note(service: CoordinatorService) -> None:
        shown.append(describe_service(make_config(), tmp_path, service))

    for finished in (False, False, True):
        monkeypatch.setattr(RunCache, "finished", finished)
        open_once(make_config(), tmp_path, note)
    assert [text.split()[2] for text in shown] == ["begun,", "resumed,", "finished,"]
    assert ["to join" in text for text in shown] == [True, True, False]


def test_a_folder_is_answered_from_its_ledger_while_the_coordinator_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, joined = tmp_path / "runs" / "coordinator", []

    async def join(service: CoordinatorService) -> None:
        async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
            joined.append(session.identity)
            owner, node = session.identity.owner, session.identity.key.public
            with closing(PublicClient(parse_endpoint(service.url))) as client:
                assert await find_target(client, owner[:8]) == owner
                assert await find_target(client, node[:12]) == node
                absent = "0" * 8 if not {owner[:8], node[:8]} & {"0" * 8} else "1" * 8
                with pytest.raises(ConfigError, match="its first 8 characters or more suffice"):
                    await find_target(client, "c42")
                with pytest.raises(ConfigError, match="no owner and no node of this run"):
                    await find_target(client, absent)
            assert (await ask_key(service.url, owner[:8])).text.startswith(f"owner {owner}: probation, 0 submissions")

    open_once(make_config(join_work=16), data, join)
    owner, node = joined[0].owner, joined[0].key.public
    names = data.parent / "launch" / "keys.json"
    names.parent.mkdir()
    names.write_text(json.dumps({"worker-1": {"node": node, "owner": owner}}))
    assert main(["explain", str(data.parent), "worker-1"]) == 0
    assert f"  node {node}: work\n" in capsys.readouterr().out
    for folder in (data, data.parent):  # the coordinator's own, and that of a run of `shoal run`
        assert main(["leaderboard", str(folder)]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["work", owner]
        assert main(["owner", "show", str(folder), "--owner", str(tmp_path / "node" / "owner.key")]) == 0
        assert f"owner {owner}: standing probation, 0 accepted" in capsys.readouterr().out
        assert main(["owner", "show", str(folder), "--owner", str(data / "coordinator.key")]) == 1
        assert "has joined this run" in capsys.readouterr().out
        assert main(["explain", str(folder), node[:8]]) == 0
        assert f"  node {node}: work\n" in capsys.readouterr().out
        assert main(["explain", str(folder), "s1"]) == 2
        assert "s1: no such submission in this ledger" in capsys.readouterr().err
        assert main(["ledger", "verify", str(folder)]) == 0
        capsys.readouterr()
        assert main(["status", str(folder)]) == 1
        shown = capsys.readouterr().out
        assert shown.startswith("the coordinator does not answer: ") and "0 of 10 steps trained" in shown
