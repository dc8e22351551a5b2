"""When the attempt of a cheating worker is over."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.net.api_error import ApiError
from shoal.protocol.messages import Standing
from shoal.redteam.campaign import AttackAttempt, AttemptLimits
from shoal.redteam.workers import WorkerAttempt
from shoal.worker.submitter import SubmissionCounts

OVER_S = 0.2
"""time of an attempt that nothing else ends"""


def watch(folder: Path, standing: Standing, refusal: ApiError | None) -> tuple[str, str]:
    """How an attempt ends whose first worker has submitted nothing but a refused manifest."""
    attempt = WorkerAttempt(AttackAttempt(attack="garbage", number=1), "", folder, AttemptLimits(seconds=OVER_S))
    attempt._counts, attempt._has_submitted = SubmissionCounts(dropped=1, refusal=refusal), True
    session: Any = SimpleNamespace(answer=SimpleNamespace(standing=standing))
    return asyncio.run(attempt._watch(session, None, ()))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", ["too_large", "tokens", "rollouts", "version", "blob_known"])
def test_a_manifest_refused_for_what_it_says_ends_the_attempt_at_once(tmp_path: Path, code: str) -> None:
    refusal = ApiError(413, code, "invalid file size")
    assert watch(tmp_path, Standing.PROBATION, refusal) == ("refused", "invalid file size")


@pytest.mark.parametrize("code", ["superseded", "lease_ended", "room"])
def test_work_that_others_did_first_does_not_end_it(tmp_path: Path, code: str) -> None:
    assert watch(tmp_path, Standing.PROBATION, ApiError(409, code, "another node was first")) == ("late", "")


def test_a_ban_ends_it_whatever_was_refused(tmp_path: Path) -> None:
    assert watch(tmp_path, Standing.BANNED, ApiError(413, "too_large", "invalid file size")) == ("banned", "")
    assert watch(tmp_path, Standing.PROBATION, None) == ("late", "")
