"""The schema's version: brought up to date before a writer starts, checked before a reader reads.

Invariant: an upgrade is one transaction; a process killed in it leaves the database as it was.
"""

from functools import cache
from pathlib import Path
from typing import NamedTuple

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine

from shoal.errors import ConfigError
from shoal.swarm.db import show_url

_FOLDER = Path(__file__).parent / "migrations"


def upgrade_schema(engine: Engine) -> None:
    """Create the tables, or bring those of an older shoal up to date."""
    config = _build_config()
    with engine.begin() as connection:
        if _read_known(connection) != _list_scripts().newest:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")


def check_schema(connection: Connection) -> None:
    """Refuse a database that has no ledger, or one of another version."""
    version, name = _read_known(connection), show_url(connection.engine)
    if version is None:
        raise ConfigError(f"{name}: holds no ledger; start its coordinator first")
    if version != _list_scripts().newest:
        raise ConfigError(f"{name}: was made by an older shoal (schema {version}); use the version that made it")


def _build_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config


class _Scripts(NamedTuple):
    newest: str | None
    known: frozenset[str]


@cache
def _list_scripts() -> _Scripts:
    """The versions that this shoal knows; read once, for they are a part of it."""
    scripts = ScriptDirectory.from_config(_build_config())
    return _Scripts(scripts.get_current_head(), frozenset(script.revision for script in scripts.walk_revisions()))


def _read_known(connection: Connection) -> str | None:
    """The database's version, None for an empty one; refuses one of a newer shoal."""
    version = MigrationContext.configure(connection).get_current_revision()
    if version is not None and version not in _list_scripts().known:
        raise ConfigError(f"{show_url(connection.engine)}: was made by a newer shoal (schema {version})")
    return version
