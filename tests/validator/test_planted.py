"""A canary's own claim about its work, compared with the validator's verdict."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shoal.protocol.messages import Verdict
from shoal.protocol.params import MILLION
from shoal.recipe import Recipe
from shoal.redteam.attacks.weights import Int8Behaviour, StaleBehaviour
from shoal.redteam.behaviours.planted import PlantedBehaviour
from shoal.redteam.canary import CanaryWork
from shoal.toploc.calibration import Calibration
from shoal.worker.behaviour import FinishedWork, WorkerBehaviour


class EditedAuthor(WorkerBehaviour):
    """Changes the log-probs of one rollout by a given amount."""

    shift = 1.0

    def finish(self, work: FinishedWork) -> FinishedWork:
        first, *rest = work.groups
        edited = replace(first.rollouts[0], logprobs=first.rollouts[0].logprobs - np.float32(self.shift))
        return replace(work, groups=(replace(first, rollouts=(edited, *first.rollouts[1:])), *rest))


@pytest.fixture
def plant(hand_in, tmp_path: Path, calibration: Calibration):
    """The validator's verdict on a canary's work, the leases that it declares bad, and the job."""

    def make(author: type[WorkerBehaviour], *, version: int = 0, check_ppm: int = MILLION):
        bad = CanaryWork(tmp_path)

        def open_author(recipe: Recipe) -> WorkerBehaviour:
            return PlantedBehaviour(author(recipe), calibration, bad, check_ppm=check_ppm)

        case = hand_in(open_author, version=version)
        return case.opinion().verdict, set(bad.list_leases()), case.job

    return make


@pytest.mark.parametrize(("author", "version"), [(StaleBehaviour, 1), (Int8Behaviour, 0), (EditedAuthor, 0)])
def test_what_a_canary_calls_bad_is_what_a_validator_rejects(plant, hand_in, author, version: int) -> None:
    verdict, bad, job = plant(author, version=version)
    assert (verdict, bad) == (Verdict.HARD, {"l1"})
    assert job.manifest == hand_in(author, version=version).job.manifest, "it submits what the cheat made"


@pytest.mark.parametrize(("author", "version"), [(WorkerBehaviour, 1), (StaleBehaviour, 0)])
def test_what_a_validator_accepts_a_canary_does_not_call_bad(plant, author, version: int) -> None:
    verdict, bad, _ = plant(author, version=version)
    assert (verdict, bad) == (Verdict.ACCEPTED, set())


def test_what_a_validator_that_looks_at_some_rollouts_may_not_see_is_not_called_bad(plant) -> None:
    assert plant(EditedAuthor, check_ppm=MILLION // 2)[1] == set()


def test_what_is_just_beyond_a_threshold_is_not_called_bad(plant, hand_in, monkeypatch) -> None:
    """Another machine's numbers may be a little smaller."""
    allowed = next(float(item.threshold) for item in hand_in().opinion().findings if item.check == "logprob")
    monkeypatch.setattr(EditedAuthor, "shift", 1.5 * allowed)
    verdict, bad, _ = plant(EditedAuthor)
    assert (verdict, bad) == (Verdict.HARD, set())
