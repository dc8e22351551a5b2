"""How often validators say nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

_INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Add the column."""
    op.add_column("judge", sa.Column("silence", _INT64, nullable=False, server_default="0"))
