"""The commands around shardcast: mistakes are one sentence, and each command does what it prints."""

import argparse
import re
import stat
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.commands.broadcast import describe_progress
from shoal.commands.broadcast_flags import add_commands
from shoal.commands.serving import build_limits
from shoal.keys import Key
from shoal.shardcast.progress import Progress
from shoal.shardcast.tickets import Ticket, TicketBook, TicketError, issue_ticket, read_ticket

HEX = "a" * 64
PUBLISH = ["publish", "nothing", "--version", "1", "--run", "r", "--key", "k", "--data", "d"]
RELAY = ["relay", "http://127.0.0.1:1", "--run", "r", "--publisher", HEX, "--data", "d"]
PULL = ["pull", "http://127.0.0.1:1", "--run", "r", "--publisher", HEX]
TICKET = ["ticket", "--key", "a.key", "--run", "r", "--node", HEX]


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
        ([*RELAY, "--listen", "8600"], "--listen: '8600' is no HOST:PORT"),
        ([*RELAY, "--listen", "127.0.0.1:99999"], "is no HOST:PORT"),
        ([*RELAY, "--rate", "fast"], "'fast': is no rate"),
        ([*RELAY, "--rate", "8bit"], "less than 65.5 kB a second"),
        ([*RELAY, "--max-bytes", "lots"], "is no number of bytes"),
        ([*RELAY, "--signer", HEX], "--signer: has no effect without --tickets"),
        ([*RELAY, "--publisher", "xyz"], "xyz"),
        ([*RELAY, "--run", "../x"], "a run's name"),
        ([*RELAY, "--ticket", "none.txt"], "none.txt: cannot be read"),
        ([*PULL, "--version", "3", "--follow"], "exclude each other"),
        ([*PULL, "--in-flight", "0"], "--in-flight: must be 1 or more"),
        (["pull", "https://x", "--run", "r", "--publisher", HEX], "https"),
        (["pull", "file:///etc/passwd", "--run", "r", "--publisher", HEX], "file:///etc/passwd"),
        (["tree", "ftp://x"], "ftp://x"),
        ([*TICKET, "--hours", "-1"], "--hours"),
        ([*TICKET, "--hours", "nan"], "--hours"),
        ([*TICKET, "--run", "Not A Run"], "a run's name"),
        ([*TICKET, "--node", "me"], "me"),
        ([*TICKET, "--bytes", "0"], "a ticket is for 1 to"),
        ([*TICKET, "--bytes", "99999999TB"], "a ticket is for 1 to"),
        ([*PULL, "--ticket", "two.txt"], "two.txt: holds no ticket"),
        ([*PULL, "--ticket", "letter.txt"], "letter.txt: holds no ticket"),
        ([*RELAY, "--ticket", "two.txt"], "two.txt: holds no ticket"),
        ([*PUBLISH, "--key", "a.key", "--listen", "nowhere"], "--listen: 'nowhere' is no HOST:PORT"),
        ([*PUBLISH, "--key", "a.key", "--shard-size", "1kB"], "shard_size = 1000"),
        ([*PUBLISH, "--key", "a.key", "--shard-size", "lots"], "is no number of bytes"),
        ([*PUBLISH, "--key", "a.key", "--signer", HEX], "--signer: has no effect without --tickets"),
        ([*PUBLISH, "--key", "a.key", "--listen", "127.0.0.1:0"], "nothing: cannot be published"),
    ],
)
def test_a_mistake_is_one_sentence(argv: list[str], text: str, capsys) -> None:
    key = Key.generate()
    key.save(Path("a.key"))
    ticket = issue_ticket(key, run="r", node=HEX, expires=1 << 39, num_bytes=1)
    Path("two.txt").write_text(f"{ticket}\n{ticket}\n")
    Path("letter.txt").write_bytes(b"Dear \xff")
    assert main(argv) == 2
    printed = capsys.readouterr()
    *notes, last = printed.err.splitlines()
    assert printed.out == "" and last.startswith("shoal: ") and text in last
    assert all(note.startswith(("serving run r at http://127.0.0.1:", "no version yet")) for note in notes)


def test_a_ticket_in_a_file_is_shown_as_it_is() -> None:
    ticket = issue_ticket(Key.generate(), run="r", node=HEX, expires=1 << 39, num_bytes=1)
    for text in (ticket, f"{ticket}\n", f"  {ticket}\r\n\n"):
        Path("t.txt").write_text(text)
        assert read_ticket(Path("t.txt")) == ticket


def test_a_server_behind_a_proxy_trusts_nobody_for_an_address() -> None:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers())
    for flags, trusted in (([], True), (["--behind-proxy"], False)):
        assert build_limits(parser.parse_args([*RELAY, *flags])).trust_loopback is trusted


def test_a_printed_ticket_is_good_where_it_should_be(capsys) -> None:
    main(["keygen", "a.key"])
    public = capsys.readouterr().out.strip()
    assert main(["ticket", "--key", "a.key", "--run", "r", "--node", HEX, "--bytes", "1kB", "--hours", "2"]) == 0
    header = f"Shoal {capsys.readouterr().out.strip()}"
    ticket = TicketBook(Path("book"), run="r", signers=[public]).check_header(header)
    assert isinstance(ticket, Ticket) and ticket.bytes == 1000 and ticket.node == HEX
    with pytest.raises(TicketError):
        TicketBook(Path("other"), run="s", signers=[public]).check_header(header)


def test_a_tree_of_nobody_says_so_and_fails(capsys) -> None:
    assert main(["tree", "http://127.0.0.1:1"]) == 1
    assert capsys.readouterr().out == "silent http://127.0.0.1:1  Connection refused\n"


def progress(**changes: object) -> Progress:
    plain = {"version": 3, "stage": "full", "bytes_done": 250, "bytes_total": 1000, "rate": 50.0, "eta_s": 15.0}
    return Progress(**{**plain, "waiting_for": None, **changes})


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
def test_progress_is_a_line(moment: Progress, text: str) -> None:
    assert describe_progress(moment) == text
