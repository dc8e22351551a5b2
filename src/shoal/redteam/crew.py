"""A crew: attacks one after another in one process, a few abreast, each by the nodes that it would be elsewhere.

    <folder>/<attempt>/<node>/     keys, orders and receipts of each node of an attempt
    <folder>/attempts.jsonl        what was tried, a line for each attempt that is over

Invariants:
- every attempt has nodes and owners of its own, who joined by the work that joining costs: what the ledger says of
  these owners is what became of the attempt;
- an attempt is over when its first owner is banned or limited, when as much of its work was judged as was asked for, or
  when its time is. What an attack raises ends that attempt alone, and is written down;
- what was written down is not tried again after a restart; what was under way is, by new owners.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from shoal.errors import ConfigError
from shoal.files import append_line, repair_jsonl
from shoal.redteam.registry import ATTACKS, check_cheat, find_attack

ATTEMPTS = "attempts.jsonl"
_BURDENS = frozenset({"hoarding", "sybil", "flood"})
Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an attempt is over, if nobody ended it before."""

    submissions: int = 12
    """of its first owner that were judged"""
    seconds: float = 90.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is to be tried: an attack, for the how many-th time."""

    attack: str
    number: int
    share: float = 1.0
    """of its submissions that are bad; below 1 it is a sleeper, which works honestly until it is in good standing"""

    @property
    def name(self) -> str:
        """Of its folder, and in tables."""
        return f"{self.spell()}-{self.number}"

    def spell(self) -> str:
        """As it is typed."""
        return self.attack if self.share == 1.0 else f"{self.attack}@{self.share:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What was tried, by whom, and why it ended. What it brought stands in the ledger."""

    attack: str
    number: int
    share: float
    owners: tuple[str, ...]
    """public keys; the first is the one that is to gain"""
    ended: str
    """unwanted, banned, limited, judged, late, done or failed"""
    text: str = ""
    seconds: float = 0.0
    trials: int = 0
    """things that a script did and that must be refused"""
    taken: tuple[str, ...] = ()
    """those that were not, or for another reason"""

    @property
    def name(self) -> str:
        return Trial(attack=self.attack, number=self.number, share=self.share).name


def parse_trials(texts: Sequence[str], repeat: int) -> list[Trial]:
    """Attacks as they are typed, `NAME` or `NAME@SHARE`, each so many times; ConfigError for what is none.

    A script does the same each time, and is tried once. Those that are a burden to all come last.
    """
    trials = [_parse_trial(text, number) for number in range(1, repeat + 1) for text in texts]
    once = [trial for trial in trials if trial.number == 1 or not ATTACKS[trial.attack].scripted]
    return sorted(once, key=lambda trial: trial.attack in _BURDENS)


def read_attempts(folder: Path) -> list[Attempt]:
    """What a crew has tried so far."""
    path = folder / ATTEMPTS
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]
    found = [json.loads(line) for line in lines]
    return [Attempt(**{**line, "owners": tuple(line["owners"]), "taken": tuple(line["taken"])}) for line in found]


class Raid(Protocol):
    """An attempt while it is made."""

    owners: list[str]
    num_trials: int
    taken: list[str]

    def run(self) -> Coroutine[Any, Any, tuple[str, str]]:
        """Why it ended, in a word and a sentence."""


class Crew:
    """Tries attacks against the run of a coordinator."""

    def __init__(self, url: str, folder: Path, *, limits: Limits, slots: int, memory_mb: int, note: Note) -> None:
        self._url, self._folder, self._limits, self._note = url, folder, limits, note
        self._slots, self._memory_mb = slots, memory_mb
        folder.mkdir(parents=True, exist_ok=True)
        repair_jsonl(folder / ATTEMPTS)
        self._under_way: set[str] = set()
        self.num_done = 0

    async def run(self, trials: Sequence[Trial], *, abreast: int) -> None:
        """Try all that was not tried yet, so many at a time."""
        known = {attempt.name for attempt in read_attempts(self._folder)}
        waiting = iter([trial for trial in trials if trial.name not in known])
        self.num_done = len(known)
        async with asyncio.TaskGroup() as group:
            for _ in range(abreast):
                group.create_task(self._take_turns(waiting))

    def describe(self) -> str:
        """One line for whoever watches."""
        return f"{self.num_done} tried; now {', '.join(sorted(self._under_way)) or 'nothing'}"

    async def _take_turns(self, waiting: Iterator[Trial]) -> None:
        for trial in waiting:
            self._under_way.add(trial.name)
            attempt = await self._try(trial)
            append_line(self._folder / ATTEMPTS, json.dumps(asdict(attempt)))
            self._under_way.discard(trial.name)
            self.num_done += 1
            self._note(f"{attempt.name}: {attempt.ended} after {attempt.seconds:.0f} s {attempt.text}".rstrip())

    async def _try(self, trial: Trial) -> Attempt:
        folder, began = self._folder / trial.name, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        raid = self._make_raid(trial, folder)
        ended, text = await _isolate(raid.run())
        for path in folder.glob("**/weights"):
            shutil.rmtree(path, ignore_errors=True)
        return Attempt(
            attack=trial.attack,
            number=trial.number,
            share=trial.share,
            owners=tuple(raid.owners),
            ended=ended,
            text=text,
            seconds=round(time.monotonic() - began, 1),
            trials=raid.num_trials,
            taken=tuple(raid.taken),
        )

    def _make_raid(self, trial: Trial, folder: Path) -> Raid:
        if ATTACKS[trial.attack].scripted:
            from shoal.redteam.script import Script

            return Script(trial.attack, self._url, folder, seconds=self._limits.seconds)
        from shoal.redteam.gang import Gang

        return Gang(trial, self._url, folder, limits=self._limits, slots=self._slots, memory_mb=self._memory_mb)


async def _isolate(work: Coroutine[Any, Any, tuple[str, str]]) -> tuple[str, str]:
    """How an attempt ended, whatever it raised; to be cancelled it is not kept from."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    error = task.exception()
    return task.result() if error is None else ("failed", f"{type(error).__name__}: {error}"[:400])


def _parse_trial(text: str, number: int) -> Trial:
    name, _, tail = text.partition("@")
    attack = find_attack(name)
    if not tail and "@" not in text:
        return Trial(attack=attack.name, number=number)
    check_cheat(name)
    try:
        share = float(tail)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise ConfigError(f"--attack {text}: what follows @ is the share that a sleeper cheats on, such as 0.25")
    return Trial(attack=attack.name, number=number, share=share)
