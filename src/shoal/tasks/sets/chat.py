"""Records in chat form, for models tuned to answer messages: `chat:PLACE`, or `chat:SHOTS:PLACE`.

    user: 31+8=   assistant: 39   user: 40+17=        with two shots there would be one more question with its answer

- The prompt of a record becomes the user's message; one that is already in chat form keeps its messages.
- Shots are solved tasks of the same source, drawn by the record's id from the first `POOL` on the training side that
  have a solution: no held-out task is ever shown with its answer, and a longer set shows the same shots.
- A problem keeps its kin whatever is shown before it, and thus its side of the split.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shoal.seeds import derive_seed
from shoal.tasks.base import ChatMessage
from shoal.tasks.sets.family import make_task
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.taskset import SetError
from shoal.tasks.split import Split, split_task

POOL = 256
"""Changing breaks: the hash of every set with shots."""
MAX_SHOTS = 16


def split_shots(place: str, rest: str) -> tuple[int, str]:
    """The number of shots, and the place to convert to chat form."""
    head, _, tail = rest.partition(":")
    if not (head.isascii() and head.isdigit()):
        return 0, rest
    if len(head) > 3 or int(head) > MAX_SHOTS or not tail:
        raise SetError(f"tasks.set: {place!r} must be chat:PLACE or chat:SHOTS:PLACE with at most {MAX_SHOTS} shots")
    return int(head), tail


def put_in_chat(records: Iterable[TaskRecord], shots: int) -> Iterator[TaskRecord]:
    """The same tasks as messages, each after `shots` solved ones."""
    listed = list(records)
    pools = _build_pools(listed) if shots else {}
    for record in listed:
        own = record.messages or (ChatMessage("user", record.text),)
        shown = _draw_shots(record, pools.get(record.source, []), shots) if shots else ()
        kin = make_task(record).kin
        yield replace(record, prompt=(*shown, *own), metadata={**record.metadata, "kin": kin})


def _build_pools(records: Iterable[TaskRecord]) -> dict[str, list[TaskRecord]]:
    """The first tasks of each source that may be shown."""
    pools: dict[str, list[TaskRecord]] = {}
    for record in records:
        pool = pools.setdefault(record.source, [])
        if len(pool) < POOL and _may_show(record):
            pool.append(record)
    return pools


def _may_show(record: TaskRecord) -> bool:
    """Whether it is a plain question with a solution on the training side."""
    is_plain = all(message.role == "user" for message in record.messages)
    has_solution = isinstance(record.metadata.get("solution"), str)
    return is_plain and has_solution and split_task(make_task(record)) is Split.TRAIN


def _draw_shots(record: TaskRecord, pool: list[TaskRecord], shots: int) -> tuple[ChatMessage, ...]:
    kin = make_task(record).kin
    others = [other for other in pool if make_task(other).kin != kin]
    if len(others) < shots:
        raise SetError(f"tasks.set: {record.source} has {len(others)} other solved tasks to show, {shots} are needed")
    drawn = random.Random(derive_seed("shots", record.id)).sample(others, shots)
    return tuple(
        message
        for other in drawn
        for message in (ChatMessage("user", other.text), ChatMessage("assistant", str(other.metadata["solution"])))
    )
