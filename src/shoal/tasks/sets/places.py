"""Where the tasks of a set come from: files, folders, the hub, generators.

    train.jsonl, train.parquet, FOLDER      rows in a format that is guessed from their columns
    gsm8k:train.jsonl                       rows in a format by name (formats.py)
    hf:ORGANISATION/NAME, hf:FOLDER         rows of a Hugging Face dataset; #SPLIT for another split than train
    gym:NAME:COUNT, family:NAME:COUNT       so many tasks of a family of reasoning-gym, or of our own; 1000 if not said.
                                            NAME?KEY=VALUE&KEY=VALUE for other options than the default ones
    rules:COUNT                             short sentences under rules that can be checked (rules.py)
    chat:PLACE, chat:SHOTS:PLACE            the tasks of a place as messages, after so many solved ones (chat.py)

Generated tasks are drawn by number, 0, 1, ..., so a longer set holds the shorter one.
"""

import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.config import Option
from shoal.seeds import derive_seed
from shoal.tasks.base import Family
from shoal.tasks.registry import GYM, load_family
from shoal.tasks.sets.chat import put_in_chat, split_shots
from shoal.tasks.sets.formats import FORMATS, guess_format, read_row
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.rows import Row, read_hub, read_rows
from shoal.tasks.sets.rules import make_rules
from shoal.tasks.sets.taskset import MAX_TASKS, SetError, TaskSet
from shoal.toml import parse_value

DEFAULT_COUNT = 1000
_MISSES = 1000
"""draws without a new task, after which a family has no more"""


def open_set(places: Iterable[str]) -> TaskSet:
    """The task set of all places together."""
    listed = list(places)
    name = listed[0] if len(listed) == 1 else f"{listed[0]} and {len(listed) - 1} more"
    return TaskSet((record for place in listed for record in read_place(place)), name=name)


def read_place(place: str) -> Iterator[TaskRecord]:
    """The records of one place."""
    kind, colon, rest = place.partition(":")
    if not colon or Path(place).exists():
        return _read_records(read_rows(place), "")
    match kind:
        case "hf":
            return _read_records(read_hub(rest), "")
        case "chat":
            shots, inner = split_shots(place, rest)
            return put_in_chat(read_place(inner), shots)
        case "rules":
            return _make_rules(place, _read_count(place, rest))
        case "gym":
            return _make_records(*_split_count(place, rest), prefix=GYM)
        case "family":
            return _make_records(*_split_count(place, rest), prefix="")
        case _ if kind in FORMATS:
            return _read_records(read_rows(rest), kind)
    kinds = ", ".join(sorted([*FORMATS, "chat", "hf", "gym", "family", "rules"]))
    raise SetError(f"tasks.set: {place!r} is no file, and {kind!r} is no kind of place; those are {kinds}")


def _read_records(rows: Iterator[Row], name: str) -> Iterator[TaskRecord]:
    for row in rows:
        name = name or guess_format(row)
        yield read_row(row, name)


def _split_count(place: str, rest: str) -> tuple[str, int]:
    name, colon, text = rest.partition(":")
    return name, _read_count(place, text) if colon else DEFAULT_COUNT


def _read_count(place: str, text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= count <= MAX_TASKS:
        raise SetError(f"tasks.set: {place!r} must end in a number of tasks from 1 to {MAX_TASKS}")
    return count


def _make_rules(place: str, count: int) -> Iterator[TaskRecord]:
    found = 0
    for record in make_rules(count):
        found += 1
        yield record
    if found < count:
        raise SetError(f"tasks.set: {place!r} has no {count} different tasks, found were {found}")


def _make_records(name: str, count: int, *, prefix: str) -> Iterator[TaskRecord]:
    name, _, options = name.partition("?")
    family = load_family(f"{prefix}{name}", _parse_options(options))
    seen: set[str] = set()
    for record in _draw_records(family, is_gym=bool(prefix)):
        if len(seen) < count and record.id not in seen:
            yield record
            seen.add(record.id)
        if len(seen) == count:
            return
    raise SetError(f"tasks.set: {family.name} has no {count} different tasks, found were {len(seen)}")


def _parse_options(text: str) -> dict[str, Option]:
    """`min_length=3&items=numbers` as options of a family, each of the type that it is spelled as."""
    options: dict[str, Option] = {}
    for part in text.split("&") if text else ():
        key, equals, spelled = part.partition("=")
        value = parse_value(spelled)
        if not (key and equals) or not isinstance(value, Option):
            raise SetError(f"tasks.set: {part!r} is no option, which is KEY=VALUE")
        options[key] = value
    return options


def _draw_records(family: Family, *, is_gym: bool) -> Iterator[TaskRecord]:
    """Tasks of a family, until it says nothing new for a while."""
    seen: set[str] = set()
    number = last = 0
    while number - last < _MISSES:
        task = family.make_task(random.Random(derive_seed("set", family.name, number)))
        number += 1
        if task.id not in seen:
            seen.add(task.id)
            last = number
            yield TaskRecord(
                id=task.id,
                source=family.name,
                task_type="gym" if is_gym else "family",
                prompt=task.prompt,
                info=dict(task.info) if is_gym else {"family": family.name, "info": dict(task.info)},
                metadata={"kin": task.kin, "solution": family.demonstrate(task)},
            )
