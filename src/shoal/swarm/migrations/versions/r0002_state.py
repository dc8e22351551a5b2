"""The state of a run: owners and nodes, steps, spans, leases, submissions, the queue, credit that is not free.

The tables are spelled out here and not taken from `state`, which goes on changing while this file stays as it is.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

_INT64 = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Create the tables."""
    _create_run()
    _create_members()
    _create_steps()
    _create_spans()
    _create_leases()
    _create_submissions()
    _create_queue()
    _create_credit()
    _create_claims()
    _create_canaries()


def _create_run() -> None:
    op.create_table(
        "run_state",
        sa.Column("run", sa.Text, primary_key=True),
        sa.Column("operator", sa.Text, nullable=False),
        sa.Column("beacon", sa.Text, nullable=False),
        sa.Column("params", sa.Text, nullable=False),
        sa.Column("stopped", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "command",
        sa.Column("nonce", sa.Text, primary_key=True),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "outage",
        sa.Column("seq", _INT64, primary_key=True, autoincrement=False),
        sa.Column("until_ms", _INT64, nullable=False),
        sa.Column("away_ms", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_members() -> None:
    op.create_table(
        "owner",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("standing", sa.Text, nullable=False),
        sa.Column("since_ms", _INT64, nullable=False),
        sa.Column("accepted", _INT64, nullable=False),
        sa.Column("rejected", _INT64, nullable=False),
        sa.Column("soft_row", _INT64, nullable=False),
        sa.Column("staked", _INT64, nullable=False),
        sa.Column("tokens", _INT64, nullable=False),
        sa.Column("earned", _INT64, nullable=False),
        sa.Column("lapses", _INT64, nullable=False),
        sa.Column("failures", _INT64, nullable=False),
        sa.Column("failed_ms", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("owner_standing", "owner", ["standing", "since_ms", "owner"])
    op.create_index("owner_rank", "owner", ["tokens", "owner"])
    op.create_table(
        "node",
        sa.Column("node", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("scopes", sa.Text, nullable=False),
        sa.Column("not_before_ms", _INT64, nullable=False),
        sa.Column("not_after_ms", _INT64, nullable=False),
        sa.Column("max_leases", _INT64, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("joined_ms", _INT64, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sa.Column("gone", sa.Text, nullable=False),
        sa.Column("width", _INT64, nullable=False),
        sa.Column("progress", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_node_owner", "node", ["owner"])
    op.create_table(
        "ban",
        sa.Column("target", sa.Text, primary_key=True),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_steps() -> None:
    op.create_table(
        "step",
        sa.Column("step", _INT64, primary_key=True, autoincrement=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("beacon", sa.Text, nullable=False),
        sa.Column("next_index", _INT64, nullable=False),
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("opened_ms", _INT64, nullable=False),
        sa.Column("delivered_ms", _INT64, nullable=False),
        sa.Column("cut_ms", _INT64, nullable=False),
        sa.Column("trained_ms", _INT64, nullable=False),
        sa.Column("leased", _INT64, nullable=False),
        sa.Column("offered", _INT64, nullable=False),
        sa.Column("delivered", _INT64, nullable=False),
        sa.Column("signal", _INT64, nullable=False),
        sa.Column("dull", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_step_state", "step", ["state"])
    op.create_table(
        "version",
        sa.Column("version", _INT64, primary_key=True, autoincrement=False),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("manifest", sa.Text, nullable=False),
        sa.Column("batch", sa.Text, nullable=False),
        sa.Column("published_ms", _INT64, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_spans() -> None:
    op.create_table(
        "span",
        sa.Column("step", _INT64, primary_key=True, autoincrement=False),
        sa.Column("first", _INT64, primary_key=True, autoincrement=False),
        sa.Column("count", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("fence", _INT64, nullable=False),
        sa.Column("holders", _INT64, nullable=False),
        sa.Column("reserved", sa.Text, nullable=False),
        sa.Column("granted_ms", _INT64, nullable=False),
        sa.Column("offered_ms", _INT64, nullable=False),
        sa.Column("submission", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    _index_some("span_offer", "span", ["step", "reserved", "first"], "state = 'offered'")
    _index_some("span_offered", "span", ["step", "offered_ms", "first"], "state = 'offered'")
    _index_some("span_slow", "span", ["step", "granted_ms", "first"], "state = 'leased' AND holders = 1")
    op.create_table(
        "trained_group",
        sa.Column("step", _INT64, primary_key=True, autoincrement=False),
        sa.Column("position", _INT64, primary_key=True, autoincrement=False),
        sa.Column("submission", sa.Text, nullable=False),
        sa.Column("place", _INT64, nullable=False),
        sa.Column("version", _INT64, nullable=False),
        sa.Column("blob", sa.Text, nullable=False),
        sa.Column("signal", _INT64, nullable=False),
        sa.Column("batched", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_leases() -> None:
    op.create_table(
        "lease",
        sa.Column("lease", sa.Text, primary_key=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("request_key", sa.Text, nullable=False),
        sa.Column("step", _INT64, nullable=False),
        sa.Column("first", _INT64, nullable=False),
        sa.Column("count", _INT64, nullable=False),
        sa.Column("fence", _INT64, nullable=False),
        sa.Column("backup", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("granted_ms", _INT64, nullable=False),
        sa.Column("deadline_ms", _INT64, nullable=False),
        sa.Column("ended_ms", _INT64, nullable=False),
        sa.Column("upload_s", _INT64, nullable=False),
        sa.Column("duplicate_tokens", _INT64, nullable=False),
        sa.Column("newest_version", _INT64, nullable=False),
        sa.Column("price", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("lease_due", "lease", ["state", "deadline_ms"])
    op.create_index("lease_holder", "lease", ["state", "owner"])
    op.create_index("lease_request", "lease", ["node", "request_key"], unique=True)
    op.create_index("lease_span", "lease", ["step", "first"])
    op.create_index("lease_slow", "lease", ["step", "state", "granted_ms"])


def _create_submissions() -> None:
    op.create_table(
        "submission",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("lease", sa.Text, nullable=False, unique=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("step", _INT64, nullable=False),
        sa.Column("first", _INT64, nullable=False),
        sa.Column("count", _INT64, nullable=False),
        sa.Column("version", _INT64, nullable=False),
        sa.Column("blob", sa.Text, nullable=False),
        sa.Column("size", _INT64, nullable=False),
        sa.Column("tokens", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("committed_ms", _INT64, nullable=False),
        sa.Column("upload_ms", _INT64, nullable=False),
        sa.Column("received_ms", _INT64, nullable=False),
        sa.Column("decided_ms", _INT64, nullable=False),
        sa.Column("paid", _INT64, nullable=False),
        sa.Column("dropped", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_submission_blob", "submission", ["blob"])
    op.create_index("submission_kept", "submission", ["dropped", "state", "decided_ms"])
    op.create_index("submission_span", "submission", ["step", "first"])
    op.create_index("submission_due", "submission", ["state", "upload_ms"])
    op.create_index("submission_owner", "submission", ["owner", "state"])
    op.create_table(
        "rollout",
        sa.Column("hash", sa.Text, primary_key=True),
        sa.Column("submission", sa.Text, nullable=False),
        sa.Column("step", _INT64, nullable=False),
        sa.Column("position", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "duplicate",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("place", _INT64, primary_key=True, autoincrement=False),
        sa.Column("position", _INT64, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("rival", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_duplicate_rival", "duplicate", ["rival"])


def _create_queue() -> None:
    op.create_table(
        "job",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("round", _INT64, nullable=False),
        sa.Column("since_ms", _INT64, nullable=False),
        sa.Column("claims", _INT64, nullable=False),
        sa.Column("validator", sa.Text, nullable=False),
        sa.Column("deadline_ms", _INT64, nullable=False),
        sa.Column("appeal", _INT64, nullable=False),
        sa.Column("judge", sa.Text, nullable=False),
        sa.Column("turn", _INT64, nullable=False),
        sa.Column("blocked", _INT64, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )
    waiting, claimed = "state = 'queued' AND validator = ''", "state = 'queued' AND validator <> ''"
    _index_some("job_queued", "job", ["since_ms"], "state = 'queued'")
    _index_some("job_next", "job", ["judge", "turn", "seq"], f"{waiting} AND blocked = 0")
    _index_some("job_owner", "job", ["owner"], "state = 'queued'")
    _index_some("job_validator", "job", ["validator"], claimed)
    _index_some("job_claimed", "job", ["deadline_ms", "submission"], claimed)
    _index_some("job_tired", "job", ["claims", "submission"], waiting)
    _index_some("job_doubted", "job", ["since_ms", "submission"], f"{waiting} AND (round > 1 OR appeal = 1)")
    op.create_table(
        "served_owner",
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "verdict",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("round", _INT64, primary_key=True, autoincrement=False),
        sa.Column("validator", sa.Text, nullable=False),
        sa.Column("verdict", sa.Text, nullable=False),
        sa.Column("tokens", _INT64, nullable=False),
        sa.Column("crashed", _INT64, nullable=False),
        sa.Column("appeal", _INT64, nullable=False),
        sa.Column("time_ms", _INT64, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("paid", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_table(
        "lapse",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("validator", sa.Text, nullable=False),
        sa.Column("round", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_credit() -> None:
    op.create_table(
        "hold",
        sa.Column("seq", _INT64, primary_key=True, autoincrement=False),
        sa.Column("line", _INT64, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("amount", _INT64, nullable=False),
        sa.Column("made_ms", _INT64, nullable=False),
        sa.Column("number", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("hold_due", "hold", ["state", "made_ms", "seq", "line"])
    op.create_index("hold_owner", "hold", ["owner", "state", "number"])
    op.create_table(
        "bond",
        sa.Column("seq", _INT64, primary_key=True, autoincrement=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("amount", _INT64, nullable=False),
        sa.Column("free_ms", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("bond_due", "bond", ["state", "free_ms", "seq"])
    op.create_index("bond_request", "bond", ["request"])
    op.create_index("bond_owner", "bond", ["owner", "state"])
    op.create_table(
        "loss",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, primary_key=True),
        sa.Column("amount", _INT64, nullable=False),
        sqlite_strict=True,
    )


def _create_claims() -> None:
    op.create_table(
        "appeal",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("opened_ms", _INT64, nullable=False),
        sa.Column("fee", _INT64, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_appeal_owner", "appeal", ["owner"])
    op.create_table(
        "redeem",
        sa.Column("request", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("amount", _INT64, nullable=False),
        sa.Column("goal", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("asked_ms", _INT64, nullable=False),
        sa.Column("ended_ms", _INT64, nullable=False),
        sa.Column("seq", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("redeem_state", "redeem", ["state", "asked_ms"])


def _create_canaries() -> None:
    op.create_table(
        "seal",
        sa.Column("seal", sa.Text, primary_key=True),
        sa.Column("seq", _INT64, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_seal_owner", "seal", ["owner"])
    op.create_table(
        "canary",
        sa.Column("submission", sa.Text, primary_key=True),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("missed_by", sa.Text, nullable=False),
        sa.Column("trained", _INT64, nullable=False),
        sa.Column("graded_ms", _INT64, nullable=False),
        sqlite_strict=True,
    )
    op.create_index("ix_canary_owner", "canary", ["owner"])
    op.create_index("canary_state", "canary", ["state", "graded_ms"])


def _index_some(name: str, table: str, columns: list[str], condition: str) -> None:
    """An index of the rows for which something holds."""
    op.create_index(name, table, columns, sqlite_where=sa.text(condition), postgresql_where=sa.text(condition))
