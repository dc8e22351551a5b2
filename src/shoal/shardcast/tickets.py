"""Tickets: signed leave to fetch so many bytes of a run until some time.

    Authorization: Shoal <base64url of the body>.<base64url of the signature>
    body: {"bytes":B,"expires":T,"id":I,"node":N,"run":R}   (one form: sorted keys, no spaces, ASCII)

Invariants:
- nothing of a ticket is parsed that no known key has signed; a signature's purpose tag makes it good for nothing else;
- the bytes of an answer are charged before its first byte goes out, so two answers at once cannot overspend; what was
  not sent is given back;
- what was spent is in the book's file before the answer begins, and a restart goes on from there. Where the file cannot
  be written, nothing is served on tickets.

A ticket is a bearer's paper: `node` says in whose name bytes are spent, whoever shows it. One process per book.
"""

import base64
import binascii
import json
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import repair_jsonl, write_atomic
from shoal.keys import Key, check_public, verify_signature
from shoal.runname import check_run

SCHEME = "Shoal"
MAX_BYTES = (1 << 63) - 1
MAX_EXPIRES = 1 << 40
MAX_FILE_BYTES = 1 << 16
"""Read of a file that is said to hold a ticket."""
_CONTEXT = b"shoal-shardcast-ticket-1\n"
_HEADER = re.compile(r"Shoal ([A-Za-z0-9_-]{1,1024})\.([A-Za-z0-9_-]{86})")
_NODE = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{32}")
_CACHED = 1024
_MAX_LINES = 1 << 16


class TicketError(Exception):
    """Why a request is not served, and the status that says so."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a ticket says."""

    run: str
    node: str
    """public key in whose name bytes are spent"""
    expires: int
    """seconds of the wall clock since 1970"""
    bytes: int
    """how many may be fetched in all"""
    id: str
    """32 hex characters; bytes are counted under it"""


def issue_ticket(key: Key, *, run: str, node: str, expires: int, num_bytes: int) -> str:
    """A new ticket in the form that a client shows, without the scheme; ConfigError for one that nobody would take."""
    try:
        check_run(run)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_public(node)
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(f"bytes = {num_bytes}: a ticket is for 1 to {MAX_BYTES} bytes")
    if not 0 < expires <= MAX_EXPIRES:
        raise ConfigError(f"expires = {expires}: must be a time in seconds since 1970, at most {MAX_EXPIRES}")
    return encode_ticket(key, Ticket(run, node, expires, num_bytes, os.urandom(16).hex()))


def read_ticket(path: Path) -> str:
    """The ticket in a file, in the form that a client shows; ConfigError for what has not that form."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    text = data.decode("ascii", errors="replace").strip()
    if _HEADER.fullmatch(f"{SCHEME} {text}") is None:
        raise ConfigError(f"{path}: holds no ticket, which is one line as `shoal ticket` prints it")
    return text


def encode_ticket(key: Key, ticket: Ticket) -> str:
    """A ticket signed by a key."""
    body = _encode_body(ticket)
    return f"{_encode_base64(body)}.{_encode_base64(key.sign(_CONTEXT + body))}"


class TicketBook:
    """Knows whose tickets are good, and what was spent on each."""

    def __init__(
        self, path: Path, *, run: str, signers: Collection[str], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._run = run
        self._signers = tuple(signers)
        self._clock = clock
        self._known: dict[str, Ticket] = {}
        self._descriptor = -1
        try:
            repair_jsonl(path)
            self._spent = _read_book(path, clock())
            self._compact_book()
        except OSError as error:
            raise ConfigError(f"{path}: no book of tickets can be kept there ({error.strerror})") from None

    def check_header(self, header: str | None) -> Ticket:
        """The ticket in an Authorization header; `TicketError` if it gives no leave now."""
        if header is None:
            raise TicketError(401, "a ticket is needed")
        ticket = self._known.get(header)
        if ticket is None:
            ticket = self._open_header(header)
            if len(self._known) >= _CACHED:
                del self._known[next(iter(self._known))]
            self._known[header] = ticket
        if ticket.expires <= self._clock():
            raise TicketError(403, "the ticket has expired")
        return ticket

    def charge_bytes(self, ticket: Ticket, size: int) -> None:
        """Spend bytes of a ticket; `TicketError` if it has not so many left."""
        spent = self.count_spent(ticket) + size
        if spent > ticket.bytes:
            raise TicketError(403, "the ticket is spent")
        self._write_spent(ticket, spent)

    def return_bytes(self, ticket: Ticket, size: int) -> None:
        """Give back what was charged and not sent. A book that cannot be written gives it back until the next start."""
        if size <= 0:
            return
        spent = self.count_spent(ticket) - size
        try:
            self._write_spent(ticket, spent)
        except TicketError:
            self._spent[ticket.id] = (spent, ticket.expires)

    def count_spent(self, ticket: Ticket) -> int:
        """Bytes spent of a ticket so far."""
        return self._spent.get(ticket.id, (0, 0))[0]

    def close(self) -> None:
        """Let go of the file; all that was written to it is safe from a power cut from then on."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _open_header(self, header: str) -> Ticket:
        match = _HEADER.fullmatch(header)
        body, signature = (_decode_base64(match[1]), _decode_base64(match[2])) if match else (None, None)
        if body is None or signature is None:
            raise TicketError(401, "not the form of a ticket")
        if not any(verify_signature(signer, _CONTEXT + body, signature) for signer in self._signers):
            raise TicketError(403, "a ticket that nobody we know has signed")
        ticket = _decode_body(body)
        if ticket is None:
            raise TicketError(403, "a signed ticket in a form we do not know")
        if ticket.run != self._run:
            raise TicketError(403, "a ticket for another run")
        return ticket

    def _write_spent(self, ticket: Ticket, spent: int) -> None:
        """Sums, not differences: a line that a full disk swallowed is made good by the next one."""
        line = _encode_line(ticket.id, spent, ticket.expires)
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # the next line must not go on in the middle of this one
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError("a line was cut short")
            self._spent[ticket.id] = (spent, ticket.expires)
            self._num_lines += 1
            if self._num_lines > _MAX_LINES + 2 * len(self._spent):
                self._compact_book()
        except OSError as error:
            raise TicketError(503, "tickets cannot be counted now") from error

    def _compact_book(self) -> None:
        """Write the book anew: one line for each ticket that has not expired."""
        now = self._clock()
        self._spent = {key: value for key, value in self._spent.items() if value[1] > now}
        lines = [_encode_line(key, spent, expires) for key, (spent, expires) in self._spent.items()]
        write_atomic(self._path, b"".join(lines))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = descriptor
        self._num_lines = len(lines)


def _encode_body(ticket: Ticket) -> bytes:
    return json.dumps(asdict(ticket), sort_keys=True, separators=(",", ":")).encode()


def _decode_body(body: bytes) -> Ticket | None:
    """The ticket if the bytes are one in its one form."""
    try:
        fields = json.loads(body)
        ticket = Ticket(**fields)
        if _encode_body(ticket) != body:
            return None
    except (ValueError, TypeError, RecursionError):
        return None
    is_text = all(type(text) is str for text in (ticket.run, ticket.node, ticket.id))
    is_number = type(ticket.bytes) is int and type(ticket.expires) is int
    if not (is_text and is_number and _NODE.fullmatch(ticket.node) and _ID.fullmatch(ticket.id)):
        return None
    return ticket if 0 <= ticket.bytes <= MAX_BYTES and 0 <= ticket.expires <= MAX_EXPIRES else None


def _encode_line(key: str, spent: int, expires: int) -> bytes:
    return f'{{"expires":{expires},"id":"{key}","spent":{spent}}}\n'.encode()


def _read_book(path: Path, now: float) -> dict[str, tuple[int, int]]:
    """What was spent on each ticket that has not expired; the last line about it counts."""
    book: dict[str, tuple[int, int]] = {}
    if not path.exists():
        return book
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                key, spent, expires = str(fields["id"]), int(fields["spent"]), int(fields["expires"])
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}: line {number} is not of a book of tickets; move the file away") from None
            if expires > now:
                book[key] = (spent, expires)
    return book


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes | None:
    """The bytes, if this is their one spelling."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return None
    return data if _encode_base64(data) == text else None
