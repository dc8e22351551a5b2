"""Honest work passes, and every attack is caught by the check designed for it."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.config.run import PolicyConfig, TinyConfig
from shoal.errors import ConfigError
from shoal.policy.model import Policy, load_policy
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.toploc.build import build_batch
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import RolloutChecker, RolloutReport, check_rollouts, weigh_reports
from shoal.toploc.finding import Check, rank_finding
from shoal.toploc.replay import join_replays, replay_rollouts
from shoal.toploc.sequential_test import EvidenceStream
from shoal.toploc.shape_test import average_wealth
from shoal.toploc.verify import verify_proofs

RATE = 1e-4


def failures(reports: list[RolloutReport]) -> dict[Check, int]:
    """In how many rollouts each check failed."""
    counts: dict[Check, int] = {}
    for report in reports:
        for finding in report.failed:
            counts[finding.check] = counts.get(finding.check, 0) + 1
    return counts


def caught(reports: list[RolloutReport]) -> int:
    return sum(bool(report.failed) for report in reports)


@pytest.fixture(scope="module")
def honest(work, speaker: Policy, requests_16: list[Request]):
    return work(speaker.model, requests_16)


def edit_tokens(rollout: Rollout, places: int, rng: np.random.Generator) -> Rollout:
    tokens = rollout.token_ids.copy()
    for place in rng.choice(len(tokens) - 1, places, replace=False):
        tokens[place] = rng.choice([t for t in range(3, 55) if t != tokens[place]])
    return replace(rollout, token_ids=tokens)


def cut_short(rollout: Rollout, length: int) -> Rollout:
    tokens = np.append(rollout.token_ids[: length - 1], 1).astype(np.int32)
    logprobs = rollout.logprobs[:length]
    return replace(
        rollout, token_ids=tokens, logprobs=logprobs, finish=Finish.STOP, versions=(VersionRange(0, 0, length),)
    )


def spoil_weights(policy: Policy, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(change(parameter))
    return model


def round_int8(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
    return (weight / scale).round() * scale


def test_honest_rollouts_pass_with_a_wide_margin(check, honest) -> None:
    reports = check(honest)
    assert len(reports) == 16 and failures(reports) == {}
    statistical = [f for report in reports for f in report.findings if f.check not in (Check.EOS, Check.OUTSIDE)]
    assert max(rank_finding(finding)[1] for finding in statistical) < 0.5
    checks = {finding.check for finding in reports[0].findings}
    assert checks == set(Check) - {Check.SHAPE, Check.FORM, Check.RIVAL}


def test_honest_rollouts_pass_without_seeds(check, honest) -> None:
    reports = check(honest, seeded=False)
    assert failures(reports) == {}
    checks = {finding.check for finding in reports[0].findings}
    assert checks == set(Check) - {Check.SAMPLING, Check.FORM, Check.RIVAL}


def test_honest_submissions_leave_no_evidence(check, honest, calibration: Calibration) -> None:
    evidence = weigh_reports(check(honest), calibration)
    assert not evidence.judge(RATE).failed and evidence.peak < 1
    assert evidence.rollouts == 16 and evidence.chunks == sum(len(proofs) for proofs in honest.proofs.values())


@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_another_temperature_is_seen_by_the_seeds(
    check, work, launder, speaker: Policy, requests_16: list[Request], temperature: float
) -> None:
    changed = [replace(request, temperature=temperature) for request in requests_16]
    reports = check(launder(work(speaker.model, changed, requests_16).rollouts))
    assert set(failures(reports)) <= {Check.SAMPLING, Check.SEQUENCE}
    assert failures(reports)[Check.SAMPLING] == 16


def test_top_p_is_seen_by_the_seeds(check, launder, speaker: Policy, honest) -> None:
    rollouts = [sample_nucleus(speaker, rollout, 0.95) for rollout in honest.rollouts[::4]]
    others = [rollout for index, rollout in enumerate(honest.rollouts) if index % 4]
    reports = check(launder([*rollouts, *others]))
    assert [bool(report.failed) for report in reports] == [True, False, False, False] * 4
    assert failures(reports)[Check.SAMPLING] == 4


@torch.no_grad()
def sample_nucleus(policy: Policy, rollout: Rollout, top_p: float) -> Rollout:
    """The seeded sampler on the smallest set of likeliest tokens with probability `top_p`."""
    from shoal.seeds import token_uniforms

    uniforms = token_uniforms(rollout.seed, 0, rollout.num_tokens)
    prompt = rollout.prompt_ids.tolist()
    ids = list(prompt)
    cache = None
    feed = torch.tensor([prompt])
    for u in uniforms:
        output = policy.model(input_ids=feed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        probs = output.logits[0, -1].double().softmax(-1)
        ranked, order = probs.sort(descending=True)
        kept = torch.zeros_like(probs)
        kept[order] = torch.where(ranked.cumsum(0) - ranked < top_p, ranked, 0.0)
        cdf = kept.cumsum(0)
        ids.append(int(torch.searchsorted(cdf, u * cdf[-1], right=True)))
        feed = torch.tensor([[ids[-1]]])
    tokens = np.array(ids[len(prompt) :], dtype=np.int32)
    if len(ends := np.flatnonzero(tokens == policy.eos_id)):
        tokens = tokens[: ends[0] + 1]
    stop = Finish.STOP if tokens[-1] == policy.eos_id else Finish.LENGTH
    span = (VersionRange(0, 0, len(tokens)),)
    return replace(rollout, token_ids=tokens, logprobs=rollout.logprobs[: len(tokens)], finish=stop, versions=span)


def test_best_of_four_is_seen_wherever_another_seed_won(
    check, work, speaker: Policy, requests_16: list[Request]
) -> None:
    tries = [work(speaker.model, [replace(r, seed=r.seed ^ k) for r in requests_16], requests_16) for k in range(4)]
    winners = [np.argmax([t.rollouts[i].logprobs.mean() for t in tries]) for i in range(16)]
    best = type(tries[0])(
        [tries[w].rollouts[i] for i, w in enumerate(winners)],
        {r.id: tries[w].proofs[r.id] for r, w in zip(requests_16, winners, strict=True)},
    )
    found = [report.worst.check if report.failed else None for report in check(best)]
    assert len(set(winners)) == 4
    assert found == [None if w == 0 else Check.SAMPLING for w in winners]


@pytest.mark.parametrize("places", [1, 5])
def test_edited_tokens_are_seen_even_after_an_honest_prefill(check, launder, honest, places: int) -> None:
    rng = np.random.default_rng(places)
    edited = [edit_tokens(rollout, places, rng) for rollout in honest.rollouts]
    assert failures(check(launder(edited)))[Check.SAMPLING] == 16


def test_edited_tokens_under_the_old_proofs_fail_everything(check, honest) -> None:
    rng = np.random.default_rng(0)
    edited = replace(honest, rollouts=[edit_tokens(rollout, 5, rng) for rollout in honest.rollouts])
    found = failures(check(edited))
    assert min(found[name] for name in (Check.EXPONENT, Check.MANTISSA, Check.LOGPROB, Check.SAMPLING)) == 16


def test_text_of_another_model_is_seen_even_after_an_honest_prefill(
    check, work, launder, stranger: Policy, requests_16: list[Request]
) -> None:
    rollouts = work(stranger.model, requests_16).rollouts
    assert failures(check(launder(rollouts)))[Check.SAMPLING] == 16
    assert failures(check(launder(rollouts), seeded=False))[Check.SHAPE] == 16


def test_another_model_is_seen_by_its_proofs(check, work, stranger: Policy, requests_16: list[Request]) -> None:
    found = failures(check(work(stranger.model, requests_16)))
    assert min(found[name] for name in (Check.EXPONENT, Check.MANTISSA, Check.MEDIAN, Check.LOGPROB)) == 16


def test_a_forced_end_is_seen(check, launder, honest, calibration: Calibration) -> None:
    cut = [cut_short(rollout, rollout.num_tokens // 2) for rollout in honest.rollouts]
    reports = check(launder(cut))
    assert failures(reports)[Check.SAMPLING] == 16 and Check.ENDING not in failures(reports)
    unseeded = weigh_reports(check(launder(cut), seeded=False), calibration)
    assert unseeded.judge(RATE).failed and unseeded.leader == "hazard"


def test_a_cut_without_an_end_is_seen(check, launder, honest) -> None:
    halves = [(r, r.num_tokens // 2) for r in honest.rollouts]
    cut = [replace(cut_short(r, half), token_ids=r.token_ids[:half], finish=Finish.LENGTH) for r, half in halves]
    assert failures(check(launder(cut)))[Check.ENDING] == 16


def test_another_seed_is_invisible_without_seeds(
    check, work, speaker: Policy, requests_16: list[Request], calibration: Calibration
) -> None:
    reports = check(work(speaker.model, [replace(r, seed=r.seed ^ 1) for r in requests_16], requests_16), seeded=False)
    assert failures(reports) == {} and not weigh_reports(reports, calibration).judge(RATE).failed


def test_the_proof_of_another_rollout_is_seen(check, honest) -> None:
    ids = [rollout.id for rollout in honest.rollouts]
    swapped = {name: honest.proofs[other] for name, other in zip(ids, ids[1:] + ids[:1], strict=True)}
    assert failures(check(replace(honest, proofs=swapped)))[Check.EXPONENT] == 16


def test_an_edited_prompt_is_seen(check, work, speaker: Policy, requests_16: list[Request]) -> None:
    edited = [replace(r, prompt_ids=(*r.prompt_ids[:-1], 3 + (r.prompt_ids[-1] - 2) % 40)) for r in requests_16]
    found = failures(check(work(speaker.model, edited, requests_16)))
    assert min(found[name] for name in (Check.MANTISSA, Check.LOGPROB)) == 16


@pytest.mark.parametrize(("lr", "stream"), [(1e-5, "mantissa"), (1e-6, "logprob_mean")])
def test_a_model_one_step_older_is_seen(
    check, work, speaker: Policy, requests_16: list[Request], calibration: Calibration, lr: float, stream: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    # what AdamW does to a weight in its first step: lr times the sign of the gradient
    model = spoil_weights(speaker, lambda w: w + lr * torch.randn(w.shape, generator=generator).sign())
    reports = check(work(model, requests_16))
    assert failures(reports)[Check.LOGPROB] >= 12  # limits, and so the last few, depend on the processor
    evidence = weigh_reports(reports, calibration)
    assert evidence.judge(RATE).failed
    assert max(evidence.wealth[stream]) > -math.log(RATE)


def test_int8_weights_are_seen(check, work, speaker: Policy, requests_16: list[Request]) -> None:
    found = failures(check(work(spoil_weights(speaker, round_int8), requests_16)))
    assert min(found[name] for name in (Check.MANTISSA, Check.MEDIAN, Check.LOGPROB)) == 16


def test_shifted_log_probs_are_seen_though_each_shift_is_allowed(check, honest, calibration: Calibration) -> None:
    limit = min(kind.limits[Check.LOGPROB].threshold for kind in (calibration.full, calibration.short))
    shifted = [replace(r, logprobs=r.logprobs - np.float32(0.5 * limit)) for r in honest.rollouts]
    reports = check(replace(honest, rollouts=shifted))
    assert Check.LOGPROB not in failures(reports)
    assert weigh_reports(reports, calibration).judge(RATE).failed


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.5])
def test_numbers_that_are_no_log_probs_are_seen(check, honest, value: float) -> None:
    rollouts = list(honest.rollouts)
    logprobs = rollouts[3].logprobs.copy()
    logprobs[37] = value
    rollouts[3] = replace(rollouts[3], logprobs=logprobs)
    reports = check(replace(honest, rollouts=rollouts))
    assert [bool(report.failed) for report in reports] == [index == 3 for index in range(16)]
    assert {finding.check: finding.where for finding in reports[3].failed}[Check.LOGPROB] == "token 37"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda proofs: proofs[:-1], "missing"),
        (lambda proofs: [*proofs, proofs[0]], "surplus"),
        (lambda proofs: [bytes(258), *proofs[1:]], "null"),
        (lambda proofs: [proofs[0][:-1], *proofs[1:]], "length"),
        (lambda proofs: [None, *proofs[1:]], "unreadable"),
        (lambda proofs: [proofs[0][:4] + bytes(254), *proofs[1:]], "degree"),
    ],
)
def test_an_invalid_proof_fails_only_its_rollout(check, honest, change, fault: str) -> None:
    broken = {**honest.proofs, "g1.2": change(honest.proofs["g1.2"])}
    reports = {report.rollout_id: report for report in check(replace(honest, proofs=broken))}
    assert [name for name, report in reports.items() if report.failed] == ["g1.2"]
    found = {finding.check: finding for finding in reports["g1.2"].failed}
    assert fault in found[Check.PROOF].where


def test_no_proofs_at_all_fail_everything(check, honest) -> None:
    assert failures(check(replace(honest, proofs={})))[Check.PROOF] == 16


def test_a_constant_proof_is_seen(check, honest) -> None:
    constant = bytes([0xFF, 0xD9]) + (0x4080).to_bytes(2) + bytes(252) + (1).to_bytes(2)  # 4.0, and x^127
    proofs = {name: [constant] * len(own) for name, own in honest.proofs.items()}
    assert caught(check(replace(honest, proofs=proofs))) == 16


def test_a_few_top_like_places_are_chance_or_values_that_changed_places(
    speaker: Policy, honest, calibration: Calibration
) -> None:
    rollout = honest.rollouts[0]
    (replay,) = replay_rollouts(speaker.model, [rollout], eos_id=1)
    results = verify_proofs(replay.hidden, honest.proofs[rollout.id])
    judge = RolloutChecker(calibration=calibration, eos_id=1, max_tokens=96)
    for hits, mismatches, failed in ((3, 0, False), (16, 0, True), (16, 10, False), (32, 10, True)):
        results[1] = replace(results[1], outside_hits=hits, outside_points=32, exp_mismatches=mismatches)
        report = judge.judge_rollout(rollout, replay, results)
        (finding,) = [finding for finding in report.findings if finding.check is Check.OUTSIDE]
        assert finding.failed is failed and (not failed or finding.where == "chunk 1")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": 5}, "seed"),
        ({"temperature": 0.5}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"prompt_ids": np.array([4, 4], dtype=np.int32)}, "prompt_ids"),
        ({"versions": (VersionRange(0, 0, 3), VersionRange(0, 4, 96))}, "versions"),
        ({"versions": (VersionRange("v7", 0, 96),)}, "versions"),
        ({"versions": None}, "versions"),
        ({"seed": np.zeros(3)}, "seed"),
        ({"temperature": np.ones(2)}, "temperature"),
        ({"finish": None}, "finish"),
    ],
)
def test_what_differs_from_the_request_is_not_replayed(check, honest, change, field: str) -> None:
    rollouts = list(honest.rollouts)
    rollouts[0] = replace(rollouts[0], **change)
    reports = check(replace(honest, rollouts=rollouts))
    assert caught(reports) == 1
    (finding,) = reports[0].failed
    assert finding.check is Check.FORM and finding.where.startswith(field)
    assert not reports[0].chunks


def test_missing_duplicate_and_unknown_rollouts_are_reported(check, honest) -> None:
    strange = replace(honest.rollouts[0], id="x")
    rollouts = [*honest.rollouts[1:], honest.rollouts[5], strange, strange]
    reports = check(replace(honest, rollouts=rollouts))
    assert [report.rollout_id for report in reports if report.failed] == ["g0.0", "g1.1", "x"]
    assert len(reports) == 17
    assert all(report.worst.check is Check.FORM for report in reports if report.failed)


def test_nothing_submitted_is_sixteen_failures(check, honest) -> None:
    assert caught(check(replace(honest, rollouts=[], proofs={}))) == 16


def test_reports_do_not_depend_on_the_order_of_the_rollouts(check, honest) -> None:
    reports = check(honest)
    again = check(replace(honest, rollouts=honest.rollouts[::-1]))
    assert [report.rollout_id for report in reports] == [report.rollout_id for report in again]
    assert [f.where for r in reports for f in r.findings] == [f.where for r in again for f in r.findings]


def test_a_lower_temperature_than_the_calibrated_is_a_mistake_of_ours(
    speaker: Policy, requests_16: list[Request], calibration: Calibration
) -> None:
    cold = [replace(request, temperature=0.7) for request in requests_16]
    with pytest.raises(ConfigError, match=r"temperatures of 1 and above, g0\.0 asks for 0\.7"):
        check_rollouts({0: speaker.model}, cold, [], {}, calibration, eos_id=1)


def test_greedy_requests_are_checked_against_the_likeliest_token(
    work, speaker: Policy, requests_16: list[Request], calibration: Calibration
) -> None:
    greedy = [replace(request, temperature=0.0) for request in requests_16]
    own = work(speaker.model, greedy)
    sampled = work(speaker.model, requests_16, greedy)
    for done, expected in ((own, 0), (sampled, 16)):
        reports = check_rollouts({0: speaker.model}, greedy, done.rollouts, done.proofs, calibration, eos_id=1)
        assert failures(reports).get(Check.SAMPLING, 0) == expected


@pytest.mark.parametrize("own", [None, 5, {}, "text", b"bytes"])
def test_proofs_of_another_type_are_missing_proofs(check, honest, own: object) -> None:
    reports = check(replace(honest, proofs={**honest.proofs, "g0.0": own}))
    assert caught(reports) == 1 and Check.PROOF in {finding.check for finding in reports[0].failed}


def test_an_id_that_is_no_text_is_a_rollout_that_nobody_asked_for(check, honest) -> None:
    odd = replace(honest.rollouts[0], id=["g0.0"])
    reports = check(replace(honest, rollouts=[*honest.rollouts, odd]))
    assert caught(reports) == 1 and reports[-1].failed[0].where == "id: nobody asked for it"


def test_a_version_without_weights_neither_passes_nor_fails(check, honest) -> None:
    for version in (1, 10**9, -5):
        rollouts = [replace(r, versions=(VersionRange(version, 0, r.num_tokens),)) for r in honest.rollouts]
        reports = check(replace(honest, rollouts=rollouts))
        assert {report.unchecked for report in reports} == {f"the weights of version {version} are not available"}
        assert not any(report.passed or report.failed or report.worst for report in reports)


def test_a_rollout_of_two_versions_is_checked_under_both(
    work, speaker: Policy, stranger: Policy, requests_16: list[Request], calibration: Calibration, check, honest
) -> None:
    """The halves come from an engine whose weights were swapped; under the wrong weights either half is detected."""
    models = {0: speaker.model, 1: stranger.model}
    spans = {r.id: (VersionRange(0, 0, 40), VersionRange(1, 40, r.num_tokens)) for r in honest.rollouts}
    long = [r for r in honest.rollouts if r.num_tokens == 96]
    both = {version: replay_rollouts(model, long, eos_id=1) for version, model in models.items()}
    joined = [join_replays(spans[r.id], {v: both[v][i] for v in models}) for i, r in enumerate(long)]
    rollouts = [
        replace(r, versions=spans[r.id], logprobs=replay.logprobs) for r, replay in zip(long, joined, strict=True)
    ]
    proofs = {r.id: own for r, own in zip(long, build_batch([x.hidden for x in joined]), strict=True)}
    asked = [request for request in requests_16 if request.id in proofs]
    good = check_rollouts(models, asked, rollouts, proofs, calibration, eos_id=1)
    seen = {Check.LOGPROB, Check.EXPONENT, Check.MANTISSA, Check.SIGN, Check.MEDIAN, Check.PROOF}
    assert not any(finding.check in seen for report in good for finding in report.failed)
    swapped = {0: stranger.model, 1: speaker.model}
    bad = check_rollouts(swapped, asked, rollouts, proofs, calibration, eos_id=1)
    assert all(any(finding.check in seen for finding in report.failed) for report in bad)


def test_a_model_of_another_shape_is_a_mistake_of_ours(requests_16: list[Request], calibration: Calibration) -> None:
    other = load_policy(PolicyConfig(tiny=TinyConfig(layers=1, width=64, heads=2)), alphabet="ab", seed=0).model
    with pytest.raises(ConfigError, match="is for another model"):
        check_rollouts({0: other}, requests_16, [], {}, calibration, eos_id=1)


def test_greedy_text_of_another_model_is_found_without_seeds_too(
    work, speaker: Policy, stranger: Policy, requests_16: list[Request], calibration: Calibration, launder
) -> None:
    greedy = [replace(request, temperature=0.0) for request in requests_16]
    honest, foreign = work(speaker.model, greedy), launder(work(stranger.model, greedy).rollouts)
    for done, expected in ((honest, 0), (foreign, 16)):
        reports = check_rollouts(
            {0: speaker.model}, greedy, done.rollouts, done.proofs, calibration, eos_id=1, seeded=False
        )
        assert caught(reports) == expected


def test_greedy_rollouts_are_not_judged_by_the_odds_of_sampling(
    work, speaker: Policy, requests_16: list[Request], calibration: Calibration
) -> None:
    greedy = [replace(request, temperature=0.0) for request in requests_16]
    own = work(speaker.model, greedy)
    reports = check_rollouts({0: speaker.model}, greedy, own.rollouts, own.proofs, calibration, eos_id=1)
    assert not any(report.odds for report in reports) and caught(reports) == 0
    assert not weigh_reports(reports * 20, calibration).judge(calibration.share).failed


def test_reports_without_chunks_add_nothing_to_the_evidence(check, honest, calibration: Calibration) -> None:
    reports = check(replace(honest, rollouts=honest.rollouts[1:]))
    assert not reports[0].chunks
    assert weigh_reports(reports, calibration) == weigh_reports(reports[1:], calibration)


def test_a_hardly_possible_token_shows_however_close_it_is_to_the_draw(
    check, honest, launder, speaker: Policy, calibration: Calibration
) -> None:
    """In bfloat16 distances must be generous. Only the tail bets detect a token that is practically never sampled."""
    rollouts = []
    for rollout in honest.rollouts:
        place = rollout.num_tokens // 2
        text = np.concatenate([rollout.prompt_ids, rollout.token_ids[:place]])
        with torch.inference_mode():
            logits = speaker.model(torch.from_numpy(text)[None].long()).logits[0, -1]
        tokens = rollout.token_ids.copy()
        tokens[place] = int(logits.argmin())
        rollouts.append(replace(rollout, token_ids=tokens))
    gains = [report.odds[EvidenceStream.TAIL] for report in check(launder(rollouts))]
    assert average_wealth(np.sum([path[-1] for path in gains], axis=0)) > 30
    plain = [report.odds[EvidenceStream.TAIL] for report in check(honest)]
    assert average_wealth(np.sum([path[-1] for path in plain], axis=0)) < 3
