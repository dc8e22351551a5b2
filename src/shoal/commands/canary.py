"""`shoal canary`: submit bad work under an identity that only the operator knows, to test the validators.

    shoal canary seal URL --key operator.key     once, early: commit owners to the ledger without naming them
    shoal canary plant URL --key operator.key    now and then: one owner joins, cheats, and is revealed once judged

    plant: join -> work and cheat like any other worker -> a bad submission is judged, or timeout -> reveal

Invariants:
- until it is revealed, a canary behaves exactly like `shoal redteam work` and runs the same code. It keeps requesting
  work while it waits: a node that submits once and leaves would stand out;
- it is revealed as soon as one of its bad submissions is accepted or rejected, so that as little as possible of its
  work is trained on;
- if it is stopped or killed, it stays planted, and the same command resumes it.
"""

import argparse
import asyncio
import json
import logging
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands import common
from shoal.commands.admin import make_nonce, send_command
from shoal.commands.common import CliCommand, CommandResult, flag
from shoal.commands.roles import TASKS, MakeBehaviour, add_engine, check_engine, fetch_calibration, write_work
from shoal.errors import ConfigError, UnreachableError
from shoal.util.disk import guard_disk
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    from shoal.identity.keys import Key
    from shoal.node.public_client import PublicClient
    from shoal.node.session import Session
    from shoal.protocol.messages import CanaryGrade, CommandAnswer
    from shoal.recipe import Recipe
    from shoal.redteam.canary import CanarySet, CanaryWork
    from shoal.worker.behaviour import WorkerBehaviour

COUNT = 16
POLL_S = 1.0
_GRADES = "grades.json"
_NONCE = "reveal.nonce"
logger = logging.getLogger(__name__)


_PLACE = "folder of the operator's canaries; keep it secret until they are revealed (%(default)s)"
_FOLDER = flag("--folder", type=Path, default=Path("canaries"), metavar="DIR", help=_PLACE)
_KEY = flag("--key", type=Path, required=True, metavar="FILE", help="the operator's key")
_CANARY = (*common.QUERY, _KEY, _FOLDER)
_STOCK = "number of canaries; sealing more than you need hides how many are used (%(default)s)"
_PLANT = (
    *_CANARY,
    flag("--attack", default="int8", metavar="NAME", help="attack to run, see `shoal redteam list` (%(default)s)"),
    flag("--wait", type=int, default=3600, metavar="S", help="maximum seconds to wait for a verdict (%(default)s)"),
    flag("--threads", type=int, default=0, metavar="N", help="torch threads (default: all cores)"),
    TASKS,
    add_engine,
)


def run_list(args: argparse.Namespace) -> int:
    """List the canaries of a folder and their state."""
    from shoal.redteam.canary import PLANTED, REVEALED, SEALED, SEALING, CanarySet

    if not (args.folder / "run").exists():
        raise ConfigError(f"{args.folder}: no canaries found; create some with `shoal canary seal`")
    run = (args.folder / "run").read_text()
    canaries = CanarySet(args.folder, run)
    places = {place: canaries.list_canaries(place) for place in (SEALING, SEALED, PLANTED, REVEALED)}
    lines = [f"run {run}: {len(places[SEALED])} sealed and unused"]
    lines += [f"  {path.name}  planted, not revealed" for path in places[PLANTED]]
    lines += [f"  {path.name}  {_describe_revealed(path)}" for path in places[REVEALED]]
    data = {"run": run, **{place: [path.name for path in paths] for place, paths in places.items()}}
    return common.print_result(CommandResult(0, "\n".join(lines), data), as_json=args.json)


async def reveal_one(client: "PublicClient", key: "Key", canaries: "CanarySet", path: Path) -> "CommandAnswer":
    """Reveal a planted canary with all its submissions known to be bad. The stored nonce makes a repeat harmless."""
    from shoal.protocol.beacon import sign_seal
    from shoal.protocol.messages import MAX_SEALS, Action, CanaryReveal, Command
    from shoal.redteam.canary import CanaryWork, load_owner

    descriptor, _ = await common.fetch_descriptor(client)
    nonce = path / _NONCE
    if not nonce.exists():
        write_atomic(nonce, make_nonce().encode())
    owner, bad = load_owner(path), CanaryWork(path).list_submissions()
    canary = CanaryReveal(signature=sign_seal(owner, descriptor.run), submissions=tuple(bad[:MAX_SEALS]))
    action, target = Action.CANARY_REVEAL, owner.public
    command = Command(nonce=nonce.read_text(), action=action, target=target, reason="", canary=canary)
    answer = await send_command(client, key, command)
    write_atomic(path / _GRADES, json.dumps([grade.model_dump(mode="json") for grade in answer.grades]).encode())
    canaries.end_planted(path)
    return answer


def describe_grade(grade: "CanaryGrade") -> str:
    """Describe the outcome of one canary submission."""
    if grade.state != "missed":
        return f"{grade.submission} was {'caught' if grade.state == 'caught' else 'not judged'}"
    trained = f", and step {grade.trained} was trained on it" if grade.trained else ""
    return f"{grade.submission} was MISSED: accepted by validator {', '.join(grade.missed_by)}{trained}"


async def _seal(args: argparse.Namespace) -> CommandResult:
    """Commit future canary owners to the ledger without naming them."""
    from shoal.protocol.messages import MAX_SEALS, Action, Command
    from shoal.redteam.canary import CanarySet

    common.check_least("--count", args.count, 1)
    if args.count > MAX_SEALS:
        raise ConfigError(f"--count: at most {MAX_SEALS} in one command")
    key = common.load_key(args.key)
    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        canaries = CanarySet(args.folder, descriptor.run)
        sealing = canaries.begin_sealing(args.count)
        seals = canaries.list_seals(sealing)
        command = Command(nonce=sealing.name, action=Action.CANARY_SEAL, seals=seals)
        answer = await send_command(client, key, command)
    canaries.end_sealing(sealing)
    text = f"{len(seals)} owners sealed, recorded as event {answer.seq}; their keys are in {args.folder}"
    return CommandResult(0, text, {"event": answer.seq, "seals": list(seals)})


async def _reveal(args: argparse.Namespace) -> CommandResult:
    """Reveal all idle planted canaries, judged or not."""
    from shoal.redteam.canary import CanarySet

    key = common.load_key(args.key)
    lines, grades = [], []
    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        canaries = CanarySet(args.folder, descriptor.run)
        while canaries.has_idle():
            with canaries.hold_planted() as path:
                answer = await reveal_one(client, key, canaries, path)
            lines += [f"{path.name}: revealed, recorded as event {answer.seq}"]
            lines += [f"  {describe_grade(grade)}" for grade in answer.grades]
            grades += list(answer.grades)
    code = int(any(grade.state == "missed" for grade in grades))
    text = "\n".join(lines) or "no planted canary to reveal"
    return CommandResult(code, text, {"grades": [grade.model_dump(mode="json") for grade in grades]})


def _describe_revealed(path: Path) -> str:
    from shoal.protocol.messages import CanaryGrade

    file = path / _GRADES
    try:
        items = json.loads(file.read_bytes()) if file.exists() else []
        grades = [CanaryGrade.model_validate_json(json.dumps(item)) for item in items]
    except ValueError:
        raise ConfigError(f"{file}: corrupt file") from None
    return "; ".join(map(describe_grade, grades)) or "revealed; it submitted no bad work"


def run_plant(args: argparse.Namespace) -> int:
    """Plant or resume a canary, wait for a verdict, then reveal it."""
    check_engine(args)
    common.check_least("--wait", args.wait, 1)
    from shoal.redteam.registry import check_worker_attack

    check_worker_attack(args.attack)
    key = common.load_key(args.key)
    with guard_disk(args.folder):
        return common.run_query(_plant(args, key), as_json=args.json)


async def _plant(args: argparse.Namespace, key: "Key") -> CommandResult:
    from shoal.redteam.canary import CanarySet, CanaryWork

    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        if key.public != descriptor.operator:
            raise ConfigError(f"wrong key: the operator of this run is {descriptor.operator}")
        logger.info("planting a canary; loading libraries first")
        from shoal.util.process import tune_process

        tune_process(args.threads)
        canaries = CanarySet(args.folder, descriptor.run)
        with canaries.hold_planted() as path:
            work = _CanaryWorker(args, path)
            try:
                if not await _await_verdict(client, CanaryWork(path), work, args.wait):
                    why = "stopped" if work.is_stopped else f"submitted no bad work within {args.wait} s"
                    text = f"canary {path.name} {why}; it stays planted, the same command resumes it"
                    return CommandResult(1, text, {"canary": path.name, "grades": []})
                answer = await reveal_one(client, key, canaries, path)
            finally:
                await work.end()
    return _describe_grades(path, args.attack, answer)


class _CanaryWorker:
    """A canary's worker, running in its own task."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        own = {"folder": folder, "owner": None, "coordinator": None}
        flags = argparse.Namespace(**{**vars(args), **own})
        self._session: Session | None = None
        self._task = asyncio.create_task(self._run(flags, partial(self._make_behaviour, args.attack, folder)))

    @property
    def is_stopped(self) -> bool:
        """Whether a signal stopped it."""
        return self._task.done() and self._session is not None and self._session.stopping.is_set()

    def check(self) -> None:
        """Raise the worker's exception, if it failed."""
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        """Stop the worker if it is still running."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, flags: argparse.Namespace, make_behaviour: MakeBehaviour) -> None:
        from shoal.node.session import SessionError

        try:
            await write_work(flags, make_behaviour)
        except SessionError as error:  # probably banned; its submissions are judged anyway
            logger.warning("the canary's worker stopped: %s", error)

    async def _make_behaviour(
        self, attack: str, folder: Path, session: "Session", recipe: "Recipe"
    ) -> "WorkerBehaviour":
        from shoal.redteam.behaviours.planted import PlantedBehaviour
        from shoal.redteam.canary import CanaryWork
        from shoal.redteam.registry import make_behaviours

        self._session = session
        calibration = await fetch_calibration(session, recipe, folder / "calibration.json")
        cheat, ppm = make_behaviours(attack, recipe)[0], session.params.check_probation
        return PlantedBehaviour(cheat, calibration, CanaryWork(folder), check_ppm=ppm)


async def _await_verdict(client: "PublicClient", bad: "CanaryWork", work: _CanaryWorker, seconds: float) -> bool:
    """Wait until a bad submission is judged or time is up. Returns whether there is anything to reveal."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not work.is_stopped:
        work.check()
        if await _is_judged(client, await asyncio.to_thread(bad.list_submissions)):
            return True
        await asyncio.sleep(POLL_S)
    return not work.is_stopped and bool(bad.list_submissions())


async def _is_judged(client: "PublicClient", submissions: Iterable[str]) -> bool:
    """Whether any of them was accepted or rejected; an unreachable coordinator counts as not yet."""
    from shoal.protocol.messages import SubmissionState

    judged = {SubmissionState.ACCEPTED, SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD}
    try:
        return any([(await client.explain(name)).state in judged for name in submissions])
    except UnreachableError:
        return False


def _describe_grades(path: Path, attack: str, answer: "CommandAnswer") -> CommandResult:
    """Describe all grades; exit code 0 if at least one submission was caught and none was missed."""
    states = {grade.state for grade in answer.grades}
    lines = [f"canary {path.name} ({attack}) revealed, recorded as event {answer.seq}"]
    lines += [f"  {describe_grade(grade)}" for grade in answer.grades]
    if states == {"unseen"}:
        lines.append("  not judged in time; is a validator running?")
    grades = [grade.model_dump(mode="json") for grade in answer.grades]
    code = 0 if "caught" in states and "missed" not in states else 1
    return CommandResult(code, "\n".join(lines), {"canary": path.name, "event": answer.seq, "grades": grades})


_ACTIONS = (
    CliCommand("seal", _seal, (*_CANARY, flag("--count", type=int, default=COUNT, metavar="N", help=_STOCK))),
    CliCommand("plant", run_plant, _PLANT),
    CliCommand("reveal", _reveal, _CANARY),
    CliCommand("list", run_list, (common.JSON, _FOLDER)),
)
_ABOUT = "plant known-bad work to test the validators"
COMMANDS = (CliCommand("canary", text=_ABOUT, actions=_ACTIONS),)
