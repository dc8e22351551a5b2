"""A campaign: attacks one after another in one process, a few in parallel, each with its own nodes.

    <folder>/<attempt>/<node>/     keys, orders and receipts of each node of an attempt
    <folder>/attempts.jsonl        the finished attempts, one line each

Invariants:
- every attempt has its own nodes and owners, which did the proof of work for joining: what the ledger records about
  these owners is the outcome of the attempt;
- an attempt ends when its first owner is banned or limited, when a manifest is refused for what it says, when enough of
  its work was judged, or when its time is up. An exception in an attack ends only that attempt, and is recorded;
- after a restart, recorded attempts are not repeated; attempts that were in progress are repeated with new owners.
"""

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.errors import ConfigError
from shoal.redteam.registry import check_worker_attack, find_attack
from shoal.util.files import append_line, repair_jsonl

logger = logging.getLogger(__name__)

ATTEMPTS = "attempts.jsonl"
_DISRUPTIVE = frozenset({"hoarding", "sybil", "flood", "fill_store", "neighbour"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptLimits:
    """When an attempt ends if it was not stopped before, and the resources of its workers."""

    submissions: int = 12
    """judged submissions of its first owner"""
    seconds: float = 90.0
    slots: int = 64
    memory_mb: int = 1024


@dataclass(slots=True, kw_only=True)
class AttackAttempt:
    """One attempt at an attack. The first fields are the plan, the others are filled in when it runs. Its gain is in
    the ledger."""

    attack: str
    number: int
    """index among the attempts of this attack"""
    share: float = 1.0
    """share of bad submissions; below 1 it is a sleeper, which works honestly until it has good standing"""
    owners: Sequence[str] = ()
    """public keys; the first one is the one that should gain"""
    ended: str = ""
    """unwanted, banned, limited, refused, judged, late, done or failed; empty before its end"""
    text: str = ""
    """why it ended"""
    seconds: float = 0.0
    trials: int = 0
    """requests of a script that must be refused"""
    taken: Sequence[str] = ()
    """those that were accepted, or refused for a wrong reason"""
    unchanged: Sequence[str] = ()
    """leases of its first worker whose work is honest: the attack found nothing to change"""

    @property
    def name(self) -> str:
        """Name of its folder, also used in tables."""
        return f"{self.attack}-{self.number}" if self.share == 1.0 else f"{self.attack}@{self.share:g}-{self.number}"


def parse_attempts(texts: Sequence[str], repeat: int) -> list[AttackAttempt]:
    """Parse attacks as typed, `NAME` or `NAME@SHARE`, each `repeat` times; ConfigError for an unknown one.

    Scripts are deterministic and are tried once. Attacks that load the whole swarm come last.
    """
    planned = [_parse_attempt(text, number) for number in range(1, repeat + 1) for text in texts]
    once = [attempt for attempt in planned if attempt.number == 1 or not find_attack(attempt.attack).scripted]
    return sorted(once, key=lambda attempt: attempt.attack in _DISRUPTIVE)


def read_attempts(folder: Path) -> list[AttackAttempt]:
    """The finished attempts of a campaign."""
    path = folder / ATTEMPTS
    if not path.exists():
        return []
    return [AttackAttempt(**json.loads(line)) for line in path.read_text().split("\n")[:-1]]


class Campaign:
    """Runs attacks against the run of a coordinator."""

    def __init__(self, url: str, folder: Path, limits: AttemptLimits) -> None:
        self._url, self._folder, self._limits = url, folder, limits
        folder.mkdir(parents=True, exist_ok=True)
        repair_jsonl(folder / ATTEMPTS)
        self._in_progress: set[str] = set()
        self.num_done = 0

    async def run(self, planned: Sequence[AttackAttempt], *, parallel: int) -> None:
        """Run all attempts that are not finished, `parallel` at a time."""
        known = {attempt.name for attempt in read_attempts(self._folder)}
        waiting = iter([attempt for attempt in planned if attempt.name not in known])
        self.num_done = len(known)
        async with asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(self._try_next(waiting))

    def describe(self) -> str:
        """One line of progress."""
        return f"{self.num_done} tried; now {', '.join(sorted(self._in_progress)) or 'nothing'}"

    async def _try_next(self, waiting: Iterator[AttackAttempt]) -> None:
        for attempt in waiting:
            self._in_progress.add(attempt.name)
            await self._try(attempt)
            append_line(self._folder / ATTEMPTS, json.dumps(asdict(attempt)))
            self._in_progress.discard(attempt.name)
            self.num_done += 1
            logger.info(f"{attempt.name}: {attempt.ended} after {attempt.seconds:.0f} s {attempt.text}".rstrip())

    async def _try(self, attempt: AttackAttempt) -> None:
        folder, began = self._folder / attempt.name, time.monotonic()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (error,) = await asyncio.gather(self._make_attempt(attempt, folder), return_exceptions=True)
        if error is not None:
            attempt.ended, attempt.text = "failed", f"{type(error).__name__}: {error}"[:400]
        for path in folder.glob("**/weights"):
            shutil.rmtree(path, ignore_errors=True)
        attempt.seconds = round(time.monotonic() - began, 1)

    async def _make_attempt(self, attempt: AttackAttempt, folder: Path) -> None:
        if find_attack(attempt.attack).scripted:
            from shoal.redteam.scripted import make_scripted_attempt

            await make_scripted_attempt(attempt, self._url, folder, seconds=self._limits.seconds)
        else:
            from shoal.redteam.workers import WorkerAttempt

            await WorkerAttempt(attempt, self._url, folder, self._limits).run()


def _parse_attempt(text: str, number: int) -> AttackAttempt:
    name, at, tail = text.partition("@")
    if not at:
        return AttackAttempt(attack=find_attack(name).name, number=number)
    check_worker_attack(name)
    try:
        share = float(tail)
    except ValueError:
        share = 0.0
    if not 0.0 < share < 1.0:
        raise ConfigError(f"--attack {text}: expected NAME@SHARE with the share that a sleeper cheats on, e.g. 0.25")
    return AttackAttempt(attack=name, number=number, share=share)
