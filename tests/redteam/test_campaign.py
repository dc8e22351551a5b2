"""A campaign: parsing of attacks, isolation of failures, and resuming."""

import asyncio
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.redteam.campaign import ATTEMPTS, AttackAttempt, AttemptLimits, Campaign, parse_attempts, read_attempts


def open_campaign(folder: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str]) -> Campaign:
    """A campaign whose attempts end as their attacks say."""
    campaign = Campaign("http://127.0.0.1:1", folder, AttemptLimits())

    async def make_attempt(trial: AttackAttempt, place: Path) -> None:
        assert place.is_dir() and not list(place.iterdir())
        tried.append(trial.name)
        trial.owners, trial.trials, trial.taken = [trial.attack * 4], 2, ["one: taken"]
        await asyncio.sleep(0)
        if trial.attack == "int4":
            raise KeyError("rows")
        trial.ended = "banned"

    monkeypatch.setattr(campaign, "_make_attempt", make_attempt)
    return campaign


def test_an_attack_that_breaks_is_written_down_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    campaign = open_campaign(tmp_path, monkeypatch, tried)
    asyncio.run(campaign.run(parse_attempts(["int4", "int8", "stale"], 2), parallel=2))
    found = {attempt.name: attempt for attempt in read_attempts(tmp_path)}
    assert set(tried) == set(found) == {f"{name}-{n}" for name in ("int4", "int8", "stale") for n in (1, 2)}
    assert found["int4-1"].ended == "failed" and "KeyError: 'rows'" in found["int4-1"].text
    assert found["int8-2"].ended == "banned" and found["int8-2"].owners == ["int8int8int8int8"]
    assert found["int8-2"].trials == 2 and found["int8-2"].taken == ["one: taken"]


def test_what_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    trials = parse_attempts(["int8", "stale"], 1)
    asyncio.run(open_campaign(tmp_path, monkeypatch, tried).run(trials[:1], parallel=1))
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write('{"attack": "stale", "num')  # killed in the middle of a line
    (tmp_path / "stale-1").mkdir()
    (tmp_path / "stale-1" / "of-last-time").touch()
    asyncio.run(open_campaign(tmp_path, monkeypatch, tried).run(trials, parallel=1))
    assert tried == ["int8-1", "stale-1"] and len(read_attempts(tmp_path)) == 2


def test_scripts_are_tried_once_and_burdens_last() -> None:
    names = [trial.name for trial in parse_attempts(["flood", "late", "int8"], 2)]
    assert names == ["late-1", "int8-1", "int8-2", "flood-1"]


def test_a_sleeper_is_typed_with_its_share() -> None:
    (trial,) = parse_attempts(["greedy@0.25"], 1)
    assert (trial.attack, trial.share, trial.name) == ("greedy", 0.25, "greedy@0.25-1")


@pytest.mark.parametrize("text", ["greedy@", "greedy@0", "greedy@1", "greedy@x", "late@0.5", "nothing"])
def test_what_is_no_attack_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--attack"):
        parse_attempts([text], 1)
