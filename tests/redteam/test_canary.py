"""The operator's folder of canaries: created, sealed and planted once, and consistent after a kill."""

import os
import stat
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.protocol.beacon import make_seal
from shoal.redteam.canary import PLANTED, REVEALED, SEALED, SEALING, CanarySet, CanaryWork, load_owner


def count(nest: CanarySet) -> list[int]:
    return [len(nest.list_canaries(place)) for place in (SEALING, SEALED, PLANTED, REVEALED)]


def fill(nest: CanarySet, number: int = 3) -> None:
    nest.end_sealing(nest.begin_sealing(number))


@pytest.fixture
def nest(tmp_path: Path) -> CanarySet:
    return CanarySet(tmp_path / "canaries", "demo")


def test_what_was_begun_to_be_sealed_is_sealed_under_the_same_nonce(nest: CanarySet, tmp_path: Path) -> None:
    sealing = nest.begin_sealing(3)
    seals = nest.list_seals(sealing)
    again = CanarySet(tmp_path / "canaries", "demo")
    assert again.begin_sealing(9) == sealing and again.list_seals(sealing) == seals and len(set(seals)) == 3
    again.end_sealing(sealing)
    assert count(again) == [0, 3, 0, 0]
    assert {path.name for path in again.list_canaries(SEALED)} == {seal[:12] for seal in seals}
    assert again.begin_sealing(1) != sealing


def test_a_canary_is_planted_by_one_process_and_gone_on_with_by_the_next(nest: CanarySet) -> None:
    fill(nest)
    with nest.hold_planted() as first:
        assert make_seal(load_owner(first), "demo").startswith(first.name)
        with nest.hold_planted() as second:
            assert second != first and not nest.has_idle()
        assert count(nest) == [0, 1, 2, 0] and nest.has_idle()
    with nest.hold_planted() as again:
        assert again in (first, second), "a planted canary is preferred to a sealed one"
        (again / "weights").mkdir()
        nest.end_planted(again)
    assert count(nest) == [0, 1, 1, 1]
    (done,) = nest.list_canaries(REVEALED)
    assert (done / "owner.key").exists() and not (done / "weights").exists()


def test_an_error_without_sealed_canaries_says_what_to_do(nest: CanarySet) -> None:
    with pytest.raises(ConfigError, match="create some with `shoal canary seal`"), nest.hold_planted():
        pass


def test_a_folder_is_for_one_run_and_for_the_operators_eyes(nest: CanarySet, tmp_path: Path) -> None:
    fill(nest, 1)
    (path,) = nest.list_canaries(SEALED)
    assert stat.S_IMODE((tmp_path / "canaries").stat().st_mode) == 0o700
    assert stat.S_IMODE((path / "owner.key").stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="contains canaries of run demo"):
        CanarySet(tmp_path / "canaries", "other")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used for canaries"):
        CanarySet(tmp_path / "file", "demo")


def test_bad_work_is_known_by_its_receipts(tmp_path: Path) -> None:
    bad = CanaryWork(tmp_path)
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
    with pytest.raises(ConfigError, match="corrupt file"):
        bad.list_submissions()
