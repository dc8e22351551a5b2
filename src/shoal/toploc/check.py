"""All checks on the rollouts of one or several submissions, in one call and one prefill.

- The requests are ours (from the lease); rollouts and proofs come from the peer. Nothing in them raises: a rollout that
  cannot be replayed has a failed finding instead. Rollouts, requests and proofs are matched by id.
- A rollout of a version whose weights are not available neither passes nor fails: its report states that it was not
  checked.
- All checks together raise a false alarm on an honest rollout at no more than the calibration's rate, as far as its
  thresholds are proven or extrapolated (toploc/threshold.py); those by `margin` and `floor` carry no rate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from transformers import PreTrainedModel

from shoal.engine.base import CHUNK
from shoal.errors import ConfigError
from shoal.rollout import Request, Rollout
from shoal.toploc.calibration import LIMITED, Calibration, check_model
from shoal.toploc.chunks import ChunkStats, measure_chunks
from shoal.toploc.field import P
from shoal.toploc.finding import Check, CheckResult, rank_finding
from shoal.toploc.replay import Replay, RolloutError, admit_rollout, join_replays, replay_batches
from shoal.toploc.rivals import Rival, RivalBets, RivalWeights, compare_replays, judge_odds
from shoal.toploc.sequential_test import EvidenceStream, SequentialEvidence
from shoal.toploc.shape_test import check_odds, trace_choices, trace_tails
from shoal.toploc.threshold import bound_hits
from shoal.toploc.token_checks import check_ending, check_probability, compare_logprobs, trace_hazard
from shoal.toploc.verify import BAND, ChunkResult, verify_batch
from shoal.util.units import count_things

_ODDS = {EvidenceStream.HAZARD: Check.HAZARD, EvidenceStream.TAIL: Check.TAIL, EvidenceStream.SHAPE: Check.SHAPE}
CHANCE = 256 * BAND / P
"""Upper bound of the chance that an honest proof shows an exponent of the top values at a place not committed to."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutReport:
    """All findings on one rollout, passed and failed, and what it adds to its node's history."""

    rollout_id: str
    findings: tuple[CheckResult, ...]
    chunks: tuple[ChunkStats, ...] = ()
    odds: Mapping[EvidenceStream, np.ndarray] = field(default_factory=dict)
    rivals: Mapping[Rival, float] = field(default_factory=dict)
    """logarithm of the odds that it was made with each rival"""
    unchecked: str = ""
    """why nothing could be checked; there are no findings then"""

    @property
    def failed(self) -> list[CheckResult]:
        return [finding for finding in self.findings if finding.failed]

    @property
    def passed(self) -> bool:
        """Whether it was checked and no check failed."""
        return not self.unchecked and not self.failed

    @property
    def worst(self) -> CheckResult | None:
        """The finding furthest beyond its threshold, or closest to it; None if nothing was checked."""
        return max(self.findings, key=rank_finding, default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CheckBatch:
    """What is checked of one submission: our requests, and what a peer submitted for them."""

    requests: Sequence[Request]
    rollouts: Sequence[Rollout]
    proofs: Mapping[str, Sequence[bytes]]


def check_rollouts(
    models: Mapping[int, PreTrainedModel],
    requests: Sequence[Request],
    rollouts: Sequence[Rollout],
    proofs: Mapping[str, Sequence[bytes]],
    calibration: Calibration,
    *,
    eos_id: int,
    seeded: bool = True,
) -> list[RolloutReport]:
    """One report per request, in their order, then one per rollout that was not requested.

    `models` are the trusted weights by version, at least one. `seeded=False` is for engines that do not support seeded
    sampling: the shape test then replaces the sampling check.
    """
    batch = CheckBatch(requests=requests, rollouts=rollouts, proofs=proofs)
    return check_batches(models, [batch], calibration, eos_id=eos_id, seeded=seeded)[0]


def check_batches(
    models: Mapping[int, PreTrainedModel],
    batches: Sequence[CheckBatch],
    calibration: Calibration,
    *,
    eos_id: int,
    seeded: bool = True,
    rivals: Mapping[Rival, RivalWeights] | None = None,
) -> list[list[RolloutReport]]:
    """The reports of several submissions; cheaper together than one by one, with bitwise equal numbers.

    `rivals` are compared with rollouts of one version; each costs one more replay.

    No pack holds rollouts of two submissions: the order of summation in a matrix product depends on its number of rows.
    """
    cases = [_OpenCheck(models, batch, calibration) for batch in batches]
    replays = _replay_all(models, [case.admitted for case in cases], eos_id, shape=not seeded)
    claimed = [_take_proofs(case.batch.proofs, rollout.id) for case in cases for rollout in case.admitted]
    results = iter(verify_batch([replay.hidden for own in replays for replay in own], claimed))
    for case, own in zip(cases, replays, strict=True):
        for rollout, replay in zip(case.admitted, own, strict=True):
            most = case.asked[rollout.id].max_tokens
            judge = RolloutChecker(calibration=calibration, eos_id=eos_id, max_tokens=most, seeded=seeded)
            case.reports[rollout.id] = judge.judge_rollout(rollout, replay, next(results))
    for rival, weights in (rivals or {}).items():
        _compare_rival(cases, rival, weights, calibration.rivals[rival], eos_id=eos_id)
    return [case.list_reports() for case in cases]


def _compare_rival(
    cases: "Sequence[_OpenCheck]", rival: Rival, weights: RivalWeights, bets: RivalBets, *, eos_id: int
) -> None:
    """Add the odds of a rival to the reports; its states are not kept."""
    batches = [case.admitted for case in cases]
    replays = replay_batches(weights.model, batches, eos_id=eos_id, change=weights.change)
    claimed = [_take_proofs(case.batch.proofs, rollout.id) for case in cases for rollout in case.admitted]
    results = iter(verify_batch([replay.hidden for own in replays for replay in own], claimed))
    for case, own in zip(cases, replays, strict=True):
        for rollout, replay in zip(case.admitted, own, strict=True):
            found, report = next(results), case.reports[rollout.id]
            leans = compare_replays(report.chunks, measure_chunks(rollout, replay, found))
            case.reports[rollout.id] = replace(report, rivals={**report.rivals, rival: bets.weigh(leans)})


def weigh_reports(reports: Sequence[RolloutReport], calibration: Calibration) -> SequentialEvidence:
    """The combined evidence of all reports of a submission."""
    total = SequentialEvidence()
    for report in reports:
        if report.chunks:  # a rollout that could not be replayed adds nothing
            total = total.extend(report.chunks, calibration.bets, report.odds)
    return total


def list_odds(reports: Sequence[RolloutReport]) -> dict[Rival, list[float]]:
    """The logarithms of the odds of all replayed rollouts of a submission, by rival."""
    found: dict[Rival, list[float]] = {}
    for report in reports:
        for rival, odds in report.rivals.items():
            found.setdefault(rival, []).append(odds)
    return found


def judge_rivals(reports: Sequence[RolloutReport], calibration: Calibration) -> CheckResult:
    """Whether the odds that a submission was made with other weights are beyond what honest work ever reaches."""
    found, rival = judge_odds(list_odds(reports))
    return CheckResult(
        Check.RIVAL, found, -math.log(calibration.share), f"{rival}, {count_things(len(reports), 'rollout')}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChecker:
    """The rules of one request: pure, so that joined replays of several versions are judged in the same way."""

    calibration: Calibration
    eos_id: int
    max_tokens: int
    seeded: bool = True

    def judge_rollout(self, rollout: Rollout, replay: Replay, results: Sequence[ChunkResult]) -> RolloutReport:
        """All findings on an admitted rollout; `results` are those of its proofs."""
        share = self.calibration.share
        chunks = tuple(measure_chunks(rollout, replay, results, seeded=self._is_drawn(rollout)))
        stopped = int(rollout.token_ids[-1]) == self.eos_id
        odds = self._trace_odds(rollout, replay, stopped)
        findings = [
            check_ending(rollout, eos_id=self.eos_id, max_tokens=self.max_tokens),
            _check_proofs(results),
            _check_outside(results[: len(chunks)], share),
            *self._check_chunks(rollout, replay, chunks),
            *(check_odds(_ODDS[stream], path, share) for stream, path in odds.items()),
        ]
        if rollout.temperature > 0:
            limit = self.calibration.max_tokens
            findings.append(check_probability(replay.eos_probs, stopped=stopped, rate=share, max_tokens=limit))
        findings.append(SequentialEvidence().extend(chunks, self.calibration.bets, odds).judge(share))
        return RolloutReport(rollout_id=rollout.id, findings=tuple(findings), chunks=chunks, odds=odds)

    def _is_drawn(self, rollout: Rollout) -> bool:
        """Whether each token follows from the weights; greedy tokens need no seed."""
        return self.seeded or rollout.temperature == 0

    def _trace_odds(self, rollout: Rollout, replay: Replay, stopped: bool) -> dict[EvidenceStream, np.ndarray]:
        """Exact odds of sampling. A greedy rollout has none: its tokens are judged by distance."""
        if rollout.temperature == 0:
            return {}
        odds = {
            EvidenceStream.HAZARD: trace_hazard(replay.eos_probs, stopped=stopped),
            EvidenceStream.TAIL: trace_tails(replay.logprobs, replay.masses),
        }
        if not self.seeded:
            odds[EvidenceStream.SHAPE] = trace_choices(replay.logprobs, replay.tilts, replay.masses)
        return odds

    def _check_chunks(self, rollout: Rollout, replay: Replay, chunks: Sequence[ChunkStats]) -> list[CheckResult]:
        """For each check, the chunk that is worst against its threshold, or the token if one is to blame."""
        tokens = {
            Check.SAMPLING: replay.distances,
            Check.LOGPROB: np.abs(compare_logprobs(rollout.logprobs, replay.logprobs)),
        }
        findings = []
        for check, name in LIMITED.items():
            if check is Check.SAMPLING and not self._is_drawn(rollout):
                continue
            limits = [self.calibration.limit_chunk(check, chunk) for chunk in chunks]
            own = [
                CheckResult(check, getattr(chunk, name), limit, f"chunk {index}")
                for index, (chunk, limit) in enumerate(zip(chunks, limits, strict=True))
            ]
            worst = max(range(len(own)), key=lambda index, own=own: rank_finding(own[index]))  # type: ignore[misc]
            if check in tokens:
                start = worst * CHUNK
                token = start + int(tokens[check][start : start + CHUNK].argmax())
                own[worst] = replace(own[worst], where=f"token {token}")
            findings.append(own[worst])
        return findings


class _OpenCheck:
    """A batch in progress: the admitted rollouts, and the reports so far, such as why one is not admitted."""

    def __init__(self, models: Mapping[int, PreTrainedModel], batch: CheckBatch, calibration: Calibration) -> None:
        _check_limits(batch.requests, models, calibration)
        self.batch = batch
        self.asked = {request.id: request for request in batch.requests}
        assert len(self.asked) == len(batch.requests), "request ids are unique"
        self.found: dict[str, list[Rollout]] = {}
        for rollout in batch.rollouts:
            self.found.setdefault(rollout.id if isinstance(rollout.id, str) else "", []).append(rollout)
        self.admitted: list[Rollout] = []
        self.reports: dict[str, RolloutReport] = {}
        for request in batch.requests:
            self._admit(models, request)

    def list_reports(self) -> list[RolloutReport]:
        unasked = [_refuse_rollout(name, "id: nobody asked for it") for name in self.found if name not in self.asked]
        return [self.reports[request.id] for request in self.batch.requests] + unasked

    def _admit(self, models: Mapping[int, PreTrainedModel], request: Request) -> None:
        try:
            found = self.found.get(request.id, [])
            if len(found) != 1:
                raise RolloutError("id", f"{len(found)} rollouts for one request")
            rollout = admit_rollout(found[0], request, next(iter(models.values())))
        except RolloutError as error:
            self.reports[request.id] = _refuse_rollout(request.id, str(error))
            return
        if missing := {span.version for span in rollout.versions} - set(models):
            text = f"the weights of version {min(missing)} are not available"
            self.reports[request.id] = RolloutReport(rollout_id=request.id, findings=(), unchecked=text)
            return
        self.admitted.append(rollout)


def _check_limits(requests: Sequence[Request], models: Mapping[int, PreTrainedModel], calibration: Calibration) -> None:
    assert models, "weights to check with are required"
    for model in models.values():
        check_model(calibration, model)
    for request in requests:
        if 0 < request.temperature < calibration.temperature:
            raise ConfigError(
                f"calibration: valid for temperatures of {calibration.temperature:g} and above, {request.id} asks for "
                f"{request.temperature:g}: run `shoal calibrate --temperature {request.temperature:g}`"
            )
        if request.max_tokens > calibration.max_tokens:
            raise ConfigError(f"calibration: valid for {calibration.max_tokens} tokens, {request.id} may have more")


def _replay_all(
    models: Mapping[int, PreTrainedModel], batches: Sequence[Sequence[Rollout]], eos_id: int, *, shape: bool
) -> list[list[Replay]]:
    """Replays by batch, in order. A rollout of several versions is replayed in full under each, and joined."""
    found: list[dict[str, dict[int, Replay]]] = [{rollout.id: {} for rollout in batch} for batch in batches]
    for version, model in models.items():
        own = [[r for r in batch if any(span.version == version for span in r.versions)] for batch in batches]
        for batch, replays, known in zip(
            own, replay_batches(model, own, eos_id=eos_id, shape=shape), found, strict=True
        ):
            for rollout, replay in zip(batch, replays, strict=True):
                known[rollout.id][version] = replay
    return [
        [join_replays(rollout.versions, known[rollout.id]) for rollout in batch]
        for batch, known in zip(batches, found, strict=True)
    ]


def _take_proofs(proofs: Mapping[str, Sequence[bytes]], rollout_id: str) -> Sequence[bytes]:
    """What was submitted as a rollout's proofs, if it is a list."""
    own = proofs.get(rollout_id)
    return own if isinstance(own, list | tuple) else ()


def _refuse_rollout(rollout_id: str, where: str) -> RolloutReport:
    return RolloutReport(rollout_id=rollout_id, findings=(CheckResult(Check.FORM, 1.0, 0.0, where),))


def _check_proofs(results: Sequence[ChunkResult]) -> CheckResult:
    faults = [f"chunk {index}, {result.fault}" for index, result in enumerate(results) if result.fault is not None]
    return CheckResult(Check.PROOF, float(len(faults)), 0.0, faults[0] if faults else "no chunk")


def _check_outside(results: Sequence[ChunkResult], rate: float) -> CheckResult:
    """Whether a proof shows a "top value" nearly everywhere, as a guessed one does.

    A place that the prover committed to but that is not among the verifier's own counts as a hit too. There are no more
    of these than mismatches, which the exponent check bounds.
    """
    findings = []
    for index, result in enumerate(results):
        most = bound_hits(result.outside_points, CHANCE, rate / len(results)) + result.exp_mismatches
        findings.append(CheckResult(Check.OUTSIDE, float(result.outside_hits), float(most), f"chunk {index}"))
    return max(findings, key=rank_finding)
