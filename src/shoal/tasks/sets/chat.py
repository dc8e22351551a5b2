"""Records in chat form, for models that were tuned to answer messages: `chat:PLACE`, or `chat:SHOTS:PLACE`.

    user: 31+8=   assistant: 39   user: 40+17=        two shots of it would be one more question with its answer

- The prompt of a record becomes the user's message; one that is in chat form already keeps its messages.
- Shots are solved tasks of the same source, drawn by the record's id out of the first `POOL` on the training side that
  have a solution: no held-out task is ever shown with its answer, and a longer set shows the same shots.
- A problem keeps its kin whatever is shown before it, and with it its side of the split.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shoal.seeds import derive_seed
from shoal.tasks.base import Message
from shoal.tasks.sets.family import make_task
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.taskset import SetError
from shoal.tasks.split import Split, split_task

POOL = 256
"""Changing breaks: the hash of every set with shots."""
MAX_SHOTS = 16


def split_shots(place: str, rest: str) -> tuple[int, str]:
    """The number of shots, and the place that is put in chat form."""
    head, _, tail = rest.partition(":")
    if not (head.isascii() and head.isdigit()):
        return 0, rest
    if len(head) > 3 or int(head) > MAX_SHOTS or not tail:
        raise SetError(f"tasks.set: {place!r} must be chat:PLACE or chat:SHOTS:PLACE with at most {MAX_SHOTS} shots")
    return int(head), tail


def put_in_chat(records: Iterable[TaskRecord], shots: int) -> Iterator[TaskRecord]:
    """The same tasks as messages, with so many solved ones before each."""
    listed = list(records)
    pools = _build_pools(listed) if shots else {}
    for record in listed:
        own = record.messages or (Message("user", record.text),)
        shown = _draw_shots(record, pools.get(record.source, []), shots) if shots else ()
        kin = make_task(record).kin
        yield replace(record, prompt=(*shown, *own), metadata={**record.metadata, "kin": kin})


def _build_pools(records: Iterable[TaskRecord]) -> dict[str, list[TaskRecord]]:
    """Of each source its first tasks that may be shown."""
    pools: dict[str, list[TaskRecord]] = {}
    for record in records:
        pool = pools.setdefault(record.source, [])
        if len(pool) < POOL and _may_show(record):
            pool.append(record)
    return pools


def _may_show(record: TaskRecord) -> bool:
    """A plain question with a solution, which is trained on and so no secret."""
    is_plain = all(message.role == "user" for message in record.messages)
    has_solution = isinstance(record.metadata.get("solution"), str)
    return is_plain and has_solution and split_task(make_task(record)) is Split.TRAIN


def _draw_shots(record: TaskRecord, pool: list[TaskRecord], shots: int) -> tuple[Message, ...]:
    kin = make_task(record).kin
    others = [other for other in pool if make_task(other).kin != kin]
    if len(others) < shots:
        raise SetError(f"tasks.set: {record.source} has {len(others)} other solved tasks to show, {shots} are wanted")
    drawn = random.Random(derive_seed("shots", record.id)).sample(others, shots)
    return tuple(
        message
        for other in drawn
        for message in (Message("user", other.text), Message("assistant", str(other.metadata["solution"])))
    )
