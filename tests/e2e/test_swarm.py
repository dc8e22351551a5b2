"""A coordinator as a process started by its operator, and users that run commands: killed, rolled back, banned.

Whatever happens, answered requests stand, the ledger verifies, and a repeated request gets the first answer.
"""

import asyncio
import hashlib
import json
import re
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

import pytest

from shoal.cli import main
from shoal.commands.node import open_joined
from shoal.identity.keys import Key
from shoal.ledger.head import ForkError
from shoal.net.retry import RefusedError
from shoal.node.client import NodeClient
from shoal.node.session import Role, open_session
from shoal.protocol.messages import (
    Finding,
    GroupFinding,
    Heartbeat,
    Job,
    Lease,
    Manifest,
    RolloutEntry,
    SubmissionState,
    Verdict,
    VerdictStatement,
    VersionStatement,
)
from shoal.redteam.canary import CanaryWork

sys.path.insert(0, str(Path(__file__).parent))

from warm import Running, Warm

PATIENCE_S = 60.0
DATA = b"rollouts" * 8_000
T = TypeVar("T")


class LiveRun:
    """A coordinator's process, keys of owners, and the commands of users."""

    def __init__(self, folder: Path, warm: Warm, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.warm, self.capsys = folder, warm, capsys
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        self.process: Running | None = None
        self.keys = {name: self._make_key(name) for name in ("ann", "bob", "operator")}
        self.data = folder / "coordinator"
        self.config = folder / "run.toml"
        judge = json.dumps([self.keys["bob"]])
        self.config.write_text(
            f'run = "demo"\noperator = "{self.keys["operator"]}"\njoin_work = 64\n'
            "[params]\nsteps = 1\nasync_level = 0\ngroups_per_batch = 1\ngroup_size = 2\nmax_tokens = 200\n"
            f"stake_submissions = 0\nvalidators = {judge}\ntrainers = {judge}\n"
        )

    def start(self) -> None:
        """Start or restart the coordinator."""
        flags = ["--data", self.data, "--listen", self.url.removeprefix("http://")]
        printed = self.folder / "printed"
        printed.write_bytes(b"")
        self.process = self.warm.start("coordinator", self.config, *flags, out=printed, err=self.folder / "log")
        listening = f"listening    {self.url.removeprefix('http://')}"
        await_true(lambda: listening in printed.read_text() or self.process.poll() is not None, "coordinator")
        assert listening in printed.read_text(), (self.folder / "log").read_text()

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        self.kill()
        self.start()

    def type(self, *words: str | Path, code: int = 0) -> str:
        """Run a command; returns its output, which for a user mistake is one line on stderr."""
        self.capsys.readouterr()
        found = main([str(word) for word in words])
        shown = self.capsys.readouterr()
        assert found == code, shown
        if code:
            assert shown.err.count("shoal: ") == 1 and "Traceback" not in shown.err, shown
            return shown.err
        return shown.out

    def join(self, name: str, *flags: str | Path, code: int = 0) -> str:
        owner = ["--owner", self.folder / f"{name}.key"] if "--delegation" not in flags else []
        return self.type("node", "join", self.url, "--folder", self.folder / name, *owner, *flags, code=code)

    def act(self, name: str, deed: Callable[[NodeClient], Coroutine[None, None, T]]) -> T:
        """Do something as a node that has joined."""

        async def run() -> T:
            async with asyncio.timeout(PATIENCE_S), open_joined(self.folder / name) as (client, _):
                return await deed(client)

        return asyncio.run(run())

    def _make_key(self, name: str) -> str:
        key = Key.generate()
        key.save(self.folder / f"{name}.key")
        return key.public


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Starts coordinators in separate processes."""
    with closing(Warm("shoal.coordinator.run", "shoal.coordinator.service")) as warm:
        yield warm


@pytest.fixture
def live_run(tmp_path: Path, warm: Warm, capsys: pytest.CaptureFixture[str]) -> Iterator[LiveRun]:
    live_run = LiveRun(tmp_path, warm, capsys)
    try:
        yield live_run
    finally:
        if live_run.process is not None and live_run.process.poll() is None:
            live_run.kill()


def make_manifest(lease: Lease) -> Manifest:
    hashes = [hashlib.sha256(f"{lease.lease} {place}".encode()).hexdigest() for place in range(lease.group_size)]
    rollouts = tuple(RolloutEntry(hash=text, tokens=100) for text in hashes)
    blob = hashlib.sha256(DATA).hexdigest()
    return Manifest(lease=lease.lease, fence=lease.fence, blob=blob, size=len(DATA), version=0, rollouts=rollouts)


def make_verdict(job: Job) -> VerdictStatement:
    return VerdictStatement(
        submission=job.submission,
        round=job.round,
        verdict=Verdict.ACCEPTED,
        findings=(Finding(check="toploc", statistic="0.125", threshold="0.25", passed=True, where="rollout 1"),),
        tokens=200,
        groups=(GroupFinding(index=job.first, signal=True),),
    )


def make_version(number: int, batch: str = "") -> VersionStatement:
    return VersionStatement(version=number, root="0" * 64, manifest="0" * 64, batch=batch)


def ask_first(live_run: LiveRun, request_key: str) -> Lease:
    lease = live_run.act("ann", lambda client: client.ask_lease(request_key, version=0)).lease
    assert lease is not None
    return lease


def test_a_run_survives_kill_minus_nine_between_all_its_acts(live_run: LiveRun) -> None:
    """lease -> commit -> upload -> claim -> verdict -> cut -> publish, each repeated after a kill."""
    live_run.start()
    assert "standing     probation" in live_run.join("ann")
    assert "may          train, validate" in live_run.join("bob", "--scope", "validate", "--scope", "train")
    live_run.act("bob", lambda client: client.publish_version(make_version(0)))
    lease = ask_first(live_run, "a" * 32)
    live_run.restart()
    assert ask_first(live_run, "a" * 32) == lease
    status = live_run.type("status", live_run.url)
    assert "run demo: running, 0 of 1 step trained, v0 is newest" in status
    assert "step 1 waits for 1 of 1 groups" in status and f"node {lease.node[:8]} has {lease.lease} for" in status

    manifest, path = make_manifest(lease), live_run.folder / "file"
    path.write_bytes(DATA)
    committed = live_run.act("ann", lambda client: client.commit(manifest))
    live_run.restart()
    assert live_run.act("ann", lambda client: client.commit(manifest)) == committed
    receipt = live_run.act("ann", lambda client: client.submit(manifest, path)).receipt
    job = live_run.act("bob", lambda client: client.claim_jobs()).job
    assert job is not None and job.submission == receipt.submission
    assert "validators to judge 1 submission" in live_run.type("status", live_run.url)
    live_run.restart()
    assert live_run.act("ann", lambda client: client.submit(manifest, path)).receipt == receipt
    again = live_run.act("bob", lambda client: client.claim_jobs()).job
    assert again is not None and again.deadline_ms >= job.deadline_ms  # moved by the outage
    assert again.model_copy(update={"deadline_ms": job.deadline_ms}) == job

    record = live_run.act("bob", lambda client: client.send_verdict(make_verdict(job))).record
    assert record.state is SubmissionState.ACCEPTED and record.paid == 200
    batch = live_run.act("bob", lambda client: client.cut_batch(1)).batch
    assert batch is not None and [entry.submission for entry in batch.groups] == [receipt.submission]
    live_run.restart()
    assert live_run.act("bob", lambda client: client.send_verdict(make_verdict(job))).record.state is record.state
    assert live_run.act("bob", lambda client: client.cut_batch(1)).batch == batch
    assert live_run.act("bob", lambda client: client.publish_version(make_version(1, batch.hash))).finished
    check_words(live_run, receipt.submission)
    check_ledger(live_run)


def check_words(live_run: LiveRun, submission: str) -> None:
    """The texts that users read at the end of the run."""
    assert "run demo: finished, 1 of 1 step trained, v1 is newest" in live_run.type("status", live_run.url, "--watch")
    assert json.loads(live_run.type("status", live_run.url, "--json"))["finished"] is True
    text = live_run.type("explain", live_run.url, submission)
    for part in (
        f"{submission} is accepted.",
        f"owner {live_run.keys['ann']}",
        "toploc: 0.125, threshold 0.25 at rollout 1: passed",
        f"pending:{live_run.keys['ann']}: +200 micro-credits",
        "mint: -200 micro-credits",
    ):
        assert part in text
    (first, *_) = json.loads(live_run.type("leaderboard", live_run.url, "--json"))["leaders"]
    assert (first["owner"], first["tokens"], first["accepted"], first["earned"]) == (live_run.keys["ann"], 200, 1, 200)
    best = live_run.type("leaderboard", live_run.url).splitlines()[1]
    assert best.split() == ["1", "200", "1", "0", "0.000200", "probation", "work", live_run.keys["ann"]]
    assert "no such submission" in live_run.type("explain", live_run.url, "s999", code=1)


def verify_unsigned(live_run: LiveRun, *words: Any) -> dict[str, Any]:
    """The report on the ledger of a running coordinator, which has not signed its last events yet."""
    assert main([str(word) for word in ("ledger", "verify", live_run.data, "--json", *words)]) == 1
    report: dict[str, Any] = json.loads(live_run.capsys.readouterr().out)
    return report


def check_ledger(live_run: LiveRun) -> None:
    """The same from the database next to its writer, and over HTTP once a head covers it."""
    report = verify_unsigned(live_run, "--head", live_run.folder / "ann" / "head.json")
    assert report["findings"] == [] and report["tables"] > 20, "only the last events are not signed yet"
    live_run.restart()  # signs a head over everything before
    await_true(lambda: read_size(live_run) >= report["events"], "head")
    copy = live_run.folder / "copy.db"
    first = json.loads(live_run.type("ledger", "verify", live_run.url, "--copy", copy, "--json"))
    assert first["holds"] and first["events"] == report["events"] + 1 and first["postings"] == report["postings"]
    assert json.loads(live_run.type("ledger", "verify", copy, "--json")) == first
    proof = live_run.folder / "proof.json"
    live_run.type("ledger", "prove", live_run.url, "0", "--out", proof)
    assert "kind       genesis" in live_run.type(
        "ledger", "check", proof, "--descriptor", live_run.data / "descriptor.json"
    )
    proof.write_text(proof.read_text().replace("genesis", "genesic"))
    assert main(["ledger", "check", str(proof), "--descriptor", str(live_run.data / "descriptor.json")]) == 1
    assert "val.verdict" in live_run.type("ledger", "show", live_run.url, "--from", "0", "--count", "50")


def read_size(live_run: LiveRun) -> int:
    """Number of events that the newest signed head covers."""

    async def ask(client: NodeClient) -> int:
        head = await client.read_head()
        return 0 if head is None else head.head.size

    return live_run.act("ann", ask)


def test_a_node_that_is_shown_a_rolled_back_ledger_says_so_and_works_no_more(live_run: LiveRun) -> None:
    live_run.start()
    backup = live_run.folder / "backup.db"
    with sqlite3.connect(live_run.data / "ledger.db") as source, sqlite3.connect(backup) as target:
        source.backup(target)
    source.close(), target.close()
    live_run.join("ann")
    live_run.restart()
    await_true(lambda: read_size(live_run) >= 4, "head")
    live_run.act("ann", lambda client: client.send_heartbeat(Heartbeat()))
    held = (live_run.folder / "ann" / "head.json").read_bytes()
    assert live_run.kill(signal.SIGTERM) == 0

    for name in ("ledger.db", "ledger.db-wal", "ledger.db-shm"):
        (live_run.data / name).unlink(missing_ok=True)
    backup.rename(live_run.data / "ledger.db")
    live_run.start()
    assert live_run.type("ledger", "verify", live_run.data)  # a shorter ledger is valid by itself
    text = live_run.join("ann", code=1)
    assert "shoal: fork: the coordinator of run demo signed a ledger of " in text and "and later one of 3" in text
    evidence = (live_run.folder / "ann" / "head.json.fork").read_text()
    assert json.loads(evidence)["held"] == json.loads(held)
    with pytest.raises(ForkError):
        live_run.act("ann", lambda client: client.send_heartbeat(Heartbeat()))
    assert "fork" in live_run.type(
        "node", "leave", "--folder", live_run.folder / "ann", code=1
    )  # and after a restart of the node too
    verify = ["ledger", "verify", str(live_run.data), "--head", str(live_run.folder / "ann" / "head.json")]
    assert main(verify) == 1, "an auditor with the node's head notices it as well"


def test_who_may_not_work_is_told_so_and_the_operator_decides(live_run: LiveRun) -> None:
    live_run.start()
    with pytest.raises(RefusedError, match="not known to this run; join it first"):
        ask_stranger(live_run)
    live_run.join("ann")
    key = live_run.folder / "operator.key"
    ban = ["admin", "ban", live_run.url, live_run.keys["ann"]]
    assert "wrong key: the operator of this run is" in live_run.type(*ban, "--key", live_run.folder / "ann.key", code=2)
    assert "recorded as event" in live_run.type(*ban, "--key", key, "--reason", "a test")
    with pytest.raises(RefusedError, match="banned"):
        live_run.act("ann", lambda client: client.send_heartbeat(Heartbeat()))
    assert "banned" in live_run.join("ann", "--folder", live_run.folder / "second", code=1), "nor by another node"
    assert live_run.keys["ann"] in live_run.type("leaderboard", live_run.url) and "banned" in live_run.type(
        "leaderboard", live_run.url
    )
    live_run.type("admin", "unban", live_run.url, live_run.keys["ann"], "--key", key)
    assert "standing     probation" in live_run.join("ann")

    other = live_run.folder / "other.json"
    node = Key.load(live_run.folder / "ann" / "node.key").public
    live_run.type(
        "owner", "delegate", node, "--owner", live_run.folder / "ann.key", "--run", "elsewhere", "--out", other
    )
    assert "for run elsewhere" in live_run.join("ann", "--delegation", other, code=2)
    wrong = ["--coordinator", live_run.keys["ann"]]
    assert "coordinator key is" in live_run.join("ann", *wrong, code=2)

    live_run.type("admin", "stop", live_run.url, "--key", key)
    assert "stopped by the operator" in live_run.type("status", live_run.url)
    assert live_run.act("ann", lambda client: client.ask_lease(version=0)).code == "stopped"
    live_run.type("admin", "params", live_run.url, "price=7", "--key", key)
    assert json.loads(live_run.type("admin", "params", live_run.url, "--json"))["price"] == 7
    live_run.type("owner", "revoke", live_run.url, node, "--owner", live_run.folder / "ann.key")
    assert "revoked" in live_run.join("ann", code=1)
    check_second(live_run)


def test_a_validator_that_accepts_a_canary_is_found_by_the_operators_command(
    live_run: LiveRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    live_run.start()
    live_run.join("ann")
    live_run.join("bob", "--scope", "validate", "--scope", "train")
    live_run.act("bob", lambda client: client.publish_version(make_version(0)))
    flags = ["--key", live_run.folder / "operator.key", "--folder", live_run.folder / "canaries"]
    assert "no sealed canary left" in live_run.type("canary", "plant", live_run.url, *flags, code=2)
    assert "2 owners sealed, recorded as event" in live_run.type("canary", "seal", live_run.url, *flags, "--count", "2")

    async def cheat(args: Any, make_author: object) -> None:
        """Replaces the engine: submits bad work, and bob accepts it without checking."""
        async with open_session(args.where, args.folder, role=Role.WORKER) as session:
            lease = (await session.client.ask_lease(version=0)).lease
            assert lease is not None
            CanaryWork(args.folder).add(lease.lease)
            (args.folder / "file").write_bytes(DATA)
            await session.client.submit(make_manifest(lease), args.folder / "file")
            async with open_joined(live_run.folder / "bob") as (bob, _):
                job = (await bob.claim_jobs()).job
                assert job is not None
                await bob.send_verdict(make_verdict(job))
            await asyncio.sleep(PATIENCE_S)

    monkeypatch.setattr("shoal.commands.canary.write_work", cheat)
    assert main([str(word) for word in ("canary", "plant", live_run.url, *flags)]) == 1
    shown = live_run.capsys.readouterr().out
    assert "(int8) revealed, recorded as event" in shown
    bob = Key.load(live_run.folder / "bob" / "node.key").public
    assert f"was MISSED: accepted by validator {bob}" in shown
    live_run.restart()
    assert f" of a canary was accepted by validator {bob[:8]}: it lies, or" in live_run.type("status", live_run.url)
    with pytest.raises(RefusedError, match="may not judge for a while"):
        live_run.act("bob", lambda client: client.claim_jobs())
    assert ask_first(live_run, "b" * 32).first == 0, "the canary's groups must be done again"
    assert "1 sealed and unused" in live_run.type("canary", "list", "--folder", live_run.folder / "canaries")
    assert "no planted canary" in live_run.type("canary", "reveal", live_run.url, *flags)
    (done,) = (live_run.folder / "canaries" / "revealed").iterdir()
    done.rename(live_run.folder / "canaries" / "planted" / done.name)  # as if it had died before it got the response
    assert main([str(word) for word in ("canary", "reveal", live_run.url, *flags)]) == 1
    event = shown.splitlines()[0].rpartition(" ")[2]
    assert live_run.capsys.readouterr().out.startswith(f"{done.name}: revealed, recorded as event {event}\n")
    assert verify_unsigned(live_run)["findings"] == []


def ask_stranger(live_run: LiveRun) -> Any:
    """Call as a node that never joined, with a folder made by hand."""
    folder = live_run.folder / "stranger"
    folder.mkdir()
    Key.generate().save(folder / "node.key")
    (folder / "descriptor.json").write_bytes((live_run.data / "descriptor.json").read_bytes())
    (folder / "address").write_text(live_run.url)
    return live_run.act("stranger", lambda client: client.send_heartbeat(Heartbeat()))


def check_second(live_run: LiveRun) -> None:
    """Start a second coordinator in the same folder; then stop the first one."""
    said = live_run.folder / "second.log"
    second = live_run.warm.start(
        "coordinator", live_run.config, "--data", live_run.data, "--listen", "127.0.0.1:0", err=said
    )
    assert second.wait(PATIENCE_S) == 1 and said.read_text().count("\n") == 1
    assert "another process is writing to this ledger" in said.read_text()
    assert live_run.kill(signal.SIGTERM) == 0
    log = (live_run.folder / "log").read_text()
    assert re.findall(r" INFO +(started|stopping|stopped)\b", log) == ["started", "stopping", "stopped"]
    assert "nobody can be convicted" in log, "with one validator cheating pays, and the operator is warned"
    assert "holds" in live_run.type("ledger", "verify", live_run.data)


def await_true(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:.0f} s"
        time.sleep(0.05)
