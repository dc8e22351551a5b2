"""The run itself: its parameters, whether it is stopped, when it was away, and the commands that were recorded."""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Text

from shoal.canonical import encode_canonical
from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.params import RunParams, parse_params
from shoal.swarm.sql import Sql, fetch_number, fetch_row, insert_into

RUN_STATE = define_table(
    "run_state",
    Column("run", Text, primary_key=True),
    Column("operator", Text, nullable=False),
    Column("beacon", Text, nullable=False),
    Column("params", Text, nullable=False),
    Column("stopped", INT64, nullable=False),
)
COMMAND = define_table("command", Column("nonce", Text, primary_key=True), Column("seq", INT64, nullable=False))
OUTAGE = define_table(
    "outage",
    Column("seq", INT64, primary_key=True, autoincrement=False),
    Column("until_ms", INT64, nullable=False),
    Column("away_ms", INT64, nullable=False),
)

_INSERT_RUN, _INSERT_COMMAND, _INSERT_OUTAGE = insert_into(RUN_STATE), insert_into(COMMAND), insert_into(OUTAGE)
_COUNT_AWAY = Sql("SELECT sum(away_ms) FROM outage WHERE until_ms >= :since_ms")
_SELECT_RUN = Sql("SELECT run, operator, beacon, params, stopped FROM run_state")
_SET_PARAMS = Sql("UPDATE run_state SET params = :params")
_SET_STOPPED = Sql("UPDATE run_state SET stopped = :stopped")
_SELECT_COMMAND = Sql("SELECT seq FROM command WHERE nonce = :nonce")


@dataclass(frozen=True, slots=True)
class RunRow:
    """The run as it is."""

    run: str
    operator: str
    beacon: str
    params: RunParams
    stopped: bool


def read_run(connection: Connection) -> RunRow:
    """The run of this ledger."""
    row = fetch_row(connection, _SELECT_RUN, _make_run)
    if row is None:
        raise LookupError("a ledger whose genesis has no parameters")
    return row


class RunReader:
    """Reads the run for one decision after the other, and parses its parameters only when they changed."""

    def __init__(self) -> None:
        self._row: tuple[Any, ...] | None = None
        self._state: RunRow | None = None

    def read(self, connection: Connection) -> RunRow:
        """The run as it is."""
        row = fetch_row(connection, _SELECT_RUN, _make_tuple)
        if row is None or row != self._row or self._state is None:
            self._row, self._state = row, read_run(connection)
        return self._state


def find_command(connection: Connection, nonce: str) -> int | None:
    """The event that recorded a command."""
    return fetch_number(connection, _SELECT_COMMAND, nonce=nonce) or None


def count_away(connection: Connection, since_ms: int) -> int:
    """Milliseconds that the coordinator was away since a time, in which nobody could reach it."""
    return fetch_number(connection, _COUNT_AWAY, since_ms=since_ms)


def begin_run(event: Event, connection: Connection) -> None:
    """genesis"""
    content = event.content
    if "params" not in content:
        return  # a ledger without a run: of tests, or of another use
    row = {name: content[name] for name in ("run", "operator", "beacon")}
    _INSERT_RUN.run(connection, {**row, "params": encode_canonical(content["params"]).decode(), "stopped": 0})


def change_params(event: Event, connection: Connection) -> None:
    """params"""
    _SET_PARAMS.run(connection, {"params": encode_canonical(event.content["params"]).decode()})


def switch_run(event: Event, connection: Connection) -> None:
    """admin"""
    _SET_STOPPED.run(connection, {"stopped": int(event.content["action"] == "stop")})


def note_outage(event: Event, connection: Connection) -> None:
    """coordinator.up"""
    row = {"seq": event.seq, "until_ms": event.time_ms, "away_ms": event.content["shift_ms"]}
    _INSERT_OUTAGE.run(connection, row)


def note_command(event: Event, connection: Connection) -> None:
    """Whatever the operator signed has a nonce, which is taken once."""
    if event.signature and "nonce" in event.content:
        _INSERT_COMMAND.run(connection, {"nonce": event.content["nonce"], "seq": event.seq})


def _make_tuple(*values: Any) -> tuple[Any, ...]:
    return values


def _make_run(run: str, operator: str, beacon: str, params: str, stopped: int) -> RunRow:
    return RunRow(run, operator, beacon, parse_params(json.loads(params)), bool(stopped))
