"""Tasks that end together: none is left behind, and none fails unheard."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_together(main: Coroutine[Any, Any, T], *others: Coroutine[Any, Any, None]) -> T:
    """The result of `main`. The others run beside it and are cancelled at its end; if one fails, so does this.

    Returns or raises only after every task has ended.
    """
    task = asyncio.create_task(main)
    beside = {asyncio.create_task(other) for other in others}
    try:
        waiting = {task, *beside}
        while not task.done():
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for other in done & beside:
                other.result()  # raises what it failed with
        return task.result()
    finally:
        for other in (task, *beside):
            other.cancel()
        await asyncio.gather(task, *beside, return_exceptions=True)
