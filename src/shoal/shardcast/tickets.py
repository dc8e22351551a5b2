"""Tickets: signed download quotas for a run, with an expiry time.

    Authorization: Shoal <base64url of the body>.<base64url of the signature>
    body: {"bytes":B,"expires":T,"id":I,"node":N,"run":R}   (one form: sorted keys, no spaces, ASCII)

Invariants:
- a ticket is parsed only after its signature by a known key was verified; the purpose tag makes the signature useless
  for anything else;
- the bytes of a response are charged before its first byte is sent, so concurrent responses cannot overspend; unsent
  bytes are refunded;
- the spent bytes are in the book's file before the response begins, and a restart continues from there. If the file
  cannot be written, nothing is served on tickets.

A ticket is a bearer token: `node` is the name that bytes are charged to, whichever client presents it. One process per
book.
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
from shoal.identity.keys import Key, check_public, verify_signature
from shoal.util.canonical import CanonicalError, decode_canonical
from shoal.util.files import repair_jsonl, write_atomic
from shoal.util.units import check_run

SCHEME = "Shoal"
MAX_BYTES = (1 << 63) - 1
MAX_EXPIRES = 1 << 40
MAX_FILE_BYTES = 1 << 16
"""Maximum bytes read from a ticket file."""
_CONTEXT = b"shoal-shardcast-ticket-1\n"
_HEADER = re.compile(r"Shoal ([A-Za-z0-9_-]{1,1024})\.([A-Za-z0-9_-]{86})")
_NODE = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{32}")
_CACHED = 1024
_MAX_LINES = 1 << 16


class TicketError(Exception):
    """The reason and HTTP status of a refused request."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ticket:
    """The contents of a ticket."""

    run: str
    node: str
    """public key that bytes are charged to"""
    expires: int
    """Unix time in seconds"""
    bytes: int
    """total number of bytes that may be fetched"""
    id: str
    """32 hex characters; bytes are counted by this id"""


def issue_ticket(key: Key, *, run: str, node: str, expires: int, num_bytes: int) -> str:
    """Issue a ticket as a client presents it, without the scheme; ConfigError if no server would accept it."""
    check_run(run)
    check_public(node)
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(f"bytes = {num_bytes}: must be between 1 and {MAX_BYTES}")
    if not 0 < expires <= MAX_EXPIRES:
        raise ConfigError(f"expires = {expires}: must be a Unix time in seconds, at most {MAX_EXPIRES}")
    return encode_ticket(key, Ticket(run, node, expires, num_bytes, os.urandom(16).hex()))


def read_ticket(path: Path) -> str:
    """Read the ticket from a file, in the form that a client presents; ConfigError if it is malformed."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    text = data.decode("ascii", errors="replace").strip()
    if _HEADER.fullmatch(f"{SCHEME} {text}") is None:
        raise ConfigError(f"{path}: not a ticket; expected one line as printed by `shoal weights ticket`")
    return text


def encode_ticket(key: Key, ticket: Ticket) -> str:
    """A ticket signed by a key."""
    body = _encode_body(ticket)
    return f"{_encode_base64(body)}.{_encode_base64(key.sign(_CONTEXT + body))}"


class TicketTable:
    """The accepted signers of tickets, and the bytes spent on each ticket."""

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
            raise ConfigError(f"{path}: cannot write the ticket book ({error.strerror})") from None

    def check_header(self, header: str | None) -> Ticket:
        """Check the ticket in an Authorization header; `TicketError` if it is not valid now."""
        if header is None:
            raise TicketError(401, "a ticket is required")
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
        """Charge bytes to a ticket; `TicketError` if it has too few left."""
        spent = self.count_spent(ticket) + size
        if spent > ticket.bytes:
            raise TicketError(403, "the ticket's quota is used up")
        self._write_spent(ticket, spent)

    def return_bytes(self, ticket: Ticket, size: int) -> None:
        """Refund bytes that were charged but not sent; if the book cannot be written, until the next start."""
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
        """Sync and close the file."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)

    def _open_header(self, header: str) -> Ticket:
        match = _HEADER.fullmatch(header)
        body, signature = (_decode_base64(match[1]), _decode_base64(match[2])) if match else (None, None)
        if body is None or signature is None:
            raise TicketError(401, "malformed ticket")
        if not any(verify_signature(signer, _CONTEXT + body, signature) for signer in self._signers):
            raise TicketError(403, "ticket signed by an unknown key")
        ticket = _decode_body(body)
        if ticket is None:
            raise TicketError(403, "unknown form of a signed ticket")
        if ticket.run != self._run:
            raise TicketError(403, "ticket for a different run")
        return ticket

    def _write_spent(self, ticket: Ticket, spent: int) -> None:
        """Write totals, not differences: if a full disk loses a line, the next one corrects it."""
        line = _encode_line(ticket.id, spent, ticket.expires)
        try:
            written = os.write(self._descriptor, line)
            if written < len(line):  # the next line must not continue in the middle of this one
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
                raise OSError("incomplete write")
            self._spent[ticket.id] = (spent, ticket.expires)
            self._num_lines += 1
            if self._num_lines > _MAX_LINES + 2 * len(self._spent):
                self._compact_book()
        except OSError as error:
            raise TicketError(503, "cannot record ticket usage at the moment") from error

    def _compact_book(self) -> None:
        """Rewrite the book with one line for each ticket that has not expired."""
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
    """Parse a ticket; None unless the bytes are in canonical form."""
    try:
        ticket = Ticket(**decode_canonical(body, max_bytes=MAX_FILE_BYTES))
    except (CanonicalError, TypeError):
        return None
    is_text = all(type(text) is str for text in (ticket.run, ticket.node, ticket.id))
    is_number = type(ticket.bytes) is int and type(ticket.expires) is int
    if not (is_text and is_number and _NODE.fullmatch(ticket.node) and _ID.fullmatch(ticket.id)):
        return None
    return ticket if 0 <= ticket.bytes <= MAX_BYTES and 0 <= ticket.expires <= MAX_EXPIRES else None


def _encode_line(key: str, spent: int, expires: int) -> bytes:
    return f'{{"expires":{expires},"id":"{key}","spent":{spent}}}\n'.encode()


def _read_book(path: Path, now: float) -> dict[str, tuple[int, int]]:
    """The bytes spent on each ticket that has not expired; its last line counts."""
    book: dict[str, tuple[int, int]] = {}
    if not path.exists():
        return book
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                fields = json.loads(line)
                key, spent, expires = str(fields["id"]), int(fields["spent"]), int(fields["expires"])
            except (ValueError, TypeError, KeyError):
                raise ConfigError(f"{path}: line {number}: not a ticket book entry; move the file away") from None
            if expires > now:
                book[key] = (spent, expires)
    return book


def _encode_base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode_base64(text: str) -> bytes | None:
    """Decode canonical base64url; None for any other spelling."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except binascii.Error:
        return None
    return data if _encode_base64(data) == text else None
