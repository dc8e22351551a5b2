"""Versions of the database's schema, one file each; `migrate.upgrade_schema` runs them."""
