"""What a verifier measured for many rollouts, independent of thresholds, and how the checks judge parts of it.

A record holds everything that `shoal.toploc.check.Judge` reads about one rollout. It is measured once and kept, so that
thresholds, windows and submissions can be tried without another prefill. A window of a rollout is judged by the same
code as if it were the whole rollout.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from attacks import Attack
from shoal.engine.base import CHUNK
from shoal.redteam.behaviours.forged_work import ForgedRollouts
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.toploc.calibration import Calibration
from shoal.toploc.check import RolloutChecker, RolloutReport, weigh_reports
from shoal.toploc.finding import Check
from shoal.toploc.proof import Fault
from shoal.toploc.replay import Replay, replay_rollouts
from shoal.toploc.shape_test import check_odds, trace_choices
from shoal.toploc.verify import ChunkResult, verify_batch
from stage import Stage

PUBLISHED = {Check.EXPONENT: 38.0, Check.MANTISSA: 10.0, Check.MEDIAN: 8.0}
"""The paper's thresholds for bfloat16, one set for all models."""
WINDOWS = (32, 128, 512)
SUBMISSION = 16
FAMILIES = {
    "published": (),
    "toploc": (Check.EXPONENT, Check.MANTISSA, Check.MEDIAN, Check.SIGN, Check.OUTSIDE, Check.PROOF),
    "logprob": (Check.LOGPROB,),
    "sampling": (Check.SAMPLING,),
    "ending": (Check.ENDING, Check.EOS, Check.HAZARD),
    "sequence": (Check.SEQUENCE,),
    "tail": (Check.TAIL,),
    "shape": (Check.SHAPE,),
    "all": (),
}
"""Groups of checks: the published rule; ours on proofs; on log-probs; on the seed's draws; on the end; the mean of many
chunks; too unlikely tokens; the shape test, for engines without seeds; and all of ours that a run with seeds uses (so
not `shape`)."""
_ALONE = {"published", "shape", "all"}
_TOKEN_ARRAYS = ("logprobs", "distances", "eos_probs", "tilts", "masses")
_NUMBERS = tuple(field.name for field in fields(ChunkResult) if field.name != "fault")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record:
    """One rollout as measured by its verifier."""

    rollout: Rollout
    max_tokens: int
    replay: Replay
    """without hidden states, which are already in `results`"""
    results: tuple[ChunkResult, ...]
    changed: bool
    """whether anything submitted differs from honest work on the same request"""

    @property
    def num_chunks(self) -> int:
        return len(self.results)

    def cut(self, start: int, stop: int) -> "Record":
        """Chunks start .. stop - 1 as if they were all; without the real end, as if the limit were reached there."""
        rows = slice(start * CHUNK, min(stop * CHUNK, self.rollout.num_tokens))
        num = rows.stop - rows.start
        whole = stop >= self.num_chunks
        rollout = replace(
            self.rollout,
            token_ids=self.rollout.token_ids[rows],
            logprobs=self.rollout.logprobs[rows],
            finish=self.rollout.finish if whole else Finish.LENGTH,
            versions=(VersionRange(0, 0, num),),
        )
        limit = self.max_tokens - rows.start if whole else num
        replay = Replay(hidden=self.replay.hidden, **{n: getattr(self.replay, n)[rows] for n in _TOKEN_ARRAYS})
        return replace(self, rollout=rollout, max_tokens=limit, replay=replay, results=self.results[start:stop])


@dataclass(frozen=True, slots=True)
class Verdict:
    """Families of checks that failed, and the report behind them."""

    failed: frozenset[str]
    report: RolloutReport


def measure_work(
    work: ForgedRollouts, requests: Sequence[Request], replays: Sequence[Replay], changed: Sequence[bool]
) -> list[Record]:
    """Records of submitted work, from the replays of its rollouts."""
    results = verify_batch([r.hidden for r in replays], [list(work.proofs[rollout.id]) for rollout in work.rollouts])
    rows = zip(work.rollouts, requests, replays, results, changed, strict=True)
    return [
        Record(
            rollout=rollout,
            max_tokens=request.max_tokens,
            replay=replace(replay, hidden=torch.zeros(0)),
            results=tuple(own),
            changed=odd,
        )
        for rollout, request, replay, own, odd in rows
    ]


def replay_attack(stage: Stage, attack: Attack, work: ForgedRollouts) -> list[Record]:
    """Records of an attack, from one prefill with the stage's weights."""
    replays = replay_rollouts(stage.model, work.rollouts, eos_id=stage.eos_id, shape=True)
    pairs = zip(work.rollouts, stage.honest.rollouts, strict=True)
    # with the true model, only different tokens make the work dishonest: with the same tokens it is honest
    changed = [not attack.chooses or not np.array_equal(own.token_ids, true.token_ids) for own, true in pairs]
    return measure_work(work, stage.requests, replays, changed)


def judge_record(record: Record, calibration: Calibration, eos_id: int) -> Verdict:
    """The result of every family of checks for a rollout."""
    judge = RolloutChecker(calibration=calibration, eos_id=eos_id, max_tokens=record.max_tokens)
    report = judge.judge_rollout(record.rollout, record.replay, record.results)
    path = trace_choices(record.replay.logprobs, record.replay.tilts, record.replay.masses)
    seen = {finding.check for finding in report.failed}
    failed = {name for name, checks in FAMILIES.items() if seen & set(checks)}
    if failed:
        failed.add("all")
    if check_odds(Check.SHAPE, path, calibration.share).failed:
        failed.add("shape")
    if any(breaks_published(result) for result in record.results):
        failed.add("published")
    return Verdict(frozenset(failed), report)


def breaks_published(result: ChunkResult) -> bool:
    """Whether the paper's rule rejects a chunk."""
    numbers = (result.exp_mismatches, result.mant_err_mean, result.mant_err_median)
    limits = (PUBLISHED[check] for check in (Check.EXPONENT, Check.MANTISSA, Check.MEDIAN))
    return any(not number <= limit for number, limit in zip(numbers, limits, strict=True))


def judge_submission(verdicts: Sequence[Verdict], calibration: Calibration) -> set[str]:
    """Families that fail for any of the rollouts, or for all of them together."""
    failed = set().union(*(verdict.failed for verdict in verdicts))
    if "sequence" not in failed:
        together = weigh_reports([verdict.report for verdict in verdicts], calibration)
        if together.judge(calibration.share).failed:
            failed |= {"sequence", "all"}
    return failed


def judge_windows(
    records: Sequence[Record], calibration: Calibration, eos_id: int
) -> tuple[list[Counter[str]], list[int], list[Verdict]]:
    """By size: how often each family fails on windows, and their number; also the verdicts on whole rollouts."""
    counts, trials = [Counter[str]() for _ in WINDOWS], [0 for _ in WINDOWS]
    whole = [judge_record(record, calibration, eos_id) for record in records]
    for record, verdict in zip(records, whole, strict=True):
        for index, size in enumerate(WINDOWS):
            for start, stop in cut_windows(record.num_chunks, size // CHUNK):
                all_of_it = stop - start == record.num_chunks
                own = verdict if all_of_it else judge_record(record.cut(start, stop), calibration, eos_id)
                counts[index].update(own.failed)
                trials[index] += 1
    return counts, trials, whole


def cut_windows(num: int, step: int) -> list[tuple[int, int]]:
    """Adjacent windows of `step`; the last one overlaps, so that all are as long as possible."""
    last = max(0, num - step)
    return [(start, min(start + step, num)) for start in sorted({*range(0, last, step), last})]


def save_records(path: Path, records: Sequence[Record]) -> None:
    """Write one file of plain arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    results = [result for record in records for result in record.results]
    arrays = {name: np.concatenate([getattr(r.replay, name) for r in records]) for name in _TOKEN_ARRAYS}
    np.savez_compressed(
        path,
        token_ids=np.concatenate([record.rollout.token_ids for record in records]),
        claimed=np.concatenate([record.rollout.logprobs for record in records]),
        numbers=np.array([[getattr(result, name) for name in _NUMBERS] for result in results]),
        faults=np.array([result.fault or "" for result in results], dtype="U16"),
        rows=np.array([_describe(record) for record in records]),
        **arrays,
    )


def load_records(path: Path) -> list[Record]:
    """Read what `save_records` wrote."""
    with np.load(path) as data:
        columns = {name: data[name] for name in data.files}
    records, token, chunk = [], 0, 0
    for num_tokens, num_chunks, max_tokens, stopped, changed in columns["rows"].tolist():
        tokens, chunks = slice(token, token + num_tokens), slice(chunk, chunk + num_chunks)
        token, chunk = tokens.stop, chunks.stop
        pairs = zip(columns["numbers"][chunks].tolist(), columns["faults"][chunks].tolist(), strict=True)
        records.append(
            Record(
                rollout=_restore_rollout(columns, tokens, bool(stopped)),
                max_tokens=max_tokens,
                replay=Replay(hidden=torch.zeros(0), **{name: columns[name][tokens] for name in _TOKEN_ARRAYS}),
                results=tuple(_restore_result(numbers, fault) for numbers, fault in pairs),
                changed=bool(changed),
            )
        )
    return records


def _describe(record: Record) -> tuple[int, int, int, bool, bool]:
    rollout = record.rollout
    return rollout.num_tokens, record.num_chunks, record.max_tokens, rollout.finish is Finish.STOP, record.changed


def _restore_rollout(columns: dict[str, np.ndarray], tokens: slice, stopped: bool) -> Rollout:
    """Without prompt and seed, which no check needs once there is a replay."""
    return Rollout(
        id="",
        prompt_ids=np.zeros(1, dtype=np.int32),
        token_ids=columns["token_ids"][tokens],
        logprobs=columns["claimed"][tokens],
        finish=Finish.STOP if stopped else Finish.LENGTH,
        versions=(VersionRange(0, 0, tokens.stop - tokens.start),),
        temperature=1.0,
        seed=0,
    )


def _restore_result(numbers: Sequence[float], fault: str) -> ChunkResult:
    named = dict(zip(_NUMBERS, numbers, strict=True))
    whole = {name: value if name.startswith("mant") else int(value) for name, value in named.items()}
    return ChunkResult(**whole, fault=Fault(fault) if fault else None)
