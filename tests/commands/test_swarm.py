"""The commands around a coordinator: one-line errors, no heavy imports for help, and the texts."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands import common
from shoal.commands.owner import describe_account, parse_credit
from shoal.commands.query import MAX_NODES, describe_leaders, describe_status
from shoal.config.help import list_settings
from shoal.coordinator.run import CoordinatorSettings, load_service
from shoal.errors import ConfigError
from shoal.identity.delegation import Scope, open_delegation
from shoal.identity.keys import Key
from shoal.ledger.event import show_credit
from shoal.net.client import HttpDeadlines
from shoal.net.retry import RetryPolicy
from shoal.protocol.descriptor import Descriptor, sign_descriptor
from shoal.protocol.messages import LeaderLine, Leaders, NodeInfo, OwnerAccount, Standing, Status, StepInfo, WaitInfo
from shoal.util.units import count_things

HEX = "ab" * 32
NOBODY = "http://127.0.0.1:1"
SERVE = ["coordinator", "--run", "demo"]
JOIN = ["node", "join", NOBODY, "--owner", "owner.key"]
BAN = ["admin", "ban", NOBODY, HEX, "--key", "owner.key"]
DELEGATE = ["owner", "delegate", HEX, "--owner", "owner.key", "--run", "demo"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Key.generate().save(tmp_path / "owner.key")
    return tmp_path


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["coordinator"], "run: missing name of the run"),
        (["coordinator", "--run", "A b"], "run: invalid run name 'A b'"),
        (["coordinator", "none.toml"], "none.toml: no such file"),
        ([*SERVE, "params.steps=0"], "params.steps: must be at least 1"),
        ([*SERVE, "params.stepz=1"], "did you mean params.steps?"),
        ([*SERVE, "params=1"], "params: must be a table"),
        ([*SERVE, "steps"], "steps: no such file"),
        ([*SERVE, "params.steps=1", "oops"], "oops: expected key=value"),
        ([*SERVE, "params.trainers=me"], "params.trainers: must be a list"),
        ([*SERVE, 'params.validators=["me"]'], "'me': not a public key"),
        ([*SERVE, "--operator", "me"], "'me': not a public key"),
        ([*SERVE, "--listen", "8700"], "--listen: invalid address '8700', expected HOST:PORT"),
        ([*SERVE, "--listen", "0.0.0.0:8700"], "add --public if that is intended"),
        ([*SERVE, "host=::"], "add --public if that is intended"),
        ([*SERVE, "--listen", "0.0.0.0:1", "--public", "http.behind_proxy=true"], "listen on 127.0.0.1 only"),
        ([*SERVE, "--url", "ftp://x"], "urls: 'ftp://x' is not an address"),
        ([*SERVE, "--url", "https://x/y"], "urls: 'https://x/y' is not an address"),
        ([*SERVE, "--tls-cert", "cert.pem"], "TLS needs both a certificate and its key"),
        ([*SERVE, "--tls-cert", "a", "--tls-key", "b"], "a, b: cannot load TLS certificate and key"),
        ([*SERVE, "--database", "mysql://x"], "unsupported database"),
        ([*SERVE, "--data", "owner.key"], "cannot create owner.key/: "),
        ([*DELEGATE, "--days", "0"], "--days: must be from 1 to 365"),
        ([*DELEGATE, "--days", "366"], "--days: must be from 1 to 365"),
        ([*DELEGATE, "--leases", "-1"], "leases at once"),
        ([*DELEGATE, "--leases", "5000"], "leases at once"),
        ([*DELEGATE, "--run", "A b"], "invalid run name"),
        ([*DELEGATE, "--owner", "none.key"], "none.key: cannot be read"),
        (["owner", "delegate", "me", "--owner", "owner.key", "--run", "demo"], "'me': not a public key"),
        (["node", "join", "descriptor.json", "--owner", "owner.key"], "descriptor.json: cannot be read"),
        (["node", "join", "owner.key", "--owner", "owner.key"], "owner.key: invalid run descriptor"),
        ([*JOIN, "--coordinator", "me"], "'me': not a public key"),
        (["node", "join", "https://a b", "--owner", "owner.key"], "https://a b"),
        (["node", "leave"], "node: not the folder of a joined node"),
        (["owner", "unbond", NOBODY, "--owner", "owner.key", "--request", "x"], "--request: expected 32"),
        (["explain", NOBODY, "7"], "'7': not an id; give a submission (s123), or 8 or more digits"),
        (["explain", NOBODY, "s"], "invalid submission id 's'"),
        (["owner", "appeal", NOBODY, "7", "--owner", "owner.key"], "invalid submission id '7'"),
        (["owner", "revoke", NOBODY, "me", "--owner", "owner.key"], "'me': not a public key"),
        (["owner", "redeem", NOBODY, "0", "--owner", "owner.key"], "the amount must be 0.000001 credits or more"),
        (["owner", "redeem", NOBODY, "0.5x", "--owner", "owner.key"], "invalid amount '0.5x', expected credits with"),
        (["owner", "redeem", NOBODY, "0.0000001", "--owner", "owner.key"], "up to six decimals, e.g. 0.5"),
        (["owner", "redeem", NOBODY, "1", "--owner", "owner.key", "--request", "x"], "--request: expected 32"),
        (["owner", "redeem", NOBODY, "1", "--owner", "owner.key", "--to", "\n"], "--to: up to 400"),
        ([*BAN, "--reason", "\u00e9"], "--reason: up to 400 characters of ASCII"),
        (["admin", "ban", NOBODY, "me", "--key", "owner.key"], "'me': not a public key"),
        (["admin", "redeemed", NOBODY, "x", "--key", "owner.key"], "invalid redemption request id"),
        (["admin", "params", NOBODY, "price=1"], "needs --key with the operator's key"),
        (["admin", "params", NOBODY, "price", "--key", "owner.key"], "price: expected key=value"),
        (["admin", "params", NOBODY, "--key", "owner.key", "price"], "price: expected key=value"),
        (["status", "file.json"], "file.json: cannot be read"),
        (["status", "."], ".: no descriptor.json in it; give the coordinator's address, or a run's folder"),
        (["explain", ".", "s1"], "ledger.db: no such file"),
        (["report", "."], ".: not the folder of a swarm"),
        (["status", "https://x", "--ca", "owner.key"], "owner.key: cannot load certificates from this file"),
    ],
)
def test_a_mistake_is_a_one_line_error(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("shoal: ") and shown.err.count("\n") == 1
    assert text in shown.err


@pytest.mark.parametrize(
    "argv",
    [
        ["status", NOBODY],
        ["leaderboard", NOBODY, "--json"],
        ["explain", NOBODY, "s1"],
        JOIN,
        BAN,
        ["admin", "params", NOBODY],
        ["ledger", "verify", NOBODY],
    ],
)
def test_an_unreachable_coordinator_is_a_one_line_error_and_exit_code_1(
    argv: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "quick_retries", lambda: RetryPolicy(tries=1))
    assert main(argv) == 1
    shown = capsys.readouterr()
    assert (
        shown.out == ""
        and shown.err == f"shoal: the coordinator does not answer: {NOBODY}: no connection (Connection refused)\n"
    )
    assert not Path("node").exists()


def test_nothing_is_left_behind_by_a_coordinator_that_may_not_start() -> None:
    for flags in (["--database", "mysql://x"], ["--tls-cert", "a", "--tls-key", "b"], ["params.steps=0"]):
        assert main([*SERVE, *flags]) == 2
    assert [path.name for path in Path.cwd().iterdir()] == ["owner.key"]


HEAVY = ("torch", "sqlalchemy", "fastapi", "pydantic", "cryptography", "h11")


@pytest.mark.parametrize(
    "argv", [["--help"], ["node", "join", "--help"], ["admin", "ban", "--help"], ["ledger", "--help"], ["swim"]]
)
def test_help_and_wrong_words_import_nothing_heavy(argv: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from shoal.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    with contextlib.suppress(SystemExit):
        main({argv!r})
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_help_of_the_coordinator_lists_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["coordinator", "--help", "all"])
    shown = capsys.readouterr().out
    assert re.search("params.async_level .* 2 ", shown) and "blobs.min_free_bytes" in shown


def test_a_dry_run_prints_what_would_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text(f'run = "demo"\nport = 1\n[params]\nsteps = 3\ntrainers = ["{HEX}"]\n')
    flags = ["--dry-run", "params.price=4", "--listen", "[::1]:9", "--url", "http://a:1"]
    assert main(["coordinator", "run.toml", *flags]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["run"], shown["host"], shown["port"], shown["urls"]) == ("demo", "::1", 9, ["http://a:1"])
    assert (shown["params"]["steps"], shown["params"]["price"], shown["params"]["trainers"]) == (3, 4, [HEX])


@pytest.mark.parametrize(
    "override", ["port=true", "port=1.0", "params.steps='3'", "api.read_rate=nan", "port=1979-05-27"]
)
def test_settings_are_strict_about_types(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_service(None, [override], {"run": "demo"})


def test_a_text_that_looks_like_a_number_is_a_text() -> None:
    config = load_service(None, ["run=5", "database=7"], {"operator": None})
    assert (config.run, config.database, config.operator) == ("5", "7", "")


def test_every_setting_of_a_coordinator_is_described() -> None:
    settings = list_settings(CoordinatorSettings)
    assert (settings[0].key, settings[0].default) == ("run", "required")
    assert len({setting.key for setting in settings}) == len(settings) > 80


def test_a_delegation_says_who_may_do_what_until_when(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--scope", "validate", "--scope", "work", "--days", "2", "--leases", "3"]
    assert main([*DELEGATE, *flags]) == 0
    delegation = open_delegation(capsys.readouterr().out.rstrip("\n").encode())
    assert delegation.owner == Key.load(Path("owner.key")).public
    grant = delegation.grant
    assert (grant.node, grant.run, grant.scopes, grant.max_leases) == (HEX, "demo", {Scope.WORK, Scope.VALIDATE}, 3)
    assert grant.not_after_ms - grant.not_before_ms == 3 * 86_400_000  # valid from yesterday: clocks differ
    assert main([*DELEGATE, "--out", "d.json"]) == 0
    assert open_delegation(Path("d.json").read_bytes().rstrip(b"\n")).grant.scopes == {Scope.WORK}
    assert capsys.readouterr().out == ""


def test_a_folder_of_another_run_is_not_joined_with(capsys: pytest.CaptureFixture[str]) -> None:
    key = Key.generate()
    for name, run in (("node/descriptor.json", "first"), ("other.json", "second")):
        Path(name).parent.mkdir(exist_ok=True)
        descriptor = Descriptor(run, key.public, key.public, (NOBODY,), "0" * 64)
        Path(name).write_bytes(sign_descriptor(key, descriptor))
    assert main(["node", "join", "other.json", "--owner", "owner.key"]) == 2
    assert "node: belongs to run first of coordinator" in capsys.readouterr().err
    assert not Path("node/node.key").exists()


def make_status(**changes: Any) -> Status:
    step = StepInfo(step=7, state="open", needed=8, accepted=5, dull=1, leased=2, offered=0, judged=1)
    wait = WaitInfo(
        name="groups",
        owner="step 7",
        for_whom="3 of 8 groups",
        since_ms=0,
        deadline_ms=0,
        overdue=False,
        text="step 7 waits for 3 of 8 groups, for 62 s: node n4 has l9 for 10 s more, silent 62 s",
    )
    late = wait.model_copy(update={"overdue": True, "text": "the queue waits for validators to judge 1 submission"})
    plain = {
        "run": "demo",
        "server_time_ms": 1,
        "finished": False,
        "stopped": False,
        "steps": 10,
        "trained": 6,
        "newest_version": 6,
        "open_steps": (step,),
        "queue": 1,
        "nodes_live": 4,
        "nodes_stale": 1,
        "nodes_gone": 0,
        "waits": (wait, late),
        "alarms": ("a planted submission was accepted", f"overdue: {late.text}"),
    }
    return Status(**{**plain, **changes})


def test_a_coordinator_that_hangs_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "quick_retries", lambda: RetryPolicy(tries=2, first_s=0.01, longest_s=0.01))
    monkeypatch.setattr("shoal.net.client.GLANCE", HttpDeadlines(connect_s=1.0, answer_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # the kernel accepts the connection, but nothing reads from it
        assert main(["status", f"http://127.0.0.1:{deaf.getsockname()[1]}"]) != 0
    shown = capsys.readouterr().err
    assert "the coordinator does not answer" in shown and shown.count("\n") == 1


def test_a_status_reads_as_sentences() -> None:
    assert describe_status(make_status()).splitlines() == [
        "run demo: running, 6 of 10 steps trained, v6 is newest",
        "  OVERDUE      the queue waits for validators to judge 1 submission",
        "  nodes        4 live, 1 stale, 0 gone",
        "  queue        1 submission awaiting validation",
        "  step 7       open: 5 of 8 groups accepted, 2 leased, 1 being judged, 1 without signal "
        "(all rewards equal, so replaced)",
        "  waiting      step 7 waits for 3 of 8 groups, for 62 s: node n4 has l9 for 10 s more, silent 62 s",
        "  ALARM        a planted submission was accepted",
    ]
    node = NodeInfo(node=HEX, role="worker", version=6, tokens_per_s=1500, heard_ms=1)
    shown = describe_status(make_status(nodes=(node,) * (MAX_NODES + 2))).splitlines()
    assert shown[3] == f"    worker     {HEX[:8]}, v6, 1,500 tokens/s"
    assert shown[3 + MAX_NODES] == "  ...          2 more"
    checked = make_status(checks=("every rollout",))
    assert "  checks       every rollout" in describe_status(checked, in_full=True).splitlines()
    assert "checks" not in describe_status(checked)
    assert "stopped by the operator" in describe_status(make_status(stopped=True))
    assert "finished" in describe_status(make_status(finished=True, stopped=True))
    assert "no version yet" in describe_status(make_status(newest_version=-1))


def test_leaders_are_a_table() -> None:
    assert describe_leaders(Leaders(leaders=())) == "no owner has joined yet"
    counts = {"accepted": 3, "rejected": 1, "tokens": 900, "earned": 1_500_000}
    line = LeaderLine(owner=HEX, standing=Standing.GOOD, scopes=("train", "work"), **counts)
    rows = describe_leaders(Leaders(leaders=(line, line))).splitlines()
    assert rows[2].split() == ["2", "900", "3", "1", "1.500000", "good", "train,work", HEX]
    trainer = line.model_copy(update={"standing": Standing.PROBATION, "scopes": ("train",)})
    newcomer = trainer.model_copy(update={"scopes": ("work",)})
    rows = describe_leaders(Leaders(leaders=(trainer, newcomer))).splitlines()
    assert [row.split()[5] for row in rows[1:]] == ["-", "probation"], "only work ends a probation"
    other = line.model_copy(update={"owner": "cd" * 32})
    marked = describe_leaders(Leaders(leaders=(line, other)), HEX).splitlines()
    assert marked[1].endswith(f"{HEX}  (you)") and not marked[2].endswith("(you)")
    assert describe_leaders(Leaders(leaders=(other,)), HEX).endswith(f"you ({HEX}) are not among them")
    assert [count_things(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_an_account_says_where_the_credit_is() -> None:
    work = {"accepted": 3, "rejected": 1, "earned": 3_500_000}
    credit = {"stake": 1_000_000, "pending": 2_000_000, "avail": 500_000, "unbond": 0, "redeeming": 0}
    lines = describe_account(OwnerAccount(owner=HEX, standing=Standing.GOOD, **work, **credit)).splitlines()
    assert lines[0] == f"owner {HEX}: standing good, 3 accepted, 1 rejected"
    amounts = [tuple(line.split()[:2]) for line in lines[1:]]
    assert amounts[:3] == [("earned", "3.500000"), ("bond", "1.000000"), ("unbonding", "0.000000")]
    assert amounts[3:] == [("pending", "2.000000"), ("free", "0.500000"), ("redeeming", "0.000000")]


def test_credits_are_read_and_shown_in_one_unit() -> None:
    assert [parse_credit(text) for text in ("0.5", "1", "0.000001", "12.25")] == [500_000, 1_000_000, 1, 12_250_000]
    shown = [show_credit(amount) for amount in (500_000, 1_000_000, 1, 0)]
    assert shown == ["0.5 credits", "1 credits", "0.000001 credits", "0 credits"]


def test_the_public_key_of_a_file_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    key = Key.generate()
    key.save(tmp_path / "own.key")
    assert main(["owner", "key", str(tmp_path / "own.key")]) == 0
    assert capsys.readouterr().out == f"{key.public}\n"
