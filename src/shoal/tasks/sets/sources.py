"""Where the tasks of a set come from: files, folders, the hub, generators.

    train.jsonl, train.parquet, FOLDER      rows; the format is guessed from their columns
    gsm8k:train.jsonl                       rows in a named format (formats.py)
    hf:ORGANISATION/NAME, hf:FOLDER         rows of a Hugging Face dataset; #SPLIT for a split other than train
    gym:NAME:COUNT, family:NAME:COUNT       tasks of a reasoning-gym family, or of one of ours; COUNT defaults to 1000.
                                            NAME?KEY=VALUE&KEY=VALUE sets options
    rules:COUNT                             short sentences under rules that can be checked (rules.py)
    chat:PLACE, chat:SHOTS:PLACE            the tasks of a place as messages, after SHOTS solved ones (chat.py)

Generated tasks are drawn by number, 0, 1, ..., so a longer set contains the shorter one.
"""

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from shoal.config.run import Option
from shoal.config.toml import parse_value
from shoal.seeds import derive_seed
from shoal.tasks.base import Family
from shoal.tasks.registry import GYM, load_family
from shoal.tasks.sets.chat import put_in_chat, split_shots
from shoal.tasks.sets.formats import FORMATS, guess_format, read_row
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.rows import SourceRow, read_hub, read_rows
from shoal.tasks.sets.rules import make_rules
from shoal.tasks.sets.taskset import MAX_TASKS, SetError, TaskSet

DEFAULT_COUNT = 1000
_MISSES = 1000
"""draws without a new task, after which a family is exhausted"""


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
            count = _read_count(place, rest)
            return _take_records(make_rules(count), count, repr(place))
        case "gym" | "family":
            name, colon, text = rest.partition(":")
            return _draw_records(kind, name, _read_count(place, text) if colon else DEFAULT_COUNT)
        case _ if kind in FORMATS:
            return _read_records(read_rows(rest), kind)
    kinds = ", ".join(sorted([*FORMATS, "chat", "hf", "gym", "family", "rules"]))
    raise SetError(f"tasks.set: {place!r} is not a file, and {kind!r} is not a known format; known are {kinds}")


def _read_records(rows: Iterator[SourceRow], name: str) -> Iterator[TaskRecord]:
    for row in rows:
        name = name or guess_format(row)
        yield read_row(row, name)


def _read_count(place: str, text: str) -> int:
    count = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= count <= MAX_TASKS:
        raise SetError(f"tasks.set: {place!r} must end in a number of tasks from 1 to {MAX_TASKS}")
    return count


def _take_records(records: Iterator[TaskRecord], count: int, name: str) -> Iterator[TaskRecord]:
    """The first records, all different; SetError if there are fewer."""
    found = 0
    for record in islice(records, count):
        found += 1
        yield record
    if found < count:
        raise SetError(f"tasks.set: {name} has only {found} different tasks, {count} are needed")


def _draw_records(kind: str, name: str, count: int) -> Iterator[TaskRecord]:
    name, _, options = name.partition("?")
    family = load_family(f"{GYM if kind == 'gym' else ''}{name}", _parse_options(options))
    return _take_records(_make_records(family, kind), count, family.name)


def _parse_options(text: str) -> dict[str, Option]:
    """`min_length=3&items=numbers` as options of a family; types follow from the spelling."""
    options: dict[str, Option] = {}
    for part in text.split("&") if text else ():
        key, equals, spelled = part.partition("=")
        value = parse_value(spelled)
        if not (key and equals) or not isinstance(value, Option):
            raise SetError(f"tasks.set: {part!r} is not an option of the form KEY=VALUE")
        options[key] = value
    return options


def _make_records(family: Family, kind: str) -> Iterator[TaskRecord]:
    """Tasks of a family, until it stops producing new ones."""
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
                task_type=kind,
                prompt=task.prompt,
                info=dict(task.info) if kind == "gym" else {"family": family.name, "info": dict(task.info)},
                metadata={"kin": task.kin, "solution": family.demonstrate(task)},
            )
