"""The operator's folder of canaries: made once, sealed once, planted once, and whole after a kill."""

import os
import stat
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.redteam.bad_work import BadWork
from shoal.redteam.nest import PLANTED, REVEALED, SEALED, SEALING, Nest, load_owner
from shoal.swarm.seals import make_seal


def count(nest: Nest) -> list[int]:
    return [len(nest.list_canaries(place)) for place in (SEALING, SEALED, PLANTED, REVEALED)]


def fill(nest: Nest, number: int = 3) -> None:
    nest.end_sealing(nest.begin_sealing(number))


@pytest.fixture
def nest(tmp_path: Path) -> Nest:
    return Nest(tmp_path / "canaries", "demo")


def test_what_was_begun_to_be_sealed_is_sealed_under_the_same_nonce(nest: Nest, tmp_path: Path) -> None:
    sealing = nest.begin_sealing(3)
    seals = nest.list_seals(sealing)
    again = Nest(tmp_path / "canaries", "demo")
    assert again.begin_sealing(9) == sealing and again.list_seals(sealing) == seals and len(set(seals)) == 3
    again.end_sealing(sealing)
    assert count(again) == [0, 3, 0, 0]
    assert {path.name for path in again.list_canaries(SEALED)} == {seal[:12] for seal in seals}
    assert again.begin_sealing(1) != sealing


def test_a_canary_is_planted_by_one_process_and_gone_on_with_by_the_next(nest: Nest) -> None:
    fill(nest)
    with nest.hold_planted() as first:
        assert make_seal(load_owner(first), "demo").startswith(first.name)
        with nest.hold_planted() as second:
            assert second != first and not nest.has_idle()
        assert count(nest) == [0, 1, 2, 0] and nest.has_idle()
    with nest.hold_planted() as again:
        assert again in (first, second), "one that is out goes before one in stock"
        (again / "weights").mkdir()
        nest.end_planted(again)
    assert count(nest) == [0, 1, 1, 1]
    (done,) = nest.list_canaries(REVEALED)
    assert (done / "owner.key").exists() and not (done / "weights").exists()


def test_an_empty_stock_says_what_to_do(nest: Nest) -> None:
    with pytest.raises(ConfigError, match="make some with `shoal canary seal`"), nest.hold_planted():
        pass


def test_a_folder_is_for_one_run_and_for_the_operators_eyes(nest: Nest, tmp_path: Path) -> None:
    fill(nest, 1)
    (path,) = nest.list_canaries(SEALED)
    assert stat.S_IMODE((tmp_path / "canaries").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "owner.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="has the canaries of run demo"):
        Nest(tmp_path / "canaries", "other")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used for canaries"):
        Nest(tmp_path / "file", "demo")


def test_bad_work_is_known_by_its_receipts(tmp_path: Path) -> None:
    bad = BadWork(tmp_path)
    assert bad.list_submissions() == []
    for lease in ("l2", "l7"):
        bad.add(lease)
    (tmp_path / "receipts").mkdir()
    for submission, lease in (("s30", "l7"), ("s4", "l2"), ("s9", "l5")):
        (tmp_path / "receipts" / f"{submission}.json").write_text(
            f'{{"body":{{"lease":"{lease}","submission":"{submission}"}}}}'
        )
    assert bad.list_submissions() == ["s4", "s30"]
    os.truncate(tmp_path / "bad.json", 3)
    with pytest.raises(ConfigError, match="is damaged"):
        bad.list_submissions()
