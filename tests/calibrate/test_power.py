"""Power is measured: in float32 by the checks alone, in bfloat16 by odds against rivals as well."""

import pytest
import torch
from tests.fixtures.toploc_work import make_policy

from shoal.calibrate.calibrate import CalibrationPlan, calibrate_policy
from shoal.calibrate.power import format_power, measure_work
from shoal.calibrate.prompts import PromptSource, draw_requests
from shoal.calibrate.variants import VariantSetup, probe_dtype, run_variant
from shoal.policy.altered import map_linears, round_channels, shift_weights
from shoal.policy.model import Policy
from shoal.toploc.build import ProofBuilder
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import CheckBatch, check_batches, judge_rivals
from shoal.toploc.rivals import Rival, make_rivals
from shoal.validator.finding import state_odds

SOURCE = PromptSource(tokens=64, temperature=1.0, seed=0)
SETUPS = [VariantSetup(name="engine"), VariantSetup(name="plain", source="plain", batch=32)]
STEP = 1e-3


def calibrate(policy: Policy, *, samples: int, attacks: int) -> Calibration:
    plan = CalibrationPlan(source=SOURCE, samples=samples, threads=1, attacks=attacks, step=STEP)
    return calibrate_policy(policy, SETUPS, plan, name="p")


@pytest.fixture(scope="module")
def narrow() -> Policy:
    if reason := probe_dtype("bfloat16"):
        pytest.skip(reason)
    policy = make_policy(1)
    policy.model.to(torch.bfloat16)
    return policy


@pytest.fixture(scope="module")
def measured(narrow: Policy) -> Calibration:
    return calibrate(narrow, samples=60, attacks=24)


@pytest.mark.long
def test_in_float32_altered_weights_are_found_in_single_rollouts() -> None:
    calibration = calibrate(make_policy(1), samples=600, attacks=48)
    assert calibration.rivals == {} and calibration.honest_odds == {}
    power = {own.attack: own for own in calibration.power}
    assert all(power[name].found > 0.75 and power[name].odds == () for name in ("int8", "int8 in groups", "int4"))


def test_in_bfloat16_odds_find_what_single_rollouts_do_not(measured: Calibration) -> None:
    power = {own.attack: own for own in measured.power}
    assert set(measured.rivals) == set(Rival)
    assert power["int8"].rival is Rival.INT8 and power["int8"].gain > 0.3
    assert power["int8 in groups"].rival is Rival.INT8_GROUPS and power["int8 in groups"].gain > 0.2
    assert power["adapter of 0.001"].gain < 0.0, "smaller than the noise: the power says so"
    assert all(sum(odds) / len(odds) < 0.0 for odds in measured.honest_odds.values())
    assert "adapter of 0.001" in format_power(measured)


def test_honest_work_of_every_engine_has_fair_odds_on_other_prompts(narrow: Policy, measured: Calibration) -> None:
    source = PromptSource(tokens=64, temperature=1.0, seed=1)
    rivals = make_rivals(narrow.model, shift_weights(narrow.model, STEP))
    for setup in SETUPS:
        work = measure_work(narrow, setup, narrow.model, rivals, source, 32)
        for rival, bets in measured.rivals.items():
            odds = torch.tensor([bets.weigh(own.leans[rival]) for own in work]).exp()
            assert odds.mean() < 1.0


def test_a_rival_that_is_too_close_is_not_bet_on(measured: Calibration) -> None:
    assert measured.rivals[Rival.PREVIOUS].least_change == pytest.approx(STEP, rel=0.3)
    assert measured.rivals[Rival.INT8].least_change == 0.0


def test_altered_copies_leave_the_true_weights_as_they_are(narrow: Policy) -> None:
    before = {name: tensor.clone() for name, tensor in narrow.model.state_dict().items()}
    for other in (map_linears(narrow.model, round_channels), shift_weights(narrow.model, STEP)):
        assert any(not torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in narrow.model.state_dict().items())


@pytest.mark.parametrize("is_honest", [True, False])
def test_a_submission_of_rounded_weights_is_rejected_by_its_odds_and_an_honest_one_is_not(
    narrow: Policy, measured: Calibration, is_honest: bool
) -> None:
    """No rollout of it is found alone: 24 together are."""
    requests = [request for request, _ in zip(draw_requests(narrow, SOURCE, "odds"), range(48), strict=False)][::2]
    worker = narrow.model if is_honest else map_linears(narrow.model, round_channels).eval()
    builder = ProofBuilder()
    rollouts = run_variant(VariantSetup(name="x"), worker, requests, eos_id=narrow.eos_id, sink=builder)
    batch = CheckBatch(requests=requests, rollouts=rollouts, proofs={own.id: builder.take(own.id) for own in rollouts})
    rivals = make_rivals(narrow.model, None)
    (reports,) = check_batches({0: narrow.model}, [batch], measured, eos_id=narrow.eos_id, rivals=rivals)
    assert all(set(report.rivals) == {Rival.INT8, Rival.INT8_GROUPS} for report in reports)
    finding = judge_rivals(reports, measured)
    assert finding.failed is not is_honest
    assert {own.rival for own in state_odds(reports)} == {"int8", "int8_groups"}
