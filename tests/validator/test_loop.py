"""The validator's loop: a claim that waits does not keep it from its end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal.node.waits import RoleWaits
from shoal.swarm.messages import ClaimAnswer, HeartbeatAnswer, Standing
from shoal.validator.loop import Validator

PATIENCE_S = 60.0


class FakeSession:
    """A session whose coordinator never has a job."""

    def __init__(self) -> None:
        self.stopping, self.claimed = asyncio.Event(), asyncio.Event()
        self.waits = RoleWaits("validator")
        self.client = SimpleNamespace(claim_job=self._claim_job)
        self.has_left = False
        self.describe = self.heard = None

    async def _claim_job(self, *, wait_s: int) -> ClaimAnswer:
        self.claimed.set()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    async def leave(self) -> None:
        self.has_left = True


@pytest.mark.parametrize("cause", ["stopping", "finished"])
def test_it_ends_while_a_claim_is_waiting(tmp_path: Path, cause: str) -> None:
    async def go() -> FakeSession:
        session = FakeSession()
        validator = Validator(session, None, None, tmp_path)  # type: ignore[arg-type]
        running = asyncio.create_task(validator.run())
        await session.claimed.wait()
        if cause == "stopping":
            session.stopping.set()
        else:
            validator._hear(_say_finished())
        async with asyncio.timeout(PATIENCE_S):
            await running
        return session

    assert asyncio.run(go()).has_left


def _say_finished() -> HeartbeatAnswer:
    return HeartbeatAnswer(
        cancelled=(),
        newest_version=3,
        oldest_version=3,
        head=None,
        server_time_ms=0,
        next_s=1,
        standing=Standing.PROBATION,
        finished=True,
        reasons=(),
    )
