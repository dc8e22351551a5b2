"""Bodies of events: those of a recorded ledger re-encode to the same bytes, and invalid ones are refused."""

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.ledger.db import open_database
from shoal.ledger.event import Event, EventError, EventKind, encode_body
from shoal.ledger.reader import read_events
from shoal.protocol.events import PARSERS, Ban, LeaseGrant, StepOpen, parse_event, read_ban, read_body, stops_run
from shoal.protocol.messages import Command

RECORDED = Path(__file__).parents[1] / "recorded" / "data" / "run" / "ledger.db.gz"
ACTOR = "ab" * 32
COMMAND = {"nonce": "0" * 32, "reason": "so", "target": "cd" * 32, "params": None, "seals": [], "canary": None}


def make_event(kind: EventKind, body: dict[str, Any], signature: bytes = b"") -> Event:
    return Event(7, 0, kind.value, ACTOR, "", encode_body(body), signature, bytes(32), bytes(32))


def test_every_kind_of_event_has_its_body() -> None:
    assert set(PARSERS) == set(EventKind)


def test_the_bodies_of_a_recorded_ledger_have_the_same_bytes_again(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(gzip.decompress(RECORDED.read_bytes()))
    engine = open_database(str(path))
    with engine.connect() as connection:
        events = list(read_events(connection, 0, 10**6))
    engine.dispose()
    assert len({event.kind for event in events}) > 15
    for event in events:
        assert encode_body(parse_event(event).model_dump(mode="json")) == event.body, event


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'step': Field required"),
        ({"step": "1"}, "'step': Input should be a valid integer"),
        ({"step": True}, "'step': Input should be a valid integer"),
        ({"step": 1, "more": 1}, "'more': Extra inputs are not permitted"),
    ],
)
def test_a_body_with_other_fields_is_refused_in_a_sentence(body: dict[str, Any], words: str) -> None:
    with pytest.raises(EventError, match=f"event 7: invalid body of step.open: {words}"):
        read_body(make_event(EventKind.STEP_OPEN, body), StepOpen)


@pytest.mark.parametrize("kind", EventKind)
def test_no_kind_of_event_reads_an_invalid_body(kind: EventKind) -> None:
    event = make_event(kind, {"what": 1})
    for one in (event, replace(event, signature=bytes(64)), replace(event, body=b"[1]"), replace(event, body=b"\xff")):
        with pytest.raises(EventError, match="invalid body of"):
            parse_event(one)


def test_a_body_is_parsed_once_and_must_be_of_the_class_that_is_asked_for() -> None:
    event = make_event(EventKind.STEP_OPEN, {"step": 1})
    assert read_body(event, StepOpen) is read_body(event, StepOpen)
    with pytest.raises(EventError, match=r"step\.open"):
        read_body(event, LeaseGrant)


def test_a_ban_is_read_from_coordinator_and_operator() -> None:
    own = make_event(EventKind.BAN, {"reason": "so", "target": "cd" * 32})
    commanded = make_event(EventKind.BAN, {**COMMAND, "action": "ban", "request": ""}, bytes(64))
    assert read_ban(own) == read_ban(commanded) == Ban(reason="so", target="cd" * 32)
    assert isinstance(parse_event(commanded), Command)
    with pytest.raises(EventError):
        read_ban(replace(commanded, signature=b""))


def test_only_the_operator_stops_a_run() -> None:
    stop = {**COMMAND, "action": "stop", "request": ""}
    assert stops_run(make_event(EventKind.ADMIN, stop, bytes(64)))
    assert not stops_run(make_event(EventKind.ADMIN, {**stop, "action": "resume"}, bytes(64)))
    assert not stops_run(make_event(EventKind.ADMIN, {"action": "finish", "secret": "s"}))
