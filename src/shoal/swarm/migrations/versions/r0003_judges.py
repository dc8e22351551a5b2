"""Second opinions, what became of validators' verdicts, canaries' good work, and the groups of one owner in a step."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "doubt",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("because", sa.Text, nullable=False),
        sa.Column("share", _INT64, nullable=False),
        sa.Column("check_ppm", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "judge",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("good", _INT64, nullable=False),
        sa.Column("bad", _INT64, nullable=False),
        sa.Column("graded", _INT64, nullable=False),
        sa.Column("wrong", _INT64, nullable=False),
        sa.Column("heard_ms", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "grade",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("side", sa.Text, nullable=False),
        sa.Column("correct", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.add_column("job", sa.Column("check_ppm", _INT64, nullable=False, server_default="0"))
    op.add_column("verdict", sa.Column("signals", sa.Text, nullable=False, server_default=""))
    op.add_column("verdict", sa.Column("sure", _INT64, nullable=False, server_default="0"))
    op.add_column("canary", sa.Column("good", _INT64, nullable=False, server_default="0"))
    op.create_index("lease_share", "lease", ["step", "owner"])
    op.create_index("lease_newest", "lease", ["step", "granted_ms"])
