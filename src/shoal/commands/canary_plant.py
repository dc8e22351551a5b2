"""`shoal canary plant`: one canary from its joining to its end.

    join -> work as any worker does, and cheat -> a bad piece is judged, or time is up -> reveal

Invariants:
- until it is revealed a canary does what `shoal redteam work` does, by the same code, and nothing besides: it goes on
  asking for work while it waits, for a node that hands one thing in and leaves would stand out;
- it is revealed as soon as one of its bad pieces was accepted or rejected, so that as little as possible of it can be
  trained on;
- stopped or killed it stays planted, and the same command goes on with it.
"""

import argparse
import asyncio
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.canary_deeds import reveal_one, tell_grade
from shoal.commands.live import LiveLine
from shoal.commands.serving import check_least
from shoal.commands.swarm_call import Outcome, fetch_descriptor, open_client, run_work
from shoal.commands.work import MakeAuthor, check_engine, fetch_calibration, write_work
from shoal.disk import guard_disk
from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.redteam.bad_work import BadWork
from shoal.redteam.nest import Nest
from shoal.redteam.registry import check_cheat, make_authors
from shoal.swarm.asking import UnreachableError
from shoal.swarm.messages import CommandAnswer, SubmissionState
from shoal.swarm.open_client import OpenClient

if TYPE_CHECKING:
    from shoal.node.session import Session
    from shoal.recipe import Recipe
    from shoal.worker.author import Author

LOOK_S = 1.0
_JUDGED = frozenset({SubmissionState.ACCEPTED, SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD})


def run_plant(args: argparse.Namespace) -> int:
    """Plant one, or go on with one that is planted."""
    check_engine(args)
    check_least("--wait", args.wait, 1)
    check_cheat(args.attack)
    key = Key.load(args.key)
    from shoal.runtime import tune_process

    tune_process(args.threads)
    with guard_disk(args.folder):
        return run_work(_plant(args, key), as_json=args.json)


async def _plant(args: argparse.Namespace, key: Key) -> Outcome:
    async with open_client(args.where, args.ca) as client:
        descriptor, _ = await fetch_descriptor(client)
        if key.public != descriptor.operator:
            raise ConfigError(f"not the key of this run's operator, who is {descriptor.operator}")
        nest = Nest(args.folder, descriptor.run)
        with nest.hold_planted() as path:
            work = _Work(args, path)
            try:
                if not await _await_verdict(client, BadWork(path), work, args.wait):
                    return _tell_nothing(path, work, args)
                answer = await reveal_one(client, key, nest, path)
            finally:
                await work.end()
    return _tell_grades(path, args.attack, answer)


class _Work:
    """A canary at work, in a task of its own."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        own = {"folder": folder, "owner": None, "coordinator": None}
        flags = argparse.Namespace(**{**vars(args), **own})
        self._session: Session | None = None
        self._task = asyncio.create_task(self._run(flags, partial(self._make_author, args.attack, folder)))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal ended it."""
        return self._task.done() and self._session is not None and self._session.stopping.is_set()

    def check(self) -> None:
        """Raise what it failed with, if it did."""
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Stop it, if it goes on."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, flags: argparse.Namespace, make_author: MakeAuthor) -> None:
        from shoal.node.session import SessionError

        try:
            await write_work(flags, make_author)
        except SessionError as error:  # convicted, most likely: what it handed in is judged all the same
            LiveLine().note(f"the canary works no more: {error}")

    async def _make_author(self, attack: str, folder: Path, session: "Session", recipe: "Recipe") -> "Author":
        from shoal.redteam.planted import PlantedAuthor

        self._session = session
        calibration = await fetch_calibration(session, recipe, folder / "calibration.json")
        cheat, ppm = make_authors(attack, recipe)[0], session.params.check_probation
        return PlantedAuthor(cheat, calibration, BadWork(folder), check_ppm=ppm)


async def _await_verdict(client: OpenClient, bad: BadWork, work: _Work, seconds: float) -> bool:
    """Until a bad piece is judged or time is up; whether there is anything to reveal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not work.is_stopped:
        work.check()
        if await _is_judged(client, await asyncio.to_thread(bad.list_submissions)):
            return True
        await asyncio.sleep(LOOK_S)
    return not work.is_stopped and bool(bad.list_submissions())


async def _is_judged(client: OpenClient, submissions: Iterable[str]) -> bool:
    """Whether one of them was accepted or rejected; a coordinator that is away is asked again."""
    try:
        return any([(await client.explain(name)).state in _JUDGED for name in submissions])
    except UnreachableError:
        return False


def _tell_nothing(path: Path, work: _Work, args: argparse.Namespace) -> Outcome:
    why = "stopped" if work.is_stopped else f"handed in nothing bad within {args.wait} s"
    text = f"canary {path.name} {why}; it stays planted, and the same command goes on with it"
    return Outcome(1, text, {"canary": path.name, "grades": []})


def _tell_grades(path: Path, attack: str, answer: CommandAnswer) -> Outcome:
    """0 if validators did what they are there for."""
    states = {grade.state for grade in answer.grades}
    lines = [f"canary {path.name} ({attack}) is revealed, recorded as event {answer.seq}"]
    lines += [f"  {tell_grade(grade)}" for grade in answer.grades]
    if states == {"unseen"}:
        lines.append("  nobody judged it in time; is a validator at work?")
    grades = [grade.model_dump(mode="json") for grade in answer.grades]
    code = 0 if "caught" in states and "missed" not in states else 1
    return Outcome(code, "\n".join(lines), {"canary": path.name, "event": answer.seq, "grades": grades})
