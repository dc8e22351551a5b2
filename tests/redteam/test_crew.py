"""A crew: what it is told to try, that one failure is one failure, and that it goes on where it was."""

import asyncio
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.redteam.crew import ATTEMPTS, Crew, Limits, Trial, parse_trials, read_attempts


class FakeRaid:
    """An attempt that ends as its attack says."""

    def __init__(self, attack: str) -> None:
        self.owners, self.num_trials, self.taken = [attack * 4], 2, ["one: taken"]
        self._attack = attack

    async def run(self) -> tuple[str, str]:
        await asyncio.sleep(0)
        if self._attack == "int4":
            raise KeyError("rows")
        return "banned", ""


def open_crew(folder: Path, monkeypatch: pytest.MonkeyPatch, tried: list[str]) -> Crew:
    crew = Crew("http://127.0.0.1:1", folder, limits=Limits(), slots=1, memory_mb=1, note=lambda _: None)

    def make_raid(trial: Trial, place: Path) -> FakeRaid:
        assert place.is_dir() and not list(place.iterdir())
        tried.append(trial.name)
        return FakeRaid(trial.attack)

    monkeypatch.setattr(crew, "_make_raid", make_raid)
    return crew


def test_an_attack_that_breaks_is_written_down_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []
    crew = open_crew(tmp_path, monkeypatch, tried)
    asyncio.run(crew.run(parse_trials(["int4", "int8", "stale"], 2), abreast=2))
    found = {attempt.name: attempt for attempt in read_attempts(tmp_path)}
    assert set(tried) == set(found) == {f"{name}-{n}" for name in ("int4", "int8", "stale") for n in (1, 2)}
    assert found["int4-1"].ended == "failed" and "KeyError: 'rows'" in found["int4-1"].text
    assert found["int8-2"].ended == "banned" and found["int8-2"].owners == ("int8int8int8int8",)
    assert found["int8-2"].trials == 2 and found["int8-2"].taken == ("one: taken",)


def test_what_was_tried_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    trials = parse_trials(["int8", "stale"], 1)
    asyncio.run(open_crew(tmp_path, monkeypatch, tried).run(trials[:1], abreast=1))
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write('{"attack": "stale", "num')  # killed in the middle of a line
    (tmp_path / "stale-1").mkdir()
    (tmp_path / "stale-1" / "of-last-time").touch()
    asyncio.run(open_crew(tmp_path, monkeypatch, tried).run(trials, abreast=1))
    assert tried == ["int8-1", "stale-1"] and len(read_attempts(tmp_path)) == 2


def test_scripts_are_tried_once_and_burdens_last() -> None:
    names = [trial.name for trial in parse_trials(["flood", "late", "int8"], 2)]
    assert names == ["late-1", "int8-1", "int8-2", "flood-1"]


def test_a_sleeper_is_typed_with_its_share() -> None:
    (trial,) = parse_trials(["greedy@0.25"], 1)
    assert (trial.attack, trial.share, trial.name) == ("greedy", 0.25, "greedy@0.25-1")


@pytest.mark.parametrize("text", ["greedy@", "greedy@0", "greedy@1", "greedy@x", "late@0.5", "nothing"])
def test_what_is_no_attack_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--attack"):
        parse_trials([text], 1)
