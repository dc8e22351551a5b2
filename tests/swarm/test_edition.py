"""A run that was begun under other rules is told so in a sentence, and nothing in its database is changed."""

from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import inspect

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.swarm.beacon import BeaconChain
from shoal.swarm.coordinator import open_run
from shoal.swarm.db import open_engine
from shoal.swarm.edition import RULES
from shoal.swarm.ledger import Ledger
from shoal.swarm.migrate import _build_config
from shoal.swarm.params import RunParams, dump_params
from shoal.swarm.state import PROJECTIONS
from shoal.swarm.verify import verify_ledger

SECRET = bytes(32)


def begin_run(url: str, key: Key, **rules: object) -> None:
    """A ledger that has a genesis and nothing else."""
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
    [({}, "an older shoal, under edition 1"), ({"rules": RULES + 1}, "a newer shoal, under edition 4")],
)
def test_a_run_of_other_rules_is_neither_verified_nor_continued(tmp_path: Path, rules, words: str) -> None:
    url, key = f"sqlite:///{tmp_path / 'old.db'}", Key.generate()
    begin_run(url, key, **rules)
    report = verify_ledger(open_engine(url), projections=PROJECTIONS)
    assert [finding.check for finding in report.findings] == ["law"]
    assert words in report.findings[0].text and "Error" not in report.findings[0].text
    with pytest.raises(ConfigError, match=words):
        continue_run(url, key)


def test_a_run_of_these_rules_is_both(tmp_path: Path) -> None:
    url, key = f"sqlite:///{tmp_path / 'run.db'}", Key.generate()
    for _ in range(2):
        continue_run(url, key).close()
    assert verify_ledger(open_engine(url), projections=PROJECTIONS).holds


def test_a_database_of_an_older_schema_stays_as_it_is(tmp_path: Path) -> None:
    """Its events are those of its time: new tables would help nobody, and keep what made it from going on."""
    url, key = f"sqlite:///{tmp_path / 'old.db'}", Key.generate()
    begin_run(url, key)
    engine, config = open_engine(url), _build_config()
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE judge DROP COLUMN silence")
        config.attributes["connection"] = connection
        command.stamp(config, "0004")
    with pytest.raises(ConfigError, match=r"made by an older shoal \(schema 0004\)"):
        verify_ledger(engine, projections=PROJECTIONS)
    with pytest.raises(ConfigError, match="an older shoal, under edition 1"):
        continue_run(url, key)
    assert "silence" not in {column["name"] for column in inspect(engine).get_columns("judge")}
