"""Which edition of the rules a run was begun under; its genesis says so. No other can take its decisions again.

Tables can be brought up to date, events cannot: what a decision of that time did not write down is not there.
"""

from sqlalchemy import inspect

from shoal.errors import ConfigError
from shoal.swarm.db import EVENT, open_engine, show_url
from shoal.swarm.event import Event
from shoal.swarm.rows import RowError, read_event

RULES = 3
"""Changing breaks: every run that was begun. It changes when a decision does, or what an event says of one."""


def describe_edition(genesis: Event) -> str:
    """How a run was begun, if under other rules than these; nothing if these are its rules."""
    edition = genesis.content.get("rules", 1)
    if edition == RULES:
        return ""
    age = "an older" if isinstance(edition, int) and edition < RULES else "a newer"
    return (
        f"begun by {age} shoal, under edition {edition!a:.20} of the rules, and this one has edition {RULES}; "
        "the version that began it can go on with it, and verify it"
    )


def check_edition(url: str) -> None:
    """Refuse to go on with a run that was begun under other rules; before anything in its database is changed."""
    engine = open_engine(url)
    try:
        with engine.connect() as connection:
            genesis = read_event(connection, 0) if inspect(connection).has_table(EVENT.name) else None
        words = "" if genesis is None else describe_edition(genesis)
    except (RowError, ValueError):
        return  # damaged: the ledger says where when it is opened
    finally:
        engine.dispose()
    if words:
        raise ConfigError(f"{show_url(engine)}: {words}")
