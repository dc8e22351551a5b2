"""Sealing, revealing and listing canaries."""

import argparse
import json
from pathlib import Path

from shoal.commands.serving import check_least
from shoal.commands.swarm_admin import make_nonce, send_command
from shoal.commands.swarm_call import Outcome, fetch_descriptor, finish, open_client, run_work
from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.keys import Key
from shoal.redteam.bad_work import BadWork
from shoal.redteam.nest import PLANTED, REVEALED, SEALED, SEALING, Nest, load_owner
from shoal.swarm.messages import Action, CanaryGrade, CanaryReveal, Command, CommandAnswer
from shoal.swarm.messages.operator import MAX_SEALS
from shoal.swarm.open_client import OpenClient
from shoal.swarm.seals import sign_seal

_GRADES = "grades.json"
_NONCE = "reveal.nonce"


def run_seal(args: argparse.Namespace) -> int:
    """A stock of owners that are noted and not named."""
    check_least("--count", args.count, 1)
    if args.count > MAX_SEALS:
        raise ConfigError(f"--count: at most {MAX_SEALS} in one command")
    return run_work(_seal_owners(args, Key.load(args.key)), as_json=args.json)


def run_reveal(args: argparse.Namespace) -> int:
    """All that are planted and that no process works with."""
    return run_work(_reveal_all(args, Key.load(args.key)), as_json=args.json)


def run_list(args: argparse.Namespace) -> int:
    """What there is."""
    if not (args.folder / "run").exists():
        raise ConfigError(f"{args.folder}: has no canaries; make some with `shoal canary seal`")
    run = (args.folder / "run").read_text()
    nest = Nest(args.folder, run)
    places = {place: nest.list_canaries(place) for place in (SEALING, SEALED, PLANTED, REVEALED)}
    lines = [f"run {run}: {len(places[SEALED])} sealed and in stock"]
    lines += [f"  {path.name}  planted, not revealed" for path in places[PLANTED]]
    lines += [f"  {path.name}  {_tell_kept(path)}" for path in places[REVEALED]]
    data = {"run": run, **{place: [path.name for path in paths] for place, paths in places.items()}}
    return finish(Outcome(0, "\n".join(lines), data), as_json=args.json)


async def reveal_one(client: OpenClient, key: Key, nest: Nest, path: Path) -> CommandAnswer:
    """Reveal a planted canary with all its work that is known to be bad; again, after a kill, it is done once."""
    descriptor, _ = await fetch_descriptor(client)
    nonce = path / _NONCE
    if not nonce.exists():
        write_atomic(nonce, make_nonce().encode())
    owner, bad = load_owner(path), BadWork(path).list_submissions()
    canary = CanaryReveal(signature=sign_seal(owner, descriptor.run), submissions=tuple(bad[:MAX_SEALS]))
    command = Command(
        nonce=nonce.read_text(), action=Action.CANARY_REVEAL, target=owner.public, reason="", canary=canary
    )
    answer = await send_command(client, key, command)
    write_atomic(path / _GRADES, json.dumps([grade.model_dump(mode="json") for grade in answer.grades]).encode())
    nest.end_planted(path)
    return answer


def tell_grade(grade: CanaryGrade) -> str:
    """How validators did, in words."""
    if grade.state != "missed":
        return f"{grade.submission} was {'caught' if grade.state == 'caught' else 'judged by nobody'}"
    trained = f", and step {grade.trained} was trained on it" if grade.trained else ""
    return f"{grade.submission} was MISSED: accepted by validator {', '.join(grade.missed_by)}{trained}"


async def _seal_owners(args: argparse.Namespace, key: Key) -> Outcome:
    async with open_client(args.where, args.ca) as client:
        descriptor, _ = await fetch_descriptor(client)
        nest = Nest(args.folder, descriptor.run)
        sealing = nest.begin_sealing(args.count)
        seals = nest.list_seals(sealing)
        command = Command(nonce=sealing.name, action=Action.CANARY_SEAL, seals=seals)
        answer = await send_command(client, key, command)
    nest.end_sealing(sealing)
    text = f"{len(seals)} owners sealed, recorded as event {answer.seq}; their keys are in {args.folder}"
    return Outcome(0, text, {"event": answer.seq, "seals": list(seals)})


async def _reveal_all(args: argparse.Namespace, key: Key) -> Outcome:
    lines, grades = [], []
    async with open_client(args.where, args.ca) as client:
        descriptor, _ = await fetch_descriptor(client)
        nest = Nest(args.folder, descriptor.run)
        while nest.has_idle():
            with nest.hold_planted() as path:
                answer = await reveal_one(client, key, nest, path)
            lines += [f"{path.name}: revealed, recorded as event {answer.seq}"]
            lines += [f"  {tell_grade(grade)}" for grade in answer.grades]
            grades += list(answer.grades)
    code = int(any(grade.state == "missed" for grade in grades))
    text = "\n".join(lines) or "no canary is planted and waits to be revealed"
    return Outcome(code, text, {"grades": [grade.model_dump(mode="json") for grade in grades]})


def _tell_kept(path: Path) -> str:
    try:
        grades = [CanaryGrade.model_validate_json(json.dumps(item)) for item in json.loads(_read(path / _GRADES))]
    except ValueError:
        raise ConfigError(f"{path / _GRADES}: is damaged") from None
    return "; ".join(map(tell_grade, grades)) or "revealed, no work of it was bad"


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b"[]"
