"""What Alembic runs for each command: the migrations, on the connection that `upgrade_schema` hands over."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    transactional_ddl=True,  # SQLite's too, for `db` begins its transactions itself: all of an upgrade or nothing
)
context.run_migrations()
