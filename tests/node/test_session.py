"""A role's session with a real coordinator: joined once, kept alive, pinned to its keys."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands.roles import name_details
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.coordinator.state.members import find_node
from shoal.errors import ConfigError, UnavailableError
from shoal.identity.delegation import Scope, open_delegation
from shoal.identity.keys import Key
from shoal.ledger.head import Fork, ForkError, Head, sign_head
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node import known_run
from shoal.node.identity import LIFE_MS, RENEW_MS, load_identity
from shoal.node.known_run import find_run
from shoal.node.session import FinishedError, Role, RoleState, SessionError, end_session, open_session
from shoal.protocol.descriptor import open_descriptor, sign_descriptor
from shoal.protocol.messages import (
    Action,
    Command,
    CommandAnswer,
    Heartbeat,
    HeartbeatAnswer,
    RejectionNotice,
    SignedCommand,
    SubmissionState,
    sign_message,
)
from shoal.protocol.params import RunParams
from shoal.util.waits import RoleWaits

OPERATOR = Key.generate()


@asynccontextmanager
async def running(data: Path, port: int = 0) -> AsyncIterator[CoordinatorService]:
    params = RunParams(steps=3, heartbeat_s=1)
    config = ServiceConfig(run="demo", operator=OPERATOR.public, port=port, join_work=16, params=params)
    async with asyncio.timeout(60), open_service(config, data) as service:
        yield service


def quick() -> RetryingClient:
    return RetryingClient(RetryPolicy(tries=2, first_s=0.01, longest_s=0.05))


def test_a_role_that_writes_nothing_still_reports_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its heartbeats cannot store their answers: it may wait forever for what the next answer would bring."""

    async def check() -> None:
        async with (
            running(tmp_path / "data") as service,
            open_session(service.url, tmp_path / "node", role=Role.WORKER) as session,
        ):
            send, waits = session.client.send_heartbeat, []
            full = True

            async def send_full(beat: Heartbeat) -> HeartbeatAnswer:
                waits.append(beat.wait)
                answer = await send(beat)
                if full:
                    raise OSError(errno.ENOSPC, "No space left on device", "known.json")
                return answer

            def is_told() -> bool:
                return bool(waits) and waits[-1] is not None and waits[-1].name == "disk"

            async def work() -> None:
                nonlocal full
                while not is_told():
                    session.heartbeat_now()
                    await asyncio.sleep(0.01)
                full = False
                while is_told():
                    session.heartbeat_now()
                    await asyncio.sleep(0.01)

            monkeypatch.setattr(session.client, "send_heartbeat", send_full)
            await session.keep(session.waits.with_timeout("news", work(), waiting_for="nobody", timeout_s=50))
            found = next(wait for wait in waits if wait and wait.name == "disk")
            assert (found.for_whom, found.reason) == (
                "room on its disk",
                "known.json: cannot be written (No space left on device)",
            )

    asyncio.run(check())


def test_a_session_joins_once_and_hears_answers_while_the_role_works(tmp_path: Path, log) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            size = service.coordinator.ledger.size
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
                joined = service.coordinator.ledger.size
                assert joined > size
                node, owner = session.identity.key.public, session.identity.owner
                said = ["joining: computing the proof of work, which takes some seconds"]
                assert log.messages[-2:] == [*said, f"joined run demo as node {node} of owner {owner}"]
                assert session.params.steps == 3
                assert session.answer.newest_version == -1
                heard: list[Any] = []
                session.on_heartbeat = heard.append
                session.read_state = lambda: RoleState(version=5)

                async def work() -> str:
                    session.heartbeat_now()
                    while not heard:
                        await asyncio.sleep(0.01)
                    return "done"

                assert await session.run(work()) == "done"
                assert service.coordinator.cache.seen[session.identity.key.public].version == 5
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER):
                assert service.coordinator.ledger.size == joined  # known already: no second join

    asyncio.run(check())


def test_a_node_that_heard_of_the_end_does_not_wait_for_a_coordinator_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_run, "_RETRY_POLICY", RetryPolicy(tries=1))

    async def check() -> None:
        async with running(tmp_path / "data") as service:
            url = service.url
            async with open_session(url, tmp_path / "node", role=Role.WORKER) as session:
                assert not (tmp_path / "node" / "finished").exists()
                service.coordinator.cache.newest_version = 3  # of 3 steps
                session.answer = await session._heartbeat()
            async with open_session(url, tmp_path / "node", role=Role.WORKER):
                pass  # while the coordinator answers, it is asked
        async with asyncio.timeout(60):
            with pytest.raises(FinishedError, match="run demo is finished, and its coordinator does not answer"):
                async with open_session(url, tmp_path / "node", role=Role.WORKER, asker=quick()):
                    pass

    asyncio.run(check())


def test_a_node_that_did_not_hear_of_the_end_waits_and_says_whom_to_ask(
    tmp_path: Path, log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_run, "_RETRY_POLICY", RetryPolicy(tries=1))

    async def check() -> None:
        async with running(tmp_path / "data") as service:
            url = service.url
            async with open_session(url, tmp_path / "node", role=Role.WORKER):
                pass
        waiting = asyncio.create_task(
            open_session(url, tmp_path / "node", role=Role.WORKER, asker=quick()).__aenter__()
        )
        async with asyncio.timeout(60):
            while not any("ask the operator whether the run is over" in text for text in log.messages):
                await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(check())


def test_a_coordinator_that_is_away_costs_heartbeats_and_not_the_role(tmp_path: Path, log) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            url = service.url
            opened = open_session(url, tmp_path / "node", role=Role.WORKER, asker=quick())
            session = await opened.__aenter__()
        log.messages.clear()

        async def work() -> None:
            session.heartbeat_now()
            while not log.messages:
                await asyncio.sleep(0.01)
            before = session.answer
            async with running(tmp_path / "data", int(url.rpartition(":")[2])):
                while session.answer is before:
                    session.heartbeat_now()
                    await asyncio.sleep(0.01)

        await session.run(work())
        assert log.messages[0].startswith("the coordinator does not answer: ")
        await opened.__aexit__(None, None, None)

    asyncio.run(check())


def test_a_coordinator_that_is_frozen_is_shown_before_the_request_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.session.SILENCE_S", 0.05)

    async def check() -> None:
        thawed = asyncio.Event()
        async with (
            running(tmp_path / "data") as service,
            open_session(service.url, tmp_path / "node", role=Role.WORKER) as session,
        ):
            send = session.client.send_heartbeat

            async def freeze(beat: Any) -> Any:
                await thawed.wait()
                return await send(beat)

            monkeypatch.setattr(session.client, "send_heartbeat", freeze)

            async def work() -> None:
                assert session.problem == ""
                session.heartbeat_now()
                while not session.problem:
                    await asyncio.sleep(0.01)
                assert session.problem == "the coordinator does not answer: no response for 0 s"
                thawed.set()
                while session.problem:
                    await asyncio.sleep(0.01)

            await session.run(work())

    asyncio.run(check())


def test_a_rejection_is_logged_once_with_the_command_that_explains_it(tmp_path: Path, log) -> None:
    async def check() -> None:
        async with (
            running(tmp_path / "data") as service,
            open_session(service.url, tmp_path / "node", role=Role.WORKER) as session,
        ):
            log.messages.clear()
            notice = RejectionNotice(submission="s12", state=SubmissionState.SOFT, because="failed: logprob")
            service.coordinator.cache._rejected[session.identity.key.public] = (notice,)
            beats: list[Any] = []
            session.on_heartbeat = beats.append

            async def work() -> None:
                while len(beats) < 2:
                    session.heartbeat_now()
                    await asyncio.sleep(0.01)

            await session.run(work())
            look = f"shoal explain {service.url} s12"
            assert log.messages == [f"s12 was rejected (rejected_soft, failed: logprob): {look}"]

    asyncio.run(check())


def test_a_first_start_that_fails_leaves_no_folder(tmp_path: Path) -> None:
    async def start(source: str, folder: Path, **options: Any) -> None:
        async with open_session(source, folder, role=Role.WORKER, **options):
            raise ConfigError("later")

    async def check() -> None:
        node = tmp_path / "node"
        with pytest.raises(ConfigError, match="cannot be read"):
            await start(str(tmp_path / "nowhere.json"), node)
        async with running(tmp_path / "data") as service:
            with pytest.raises(ConfigError, match=r"owner\.key"):
                await start(service.url, node, owner=tmp_path / "owner.key")
            assert not node.exists()
            node.mkdir(mode=0o700)
            Key.generate().save(node / "owner.key")
            with pytest.raises(ConfigError, match="expected"):
                await start(service.url, node, coordinator="ab" * 32)
            assert (node / "owner.key").exists(), "what the user put there stays"
            with pytest.raises(ConfigError, match="later"):
                await start(service.url, tmp_path / "other")
            assert (tmp_path / "other" / "node.key").exists(), "it has joined"

    asyncio.run(check())


def test_a_first_start_that_is_stopped_before_the_node_has_a_key_leaves_no_folder(tmp_path: Path) -> None:
    async def check() -> None:
        async def start() -> None:
            async with open_session("http://127.0.0.1:9", tmp_path / "node", role=Role.WORKER):
                raise AssertionError("nobody answers there")

        starting = asyncio.create_task(start())
        while not (tmp_path / "node" / "spans.jsonl").exists():
            await asyncio.sleep(0.01)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        assert starting.cancelled() and not (tmp_path / "node").exists()

    asyncio.run(check())


def test_a_wrong_path_of_the_owners_key_is_reported_before_the_coordinator_answers(tmp_path: Path) -> None:
    async def start() -> None:
        async with asyncio.timeout(20):
            path = tmp_path / "nosuch.key"
            async with open_session("http://127.0.0.1:9", tmp_path / "node", role=Role.WORKER, owner=path):
                pass

    with pytest.raises(ConfigError, match=r"nosuch\.key: cannot be read"):
        asyncio.run(start())
    assert list(tmp_path.iterdir()) == []


def test_a_ban_ends_the_role_with_its_sentence(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
                command = Command(nonce="0" * 32, action=Action.BAN, target=session.identity.owner, reason="test")
                signed = SignedCommand(command=command, signature=sign_message(OPERATOR, "demo", command))
                await session.client.bring("/v1/commands", signed, CommandAnswer)
                session.heartbeat_now()
                with pytest.raises(SessionError, match=r"^this node or its owner is banned") as caught:
                    await session.run(asyncio.Event().wait())  # type: ignore[arg-type]
                details = name_details(service.url, tmp_path / "node", caught.value.code)
                assert details == f"; for details: shoal explain {service.url} {session.identity.key.public[:16]}"
            with pytest.raises(SessionError, match=r"^this node or its owner is banned"):
                async with open_session(service.url, tmp_path / "node", role=Role.WORKER):
                    pass

    asyncio.run(check())


def test_a_node_that_left_joins_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
                await session.leave()
                with pytest.raises(RefusedError, match="this node left the run"):
                    await session.client.ask_lease(version=0)
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
                assert (await session.client.ask_lease(version=0)).code == "no_version"

    asyncio.run(check())


def test_a_delegation_that_was_renewed_is_shown_to_the_coordinator(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as session:
                pass
            (tmp_path / "node" / "delegation.json").unlink()
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER) as renewed:
                assert renewed.identity.digest != session.identity.digest
                size = service.coordinator.ledger.size
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER):
                assert service.coordinator.ledger.size == size
            with service.coordinator.ledger.read() as connection:
                row = find_node(connection, renewed.identity.key.public)
            assert row is not None and row.digest == renewed.identity.digest

    asyncio.run(check())


def test_a_coordinator_that_lost_its_memory_is_joined_again(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            key = tmp_path / "node"
            async with open_session(service.url, key, role=Role.WORKER) as session:
                digest = session.identity.digest
            (key / "node.key").unlink()
            (key / "delegation.json").unlink()
            load_identity(key, "demo", Scope.WORK)
            # The node believes that it has joined, but the coordinator does not know it.
            (key / "joined").write_text(load_identity(key, "demo", Scope.WORK).digest)
            async with open_session(service.url, key, role=Role.WORKER) as session:
                assert session.identity.digest != digest
                assert (await session.client.ask_lease(version=0)).code == "no_version"

    asyncio.run(check())


def test_another_coordinator_in_the_place_of_the_first_is_refused(tmp_path: Path) -> None:
    async def check() -> None:
        node = tmp_path / "node"
        async with running(tmp_path / "one") as service, open_session(service.url, node, role=Role.WORKER):
            pass
        async with running(tmp_path / "two") as service:
            with pytest.raises(
                ConfigError, match=r"belongs to run demo .* different run, demo .* \(another coordinator\)"
            ):
                async with open_session(service.url, tmp_path / "node", role=Role.WORKER):
                    pass

    asyncio.run(check())


def test_a_descriptor_in_a_file_is_believed_and_a_forged_one_is_not(tmp_path: Path) -> None:
    async def check() -> None:
        async with running(tmp_path / "data") as service:
            path = tmp_path / "data" / "descriptor.json"
            async with open_session(str(path), tmp_path / "node", role=Role.WORKER) as session:
                assert session.descriptor == service.descriptor
            forged = tmp_path / "forged.json"
            other = replace(open_descriptor(path.read_bytes()), coordinator=Key.generate().public)
            forged.write_bytes(sign_descriptor(OPERATOR, other))
            with pytest.raises(ConfigError, match="another coordinator"):
                async with open_session(str(forged), tmp_path / "node", role=Role.WORKER):
                    pass
            forged.write_bytes(path.read_bytes()[:-2])
            with pytest.raises(ConfigError, match="not a valid run descriptor"):
                async with open_session(str(forged), tmp_path / "new", role=Role.WORKER):
                    pass
            assert not (tmp_path / "new" / "node.key").exists()

    asyncio.run(check())


def test_a_node_that_starts_before_its_coordinator_waits_for_it_and_says_so(tmp_path: Path, log) -> None:
    async def check() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        session = open_session(f"http://127.0.0.1:{port}", tmp_path / "node", role=Role.WORKER)
        opening = asyncio.create_task(session.__aenter__())
        async with asyncio.timeout(30):
            while not log.messages:
                await asyncio.sleep(0.01)
        assert log.messages[0].startswith("descriptor: no answer from the coordinator: ")
        async with running(tmp_path / "data", port) as service:
            node = (await opening).identity.key.public
            seen = service.coordinator.cache.seen[node]
            assert seen.role == "worker" and seen.wait is None  # it has joined: it no longer waits to
            await session.__aexit__(None, None, None)

    asyncio.run(check())


def test_a_node_that_was_there_before_begins_while_the_coordinator_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.node.known_run._RETRY_POLICY", RetryPolicy(tries=1))

    async def check() -> None:
        async with running(tmp_path / "data") as service:
            async with open_session(service.url, tmp_path / "node", role=Role.WORKER):
                pass
            url, descriptor = service.url, service.descriptor
        assert await find_run(url, tmp_path / "node", RoleWaits("worker")) == (descriptor, url)

    asyncio.run(check())


def test_a_coordinator_with_another_key_than_was_said_is_refused_then_and_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Key.generate().public
    monkeypatch.setattr(known_run, "_RETRY_POLICY", RetryPolicy(tries=1, first_s=0.01, longest_s=0.01))

    async def find(source: str, name: str, key: str) -> None:
        await find_run(source, tmp_path / name, RoleWaits("worker"), coordinator=key)

    async def check() -> None:
        for name in ("new", "known"):
            (tmp_path / name).mkdir()
        async with running(tmp_path / "data") as service:
            url, ours = service.url, service.descriptor.coordinator
            with pytest.raises(ConfigError, match=f"has the key {ours}, expected {other}"):
                await find(url, "new", other)
            assert not (tmp_path / "new" / "descriptor.json").exists()  # nothing of it is trusted later
            await find(url, "known", ours)
            with pytest.raises(ConfigError, match=f"expected {other}"):
                await find(str(tmp_path / "data" / "descriptor.json"), "new", other)
        with pytest.raises(ConfigError, match=f"expected {other}"):
            await find(url, "known", other)  # it is unreachable, so the pinned descriptor is checked
        await find(url, "known", ours)

    asyncio.run(check())


def test_an_identity_is_made_once_and_its_delegation_renewed_in_time(tmp_path: Path) -> None:
    first = load_identity(tmp_path, "demo", Scope.WORK, clock=lambda: 10**12)
    again = load_identity(tmp_path, "demo", Scope.WORK, clock=lambda: 10**12 + LIFE_MS - RENEW_MS - 1)
    assert (again.key.public, again.delegation) == (first.key.public, first.delegation)
    later = load_identity(tmp_path, "demo", Scope.WORK, clock=lambda: 10**12 + LIFE_MS - RENEW_MS)
    assert later.delegation != first.delegation
    assert later.owner == first.owner == Key.load(tmp_path / "owner.key").public
    assert open_delegation(later.delegation).grant.not_after_ms == 10**12 + 2 * LIFE_MS - RENEW_MS


def test_another_owner_or_scope_or_run_gets_a_delegation_of_its_own(tmp_path: Path) -> None:
    owner = Key.generate()
    owner.save(tmp_path / "another.key")
    folder = tmp_path / "node"
    folder.mkdir()
    first = load_identity(folder, "demo", Scope.WORK)
    given = load_identity(folder, "demo", Scope.WORK, owner=tmp_path / "another.key")
    assert (given.owner, given.key.public) == (owner.public, first.key.public)
    judge = load_identity(folder, "demo", Scope.VALIDATE)
    assert open_delegation(judge.delegation).grant.scopes == {Scope.VALIDATE}
    assert open_delegation(load_identity(folder, "other", Scope.VALIDATE).delegation).grant.run == "other"


def test_a_delegation_that_was_signed_elsewhere_is_used_as_it_is(tmp_path: Path) -> None:
    first = load_identity(tmp_path, "demo", Scope.WORK, clock=lambda: 10**12)
    (tmp_path / "owner.key").unlink()
    again = load_identity(tmp_path, "demo", Scope.WORK, clock=lambda: 10**12 + LIFE_MS)
    assert again.delegation == first.delegation
    assert not (tmp_path / "owner.key").exists()


def test_the_longest_wait_of_the_role_is_in_its_heartbeat(tmp_path: Path) -> None:
    async def check() -> None:
        async with (
            running(tmp_path / "data") as service,
            open_session(service.url, tmp_path / "node", role=Role.TRAINER) as session,
        ):
            sent: list[Any] = []
            send = session.client.send_heartbeat

            async def keep(beat: Any) -> Any:
                sent.append(beat)
                return await send(beat)

            session.client.send_heartbeat = keep  # type: ignore[method-assign]

            async def work() -> None:
                session.heartbeat_now()
                while not sent:
                    await asyncio.sleep(0.01)

            waiting = session.waits.with_timeout("batch", work(), waiting_for="the groups of step 1", timeout_s=30)
            await session.run(waiting)
            assert (sent[0].role, sent[0].wait.name) == ("trainer", "batch")
            assert sent[0].wait.for_whom == "the groups of step 1"
            status = await asyncio.to_thread(service.coordinator.read_status)
            assert any("the groups of step 1" in wait.text for wait in status.waits)

    asyncio.run(check())


@pytest.mark.parametrize(("later", "kind"), [(1, UnavailableError), (-1, SessionError)])
def test_a_proof_that_failed_ends_a_role_until_its_next_start_and_a_fork_for_good(later: int, kind: type) -> None:
    """A larger ledger of a later time may continue the one held; one of an earlier time cannot."""
    key = Key.generate()
    held, shown = (Head("demo", size, "0" * 64, "0" * 64, time_ms) for size, time_ms in ((3, 9), (5, 9 + later)))
    fork = Fork(sign_head(key, held), sign_head(key, shown), ())
    assert type(end_session(ForkError(fork))) is kind


def test_a_delegation_is_used_as_its_command_writes_it(tmp_path):
    node, owner = Key.generate(), Key.generate()
    node.save(tmp_path / "node.key")
    owner.save(tmp_path / "elsewhere.key")
    target = str(tmp_path / "delegation.json")
    order = ["owner", "delegate", node.public, "--owner", str(tmp_path / "elsewhere.key"), "--run", "demo"]
    assert main([*order, "--out", target]) == 0
    identity = load_identity(tmp_path, "demo", Scope.WORK)
    assert identity.owner == owner.public
    assert open_delegation(identity.delegation).grant.node == node.public
    assert not (tmp_path / "owner.key").exists()
