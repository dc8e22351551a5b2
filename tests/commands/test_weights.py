"""The commands around shardcast: user mistakes give one-line errors, and each command does what it prints."""

import asyncio
import re
import stat
from pathlib import Path

import pytest

from shoal.cli import build_parser, main
from shoal.commands.weights import _describe_relay, build_limits, describe_progress
from shoal.identity.keys import Key
from shoal.shardcast.fetch.pull import PullProgress
from shoal.shardcast.relay import Relay
from shoal.shardcast.tickets import Ticket, TicketError, TicketTable, issue_ticket, read_ticket

HEX = "a" * 64
PUBLISH = ["weights", "publish", "nothing", "--version", "1", "--run", "r", "--key", "k", "--data", "d"]
RELAY = ["relay", "http://127.0.0.1:1", "--run", "r", "--publisher", HEX, "--data", "d"]
PULL = ["weights", "pull", "http://127.0.0.1:1", "--run", "r", "--publisher", HEX]
TICKET = ["weights", "ticket", "--key", "a.key", "--run", "r", "--node", HEX]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_key_is_made_once_for_its_owner_alone(capsys) -> None:
    assert main(["keygen", "a.key"]) == 0
    public = capsys.readouterr().out.strip()
    assert re.fullmatch("[0-9a-f]{64}", public) and Key.load(Path("a.key")).public == public
    assert stat.S_IMODE(Path("a.key").stat().st_mode) == 0o600
    before = Path("a.key").read_bytes()
    assert main(["keygen", "a.key"]) == 2
    assert Path("a.key").read_bytes() == before


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (PUBLISH, "k: "),
        ([*PUBLISH, "--version", "-1"], "--version: must be 0 or more"),
        ([*PUBLISH, "--keep", "0"], "--keep: must be 1 or more"),
        ([*RELAY, "--listen", "8600"], "--listen: invalid address '8600', expected HOST:PORT"),
        ([*RELAY, "--listen", "127.0.0.1:99999"], "expected HOST:PORT"),
        ([*RELAY, "--rate", "fast"], "invalid rate 'fast'"),
        ([*RELAY, "--rate", "8bit"], "below the minimum of 65.5 kB"),
        ([*RELAY, "--max-bytes", "lots"], "invalid number of bytes"),
        ([*RELAY, "--signer", HEX], "--signer: has no effect without --tickets"),
        ([*RELAY, "--publisher", "xyz"], "xyz"),
        ([*RELAY, "--run", "../x"], "invalid run name"),
        ([*RELAY, "--ticket", "none.txt"], "none.txt: cannot be read"),
        ([*PULL, "--version", "3", "--follow"], "mutually exclusive"),
        ([*PULL, "--in-flight", "0"], "--in-flight: must be 1 or more"),
        (["weights", "pull", "ftp://x", "--run", "r", "--publisher", HEX], "ftp"),
        (["weights", "pull", "file:///etc/passwd", "--run", "r", "--publisher", HEX], "file:///etc/passwd"),
        (["weights", "tree", "ftp://x"], "ftp://x"),
        ([*TICKET, "--hours", "-1"], "--hours"),
        ([*TICKET, "--hours", "nan"], "--hours"),
        ([*TICKET, "--run", "Not A Run"], "invalid run name"),
        ([*TICKET, "--node", "me"], "me"),
        ([*TICKET, "--bytes", "0"], "must be between 1 and"),
        ([*TICKET, "--bytes", "99999999TB"], "must be between 1 and"),
        ([*PULL, "--ticket", "two.txt"], "two.txt: not a ticket"),
        ([*PULL, "--ticket", "letter.txt"], "letter.txt: not a ticket"),
        ([*RELAY, "--ticket", "two.txt"], "two.txt: not a ticket"),
        ([*PUBLISH, "--key", "a.key", "--listen", "nowhere"], "invalid address 'nowhere', expected HOST:PORT"),
        ([*PUBLISH, "--key", "a.key", "--shard-size", "1kB"], "shard_size = 1000"),
        ([*PUBLISH, "--key", "a.key", "--shard-size", "lots"], "invalid number of bytes"),
        ([*PUBLISH, "--key", "a.key", "--signer", HEX], "--signer: has no effect without --tickets"),
        ([*PUBLISH, "--key", "a.key", "--listen", "127.0.0.1:0"], "nothing: cannot be read"),
    ],
)
def test_a_mistake_is_a_one_line_error(argv: list[str], text: str, capsys) -> None:
    key = Key.generate()
    key.save(Path("a.key"))
    ticket = issue_ticket(key, run="r", node=HEX, expires=1 << 39, num_bytes=1)
    Path("two.txt").write_text(f"{ticket}\n{ticket}\n")
    Path("letter.txt").write_bytes(b"Dear \xff")
    assert main(argv) == 2
    printed = capsys.readouterr()
    *notes, last = printed.err.splitlines()
    assert printed.out == "" and last.startswith("shoal: ") and text in last
    assert all("INFO    serving run r at http://127.0.0.1:" in note or "no version yet" in note for note in notes)


def test_a_ticket_in_a_file_is_shown_as_it_is() -> None:
    ticket = issue_ticket(Key.generate(), run="r", node=HEX, expires=1 << 39, num_bytes=1)
    for text in (ticket, f"{ticket}\n", f"  {ticket}\r\n\n"):
        Path("t.txt").write_text(text)
        assert read_ticket(Path("t.txt")) == ticket


def test_a_server_behind_a_proxy_trusts_no_address() -> None:
    parser = build_parser()
    for flags, trusted in (([], True), (["--behind-proxy"], False)):
        assert build_limits(parser.parse_args([*RELAY, *flags])).trust_loopback is trusted


def test_a_printed_ticket_is_good_where_it_should_be(capsys) -> None:
    main(["keygen", "a.key"])
    public = capsys.readouterr().out.strip()
    assert (
        main(["weights", "ticket", "--key", "a.key", "--run", "r", "--node", HEX, "--bytes", "1kB", "--hours", "2"])
        == 0
    )
    header = f"Shoal {capsys.readouterr().out.strip()}"
    ticket = TicketTable(Path("book"), run="r", signers=[public]).check_header(header)
    assert isinstance(ticket, Ticket) and ticket.bytes == 1000 and ticket.node == HEX
    with pytest.raises(TicketError):
        TicketTable(Path("other"), run="s", signers=[public]).check_header(header)


def test_a_tree_without_reachable_nodes_fails(capsys) -> None:
    assert main(["weights", "tree", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == "silent http://127.0.0.1:1  Connection refused\n"


def test_a_relay_says_why_its_source_does_not_answer(tmp_path: Path) -> None:
    async def check() -> str:
        options = {"run": "s", "publisher": Key.generate().public, "host": "127.0.0.1", "port": 0}
        async with asyncio.timeout(60), await Relay.open(tmp_path, ["http://127.0.0.1:1"], **options) as relay:
            while "(" not in _describe_relay(relay):
                await asyncio.sleep(0.01)
            return _describe_relay(relay)

    assert asyncio.run(check()) == "waiting for http://127.0.0.1:1 (no connection (Connection refused))"


def progress(**changes: object) -> PullProgress:
    plain = {"version": 3, "stage": "full", "bytes_done": 250, "bytes_total": 1000, "rate": 50.0, "eta_s": 15.0}
    return PullProgress(**{**plain, "waiting_for": None, **changes})


@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (progress(), "v3 [#####               ] 25% of 1 kB  50 B/s  15 s left"),
        (progress(stage="delta"), "delta of v3 [#####               ] 25% of 1 kB  50 B/s  15 s left"),
        (
            progress(waiting_for="a source", eta_s=None),
            "v3 [#####               ] 25% of 1 kB  50 B/s  waiting for a source",
        ),
        (progress(version=None, waiting_for="version 9"), "waiting for version 9"),
        (progress(version=None), "waiting for a newer version"),
        (progress(bytes_done=0, bytes_total=0, eta_s=None), "v3 [                    ] 0% of 0 B  50 B/s"),
    ],
)
def test_progress_is_a_line(moment: PullProgress, text: str) -> None:
    assert describe_progress(moment) == text
