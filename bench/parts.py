"""What the separation benchmark measures: models, honest variants, attacks, and where the records are kept."""

import copy
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attacks import ATTACKS, Attack
from common import OUT
from models import Subject, allow_bfloat16, has_smollm2, load_subject
from records import SUBMISSION, WINDOWS, Record, load_records, measure_work, replay_attack, save_records
from shoal.calibrate.variants import VariantSetup, run_variant
from shoal.redteam.behaviours.forged_work import ForgedRollouts
from shoal.rollout import Request
from shoal.seeds import derive_seed
from shoal.toploc.build import build_batch
from shoal.toploc.replay import replay_rollouts
from shoal.util.process import tune_process, use_threads
from stage import GROUP, Stage, draw_requests

FOLDER = OUT / "separation"


@dataclass(frozen=True, slots=True)
class Source:
    """Honest rollouts of one way of generating, and the ways of replaying them, each with a number of rollouts."""

    way: VariantSetup
    rollouts: int
    replays: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """One model in one dtype, and how much of it is measured."""

    subject: str
    dtype: str
    sources: tuple[Source, ...]
    rollouts: int
    """rollouts of each attack"""
    tokens: int
    """maximum length of a rollout of an attack"""
    slots: int = 64

    @property
    def name(self) -> str:
        return f"{self.subject}_{self.dtype.replace('float', 'fp').replace('bfp', 'bf')}"


def _plain(batch: int) -> VariantSetup:
    return VariantSetup(name="transformers", source="plain", batch=batch)


def list_parts(quick: bool) -> list[Part]:
    """The parts to measure, the most expensive first."""
    many = 48 if quick else 384
    some = 16 if quick else 64
    sources = (
        Source(VariantSetup(name="256 slots", batch=256), many, {"packed": many, "alone": many // 2}),
        Source(VariantSetup(name="7 slots", batch=7), some, {"packed": some}),
        Source(VariantSetup(name="recomputed every 16 tokens", refresh=16), some, {"packed": some}),
        Source(_plain(8), some, {"packed": some}),
        Source(VariantSetup(name="2 threads", threads=2), some, {"packed": some, "2 threads": some}),
    )
    exact = (replace(sources[0], replays={**sources[0].replays, "float64": many // 2}), *sources[1:])
    times = 4 if quick else 8
    short = tuple(
        replace(s, rollouts=s.rollouts * times, replays={replay: num * times for replay, num in s.replays.items()})
        for s in exact
    )
    parts = [
        Part("text", "float32", exact, 24 if quick else 64, 192 if quick else 512),
        Part("sort", "float32", short, 64 if quick else 512, 13),
    ]
    if not quick:
        parts.insert(1, Part("text", "bfloat16", sources, 64, 512))
    if not quick and has_smollm2():
        large = (
            Source(VariantSetup(name="16 slots", batch=16), 16, {"packed": 16, "alone": 16, "float64": 4}),
            Source(_plain(4), 4, {"packed": 4}),
            Source(VariantSetup(name="2 threads", batch=16, threads=2), 8, {"2 threads": 8}),
        )
        parts.insert(0, Part("smollm2", "float32", large, SUBMISSION, 128, slots=16))
    return parts


def measure_part(part: Part, fresh: bool) -> None:
    """Measure what is not kept yet of a part."""
    tune_process(1)
    allow_bfloat16()
    for source in part.sources:
        paths = {replay: _honest_path(part, source, replay) for replay in source.replays}
        if fresh or not all(path.exists() for path in paths.values()):
            _measure_honest(part, source, paths)
    stage: Stage | None = None
    for attack in attacks_of(part):
        path = attack_path(part, attack)
        if not fresh and path.exists():
            continue
        if stage is None:
            subject = load_part(part)
            stage = Stage(
                subject, draw_requests(subject, f"attack {part.name}", part.rollouts, part.tokens), part.slots
            )
        started = time.process_time()
        work = attack.run(stage)
        save_records(path, replay_attack(stage, attack, work))
        _log(part, f"{attack.name}: {_count_tokens(work)} tokens, {time.process_time() - started:.1f} CPU s")


def _measure_honest(part: Part, source: Source, paths: Mapping[str, Path]) -> None:
    subject = load_part(part)
    started = time.process_time()
    requests = _vary_limits(draw_requests(subject, f"{part.name} {source.way.name}", source.rollouts, WINDOWS[-1]))
    states: dict[str, list[torch.Tensor]] = {}

    def keep(rollout_id: str, start: int, hidden: torch.Tensor) -> None:
        states.setdefault(rollout_id, []).append(hidden.clone())

    found = run_variant(source.way, subject.policy.model, requests, eos_id=subject.policy.eos_id, sink=keep)
    rollouts = {rollout.id: rollout for rollout in found}
    proofs = build_batch([torch.cat(states[request.id]) for request in requests])
    work = ForgedRollouts(
        tuple(rollouts[r.id] for r in requests), {r.id: p for r, p in zip(requests, proofs, strict=True)}
    )
    for replay, path in paths.items():
        count = source.replays[replay]
        save_records(path, _replay_honest(subject, replay, _cut_work(work, count), requests[:count]))
    _log(part, f"honest, {source.way.name}: {_count_tokens(work)} tokens, {time.process_time() - started:.1f} CPU s")


def _replay_honest(subject: Subject, replay: str, work: ForgedRollouts, requests: Sequence[Request]) -> list[Record]:
    model, eos_id = subject.policy.model, subject.policy.eos_id
    if replay == "float64":
        model = copy.deepcopy(model).double()
    parts = [[rollout] for rollout in work.rollouts] if replay == "alone" else [work.rollouts]
    with use_threads(2 if replay == "2 threads" else 1):
        replays = [one for own in parts for one in replay_rollouts(model, own, eos_id=eos_id, shape=True)]
    if replay == "float64":
        replays = [replace(one, hidden=one.hidden.float()) for one in replays]
    return measure_work(work, requests, replays, [False] * len(requests))


def load_part(part: Part) -> Subject:
    return load_subject(part.subject, getattr(torch, part.dtype))


def load_honest(part: Part, half: int) -> dict[str, list[Record]]:
    """Honest records of every second prompt, by how they were generated and replayed."""
    found = {}
    for source in part.sources:
        for replay in source.replays:
            records = load_records(_honest_path(part, source, replay))
            own = [record for index, record in enumerate(records) if index // GROUP % 2 == half]
            found[f"{source.way.name}, replayed {replay}"] = own
    return found


def _honest_path(part: Part, source: Source, replay: str) -> Path:
    return FOLDER / part.name / f"honest {source.way.name} {source.rollouts} {replay} {source.replays[replay]}.npz"


def attack_path(part: Part, attack: Attack) -> Path:
    return FOLDER / part.name / f"{attack.name.replace(':', '')} {part.rollouts}x{part.tokens}.npz"


def _vary_limits(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Every fourth request has its own limit, so that last chunks of every size occur."""
    rng = random.Random(derive_seed("limits", requests[0].id))
    return tuple(
        replace(r, max_tokens=rng.randint(1, r.max_tokens)) if index % 4 == 3 else r for index, r in enumerate(requests)
    )


def _cut_work(work: ForgedRollouts, count: int) -> ForgedRollouts:
    return ForgedRollouts(work.rollouts[:count], work.proofs)


def _count_tokens(work: ForgedRollouts) -> int:
    return sum(rollout.num_tokens for rollout in work.rollouts)


def _log(part: Part, text: str) -> None:
    print(f"{part.name}: {text}", file=sys.stderr, flush=True)


def attacks_of(part: Part) -> list[Attack]:
    return [attack for attack in ATTACKS.values() if part.dtype in attack.dtypes]
