"""Everything that is checked about the rollouts of a submission, or of several, in one call and one prefill.

- The requests are ours (from the lease), the rollouts and proofs the peer's. Nothing in them raises: a rollout that
  cannot be replayed has a failed finding instead. Rollouts, requests and proofs are matched by id.
- A rollout of a version whose weights are not at hand is neither good nor bad: its report says that it was not checked.
- All checks together raise a false alarm on an honest rollout at no more than the calibration's rate, as far as its
  thresholds are proven or extrapolated (toploc/tail.py); those by `margin` and `floor` carry no rate.
"""

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
from shoal.toploc.finding import Check, Finding, rank_finding
from shoal.toploc.logprobs import compare_logprobs
from shoal.toploc.replay import Replay, RolloutError, admit_rollout, join_replays, replay_batches
from shoal.toploc.sequence import Evidence, Stream
from shoal.toploc.shape import check_odds, trace_choices, trace_tails
from shoal.toploc.tail import bound_hits
from shoal.toploc.termination import check_ending, check_probability, trace_hazard
from shoal.toploc.verify import BAND, ChunkResult, verify_batch

_ODDS = {Stream.HAZARD: Check.HAZARD, Stream.TAIL: Check.TAIL, Stream.SHAPE: Check.SHAPE}
CHANCE = 256 * BAND / P
"""That an honest proof shows an exponent of the top values at a place that it does not commit to, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Report:
    """All findings on one rollout, passed and failed, and what it adds to its node's history."""

    rollout_id: str
    findings: tuple[Finding, ...]
    chunks: tuple[ChunkStats, ...] = ()
    odds: Mapping[Stream, np.ndarray] = field(default_factory=dict)
    unchecked: str = ""
    """why nothing could be checked; then there are no findings"""

    @property
    def failed(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.failed]

    @property
    def passed(self) -> bool:
        """Checked, and nothing was found."""
        return not self.unchecked and not self.failed

    @property
    def worst(self) -> Finding | None:
        """The finding that is furthest beyond its threshold, or closest to it; None if nothing was checked."""
        return max(self.findings, key=rank_finding, default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """What is checked of one submission: our requests, and what a peer handed in for them."""

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
) -> list[Report]:
    """One report per request, in their order, then one per rollout that nobody asked for.

    `models` are the trusted weights by version, at least one. `seeded=False` is for engines that cannot sample by seed:
    the shape test then stands in for the sampling check.
    """
    batch = Batch(requests=requests, rollouts=rollouts, proofs=proofs)
    return check_batches(models, [batch], calibration, eos_id=eos_id, seeded=seeded)[0]


def check_batches(
    models: Mapping[int, PreTrainedModel],
    batches: Sequence[Batch],
    calibration: Calibration,
    *,
    eos_id: int,
    seeded: bool = True,
) -> list[list[Report]]:
    """The reports of several submissions, cheaper together than one by one and with the same numbers, to the bit.

    No pack holds rollouts of two submissions: how a matrix product is summed depends on how many rows it has.
    """
    cases = [_Case.open(models, batch, calibration) for batch in batches]
    replays = _replay_all(models, [case.admitted for case in cases], eos_id, shape=not seeded)
    claimed = [_take_proofs(case.batch.proofs, rollout.id) for case in cases for rollout in case.admitted]
    results = iter(verify_batch([replay.hidden for own in replays for replay in own], claimed))
    for case, own in zip(cases, replays, strict=True):
        for rollout, replay in zip(case.admitted, own, strict=True):
            most = case.asked[rollout.id].max_tokens
            judge = Judge(calibration=calibration, eos_id=eos_id, max_tokens=most, seeded=seeded)
            case.reports[rollout.id] = judge.judge_rollout(rollout, replay, next(results))
    return [case.list_reports() for case in cases]


def weigh_reports(reports: Sequence[Report], calibration: Calibration, evidence: Evidence | None = None) -> Evidence:
    """A node's evidence after these reports; without an earlier one, that of the submission alone."""
    total = evidence or Evidence()
    for report in reports:
        if report.chunks:  # a rollout that could not be replayed adds nothing
            total = total.extend(report.chunks, calibration.bets, report.odds)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """The rules of one request: pure, so that replays of several versions, joined, are judged in the same way."""

    calibration: Calibration
    eos_id: int
    max_tokens: int
    seeded: bool = True

    def judge_rollout(self, rollout: Rollout, replay: Replay, results: Sequence[ChunkResult]) -> Report:
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
        findings.append(Evidence().extend(chunks, self.calibration.bets, odds).judge(share))
        return Report(rollout_id=rollout.id, findings=tuple(findings), chunks=chunks, odds=odds)

    def _is_drawn(self, rollout: Rollout) -> bool:
        """Whether each token follows from the weights; the likeliest one needs no seed."""
        return self.seeded or rollout.temperature == 0

    def _trace_odds(self, rollout: Rollout, replay: Replay, stopped: bool) -> dict[Stream, np.ndarray]:
        """Exact odds, which are those of sampling: a greedy rollout has none, its tokens are judged by distance."""
        if rollout.temperature == 0:
            return {}
        odds = {
            Stream.HAZARD: trace_hazard(replay.eos_probs, stopped=stopped),
            Stream.TAIL: trace_tails(replay.logprobs, replay.masses),
        }
        if not self.seeded:
            odds[Stream.SHAPE] = trace_choices(replay.logprobs, replay.tilts, replay.masses)
        return odds

    def _check_chunks(self, rollout: Rollout, replay: Replay, chunks: Sequence[ChunkStats]) -> list[Finding]:
        """Per check the chunk that is worst against its threshold; where a token is to blame, the token."""
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
                Finding(check, getattr(chunk, name), limit, f"chunk {index}")
                for index, (chunk, limit) in enumerate(zip(chunks, limits, strict=True))
            ]
            worst = max(range(len(own)), key=lambda index, own=own: rank_finding(own[index]))  # type: ignore[misc]
            if check in tokens:
                start = worst * CHUNK
                token = start + int(tokens[check][start : start + CHUNK].argmax())
                own[worst] = replace(own[worst], where=f"token {token}")
            findings.append(own[worst])
        return findings


class _Case:
    """A batch on its way: what of it can be replayed, and the reports so far."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.asked = {request.id: request for request in batch.requests}
        assert len(self.asked) == len(batch.requests), "every request has an id of its own"
        self.found: dict[str, list[Rollout]] = {}
        for rollout in batch.rollouts:
            self.found.setdefault(rollout.id if isinstance(rollout.id, str) else "", []).append(rollout)
        self.admitted: list[Rollout] = []
        self.reports: dict[str, Report] = {}

    @classmethod
    def open(cls, models: Mapping[int, PreTrainedModel], batch: Batch, calibration: Calibration) -> "_Case":
        """A batch whose rollouts were admitted, or have the report that says why not."""
        _check_limits(batch.requests, models, calibration)
        case = cls(batch)
        for request in batch.requests:
            case._admit(models, request)
        return case

    def list_reports(self) -> list[Report]:
        unasked = [_refuse_rollout(name, "id: nobody asked for it") for name in self.found if name not in self.asked]
        return [self.reports[request.id] for request in self.batch.requests] + unasked

    def _admit(self, models: Mapping[int, PreTrainedModel], request: Request) -> None:
        try:
            rollout = _admit_one(next(iter(models.values())), request, self.found.get(request.id, []))
        except RolloutError as error:
            self.reports[request.id] = _refuse_rollout(request.id, str(error))
            return
        if missing := {span.version for span in rollout.versions} - set(models):
            text = f"the weights of version {min(missing)} are not at hand"
            self.reports[request.id] = Report(rollout_id=request.id, findings=(), unchecked=text)
            return
        self.admitted.append(rollout)


def _check_limits(requests: Sequence[Request], models: Mapping[int, PreTrainedModel], calibration: Calibration) -> None:
    assert models, "weights to check with are needed"
    for model in models.values():
        check_model(calibration, model)
    for request in requests:
        if 0 < request.temperature < calibration.temperature:
            raise ConfigError(
                f"calibration: holds for temperatures of {calibration.temperature:g} and above, {request.id} asks for "
                f"{request.temperature:g}: run `shoal calibrate --temperature {request.temperature:g}`"
            )
        if request.max_tokens > calibration.max_tokens:
            raise ConfigError(f"calibration: holds for {calibration.max_tokens} tokens, {request.id} may have more")


def _admit_one(model: PreTrainedModel, request: Request, found: Sequence[Rollout]) -> Rollout:
    if len(found) != 1:
        raise RolloutError("id", f"{len(found)} rollouts for one request")
    return admit_rollout(found[0], request, model)


def _replay_all(
    models: Mapping[int, PreTrainedModel], batches: Sequence[Sequence[Rollout]], eos_id: int, *, shape: bool
) -> list[list[Replay]]:
    """Replays by batch, in order. What several versions wrote is replayed whole under each, and joined."""
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
    """What was handed in as a rollout's proofs, if it is a list at all."""
    own = proofs.get(rollout_id)
    return own if isinstance(own, list | tuple) else ()


def _refuse_rollout(rollout_id: str, where: str) -> Report:
    return Report(rollout_id=rollout_id, findings=(Finding(Check.FORM, 1.0, 0.0, where),))


def _check_proofs(results: Sequence[ChunkResult]) -> Finding:
    faults = [f"chunk {index}, {result.fault}" for index, result in enumerate(results) if result.fault is not None]
    return Finding(Check.PROOF, float(len(faults)), 0.0, faults[0] if faults else "no chunk")


def _check_outside(results: Sequence[ChunkResult], rate: float) -> Finding:
    """Whether a proof says "top value" nearly everywhere, as one that was guessed does.

    A place that the prover committed to and the verifier does not have among its own is a hit too. There are no more of
    these than mismatches, which the exponent check bounds.
    """
    findings = []
    for index, result in enumerate(results):
        most = bound_hits(result.outside_points, CHANCE, rate / len(results)) + result.exp_mismatches
        findings.append(Finding(Check.OUTSIDE, float(result.outside_hits), float(most), f"chunk {index}"))
    return max(findings, key=rank_finding)
