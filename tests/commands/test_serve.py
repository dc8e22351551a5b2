"""`shoal coordinator` in one process: what it makes at the first start, keeps later, says, and logs."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.commands.swarm_serve import serve_run
from shoal.errors import ConfigError, DiskError
from shoal.keys import Key
from shoal.swarm import service as services
from shoal.swarm.params import RunParams
from shoal.swarm.service import Service, ServiceConfig, open_service

Work = Callable[[Service], Awaitable[None]]


def make_config(**changes: Any) -> ServiceConfig:
    return ServiceConfig(**{"run": "demo", "port": 0, **changes})


def open_once(config: ServiceConfig, data: Path, work: Work | None = None) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), open_service(config, data) as service:
            if work is not None:
                await work(service)

    asyncio.run(run())


def serve_while(config: ServiceConfig, data: Path, work: Callable[[list[dict[str, Any]]], Awaitable[None]]) -> str:
    """Serve as the command does until `work` is done; what was shown to the user."""
    log: list[dict[str, Any]] = []
    shown: list[str] = []

    async def run() -> None:
        task = asyncio.create_task(
            serve_run(config, data, log=lambda line: log.append(json.loads(line)), show=shown.append)
        )
        async with asyncio.timeout(60):
            while not shown:
                await asyncio.sleep(0.01)
                assert not task.done(), task.exception()
            await work(log)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert [line["event"] for line in log[-2:]] == ["stopping", "stopped"]
    return shown[0]


async def nothing(log: list[dict[str, Any]]) -> None:
    assert log[0]["event"] == "started" and log[0]["time"].endswith("+00:00")


def test_the_first_start_makes_keys_and_says_where_everything_is(tmp_path: Path) -> None:
    data = tmp_path / "data"
    shown = serve_while(make_config(), data, nothing)
    operator, coordinator = (Key.load(data / f"{name}.key").public for name in ("operator", "coordinator"))
    assert f"operator     {operator} (its key is {data}/operator.key; move it to where it is safe)" in shown
    assert shown.splitlines()[0] == "run demo: begun, 2 events" and str(data / "descriptor.json") in shown
    assert f"--coordinator {coordinator} --owner OWNER.key" in shown
    assert data.stat().st_mode & 0o077 == 0
    for name in ("operator.key", "coordinator.key", "beacon.secret"):
        assert (data / name).stat().st_mode & 0o077 == 0
    (data / "operator.key").rename(tmp_path / "safe.key")
    shown = serve_while(make_config(), data, nothing)
    assert "run demo: resumed, " in shown and f"operator     {operator}\n" in shown
    assert not (data / "operator.key").exists(), "a second one would be nobody's"


def test_the_operator_is_fixed_by_the_first_event(tmp_path: Path) -> None:
    first, second = Key.generate().public, Key.generate().public
    open_once(make_config(operator=first), tmp_path)
    assert not (tmp_path / "operator.key").exists()
    open_once(make_config(operator=first), tmp_path)
    with pytest.raises(ConfigError, match=f"operator: this run has {first}, for good"):
        open_once(make_config(operator=second), tmp_path)
    open_once(make_config(), tmp_path)  # the ledger was let go of


def test_an_operators_key_that_is_lost_before_the_run_began_is_not_made_again(tmp_path: Path) -> None:
    """Between two starts that failed somebody moved the key away: another one must not take its place unnoticed."""
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_once(make_config(database="postgresql+psycopg://nobody@127.0.0.1:1/x"), tmp_path)
    (tmp_path / "operator.key").unlink()
    with pytest.raises(ConfigError, match=r"operator\.key: is missing; put it back, or name"):
        open_once(make_config(), tmp_path)


def test_a_run_keeps_its_parameters_and_the_log_says_so(tmp_path: Path) -> None:
    open_once(make_config(params=RunParams(steps=3, price=2)), tmp_path)

    async def check(log: list[dict[str, Any]]) -> None:
        (line,) = [line for line in log if line["event"] == "params kept"]
        assert line["names"] == ["price"]

    serve_while(make_config(params=RunParams(steps=3, price=5)), tmp_path, check)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Service]:
    """The services that were started."""
    services_found: list[Service] = []
    real = services.Service.run

    async def run(service: Service, tell: Any = None) -> None:
        services_found.append(service)
        await real(service, tell)

    monkeypatch.setattr(services.Service, "run", run)
    return services_found


async def await_true(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def test_what_waits_too_long_is_told_once_and_once_when_it_is_over(
    tmp_path: Path, found: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "WATCH_S", 0.01)

    async def check(log: list[dict[str, Any]]) -> None:
        await await_true(lambda: found)
        with found[0].coordinator.waits.wait("weights", owner="relay b", for_whom="v3", timeout_s=0.001):
            await await_true(lambda: [line for line in log if line["event"] == "alarm"])
            await asyncio.sleep(0.1)
        await await_true(lambda: [line for line in log if line["event"] == "alarm over"])
        told = [(line["event"], line["text"]) for line in log if line["event"].startswith("alarm")]
        text = "overdue: relay b waits for v3"
        assert told == [("alarm", text), ("alarm over", text)]

    serve_while(make_config(), tmp_path, check)


def test_a_ledger_that_stops_ends_the_coordinator_with_a_sentence(tmp_path: Path, found: list[Service]) -> None:
    async def check() -> None:
        log: list[str] = []
        task = asyncio.create_task(serve_run(make_config(), tmp_path, log=log.append))
        async with asyncio.timeout(60):
            await await_true(lambda: found)
            found[0].coordinator.ledger._writer.close()
            with pytest.raises(DiskError, match=r"the ledger stopped: .*start the coordinator again"):
                await task
        assert json.loads(log[-1])["event"] == "stopped"

    asyncio.run(check())


def test_a_stop_is_recorded_and_signed(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def note(service: Service) -> None:
        sizes.append(service.coordinator.ledger.size)

    open_once(make_config(), tmp_path, note)
    open_once(make_config(), tmp_path, note)
    assert sizes == [2, 4]  # genesis, up; down, up
    from shoal.commands.ledger import prove_event, verify_database

    assert prove_event(str(tmp_path / "ledger.db"), "4").event.kind == "coordinator.down"
    assert verify_database(str(tmp_path / "ledger.db")).code == 0
