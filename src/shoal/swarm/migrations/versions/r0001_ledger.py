"""The ledger: events, postings, heads, nodes of the Merkle tree, balances; rows that cannot be changed or deleted.

The tables are spelled out here and not taken from `db`, which goes on changing while this file stays as it is.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_TABLES = ("event", "posting", "head", "merkle_node")

# REPLACE deletes without asking the trigger on DELETE, so what it would replace is refused before.
_SQLITE_KEYS = {
    "event": "seq = NEW.seq OR hash = NEW.hash",
    "posting": "seq = NEW.seq AND line = NEW.line",
    "head": "size = NEW.size",
    "merkle_node": "level = NEW.level AND position = NEW.position",
}


def upgrade() -> None:
    """Create the tables and what guards them."""
    _create_chain()
    _create_derived()
    if op.get_bind().dialect.name == "sqlite":
        _guard_sqlite()
    else:
        _guard_postgres()


def _create_chain() -> None:
    op.create_table(
        "event",
        sa.Column("seq", _INT64, primary_key=True, autoincrement=False),
        sa.Column("time_ms", _INT64, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("actor", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False, index=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sa.Column("prev_hash", sa.LargeBinary, nullable=False),
        sa.Column("hash", sa.LargeBinary, nullable=False, unique=True),
        sqlite_strict=True,
    )
    op.create_table(
        "posting",
        sa.Column("seq", _INT64, sa.ForeignKey("event.seq"), primary_key=True, autoincrement=False),
        sa.Column("line", _INT64, primary_key=True, autoincrement=False),
        sa.Column("account", sa.Text, nullable=False, index=True),
        sa.Column("amount", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_derived() -> None:
    op.create_table(
        "head",
        sa.Column("size", _INT64, primary_key=True, autoincrement=False),
        sa.Column("time_ms", _INT64, nullable=False),
        sa.Column("root", sa.LargeBinary, nullable=False),
        sa.Column("last_hash", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "merkle_node",
        sa.Column("level", _INT64, primary_key=True, autoincrement=False),
        sa.Column("position", _INT64, primary_key=True, autoincrement=False),
        sa.Column("hash", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "balance",
        sa.Column("account", sa.Text, primary_key=True),
        sa.Column("amount", _INT64, sa.CheckConstraint("amount >= 0 OR account = 'mint'"), nullable=False),
        sqlite_strict=True,
    )


def _guard_sqlite() -> None:
    for table in _TABLES:
        refuse = f"SELECT RAISE(ABORT, 'the table {table} is append-only')"
        for verb in ("update", "delete"):
            op.execute(f"CREATE TRIGGER {table}_no_{verb} BEFORE {verb} ON {table} BEGIN {refuse}; END")
        op.execute(
            f"CREATE TRIGGER {table}_no_replace BEFORE INSERT ON {table} "
            f"BEGIN {refuse} WHERE EXISTS (SELECT 1 FROM {table} WHERE {_SQLITE_KEYS[table]}); END"
        )


def _guard_postgres() -> None:
    op.execute(
        "CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$ "
        "BEGIN RAISE EXCEPTION 'the table % is append-only', TG_TABLE_NAME; END $$"
    )
    for table in _TABLES:
        call = "EXECUTE FUNCTION refuse_change()"
        op.execute(f"CREATE TRIGGER {table}_no_change BEFORE UPDATE OR DELETE ON {table} FOR EACH ROW {call}")
        op.execute(f"CREATE TRIGGER {table}_no_truncate BEFORE TRUNCATE ON {table} FOR EACH STATEMENT {call}")
