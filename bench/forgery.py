"""How often a guessed proof passes: forgers that know a model's states on other texts, but not on this one.

    python bench/forgery.py [--quick] [--json]

The forgers of bench/forgers.py have the token ids of the text, the embeddings of the model, and its states on
other texts, and do not run the model.

Every proof is checked against the published rule (exponent mismatches <= 38, mantissa mean <= 10 and median <= 8), that
rule with one of our additions, and all checks that shoal.toploc makes on a proof.

Figures: pass_<rule>_<model>, the share of chunks on which the best forger passes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from common import OUT, finish, open_plots, parse_flags, save_picture
from forgers import fit_forgers
from guesses import RULES, Limits, Scores, Texts, measure_guesses, passes
from models import allow_bfloat16, has_smollm2, load_subject
from shoal.calibrate.calibrate import FLOORS, UNITS
from shoal.calibrate.variants import probe_dtype
from shoal.engine.base import CHUNK
from shoal.rollout import Rollout
from shoal.seeds import derive_seed
from shoal.toploc.calibration import SHARES
from shoal.toploc.finding import Check
from shoal.toploc.replay import replay_rollouts
from shoal.toploc.select import read_bits
from shoal.toploc.threshold import pick_threshold
from shoal.toploc.verify import verify_batch
from shoal.util.process import tune_process
from stage import Stage, draw_requests

FOLDER = OUT / "forgery"
CHECKS = (Check.EXPONENT, Check.MANTISSA, Check.SIGN)
RATE = 1e-4 / SHARES / 2 / 16
"""False positive rate per chunk of a check with its share of 1e-4 for rollouts of 512 tokens."""
CONFIDENCE = 0.95
_NEAR = (-3, -2, -1, 0, 1, 2)
"""Token offsets used by a prediction: 0 is the token fed, 1 the one then chosen."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, or a distribution of states: what a forger may see, what it must forge, what would pass."""

    name: str
    train: Texts
    test: Texts
    limits: Limits


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    tune_process(1)
    allow_bfloat16()
    figures: dict[str, float] = {}
    tables: list[str] = []
    shown: dict[str, dict[str, Scores]] = {}
    for case in list_cases(flags.quick):
        forgers = fit_forgers(case.train)
        scores = {kind: measure_guesses(forge(case.test), case.test) for kind, forge in forgers.items()}
        shown[case.name] = scores
        tables.append(_format_case(case, scores))
        for rule in ("published", "all"):
            best = max(float(passes(rule, score, case.limits).mean()) for score in scores.values())
            figures[f"pass_{rule}_{case.name}"] = best
    if not flags.quick:
        _draw_scores(shown)
    finish(flags, "\n\n".join(tables), figures)


def list_cases(quick: bool) -> Iterator[Case]:
    """Real models, then states drawn from simple distributions."""
    if not quick and has_smollm2():
        yield load_case("smollm2", torch.float32, 20, 384)
    yield load_case("text", torch.float32, 24 if quick else 128, 512)
    if not quick:
        yield load_case("scribe", torch.float32, 128, 512)
        if not probe_dtype("bfloat16"):
            yield load_case("text", torch.bfloat16, 128, 512)
    for width in (576, 5120):
        yield _draw_case(f"gauss{width}", width, jitter=None)
    for jitter in (0.05, 0.1):
        yield _draw_case(f"outliers{jitter:g}", 576, jitter=jitter)


def load_case(name: str, dtype: torch.dtype, rollouts: int, tokens: int) -> Case:
    """States of a model's rollouts: three quarters to learn from, the rest to forge."""
    title = name if dtype == torch.float32 else f"{name}_bf16"
    path = FOLDER / f"{title} {rollouts}x{tokens}.npz"
    if not path.exists():
        _measure_case(path, name, dtype, rollouts, tokens)
    with np.load(path) as data:
        states = torch.from_numpy(data["bits"].view(np.int16)).view(torch.bfloat16).float()
        near, honest, counts = torch.from_numpy(data["near"]), data["honest"], data["counts"]
    model = load_subject(name, dtype).policy.model
    tables = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    tables = tuple(table.detach().float() / table.detach().float().std() for table in tables)
    parts = [tables[offset > 0][near[..., column]] for column, offset in enumerate(_NEAR)]
    features = torch.cat((*parts, torch.ones(*near.shape[:2], 1)), dim=-1)
    cut = int(counts[: len(counts) * 3 // 4].sum())
    limits = Limits(*(_fit_limit(check, column) for check, column in zip(CHECKS, honest.T, strict=True)))
    return Case(title, Texts(states[:cut], features[:cut]), Texts(states[cut:], features[cut:]), limits)


def _fit_limit(check: Check, values: NDArray[np.float64]) -> float:
    """What `shoal calibrate` would allow, given these honest chunks."""
    return pick_threshold(values, RATE, CONFIDENCE, floor=FLOORS[check], unit=UNITS.get(check, 0.0)).value


def _measure_case(path: Path, name: str, dtype: torch.dtype, rollouts: int, tokens: int) -> None:
    """Keep the full chunks of honest rollouts: patterns, nearby tokens, and the scores of honest proofs."""
    subject = load_subject(name, dtype)
    stage = Stage(subject, draw_requests(subject, f"forgery {name}", rollouts, tokens))
    replays = replay_rollouts(stage.model, stage.honest.rollouts, eos_id=stage.eos_id)
    proofs = [stage.honest.proofs[rollout.id] for rollout in stage.honest.rollouts]
    results = verify_batch([replay.hidden for replay in replays], proofs)
    counts = [rollout.num_tokens // CHUNK for rollout in stage.honest.rollouts]
    rows = list(zip(stage.honest.rollouts, replays, counts, strict=True))
    bits = [read_bits(replay.hidden[: count * CHUNK]) for _, replay, count in rows]
    near = [_list_near(rollout, count * CHUNK) for rollout, _, count in rows]
    full = [result for own, count in zip(results, counts, strict=True) for result in own[:count]]
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        path,
        bits=np.concatenate(bits).reshape(-1, CHUNK, subject.width),
        near=np.concatenate(near).reshape(-1, CHUNK, len(_NEAR)),
        honest=np.array([(r.exp_mismatches, r.mant_err_mean, r.sign_mismatches) for r in full]),
        counts=np.array(counts),
    )


def _list_near(rollout: Rollout, num: int) -> NDArray[np.int64]:
    """Ids (num, offsets) of the tokens near each row; beyond the ends, the nearest existing token."""
    context = np.concatenate((rollout.prompt_ids, rollout.token_ids)).astype(np.int64)
    fed = len(rollout.prompt_ids) - 1 + np.arange(num)
    return context[np.clip(fed[:, None] + np.array(_NEAR), 0, len(context) - 1)]


def _draw_case(name: str, width: int, *, jitter: float | None) -> Case:
    """Gaussian states; with `jitter`, six channels are large and vary by that share between tokens."""
    rng = torch.Generator().manual_seed(derive_seed("forgery", name) % 2**63)
    states = torch.randn(96, CHUNK, width, generator=rng)
    if jitter is not None:
        channels = torch.randperm(width, generator=rng)[:6]
        sizes = torch.linspace(12, 40, 6) * torch.where(torch.rand(6, generator=rng) < 0.5, -1, 1)
        states[..., channels] = sizes * (1 + jitter * states[..., channels])
    texts = [Texts(part, torch.zeros(*part.shape[:2], 0)) for part in states.split(48)]
    return Case(name, texts[0], texts[1], Limits(2.0, 4 / 128, 0.0))


def _format_case(case: Case, scores: Mapping[str, Scores]) -> str:
    allowed = (
        f"calibrated: {case.limits.exponents:g} mismatches, mean {case.limits.mean:.2g}, {case.limits.signs:g} signs"
    )
    head = ["forger", "mismatches", "mantissa mean", "signs", "outside", *RULES]
    lines = [f"### {case.name}: {len(case.test.states)} chunks, {len(case.train.states)} to learn from; {allowed}", ""]
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, s in scores.items():
        numbers = [f"{np.median(s.exponents):.0f} (least {s.exponents.min()})", f"{np.median(s.means):.1f}"]
        numbers += [f"{np.median(s.signs):.0f}", f"{np.mean(s.outside):.2f}"]
        rates = [f"{100 * passes(rule, s, case.limits).mean():.3g} %" for rule in RULES]
        lines.append(f"| {' | '.join([name, *numbers, *rates])} |")
    return "\n".join(lines)


def _draw_scores(shown: Mapping[str, Mapping[str, Scores]]) -> None:
    """Exponent mismatches over mantissa mean, with the region that the published rule accepts."""
    pyplot = open_plots()
    figure, axes = pyplot.subplots(2, (len(shown) + 1) // 2, figsize=(13, 6), squeeze=False, sharex=True, sharey=True)
    for axis, (name, scores) in zip(axes.flat, shown.items(), strict=False):
        axis.add_patch(pyplot.Rectangle((0, 0), 38, 10, color="tab:red", alpha=0.15))
        for kind, s in scores.items():
            axis.plot(s.exponents, np.minimum(s.means, 60), ".", markersize=3, label=kind, alpha=0.6)
        axis.set_title(name, fontsize=9)
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("exponent mismatches of 128 (shaded: accepted by the published rule)")
    figure.supylabel("mean mantissa error")
    save_picture(figure, "forgery.png")


if __name__ == "__main__":
    main()
