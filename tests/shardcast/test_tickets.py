import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shoal.shardcast.tickets as tickets_module
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.shardcast.tickets import Ticket, TicketError, TicketTable, encode_ticket, issue_ticket

KEY = Key.generate()
NODE = Key.generate().public
NOW = 1_000_000


def open_book(path: Path, run: str = "reef", now: float = NOW) -> TicketTable:
    return TicketTable(path, run=run, signers=[Key.generate().public, KEY.public], clock=lambda: now)


def make_header(run: str = "reef", key: Key = KEY, expires: int = NOW + 60, num_bytes: int = 1000) -> str:
    return "Shoal " + issue_ticket(key, run=run, node=NODE, expires=expires, num_bytes=num_bytes)


def refuse_header(table: TicketTable, header: str | None) -> tuple[int, str]:
    with pytest.raises(TicketError) as caught:
        table.check_header(header)
    return caught.value.status, str(caught.value)


def test_a_ticket_that_a_known_key_signed_is_good(tmp_path: Path) -> None:
    ticket = open_book(tmp_path / "book").check_header(make_header())
    assert (ticket.run, ticket.node, ticket.expires, ticket.bytes) == ("reef", NODE, NOW + 60, 1000)


def test_a_missing_or_malformed_ticket_is_distinguished_from_a_bad_one(tmp_path: Path) -> None:
    table = open_book(tmp_path / "book")
    assert refuse_header(table, None) == (401, "a ticket is required")
    for header in ("", "Bearer x.y", "Shoal x", "shoal " + make_header()[6:], make_header() + " ", make_header()[:-1]):
        assert refuse_header(table, header) == (401, "malformed ticket")


def test_a_ticket_has_one_spelling(tmp_path: Path) -> None:
    header = make_header()
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    other = header[:-1] + alphabet[alphabet.index(header[-1]) ^ 1]  # a bit that no byte of the signature has
    assert refuse_header(open_book(tmp_path / "book"), other)[0] == 401


def test_a_ticket_signed_by_another_key_is_refused(tmp_path: Path) -> None:
    header = make_header(key=Key.generate())
    assert refuse_header(open_book(tmp_path / "book"), header) == (403, "ticket signed by an unknown key")


def test_each_server_counts_for_itself_and_a_signer_of_its_own_binds_a_ticket_to_it(tmp_path: Path) -> None:
    """R servers give a ticket at most R times its bytes; one whose signer only one of them knows, its bytes."""
    signer = Key.generate()
    first = TicketTable(tmp_path / "first", run="reef", signers=[KEY.public, signer.public], clock=lambda: NOW)
    second = TicketTable(tmp_path / "second", run="reef", signers=[KEY.public], clock=lambda: NOW)
    header = make_header(num_bytes=1000)
    for table in (first, second):
        ticket = table.check_header(header)
        table.charge_bytes(ticket, 1000)
        with pytest.raises(TicketError, match="used up"):
            table.charge_bytes(ticket, 1)
    bound = make_header(key=signer)
    first.charge_bytes(first.check_header(bound), 1000)
    assert refuse_header(second, bound) == (403, "ticket signed by an unknown key")


def test_a_ticket_with_another_body_under_the_signature_is_refused(tmp_path: Path) -> None:
    small, large = make_header(num_bytes=1), make_header(num_bytes=10**9)
    forged = large.partition(".")[0] + "." + small.partition(".")[2]
    assert refuse_header(open_book(tmp_path / "book"), forged)[0] == 403


def test_a_signature_without_the_purpose_is_no_ticket(tmp_path: Path) -> None:
    class Plain(Key):
        def sign(self, message: bytes) -> bytes:
            return super().sign(message.partition(b"\n")[2])

    key = Plain(KEY._secret)
    assert refuse_header(open_book(tmp_path / "book"), make_header(key=key))[0] == 403


def test_a_ticket_of_another_run_is_refused(tmp_path: Path) -> None:
    assert refuse_header(open_book(tmp_path / "book"), make_header(run="atoll")) == (403, "ticket for a different run")


def test_an_expired_ticket_is_refused_also_when_it_was_good_before(tmp_path: Path) -> None:
    now = NOW
    table = TicketTable(tmp_path / "book", run="reef", signers=[KEY.public], clock=lambda: now)
    header = make_header()
    table.check_header(header)
    now = NOW + 60
    assert refuse_header(table, header) == (403, "the ticket has expired")


@pytest.mark.parametrize(
    "change", [{"bytes": -1}, {"bytes": True}, {"bytes": 1.0}, {"id": "../x"}, {"node": "me"}, {"expires": "never"}]
)
def test_a_signed_ticket_with_odd_fields_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    fields: dict[str, object] = {"run": "reef", "node": NODE, "expires": NOW + 1, "bytes": 1, "id": "a" * 32}
    header = "Shoal " + encode_ticket(KEY, Ticket(**(fields | change)))  # type: ignore[arg-type]
    assert refuse_header(open_book(tmp_path / "book"), header) == (403, "unknown form of a signed ticket")


@given(text=st.text(max_size=200), tail=st.text(alphabet="AB-_.", max_size=100))
def test_whatever_stands_in_the_header_is_a_ticket_error(text: str, tail: str) -> None:
    table = TicketTable.__new__(TicketTable)
    table._known, table._signers, table._run, table._clock = {}, (KEY.public,), "reef", lambda: NOW
    for header in (text, f"Shoal {text}", f"Shoal {tail}.{'A' * 86}"):
        with pytest.raises(TicketError):
            table.check_header(header)


def test_a_ticket_can_be_spent_to_the_last_byte_and_no_further(tmp_path: Path) -> None:
    table = open_book(tmp_path / "book")
    ticket = table.check_header(make_header(num_bytes=1000))
    table.charge_bytes(ticket, 600)
    with pytest.raises(TicketError, match="quota") as caught:
        table.charge_bytes(ticket, 401)
    assert caught.value.status == 403
    table.charge_bytes(ticket, 400)
    assert table.count_spent(ticket) == 1000


def test_two_tickets_are_counted_apart(tmp_path: Path) -> None:
    table = open_book(tmp_path / "book")
    first, second = table.check_header(make_header()), table.check_header(make_header())
    table.charge_bytes(first, 1000)
    table.charge_bytes(second, 1000)


def test_what_was_not_sent_is_refunded(tmp_path: Path) -> None:
    table = open_book(tmp_path / "book")
    ticket = table.check_header(make_header())
    table.charge_bytes(ticket, 1000)
    table.return_bytes(ticket, 300)
    table.return_bytes(ticket, -5)
    assert table.count_spent(ticket) == 700


def test_what_was_spent_survives_a_kill_without_warning(tmp_path: Path) -> None:
    header = make_header(num_bytes=1000)
    code = """
        import os, signal, sys
        from pathlib import Path
        from shoal.shardcast.tickets import TicketTable
        book = TicketTable(Path(sys.argv[1]), run="reef", signers=[sys.argv[2]], clock=lambda: 1_000_000)
        book.charge_bytes(book.check_header(sys.argv[3]), 900)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "book"), KEY.public, header]
    assert subprocess.run(command, check=False, timeout=60).returncode == -9
    table = open_book(tmp_path / "book")
    ticket = table.check_header(header)
    assert table.count_spent(ticket) == 900
    with pytest.raises(TicketError, match="quota"):
        table.charge_bytes(ticket, 101)


def test_a_line_that_a_kill_left_torn_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "book"
    table = open_book(path)
    header = make_header()
    table.charge_bytes(table.check_header(header), 10)
    table.close()
    with path.open("ab") as file:
        file.write(b'{"expires":1')
    table = open_book(path)
    assert table.count_spent(table.check_header(header)) == 10


def test_a_file_that_is_not_a_ticket_book_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("[1]\n")
    with pytest.raises(ConfigError, match="line 1: not a ticket book entry"):
        open_book(tmp_path / "book")
    with pytest.raises(ConfigError, match="cannot write the ticket book"):
        open_book(tmp_path / "nowhere" / "book")


def test_the_book_forgets_expired_tickets_and_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets_module, "_MAX_LINES", 50)
    path = tmp_path / "book"
    table = open_book(path)
    ticket = table.check_header(make_header(num_bytes=10**6))
    for _ in range(500):
        table.charge_bytes(ticket, 7)
    assert path.read_bytes().count(b"\n") <= 60
    table.close()
    table = open_book(path)
    assert table.count_spent(ticket) == 3500
    table.close()
    open_book(path, now=NOW + 61)
    assert path.read_bytes() == b""


def test_if_usage_cannot_be_recorded_nothing_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_book(tmp_path / "book")
    ticket = table.check_header(make_header())
    table.charge_bytes(ticket, 100)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:5]))
    with pytest.raises(TicketError) as caught:
        table.charge_bytes(ticket, 100)
    assert caught.value.status == 503
    table.return_bytes(ticket, 40)
    monkeypatch.undo()
    assert table.count_spent(ticket) == 60
    table.charge_bytes(ticket, 1)
    table.close()
    assert open_book(tmp_path / "book").count_spent(ticket) == 61


def test_a_shown_ticket_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_book(tmp_path / "book")
    header = make_header()
    table.check_header(header)
    monkeypatch.setattr(tickets_module, "verify_signature", lambda *_: pytest.fail("verified again"))
    table.check_header(header)
    assert len(table._known) == 1
