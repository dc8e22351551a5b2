"""`shoal ledger` gives the same results for a database and for an address, where only signatures are trusted."""

import asyncio
import json
import shutil
from argparse import Namespace
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands import ledger as ledger_command
from shoal.commands.common import CommandResult
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.errors import ConfigError, UnreachableError
from shoal.identity.keys import Key
from shoal.ledger.event import Event, EventKind, Posting, seal_event
from shoal.ledger.head import SignedHead
from shoal.net.retry import RefusedError
from shoal.node.public_client import PublicClient
from shoal.protocol.params import RunParams

HEX = "ab" * 32


@asynccontextmanager
async def serve(data: Path) -> AsyncIterator[CoordinatorService]:
    config = ServiceConfig(run="demo", port=0, params=RunParams(steps=1))
    async with asyncio.timeout(60), open_service(config, data) as service:
        await service.coordinator.ledger.sign_head()
        yield service


async def append(service: CoordinatorService, count: int) -> SignedHead:
    """Append some harmless events, and sign a head over them."""
    ledger = service.coordinator.ledger
    for _ in range(count):
        ledger.submit(lambda draft: draft.append(EventKind.COORDINATOR_UP, body={"shift_ms": 0}))
    return await ledger.sign_head()


async def audit(service: CoordinatorService, copy: Path | None = None, held: SignedHead | None = None) -> CommandResult:
    return await verify_remote(service.url, copy, held)


async def verify_remote(
    url: str, copy: Path | None = None, held: SignedHead | None = None, expected: str | None = None
) -> CommandResult:
    return await ledger_command._verify_remote(Namespace(where=url, ca=None, copy=copy), held, expected, None)


async def show_remote(url: str, event: str | None, first: int | None, count: int) -> CommandResult:
    return await ledger_command._show_remote(Namespace(where=url, ca=None, event=event, first=first, count=count))


async def prove_remote(url: str, event: str, out: Path | None) -> CommandResult:
    return await ledger_command._prove_remote(Namespace(where=url, ca=None, event=event, out=out))


def test_a_stranger_copies_a_ledger_page_by_page_and_resumes_from_its_copy(tmp_path: Path, capsys) -> None:
    copy = tmp_path / "copy.db"

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            await append(service, 600)
            first = await audit(service, copy)
            assert first.code == 0 and first.data["events"] == 602 and first.data["heads"] == 1
            head = await append(service, 3)
            second = await audit(service, copy, held=head)
            assert second.data["events"] == 605 and second.data["heads"] == 2 and second.data["holds"]
            assert (await audit(service)).data["root"] == second.data["root"] == head.head.root
            assert (await show_remote(service.url, None, 510, 40)).data["events"][-1]["seq"] == 549
            last = (await show_remote(service.url, None, None, 2)).data
            assert [event["seq"] for event in last["events"]] == [603, 604]
            assert (await show_remote(service.url, None, 700, 2)).data == {"events": [], "size": 605}
            other = await verify_remote(service.url, None, None, HEX)
            assert other.code == 1 and f"expected {HEX}" in other.text

    asyncio.run(check())
    assert main(["ledger", "verify", str(copy)]) == 0
    assert "605 events" in capsys.readouterr().out


def test_a_wrong_coordinator_key_is_refused_before_the_download(tmp_path: Path) -> None:
    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            found = await verify_remote(service.url, tmp_path / "copy.db", expected=HEX)
            names = f"names {service.coordinator.public}, expected {HEX}"
            assert found.code == 1 and found.text.endswith(f": wrong coordinator key: the run's descriptor {names}")

    asyncio.run(check())
    assert not (tmp_path / "copy.db").exists()


def test_a_kept_copy_reveals_a_fork(tmp_path: Path) -> None:
    old, copy = tmp_path / "old", tmp_path / "copy.db"

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            await append(service, 1)
        shutil.copytree(tmp_path / "data", old)
        async with serve(tmp_path / "data") as service:
            await append(service, 3)
            assert (await audit(service, copy)).code == 0
        async with serve(old) as service:  # the same coordinator without its last events
            outcome = await audit(service, copy)
            assert outcome.code == 1 and "the coordinator's newest head only" in outcome.text
            await append(service, 9)
            outcome = await audit(service, copy)
            assert outcome.code == 1 and "of the copy: a fork" in outcome.text
            assert (await audit(service)).code == 0, "without an earlier copy it cannot be noticed"

    asyncio.run(check())


def test_a_copy_of_another_ledger_is_a_mistake_and_no_fork(tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"

    async def check() -> None:
        async with serve(tmp_path / "one") as service:
            assert (await audit(service, copy)).code == 0
        async with serve(tmp_path / "two") as service:
            with pytest.raises(ConfigError, match=r"is the ledger of coordinator .*; name another file"):
                await audit(service, copy)

    asyncio.run(check())


def forge_body(event: Event) -> Event:
    return replace(event, body=b'{"shift_ms":7}')


def forge_postings(event: Event) -> Event:
    return seal_event(replace(event, kind="credit.post", postings=(Posting("burn", 5), Posting("mint", -4))))


def forge_receipt(event: Event) -> Event:
    return seal_event(replace(event, kind="sub.receipt", subject="s9", body=b'{"first":0,"lease":"l1","step":1}'))


@pytest.mark.parametrize(
    ("forge", "text"),
    [
        (forge_body, "stored hash does not match the content"),
        (forge_postings, "contradicts those before it"),
        (forge_receipt, "contradicts those before it"),
    ],
)
def test_a_server_that_shows_forged_events_is_caught(
    forge: Callable[[Event], Event], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PublicClient.read_page

    async def read_page(client: PublicClient, first: int) -> list[Event]:
        return [forge(event) if event.seq == 3 else event for event in await real(client, first)]

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            await append(service, 3)
            assert (await audit(service)).code == 0
            monkeypatch.setattr(PublicClient, "read_page", read_page)
            outcome = await audit(service)
            assert outcome.code == 1 and text in outcome.text

    asyncio.run(check())


@pytest.mark.parametrize(
    "choose", [lambda page: (), lambda page: page[1:], lambda page: page[::-1], lambda page: ("x",)]
)
def test_a_page_with_other_events_than_requested_is_rejected(
    choose: Callable[[tuple[str, ...]], tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PublicClient._get

    async def get(client: PublicClient, target: str, *rest: Any) -> Any:
        answer = await real(client, target, *rest)
        return answer.model_copy(update={"events": choose(answer.events)}) if "/ledger/" in target else answer

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            monkeypatch.setattr(PublicClient, "_get", get)
            with pytest.raises(UnreachableError, match="the server sent"):
                await audit(service)

    asyncio.run(check())


@pytest.mark.parametrize("body", [b"nonsense", b"[" * 60_000])
def test_invalid_remote_events_are_not_shown(body: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PublicClient.read_page

    async def read_page(client: PublicClient, first: int) -> list[Event]:
        return [replace(event, body=body) for event in await real(client, first)]

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            monkeypatch.setattr(PublicClient, "read_page", read_page)
            with pytest.raises(UnreachableError, match="sent malformed events: event 0: event body is not"):
                await show_remote(service.url, None, 0, 5)

    asyncio.run(check())


def test_a_proof_from_afar_is_checked_before_it_is_believed(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, descriptor = tmp_path / "proof.json", str(tmp_path / "data" / "descriptor.json")
    real = PublicClient.read_event

    async def read_next(client: PublicClient, seq: int) -> bytes:
        return await real(client, seq + 1)

    async def read_forged(client: PublicClient, seq: int) -> bytes:
        return (await real(client, seq)).replace(b"coordinator.up", b"coordinator.do")

    async def check() -> None:
        async with serve(tmp_path / "data") as service:
            await append(service, 300)
            assert "proof written to" in (await prove_remote(service.url, "7", path)).text
            assert json.loads((await prove_remote(service.url, "7", None)).text)["event"]["seq"] == 7
            with pytest.raises(RefusedError, match="no signed head covers"):
                await prove_remote(service.url, "999", None)
            for event in ("x", "-1", "", "1" * 16):
                with pytest.raises(ConfigError, match="not an event number"):
                    await prove_remote(service.url, event, None)
            for forged, text in ((read_next, "a different event"), (read_forged, "invalid proof")):
                monkeypatch.setattr(PublicClient, "read_event", forged)
                with pytest.raises(UnreachableError, match=text):
                    await prove_remote(service.url, "7", None)

    asyncio.run(check())
    assert main(["ledger", "check", str(path), "--descriptor", descriptor]) == 0
    out = capsys.readouterr().out
    assert out.startswith("valid: event 7 is in the ledger of run demo, signed by ") and "\nevent      7" in out
    assert main(["ledger", "prove", str(tmp_path / "data"), "7"]) == 0
    (tmp_path / "second").write_text(capsys.readouterr().out)
    coordinator = Key.load(tmp_path / "data" / "coordinator.key").public
    assert main(["ledger", "check", str(tmp_path / "second"), "--run", "demo", "--coordinator", coordinator]) == 0
    assert main(["ledger", "check", str(tmp_path / "second"), "--run", "other", "--coordinator", coordinator]) == 1
    assert main(["ledger", "check", str(tmp_path / "second"), "--run", "demo", "--coordinator", HEX]) == 1
    assert "invalid proof" in capsys.readouterr().out
    assert main(["ledger", "check", str(tmp_path / "second"), "--coordinator", coordinator, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["valid"], found["run"], found["event"]["seq"]) == (True, "demo", 7)


def test_a_long_list_in_an_event_is_shown_by_its_size() -> None:
    rollouts = [{"hash": "ab", "tokens": number} for number in range(256)]
    shown = ledger_command._shorten({"lease": "l7", "rollouts": rollouts, "signals": [1, 0], "note": "x" * 2000})
    assert shown == {
        "lease": "l7",
        "rollouts": "256 entries, 32640 tokens; --json shows them",
        "signals": [1, 0],
        "note": "2000 characters",
    }


def test_verify_of_a_folder_compares_every_table_and_names_a_changed_row(tmp_path: Path, capsys) -> None:
    async def begin() -> None:
        async with serve(tmp_path / "data"):
            pass

    asyncio.run(begin())
    assert main(["ledger", "verify", str(tmp_path / "data"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] and report["tables"] > 20
    from sqlalchemy import text as sql

    from shoal.ledger.db import open_database

    engine = open_database(str(tmp_path / "data" / "ledger.db"))
    with engine.begin() as connection:
        connection.execute(sql("UPDATE run_state SET stopped = 1"))
    engine.dispose()
    assert main(["ledger", "verify", str(tmp_path / "data")]) == 1
    assert "projection: run_state 'demo': stopped is 1, not 0" in capsys.readouterr().out
    assert main(["ledger", "verify", str(tmp_path / "data"), "--coordinator", HEX]) == 1
    assert main(["ledger", "show", str(tmp_path / "data"), "0", "--json"]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["verify", "none.db"], "none.db: no such file"),
        (["verify", "."], "ledger.db: no such file"),
        (["verify", "none.db", "--copy", "x"], "--copy: only for a ledger at an address"),
        (["verify", "none.db", "--head", "x"], "x: cannot be read"),
        (["verify", "none.db", "--coordinator", "me"], "'me': not a public key"),
        (["verify", "ftp://x"], "unsupported database"),
        (["show", "none.db", "--count", "0"], "--count: must be from 1"),
        (["show", "none.db", "--from", "-1"], "--from: must be 0 or more"),
        (["prove", "none.db", "0"], "none.db: no such file"),
        (["check", "none.json"], "give --coordinator KEY or --descriptor FILE"),
        (["check", "none.json", "--run", "demo", "--coordinator", HEX], "none.json: cannot be read"),
        (["check", "none.json", "--run", "A b", "--coordinator", HEX], "invalid run name"),
    ],
)
def test_a_mistake_is_a_one_line_error(
    words: list[str], text: str, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ledger", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("shoal: ") and shown.err.count("\n") == 1
    assert text in shown.err
    assert list(tmp_path.iterdir()) == []
