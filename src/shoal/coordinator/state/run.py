"""The run: its parameters, whether it is stopped, its outages, recorded commands; its steps and versions.

    step: (closed) -> open -> cut -> trained

A closed step has no row. Step n is trained when version n is published.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from sqlalchemy import Connection

from shoal.ledger import db
from shoal.ledger.event import Event
from shoal.protocol import events
from shoal.protocol.events import parse_event, read_body, stops_run
from shoal.protocol.messages import Command, VersionStatement
from shoal.protocol.params import RunParams, parse_params
from shoal.util.canonical import encode_canonical

RUN_STATE = db.define_table(
    "run_state", {"run": str, "operator": str, "beacon": str, "params": str, "stopped": int}, key="run"
)
COMMAND = db.define_table("command", {"nonce": str, "seq": int}, key="nonce")
OUTAGE = db.define_table("outage", {"seq": int, "until_ms": int, "away_ms": int}, key="seq")

_SELECT_RUN = db.Sql("SELECT run, operator, beacon, params, stopped FROM run_state")


@dataclass(frozen=True, slots=True)
class RunRow:
    """The current state of the run."""

    run: str
    operator: str
    beacon: str
    params: RunParams
    stopped: bool


def read_run(connection: Connection) -> RunRow:
    """The run of this ledger."""
    row = db.fetch_row(connection, _SELECT_RUN, _make_run)
    if row is None:
        raise LookupError("the genesis of this ledger has no parameters")
    return row


def find_command(connection: Connection, nonce: str) -> int | None:
    """The event that recorded a command."""
    return db.fetch_number(connection, "SELECT seq FROM command WHERE nonce = :nonce", nonce=nonce) or None


def last_command_time(connection: Connection) -> int:
    """When the operator last stopped or resumed the run; a stopped run has few events after that."""
    return db.fetch_number(connection, "SELECT time_ms FROM event WHERE kind = 'admin' ORDER BY seq DESC LIMIT 1")


def count_away(connection: Connection, since_ms: int) -> int:
    """Milliseconds since a time in which the coordinator was down and could not be reached."""
    return db.fetch_number(connection, "SELECT sum(away_ms) FROM outage WHERE until_ms >= :since_ms", since_ms=since_ms)


def begin_run(event: Event, connection: Connection) -> None:
    """genesis"""
    body = read_body(event, events.Genesis)
    row = {"run": body.run, "operator": body.operator, "beacon": body.beacon, "stopped": 0}
    db.insert_rows(connection, RUN_STATE, {**row, "params": encode_canonical(body.params).decode()})


def change_params(event: Event, connection: Connection) -> None:
    """params"""
    text = encode_canonical(read_body(event, Command).params).decode()
    db.execute(connection, "UPDATE run_state SET params = :params", params=text)


def switch_run(event: Event, connection: Connection) -> None:
    """admin"""
    db.execute(connection, "UPDATE run_state SET stopped = :stopped", stopped=int(stops_run(event)))


def note_outage(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    row = {"seq": event.seq, "until_ms": event.time_ms, "away_ms": read_body(event, events.CoordinatorUp).shift_ms}
    db.insert_rows(connection, OUTAGE, row)


def note_command(event: Event, connection: Connection) -> None:
    """Record the nonce of an operator's command; each may be used once."""
    body = parse_event(event)
    if isinstance(body, Command):
        db.insert_rows(connection, COMMAND, {"nonce": body.nonce, "seq": event.seq})


def _make_run(run: str, operator: str, beacon: str, params: str, stopped: int) -> RunRow:
    return RunRow(run, operator, beacon, _parse_params(params), bool(stopped))


@lru_cache(maxsize=4)
def _parse_params(text: str) -> RunParams:
    """Cached, because each decision reads the run and its parameters hardly ever change."""
    return parse_params(json.loads(text))


class StepRow(NamedTuple):
    """A step that was opened."""

    step: int
    state: str
    """open, cut or trained"""
    beacon: str
    """empty until its batch is cut"""
    next_index: int
    """groups with a lower index were granted"""
    batch: str
    opened_ms: int
    delivered_ms: int
    """when the last work for it arrived"""
    cut_ms: int
    trained_ms: int
    leased: int
    """number of groups, as for the four that follow: each granted group is counted in one of the five"""
    offered: int
    delivered: int
    signal: int
    """accepted, with a learning signal"""
    dull: int
    """accepted, without a learning signal"""

    @property
    def on_their_way(self) -> int:
        return self.leased + self.offered + self.delivered


STEP = db.define_table("step", StepRow, key="step", index="state")


class VersionRow(NamedTuple):
    """A published version."""

    version: int
    root: str
    manifest: str
    batch: str
    published_ms: int
    seq: int


VERSION = db.define_table("version", VersionRow, key="version")


_COUNT_GROUPS = db.Sql(
    "UPDATE step SET leased = leased + :leased, offered = offered + :offered, delivered = delivered + :delivered, "
    "signal = signal + :signal, dull = dull + :dull WHERE step = :step"
)
_TAKE_INDICES = db.Sql("UPDATE step SET next_index = next_index + :count WHERE step = :step AND next_index = :first")
_NO_GROUPS = dict.fromkeys(("leased", "offered", "delivered", "signal", "dull"), 0)


def find_step(connection: Connection, step: int) -> StepRow | None:
    return db.find_row(connection, StepRow, step=step)


def list_steps(connection: Connection, state: str) -> list[StepRow]:
    """Steps in a state, lowest first."""
    return db.list_rows(connection, StepRow, "WHERE state = :state ORDER BY step", state=state)


def find_version(connection: Connection, version: int) -> VersionRow | None:
    return db.find_row(connection, VersionRow, version=version)


def newest_version(connection: Connection) -> int:
    """The newest version, which is also the last trained step; -1 before version 0."""
    return db.fetch_number(connection, "SELECT coalesce(max(version), -1) FROM version")


def open_step(event: Event, connection: Connection) -> None:
    """step.open"""
    times = {"opened_ms": event.time_ms, "delivered_ms": 0, "cut_ms": 0, "trained_ms": 0}
    row = {**dict(read_body(event, events.StepOpen)), "state": "open"}
    db.insert_rows(connection, STEP, {**row, "beacon": "", "next_index": 0, "batch": "", **times, **_NO_GROUPS})


def take_indices(event: Event, connection: Connection) -> None:
    """lease.grant of groups that were never granted before"""
    body = read_body(event, events.LeaseGrant)
    if body.fresh:
        values = {"step": body.step, "first": body.first, "count": body.count}
        db.change_one(connection, _TAKE_INDICES, "indices granted twice, or with a gap", **values)


def note_delivery(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    step = read_body(event, events.SubmissionReceipt).step
    db.update_rows(connection, STEP, {"delivered_ms": event.time_ms}, step=step)


def cut_step(event: Event, connection: Connection) -> None:
    """batch.cut"""
    body = read_body(event, events.BatchCut)
    changes = {"state": "cut", "batch": body.hash, "beacon": body.beacon, "cut_ms": event.time_ms}
    if not db.update_rows(connection, STEP, changes, step=body.step, state="open"):
        raise ValueError("batch of a step that is not open")


def add_version(event: Event, connection: Connection) -> None:
    """version.publish"""
    body = read_body(event, VersionStatement)
    if body.version != newest_version(connection) + 1:
        raise ValueError(f"version {body.version} out of order")
    if body.version > 0:
        changes = {"state": "trained", "trained_ms": event.time_ms}
        if not db.update_rows(connection, STEP, changes, step=body.version, state="cut", batch=body.batch):
            raise ValueError("version of a batch that was not cut")
    db.insert_rows(connection, VERSION, {**dict(body), "published_ms": event.time_ms, "seq": event.seq})


def move_groups(connection: Connection, step: int, **changes: int) -> None:
    """Change the numbers of a step's groups in each state."""
    _COUNT_GROUPS.run(connection, {"step": step, **_NO_GROUPS, **changes})
