"""What a worker logs about submissions that the coordinator refuses."""

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.net.api_error import ApiError
from shoal.net.retry import RefusedError
from shoal.worker.leases import LeaseTable
from shoal.worker.submitter import Submitter


@pytest.mark.parametrize(("code", "level"), [("superseded", logging.INFO), ("fence", logging.WARNING)])
def test_only_a_refusal_that_is_no_normal_event_is_a_warning(
    caplog: pytest.LogCaptureFixture, code: str, level: int
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise RefusedError(ApiError(409, code, "not this one"))

    session: Any = SimpleNamespace(ask_coordinator=refuse, client=SimpleNamespace(commit=refuse))
    record: Any = SimpleNamespace(order=SimpleNamespace(lease="l1"), manifest=object())
    with caplog.at_level(logging.INFO, "shoal"):
        asyncio.run(Submitter(session, LeaseTable(), lambda: None)._submit(record))
    (entry,) = caplog.records
    assert entry.levelno == level and entry.getMessage().endswith(f"not this one ({code})")
