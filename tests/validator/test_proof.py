"""Which rollouts are checked."""

import pytest

from shoal.validator.finding import spell_number
from shoal.validator.proof import draw_positions


@pytest.fixture
def job(hand_in):
    return hand_in().job


@pytest.mark.parametrize("ppm", [1, 100_000, 250_000, 1_000_000])
def test_the_share_is_the_one_that_was_asked_for(job, ppm: int) -> None:
    chosen = draw_positions(job.model_copy(update={"check_ppm": ppm}), 4000)
    assert chosen == sorted(set(chosen)) and 1 <= len(chosen) <= 4000
    assert len(chosen) == max(1, 4000 * ppm // 1_000_000)


def test_another_seed_draws_others(job) -> None:
    draws = {
        tuple(draw_positions(job.model_copy(update={"check_ppm": 300_000, "check_seed": f"{seed:064x}"}), 40))
        for seed in range(20)
    }
    assert len(draws) == 20


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.5, "1.5"), (0.0, "0"), (-2e-9, "-2e-09"), (3e25, "3e25"), (float("inf"), "1e999"), (float("nan"), "1e999")],
)
def test_numbers_are_spelled_as_the_ledger_spells_them(value: float, text: str) -> None:
    assert spell_number(value) == text
