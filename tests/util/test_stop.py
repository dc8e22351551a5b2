"""The first signal requests a stop, the second ends the process."""

import asyncio
import os
import signal
import time

import pytest

from shoal.util.aio import EXIT_INTERRUPTED, catch_signals, interrupt_on_sigterm


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_ends_the_process(number: int, log) -> None:
    async def check() -> None:
        stopping, codes = asyncio.Event(), []
        with catch_signals(stopping, exit_now=lambda: codes.append(EXIT_INTERRUPTED)):
            os.kill(os.getpid(), number)
            await asyncio.wait_for(stopping.wait(), 10)
            assert (codes, log.messages) == ([], ["stopping; press Ctrl-C again to stop immediately"])
            os.kill(os.getpid(), number)
            while not codes:
                await asyncio.sleep(0.01)
        assert codes == [EXIT_INTERRUPTED]

    asyncio.run(check())


def test_sigterm_interrupts_blocking_code_like_ctrl_c() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def block() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    with pytest.raises(KeyboardInterrupt), interrupt_on_sigterm():
        block()
    assert signal.getsignal(signal.SIGTERM) == before
