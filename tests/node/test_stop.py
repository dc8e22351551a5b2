"""The first signal asks, the second ends."""

import asyncio
import os
import signal

import pytest

from shoal.node.stop import EXIT_INTERRUPTED, catch_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_the_process(number: int) -> None:
    async def check() -> None:
        stopping, codes, notes = asyncio.Event(), [], []
        with catch_signals(stopping, notes.append, exit_now=codes.append):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stopping.wait(), 10)
            assert (codes, notes) == ([], ["stopping; once more to stop at once"])
            os.kill(os.getpid(), number)
            while not codes:
                await asyncio.sleep(0.01)
        assert codes == [EXIT_INTERRUPTED]

    asyncio.run(check())
