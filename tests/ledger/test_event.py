from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from shoal.identity.keys import Key
from shoal.ledger.event import (
    GENESIS_PREV,
    MAX_BODY_BYTES,
    Event,
    EventError,
    EventKind,
    Posting,
    Statement,
    move_credit,
    seal_event,
    sign_statement,
)
from shoal.util.canonical import encode_canonical

COORDINATOR = Key.generate()
WORKER = Key.generate()
OWNER = "cd" * 32


def build(**changes: Any) -> Event:
    draft = Event(7, 1000, "val.verdict", COORDINATOR.public, "sub:1", b'{"a":1}', b"", b"\x01" * 32, b"")
    return seal_event(replace(draft, postings=move_credit("mint", f"pending:{OWNER}", 5), **changes))


def test_the_hash_is_the_documented_one() -> None:
    def frame(text: str) -> bytes:
        return len(text).to_bytes(4, "big") + text.encode()

    event = build()
    data = b"shoal-event-1\n" + b"\x01" * 32 + (7).to_bytes(8, "big") + (1000).to_bytes(8, "big")
    data += frame("val.verdict") + frame(COORDINATOR.public) + frame("sub:1")
    data += sha256(b'{"a":1}').digest() + sha256(b"").digest()
    data += sha256(f'[["mint",-5],["pending:{OWNER}",5]]'.encode()).digest()
    assert event.hash == sha256(data).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": 8},
        {"time_ms": 1001},
        {"kind": "slash"},
        {"actor": WORKER.public},
        {"subject": "sub:2"},
        {"body": b'{"a":2}'},
        {"signature": b"\x00" * 64},
        {"prev_hash": GENESIS_PREV},
        {"postings": move_credit("mint", f"pending:{OWNER}", 6)},
        {"postings": ()},
    ],
)
def test_every_field_is_under_the_hash(changes: dict[str, Any]) -> None:
    assert replace(build(), **changes).compute_hash() != build().hash


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = replace(build(), kind="ab", actor="c").compute_hash()
    assert one != replace(build(), kind="a", actor="bc").compute_hash()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "val.Verdict"}, "unknown kind"),
        ({"actor": "x"}, "public key"),
        ({"actor": COORDINATOR.public.upper()}, "public key"),
        ({"subject": "A"}, "subject"),
        ({"subject": "a\n"}, "subject"),
        ({"subject": "a" * 129}, "subject"),
        ({"seq": -1}, "outside"),
        ({"time_ms": 1 << 63}, "outside"),
        ({"signature": b"\x00" * 63}, "invalid length"),
        ({"prev_hash": b""}, "invalid length"),
        ({"body": b"[]"}, "not an object"),
        ({"body": b'{"a": 1}'}, "not canonical"),
        ({"body": b'{"a":1.5}'}, "not canonical"),
        ({"body": encode_canonical({"a": "x" * MAX_BODY_BYTES})}, "not canonical"),
        ({"kind": "lease.grant"}, "cannot have postings"),
        ({"postings": (Posting("mint", -5),)}, "sum to"),
    ],
)
def test_fields_that_no_event_may_have_are_refused(changes: dict[str, Any], reason: str) -> None:
    build().check_form()
    with pytest.raises(EventError, match=reason):
        replace(build(), **changes).check_form()


def test_only_the_coordinators_own_events_go_without_a_signature() -> None:
    build().check_signed("demo", COORDINATOR.public)
    with pytest.raises(EventError, match="did not sign"):
        build(actor=WORKER.public).check_signed("demo", COORDINATOR.public)


def test_a_statement_holds_for_its_run_kind_subject_and_body_alone() -> None:
    statement = sign_statement(WORKER, "demo", EventKind.SUB_COMMIT, "lease:1", {"root": "ab"})
    assert statement.actor == WORKER.public
    fields = {name: getattr(statement, name) for name in ("run", "actor", "kind", "subject", "body", "signature")}
    assert Statement(**fields) == statement
    changes: list[dict[str, Any]] = [
        {"run": "other"},
        {"actor": COORDINATOR.public},
        {"kind": EventKind.SUB_RECEIPT},
        {"subject": "lease:2"},
        {"body": b'{"root":"cd"}'},
        {"signature": bytes(64)},
        {"signature": b""},
    ]
    for change in changes:
        with pytest.raises(EventError, match="did not sign"):
            Statement(**fields | change)


def test_an_event_with_a_statements_signature_is_signed_by_its_actor() -> None:
    statement = sign_statement(WORKER, "demo", EventKind.SUB_COMMIT, "lease:1", {"root": "ab"})
    draft = Event(1, 1, "sub.commit", WORKER.public, "lease:1", statement.body, statement.signature, bytes(32), b"")
    seal_event(draft).check_signed("demo", COORDINATOR.public)
    with pytest.raises(EventError, match="did not sign"):
        seal_event(replace(draft, subject="lease:2")).check_signed("demo", COORDINATOR.public)
