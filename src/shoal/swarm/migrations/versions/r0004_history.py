"""What owners' accepted groups are like: numbers that wait, bags by version, evidence by owner."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "group_numbers",
        sa.Column("step", _INT64, primary_key=True, autoincrement=False),
        sa.Column("position", _INT64, primary_key=True, autoincrement=False),
        sa.Column("submission", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("author", sa.Text, nullable=False),
        sa.Column("version", _INT64, nullable=False),
        sa.Column("numbers", sa.Text, nullable=False),
        sa.Column("drift", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "history_bag",
        sa.Column("version", _INT64, primary_key=True, autoincrement=False),
        sa.Column("length", sa.LargeBinary, nullable=False),
        sa.Column("reward", sa.LargeBinary, nullable=False),
        sa.Column("entropy", sa.LargeBinary, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "history",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("num_groups", _INT64, nullable=False),
        sa.Column("num_submissions", _INT64, nullable=False),
        sa.Column("wealth", sa.Text, nullable=False),
        sa.Column("peak", _INT64, nullable=False),
        sa.Column("leader", sa.Text, nullable=False),
        sa.Column("watch_seq", _INT64, nullable=False),
        sa.Column("remaining", _INT64, nullable=False),
        sa.Column("because", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("history_watch", "history", ["watch_seq", "peak"])
