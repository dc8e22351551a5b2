"""A run that was started under different rules is refused with a clear message, and its database is not changed."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import inspect

from shoal.audit.verify import verify_ledger
from shoal.coordinator.coordinator import open_run
from shoal.coordinator.state import PROJECTIONS, VERSION
from shoal.errors import ConfigError
from shoal.identity.keys import Key
from shoal.ledger.db import open_database
from shoal.ledger.ledger import Ledger
from shoal.ledger.schema import RULES
from shoal.protocol.beacon import BeaconChain
from shoal.protocol.params import RunParams, dump_params

SECRET = bytes(32)


def begin_run(url: str, key: Key, **rules: object) -> None:
    """A ledger with only a genesis."""
    params = RunParams()
    genesis = {
        "beacon": BeaconChain(SECRET, params.steps).tip,
        "operator": key.public,
        "params": dump_params(params),
        "recipe": "",
        **rules,
    }
    Ledger.open(url, run="demo", key=key, genesis=genesis, projections=PROJECTIONS, linger_s=0.0).close()


def continue_run(url: str, key: Key) -> Ledger:
    return open_run(url, run="demo", key=key, operator=key.public, secret=SECRET, params=RunParams(), linger_s=0.0)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({}, "an older shoal with rules edition 1"),
        ({"rules": RULES + 1}, f"a newer shoal with rules edition {RULES + 1}"),
    ],
)
def test_a_run_of_other_rules_is_neither_verified_nor_continued(tmp_path: Path, rules, words: str) -> None:
    url, key = f"sqlite:///{tmp_path / 'old.db'}", Key.generate()
    begin_run(url, key, **rules)
    report = verify_ledger(open_database(url), projections=PROJECTIONS)
    assert [finding.check for finding in report.findings] == ["rules"]
    assert words in report.findings[0].text and "Error" not in report.findings[0].text
    with pytest.raises(ConfigError, match=words):
        continue_run(url, key)


def test_a_run_of_these_rules_is_both(tmp_path: Path) -> None:
    url, key = f"sqlite:///{tmp_path / 'run.db'}", Key.generate()
    for _ in range(2):
        ledger = continue_run(url, key)
        asyncio.run(ledger.sign_head())
        ledger.close()
    assert verify_ledger(open_database(url), projections=PROJECTIONS).holds


def test_a_database_of_an_older_schema_stays_as_it_is(tmp_path: Path) -> None:
    """Its events are those of its version: new tables would not help, and would keep that version from continuing."""
    url, key = f"sqlite:///{tmp_path / 'old.db'}", Key.generate()
    begin_run(url, key)
    engine = open_database(url)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE judge DROP COLUMN silence")
        connection.exec_driver_sql("UPDATE schema_version SET version = 4 WHERE name = 'state'")
    with pytest.raises(ConfigError, match=f"tables 'state' have version 4, this shoal needs version {VERSION}"):
        verify_ledger(engine, projections=PROJECTIONS)
    with pytest.raises(ConfigError, match="an older shoal with rules edition 1"):
        continue_run(url, key)
    assert "silence" not in {column["name"] for column in inspect(engine).get_columns("judge")}
