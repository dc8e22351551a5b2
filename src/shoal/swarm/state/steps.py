"""Steps, versions and batches.

    step: (closed) -> open -> cut -> trained

A closed step has no row. Step n is trained when version n is published.
"""

from typing import NamedTuple

from sqlalchemy import Column, Connection, Text

from shoal.swarm.db import INT64, define_table
from shoal.swarm.event import Event
from shoal.swarm.sql import Sql, fetch_number, fetch_row, fetch_rows, insert_into, list_columns

STEP = define_table(
    "step",
    Column("step", INT64, primary_key=True, autoincrement=False),
    Column("state", Text, nullable=False, index=True),
    Column("beacon", Text, nullable=False),
    Column("next_index", INT64, nullable=False),
    Column("batch", Text, nullable=False),
    Column("opened_ms", INT64, nullable=False),
    Column("delivered_ms", INT64, nullable=False),
    Column("cut_ms", INT64, nullable=False),
    Column("trained_ms", INT64, nullable=False),
    Column("leased", INT64, nullable=False),
    Column("offered", INT64, nullable=False),
    Column("delivered", INT64, nullable=False),
    Column("signal", INT64, nullable=False),
    Column("dull", INT64, nullable=False),
)
VERSION = define_table(
    "version",
    Column("version", INT64, primary_key=True, autoincrement=False),
    Column("root", Text, nullable=False),
    Column("manifest", Text, nullable=False),
    Column("batch", Text, nullable=False),
    Column("published_ms", INT64, nullable=False),
    Column("seq", INT64, nullable=False),
)


class StepRow(NamedTuple):
    """A step that was opened."""

    step: int
    state: str
    """open, cut or trained"""
    beacon: str
    next_index: int
    """groups below were given out"""
    batch: str
    opened_ms: int
    delivered_ms: int
    """when the last work for it arrived"""
    cut_ms: int
    trained_ms: int
    leased: int
    """groups, as the four that follow: each group given out is counted in one of the five"""
    offered: int
    delivered: int
    signal: int
    """accepted, with a learning signal"""
    dull: int
    """accepted, without one"""

    @property
    def on_their_way(self) -> int:
        return self.leased + self.offered + self.delivered


class VersionRow(NamedTuple):
    """A version that was published."""

    version: int
    root: str
    manifest: str
    batch: str
    published_ms: int
    seq: int


_STEPS = f"SELECT {list_columns(STEP)} FROM step"
_SELECT_STEP = Sql(f"{_STEPS} WHERE step = :step")
_SELECT_STATE = Sql(f"{_STEPS} WHERE state = :state ORDER BY step")
_SELECT_VERSION = Sql(f"SELECT {list_columns(VERSION)} FROM version WHERE version = :version")
_MAX_VERSION = Sql("SELECT coalesce(max(version), -1) FROM version")
_INSERT_STEP, _INSERT_VERSION = insert_into(STEP), insert_into(VERSION)
_COUNT_GROUPS = Sql(
    "UPDATE step SET leased = leased + :leased, offered = offered + :offered, delivered = delivered + :delivered, "
    "signal = signal + :signal, dull = dull + :dull WHERE step = :step"
)
_SET_DELIVERED = Sql("UPDATE step SET delivered_ms = :time_ms WHERE step = :step")
_TAKE_INDICES = Sql("UPDATE step SET next_index = next_index + :count WHERE step = :step AND next_index = :first")
_CUT = Sql("UPDATE step SET state = 'cut', batch = :batch, cut_ms = :time_ms WHERE step = :step AND state = 'open'")
_TRAIN = Sql(
    "UPDATE step SET state = 'trained', trained_ms = :time_ms WHERE step = :step AND state = 'cut' AND batch = :batch"
)


_NO_GROUPS = dict.fromkeys(("leased", "offered", "delivered", "signal", "dull"), 0)


def find_step(connection: Connection, step: int) -> StepRow | None:
    return fetch_row(connection, _SELECT_STEP, StepRow, step=step)


def list_steps(connection: Connection, state: str) -> list[StepRow]:
    """Steps in a state, the smallest first."""
    return fetch_rows(connection, _SELECT_STATE, StepRow, state=state)


def find_version(connection: Connection, version: int) -> VersionRow | None:
    return fetch_row(connection, _SELECT_VERSION, VersionRow, version=version)


def newest_version(connection: Connection) -> int:
    """The newest version, which is also the last trained step; -1 before version 0."""
    return fetch_number(connection, _MAX_VERSION)


def open_step(event: Event, connection: Connection) -> None:
    """step.open"""
    times = {"opened_ms": event.time_ms, "delivered_ms": 0, "cut_ms": 0, "trained_ms": 0}
    row = {"step": event.content["step"], "state": "open", "beacon": event.content["beacon"]}
    _INSERT_STEP.run(connection, {**row, "next_index": 0, "batch": "", **times, **_NO_GROUPS})


def take_indices(event: Event, connection: Connection) -> None:
    """lease.grant of groups that nobody had before"""
    content = event.content
    if content["fresh"]:
        values = {name: content[name] for name in ("step", "first", "count")}
        _change_one(_TAKE_INDICES.run(connection, values).rowcount, "indices given out twice, or with a gap")


def note_delivery(event: Event, connection: Connection) -> None:
    """sub.receipt"""
    _SET_DELIVERED.run(connection, {"step": event.content["step"], "time_ms": event.time_ms})


def cut_step(event: Event, connection: Connection) -> None:
    """batch.cut"""
    values = {"step": event.content["step"], "batch": event.content["hash"], "time_ms": event.time_ms}
    _change_one(_CUT.run(connection, values).rowcount, "a batch of a step that is not open")


def add_version(event: Event, connection: Connection) -> None:
    """version.publish"""
    content = event.content
    version = content["version"]
    if version != newest_version(connection) + 1:
        raise ValueError(f"version {version} out of order")
    if version > 0:
        values = {"step": version, "batch": content["batch"], "time_ms": event.time_ms}
        _change_one(_TRAIN.run(connection, values).rowcount, "a version of a batch that was not cut")
    row = {name: content[name] for name in ("version", "root", "manifest", "batch")}
    _INSERT_VERSION.run(connection, {**row, "published_ms": event.time_ms, "seq": event.seq})


def move_groups(connection: Connection, step: int, **changes: int) -> None:
    """Groups of a step moved: how many more there are where they went, how many fewer where they were."""
    _COUNT_GROUPS.run(connection, {"step": step, **_NO_GROUPS, **changes})


def _change_one(rows: int, text: str) -> None:
    """An event that changes nothing where it must is no event of this run."""
    if rows != 1:
        raise ValueError(text)
