"""Reads a ledger from its database: single events, proofs, and the results of each task.

Read-only, so it may run while the coordinator is running. A proof is checked before it is returned.

Tasks: for every accepted group, with a training signal or without, a ledger holds the step, the index and the mean
reward that a validator found, and for every step its beacon. The task follows from the recipe and the task set. So
these statistics are complete; a trainer sees only the groups it trains on. A group that was accepted twice (a backup
lease) has the same rollouts and counts once.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from shoal.errors import ConfigError
from shoal.ledger import reader
from shoal.ledger.db import read_snapshot, show_url
from shoal.ledger.event import Event, EventError
from shoal.ledger.head import InclusionProof
from shoal.ledger.merkle import prove_inclusion
from shoal.ledger.schema import check_schema
from shoal.ledger.untrusted import open_untrusted
from shoal.node.recipe import read_tasks
from shoal.protocol.beacon import number_beacon
from shoal.protocol.events import BatchCut, Genesis, LeaseGrant, SubmissionOutcome, parse_event, read_body
from shoal.protocol.messages import GroupFinding, Manifest, SubmissionState, Verdict, VerdictStatement
from shoal.protocol.params import MILLION
from shoal.recipe import RecipeError, load_recipe
from shoal.seeds import derive_seed
from shoal.tasks.base import at_step
from shoal.tasks.split import train_task


def find_database(text: str) -> str:
    """Resolve a user's argument to a database URL: a URL, a file, or the folder of a coordinator or a run."""
    if "://" not in text and Path(text).is_dir():
        own, inner = Path(text) / "ledger.db", Path(text) / "coordinator" / "ledger.db"
        return str(inner if inner.exists() and not own.exists() else own)
    return text


@contextmanager
def open_reader(url: str) -> Iterator[Engine]:
    """Open a database that anyone may have written, to read a ledger from it (`ledger/untrusted.py`).

    Every database error becomes a one-line ConfigError.
    """
    try:
        engine = open_untrusted(url)
    except ModuleNotFoundError as error:
        install = 'in a checkout, pip install ".[postgres]"'
        raise ConfigError(f"PostgreSQL needs the package {error.name}: {install}") from None
    name = show_url(engine)
    try:
        yield engine
    except reader.RowError as error:
        raise ConfigError(f"{name}: the ledger is corrupt ({error}); see `shoal ledger verify`") from None
    except (SQLAlchemyError, sqlite3.Error) as error:  # the latter for every row but the first of a statement
        raise ConfigError(f"{name}: cannot be read ({str(error).splitlines()[0]})") from error
    except UnicodeDecodeError as error:  # in a name of the schema, or in SQLite's message about it
        raise ConfigError(f"{name}: cannot be read (text that is not UTF-8)") from error
    finally:
        engine.dispose()


@contextmanager
def read_ledger(engine: Engine) -> Iterator[Connection]:
    """A connection to a ledger whose tables have this version's schema, reading one snapshot."""
    with read_snapshot(engine) as connection:
        check_schema(connection)
        yield connection


def choose_event(connection: Connection, text: str) -> Event:
    """Find an event by its number or its hash."""
    found = None
    if text.isascii() and text.isdecimal() and len(text) < 19:
        found = reader.read_event(connection, int(text))
    elif len(text) == 64 and set(text) <= set("0123456789abcdef"):
        found = reader.find_event(connection, bytes.fromhex(text))
    if found is None:
        raise ConfigError(f"{text[:80]!r}: no event with this number or hash")
    return check_event(found)


def check_event(event: Event) -> Event:
    """Reject an event that shoal cannot have written: anyone who edits the file can put anything into it."""
    try:
        event.check_form()
    except EventError as error:
        raise reader.RowError(f"event {event.seq}: {error}") from None
    return event


def read_range(url: str, first: int | None, count: int) -> tuple[list[Event], int]:
    """`count` events starting at `first` (None: the last ones), and the size of the ledger."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        size = reader.count_events(connection)
        start = max(0, size - count) if first is None else min(max(0, first), reader.MAX_SEQ - count)
        return [check_event(event) for event in reader.read_events(connection, start, start + count)], size


def read_one(url: str, event: str) -> Event:
    """Read an event by its number or its hash."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        return choose_event(connection, event)


def prove_event(url: str, event: str) -> InclusionProof:
    """Build and check the proof that an event is in the ledger."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        chosen = choose_event(connection, event)
        genesis = choose_event(connection, "0").content
        run = str(genesis.get("run"))
        head = reader.read_newest_head(connection, run)
        if head is None or head.head.size <= chosen.seq:
            raise ConfigError(f"event {chosen.seq}: no signed head covers it yet; one is signed every minute")
        path = prove_inclusion(reader.NodeReader(connection), chosen.seq, head.head.size)
    proof = InclusionProof(chosen, head, tuple(path))
    try:
        proof.check_proof(run, str(genesis.get("coordinator")))
    except EventError as error:
        raise ConfigError(f"the ledger is corrupt ({error}); see `shoal ledger verify`") from None
    return proof


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedGroup:
    """An accepted group, as recorded in the ledger."""

    step: int
    index: int
    beacon: str = ""
    tokens: int
    reward: float
    """mean over its rollouts"""
    signal: bool


def read_groups(url: str) -> tuple[list[AcceptedGroup], str]:
    """The accepted groups of a ledger, and the hash of the recipe it started with."""
    with open_reader(url) as engine, read_ledger(engine) as connection:
        try:
            groups = list_groups(reader.read_events(connection, 0, reader.count_events(connection)))
            genesis = reader.read_event(connection, 0)
            recipe = "" if genesis is None else read_body(genesis, Genesis).recipe
        except (EventError, LookupError) as error:  # only someone who edits the file can write this
            raise reader.RowError(f"an event with missing fields: {error!s:.200}") from None
    return groups, recipe


def list_groups(events: Iterable[Event]) -> list[AcceptedGroup]:
    """The accepted groups of a ledger, by step and index."""
    beacons: dict[int, str] = {}
    steps: dict[str, int] = {}
    leases: dict[str, str] = {}
    groups: dict[str, tuple[GroupFinding, ...]] = {}
    found: dict[tuple[int, int], AcceptedGroup] = {}
    for event in events:
        match parse_event(event):
            case BatchCut() as body:
                beacons[body.step] = body.beacon
            case LeaseGrant() as body:
                steps[event.subject] = body.step
            case Manifest() as body:
                leases[f"s{event.seq}"] = body.lease
            case VerdictStatement(verdict=Verdict.ACCEPTED) as body:
                groups.setdefault(event.subject, body.groups)
            case SubmissionOutcome(state=SubmissionState.ACCEPTED):
                step = steps[leases[event.subject]]
                for group in groups.get(event.subject, ()):
                    if group.numbers is not None:
                        found[step, group.index] = AcceptedGroup(
                            step=step,
                            index=group.index,
                            tokens=group.numbers.tokens,
                            reward=group.numbers.reward / MILLION,
                            signal=group.signal,
                        )
    # The tasks of a step are known once its batch is cut.
    return [replace(found[place], beacon=beacons[place[0]]) for place in sorted(found) if place[0] in beacons]


def name_tasks(groups: Iterable[AcceptedGroup], recipe_data: bytes, tasks: Path | None) -> Iterator[dict[str, Any]]:
    """One record per group, with the task that its step, beacon and index select."""
    try:
        recipe = load_recipe(recipe_data)
    except RecipeError as error:
        raise ConfigError(f"--recipe: {error}") from None
    if recipe.set.hash:
        if tasks is None:
            raise ConfigError("--tasks: this run uses a task set; pass the file that contains it")
        recipe = recipe.bring_set(read_tasks(tasks, recipe))
    family = recipe.open_family()
    for group in groups:
        task = train_task(at_step(family, group.step), derive_seed("task", number_beacon(group.beacon), group.index))
        yield {
            "step": group.step,
            "task": task.problem,
            "index": group.index,
            "attempts": recipe.group_size,
            "reward": group.reward,
            "tokens": group.tokens,
            "signal": group.signal,
        }
