"""`shoal ledger tasks`: what became of each task of a run, from its ledger alone.

A ledger holds of every accepted group, with a signal or without, its step, its index and the mean of its rewards, as a
validator found them; and the beacon of every step. Which task that was follows from recipe and task set. So these
statistics are complete, which those of a swarm's trainer, who sees only what it trains on, would not be.

A group that was accepted twice (a backup lease) is the same rollouts, and counts once.
"""

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.commands.ledger import find_database, is_address, open_reader, read_ledger
from shoal.commands.swarm_call import Outcome, finish, read_file
from shoal.errors import ConfigError
from shoal.files import check_output, write_output
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import SubmissionState, Verdict
from shoal.swarm.params import MILLION
from shoal.swarm.rows import RowError, count_events, read_events

_EXAMPLES = 10
"""tasks that are shown on the screen"""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupNote:
    """An accepted group, as the ledger tells of it."""

    step: int
    index: int
    beacon: str
    tokens: int
    reward: float
    """mean over its rollouts"""
    signal: bool


def run_tasks(args: argparse.Namespace) -> int:
    """Read the ledger, name the tasks, and write a line for each group."""
    if is_address(args.where):
        raise ConfigError("give a folder or a database; `shoal ledger verify ADDRESS --copy FILE` makes one")
    if args.out is not None:
        check_output(args.out)
    with open_reader(find_database(args.where)) as engine, read_ledger(engine) as connection:
        try:
            groups = list_groups(read_events(connection, 0, count_events(connection)))
        except (LookupError, TypeError) as error:  # no coordinator writes that, but who edits the file can
            raise RowError(f"an event that says too little: {error!r:.80}") from None
        papers = _find_recipe(read_events(connection, 0, 1))
    lines = list(name_tasks(groups, _read_recipe(args.recipe, papers), args.tasks))
    if args.out is not None:
        write_output(args.out, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return finish(describe_tasks(lines), as_json=args.json)


def list_groups(events: Iterable[Event]) -> list[GroupNote]:
    """The accepted groups of a ledger, by step and index."""
    beacons: dict[int, str] = {}
    steps: dict[str, int] = {}
    leases: dict[str, str] = {}
    told: dict[str, list[dict[str, Any]]] = {}
    found: dict[tuple[int, int], GroupNote] = {}
    for event in events:
        content = event.content
        match event.kind:
            case Kind.STEP_OPEN:
                beacons[content["step"]] = content["beacon"]
            case Kind.LEASE_GRANT:
                steps[event.subject] = content["step"]
            case Kind.SUB_COMMIT:
                leases[f"s{event.seq}"] = content["lease"]
            case Kind.VAL_VERDICT if content["verdict"] == Verdict.ACCEPTED:
                told.setdefault(event.subject, content["groups"])
            case Kind.SUB_OUTCOME if content["state"] == SubmissionState.ACCEPTED:
                step = steps[leases[event.subject]]
                for group in told.get(event.subject, ()):
                    if group["numbers"] is not None:
                        found[step, group["index"]] = _read_group(step, beacons[step], group)
    return [found[place] for place in sorted(found)]


def name_tasks(groups: Iterable[GroupNote], recipe_data: bytes, tasks: Path | None) -> Iterator[dict[str, Any]]:
    """One line for each group, with the task that its step, beacon and index give."""
    from shoal.node.recipe import read_tasks
    from shoal.recipe import RecipeError, load_recipe
    from shoal.seeds import derive_seed
    from shoal.swarm.beacon import number_beacon
    from shoal.tasks.base import at_step
    from shoal.tasks.split import train_task

    try:
        recipe = load_recipe(recipe_data)
    except RecipeError as error:
        raise ConfigError(f"--recipe: {error}") from None
    if recipe.set.hash:
        if tasks is None:
            raise ConfigError("--tasks: the run has a task set; name a file that holds it")
        recipe = recipe.bring_set(read_tasks(tasks, recipe))
    family = recipe.open_family()
    for group in groups:
        task = train_task(at_step(family, group.step), derive_seed("task", number_beacon(group.beacon), group.index))
        yield {
            "step": group.step,
            "task": task.problem,
            "index": group.index,
            "attempts": recipe.group_size,
            "reward": group.reward,
            "tokens": group.tokens,
            "signal": group.signal,
        }


def describe_tasks(lines: list[dict[str, Any]]) -> Outcome:
    """How many there are, and those that were met most often."""
    rewards: dict[str, list[float]] = {}
    for line in lines:
        rewards.setdefault(line["task"], []).append(line["reward"])
    signal = sum(line["signal"] for line in lines)
    text = [f"{len(lines)} accepted groups of {len(rewards)} tasks; {signal} of them have a signal"]
    often = sorted(rewards, key=lambda task: (-len(rewards[task]), task))[:_EXAMPLES]
    text += [f"  {len(rewards[task]):5d} x  {_mean(rewards[task]):.3f}  {task}" for task in often]
    data = {task: {"groups": len(found), "reward": _mean(found)} for task, found in sorted(rewards.items())}
    return Outcome(0, "\n".join(text), {"groups": len(lines), "signal": signal, "tasks": data})


def _read_group(step: int, beacon: str, group: dict[str, Any]) -> GroupNote:
    numbers = group["numbers"]
    return GroupNote(
        step=step,
        index=group["index"],
        beacon=beacon,
        tokens=numbers["tokens"],
        reward=numbers["reward"] / MILLION,
        signal=bool(group["signal"]),
    )


def _find_recipe(events: Iterable[Event]) -> str:
    """The hash of the recipe that a ledger began with."""
    return next((str(event.content.get("recipe", "")) for event in events), "")


def _read_recipe(path: Path, wanted: str) -> bytes:
    data = read_file(path)
    if wanted and hashlib.sha256(data).hexdigest() != wanted:
        raise ConfigError(f"{path}: is another recipe than the one that the ledger began with")
    return data


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
