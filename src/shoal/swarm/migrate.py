"""The schema's version: brought up to date before a writer starts, checked before a reader reads.

Invariant: an upgrade is one transaction; a process killed in it leaves the database as it was.
"""

from pathlib import Path

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
        _check_known(config, connection)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check_schema(connection: Connection) -> None:
    """Refuse a database that has no ledger, or one of another version."""
    config = _build_config()
    _check_known(config, connection)
    if _read_version(connection) != ScriptDirectory.from_config(config).get_current_head():
        raise ConfigError(
            f"{show_url(connection.engine)}: holds no ledger, or that of an older shoal; start its coordinator first"
        )


def _build_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return config


def _read_version(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _check_known(config: Config, connection: Connection) -> None:
    version = _read_version(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise ConfigError(f"{show_url(connection.engine)}: was made by a newer shoal (schema {version})")
