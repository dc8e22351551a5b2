"""How often a guessed proof passes: forgers that know a model's states on other texts, but not on this one.

    python bench/forgery.py [--quick] [--json]

A forger has the token ids of the text, the model's embeddings, and the states of other texts. It does not run the model.
    constant   one pattern everywhere: the commonest among top values
    channels   one pattern per channel, with the modulus set to the width, so that all tokens share them
    linear     states predicted by ridge regression from the embeddings of nearby tokens, the next ones included
    network    states predicted by a network with one hidden layer on the same features, fitted by gradient descent
The last two commit to the 128 predicted values that are largest, scaled as fits best on texts held back.

Every proof is held against the published rule (exponent mismatches <= 38, mantissa mean <= 10 and median <= 8), against
that rule with one of our additions, and against all checks that shoal.toploc makes on a proof.

Figures: pass_<rule>_<model>, the share of chunks on which the best forger passes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from attacks import Stage, draw_requests
from common import OUT, finish, open_plots, parse_flags, save_picture
from models import has_smollm2, load_subject
from shoal.engine.base import CHUNK
from shoal.rollout import Rollout
from shoal.runtime import tune_process
from shoal.seeds import derive_seed
from shoal.toploc.build import find_moduli
from shoal.toploc.field import Vandermonde, interpolate, to_canonical
from shoal.toploc.probe import probe_dtype
from shoal.toploc.proof import TOPK, pack_proofs
from shoal.toploc.replay import replay_rollouts
from shoal.toploc.select import read_bits, select_top, split_chunks
from shoal.toploc.verify import verify_batch

FOLDER = OUT / "forgery"
Bits = NDArray[np.uint16]
_NEAR = (-3, -2, -1, 0, 1, 2)
"""Tokens that a prediction looks at: 0 is the one fed, 1 the one then chosen."""
_SCALES = (0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
_HIDDEN, _EPOCHS, _BATCH, _RATE = 768, 30, 256, 1e-3
_OUTSIDE = 128
_BAND = 8


@dataclass(frozen=True, slots=True)
class Texts:
    """Full chunks of some rollouts: states (C, 32, W) in float32, and the features of each row (C, 32, F)."""

    states: Tensor
    features: Tensor

    @property
    def width(self) -> int:
        return self.states.shape[2]

    @property
    def bits(self) -> list[NDArray[np.int16]]:
        return [chunk for rows in self.states for chunk in split_chunks(rows, CHUNK)]


@dataclass(frozen=True, slots=True)
class Guess:
    """A forged commitment of one chunk: patterns at residues of a modulus."""

    modulus: int
    residues: NDArray[np.int64]
    patterns: Bits


Forger = Callable[[Texts], list[Guess]]


@dataclass(frozen=True, slots=True)
class Scores:
    """How guesses fare, one entry per chunk."""

    exponents: NDArray[np.int64]
    means: NDArray[np.float64]
    medians: NDArray[np.float64]
    signs: NDArray[np.int64]
    outside: NDArray[np.float64]
    void: NDArray[np.bool_]
    """shoal.toploc refuses the form: modulus, degree or coefficients"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What calibration allows for this model."""

    exponents: float
    mean: float
    signs: float


@dataclass(frozen=True, slots=True)
class Case:
    """A model, or a law that states are drawn from: what a forger may see, what it must forge, what would pass."""

    name: str
    train: Texts
    test: Texts
    limits: Limits


def main() -> None:
    flags = parse_flags(__doc__.splitlines()[0])
    tune_process(1)
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


def fit_forgers(train: Texts) -> dict[str, Forger]:
    """Every forger, fitted to texts that are not the ones it will forge."""
    forgers: dict[str, Forger] = {"constant": fit_constant(train), "channels": fit_channels(train)}
    if train.features.shape[2]:
        forgers["linear"] = fit_scale(train, fit_linear)
        forgers["network"] = fit_scale(train, fit_network)
    return forgers


def fit_constant(train: Texts) -> Forger:
    """The commonest exponent of top values and the median mantissa there, at every place: a polynomial of degree 0."""
    pattern = pick_pattern(select_top(train.bits, TOPK)[1].ravel())

    def forge(test: Texts) -> list[Guess]:
        return [Guess(65497, np.arange(TOPK), np.full(TOPK, pattern)) for _ in test.states]

    return forge


def fit_channels(train: Texts) -> Forger:
    """The 128 channels that hold most top values, each with its commonest pattern."""
    width = train.width
    indices, patterns = select_top(train.bits, TOPK)
    channels = indices.ravel() % width
    counts = np.bincount(channels, minlength=width)
    kept = np.sort(np.argsort(-counts, kind="stable")[: min(TOPK, width)])
    overall = pick_pattern(patterns.ravel())
    chosen = [pick_pattern(patterns.ravel()[channels == c]) if counts[c] else overall for c in kept]

    def forge(test: Texts) -> list[Guess]:
        return [Guess(width, kept, np.array(chosen, dtype=np.uint16)) for _ in test.states]

    return forge


def fit_linear(train: Texts) -> Callable[[Tensor], Tensor]:
    """Ridge regression, the penalty chosen on texts held back."""
    fit, held = _split_texts(train)
    x, y = fit.features.flatten(0, 1).double(), fit.states.flatten(0, 1).double()
    x_held, y_held = held.features.flatten(0, 1).double(), held.states.flatten(0, 1).double()
    gram, cross = x.T @ x, x.T @ y
    best, least = torch.zeros(0), float("inf")
    for penalty in (1e-3, 1e-2, 1e-1, 1.0):
        scale = penalty * gram.diagonal().mean()
        weights = torch.linalg.solve(gram + scale * torch.eye(len(gram), dtype=torch.float64), cross)
        lost = float((x_held @ weights - y_held).square().mean())
        if lost < least:
            best, least = weights.float(), lost
    return lambda features: features @ best


def fit_network(train: Texts) -> Callable[[Tensor], Tensor]:
    """One hidden layer beside a linear path; the epoch that does best on texts held back is kept."""
    fit, held = _split_texts(train)
    x, y = fit.features.flatten(0, 1), fit.states.flatten(0, 1)
    torch.manual_seed(derive_seed("forgery") % 2**31)
    scale = y.std(0) + 1e-6
    layers = [torch.nn.Linear(x.shape[1], _HIDDEN), torch.nn.Linear(_HIDDEN, y.shape[1])]
    skip = torch.nn.Linear(x.shape[1], y.shape[1])

    def predict(features: Tensor) -> Tensor:
        return (layers[1](F.gelu(layers[0](features))) + skip(features)) * scale

    parameters = [p for layer in (*layers, skip) for p in layer.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=_RATE, weight_decay=0.1)
    best, least = [p.detach().clone() for p in parameters], float("inf")
    for _ in range(_EPOCHS):
        for rows in torch.randperm(len(x)).split(_BATCH):
            optimizer.zero_grad()
            ((predict(x[rows]) - y[rows]) / scale).square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            lost = float((predict(held.features.flatten(0, 1)) - held.states.flatten(0, 1)).square().mean())
            if lost < least:
                best, least = [p.detach().clone() for p in parameters], lost
    with torch.no_grad():
        for parameter, value in zip(parameters, best, strict=True):
            parameter.copy_(value)
    return predict


def fit_scale(train: Texts, fit: Callable[[Texts], Callable[[Tensor], Tensor]]) -> Forger:
    """Predictions shrink towards the mean; they are stretched by what gives fewest mismatches on texts held back."""
    held = _split_texts(train)[1]
    predict = fit(train)

    def forge_with(scale: float) -> Forger:
        @torch.no_grad()
        def forge(test: Texts) -> list[Guess]:
            states = predict(test.features.flatten(0, 1)).view(test.states.shape) * scale
            indices, patterns = select_top([chunk for rows in states for chunk in split_chunks(rows, CHUNK)], TOPK)
            moduli = find_moduli(indices)
            return [Guess(int(m), i % m, p) for m, i, p in zip(moduli, indices, patterns, strict=True)]

        return forge

    return min(
        (forge_with(scale) for scale in _SCALES),
        key=lambda forge: float(measure_guesses(forge(held), held).exponents.mean()),
    )


def measure_guesses(guesses: Sequence[Guess], test: Texts) -> Scores:
    """Hold guessed commitments against the true states, as a verifier does that refuses none for its form."""
    columns: list[tuple[float, ...]] = []
    proofs: list[bytes] = []
    indices, own = select_top(test.bits, TOPK)
    rng = np.random.default_rng(derive_seed("outside"))
    for guess, places, patterns in zip(guesses, indices, own, strict=True):
        coefficients = interpolate_guess(guess)
        strangers = np.setdiff1d(rng.choice(CHUNK * test.width, 2 * _OUTSIDE, replace=False), places)[:_OUTSIDE]
        points = np.concatenate((places, strangers)) % guess.modulus
        values = Vandermonde(points[None].astype(np.float64), TOPK).evaluate(coefficients[None].astype(np.float64))
        claimed = to_canonical(values)[0]
        columns.append((*compare_patterns(claimed[:TOPK], patterns), share_hits(claimed[TOPK:], patterns)))
        proofs += pack_proofs(np.array([guess.modulus]), coefficients[None])
    results = verify_batch(list(test.states), [[proof] for proof in proofs])
    void = np.array([own[0].fault is not None for own in results])
    exponents, means, medians, signs, outside = (np.array(column) for column in zip(*columns, strict=True))
    return Scores(exponents, means, medians, signs, outside, void)


def interpolate_guess(guess: Guess) -> Bits:
    """128 coefficients through the guessed points."""
    known = interpolate(guess.residues[None].astype(np.float64), guess.patterns[None].astype(np.float64))
    return np.pad(to_canonical(known)[0], (0, TOPK - len(guess.residues)))


def compare_patterns(claimed: Bits, own: Bits) -> tuple[int, float, float, int]:
    """Exponent mismatches, mean and median mantissa error, and sign mismatches."""
    agree = (claimed & 0x7F80) == (own & 0x7F80)
    errors = np.abs((claimed & 0x7F).astype(int) - (own & 0x7F).astype(int))[agree]
    signs = int(((claimed ^ own) >= 0x8000)[agree].sum())
    mean, median = (float(errors.mean()), float(np.median(errors))) if len(errors) else (np.inf, np.inf)
    return int((~agree).sum()), mean, median, signs


def pick_pattern(patterns: Bits) -> np.uint16:
    """The commonest exponent, the median mantissa of those that have it, and their commoner sign."""
    exponents = patterns & 0x7F80
    values, counts = np.unique(exponents, return_counts=True)
    same = patterns[exponents == values[counts.argmax()]]
    sign = 0x8000 if (same >= 0x8000).mean() > 0.5 else 0
    return np.uint16(values[counts.argmax()] | int(np.median(same & 0x7F)) | sign)


def share_hits(claimed: Bits, own: Bits) -> float:
    """Share of patterns whose exponent could be a top value's: from the smallest of those, eight upwards."""
    exponents, shown = (own & 0x7F80) >> 7, (claimed & 0x7F80) >> 7
    low = exponents.min()
    return float(((shown >= low) & (shown <= min(exponents.max(), low + _BAND - 1))).mean())


def passes(rule: str, scores: Scores, limits: Limits) -> NDArray[np.bool_]:
    """Which chunks a rule lets pass."""
    return RULES[rule](scores, limits)


def _published(s: Scores, limits: Limits) -> NDArray[np.bool_]:
    return (s.exponents <= 38) & (s.means <= 10) & (s.medians <= 8)


RULES: dict[str, Callable[[Scores, Limits], NDArray[np.bool_]]] = {
    "published": _published,
    "form": lambda s, limits: _published(s, limits) & ~s.void,
    "outside": lambda s, limits: _published(s, limits) & (s.outside <= 0.25),
    "sign": lambda s, limits: _published(s, limits) & (s.signs <= limits.signs),
    "calibrated": lambda s, limits: (s.exponents <= limits.exponents) & (s.means <= limits.mean),
}
RULES["all"] = lambda s, limits: np.logical_and.reduce([rule(s, limits) for n, rule in RULES.items() if n != "all"])
"""The published rule alone, with one addition, calibrated limits in its place, and all together."""


def list_cases(quick: bool) -> Iterator[Case]:
    """Real models, then states drawn from simple laws."""
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
    """States of rollouts of a model: three quarters to learn from, the rest to forge."""
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
    largest = honest.max(axis=0)
    limits = Limits(*(max(floor, 2 * float(seen)) for floor, seen in zip((2.0, 4 / 128, 0.0), largest, strict=True)))
    return Case(title, Texts(states[:cut], features[:cut]), Texts(states[cut:], features[cut:]), limits)


def _measure_case(path: Path, name: str, dtype: torch.dtype, rollouts: int, tokens: int) -> None:
    """Keep the full chunks of honest rollouts: patterns, nearby tokens, and how honest proofs fare."""
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
    """Ids (num, offsets) of the tokens near each row; beyond the ends stands the nearest there is."""
    context = np.concatenate((rollout.prompt_ids, rollout.token_ids)).astype(np.int64)
    fed = len(rollout.prompt_ids) - 1 + np.arange(num)
    return context[np.clip(fed[:, None] + np.array(_NEAR), 0, len(context) - 1)]


def _draw_case(name: str, width: int, *, jitter: float | None) -> Case:
    """Gaussian states; with `jitter`, six channels are large and vary by that share from token to token."""
    rng = torch.Generator().manual_seed(derive_seed("forgery", name) % 2**63)
    states = torch.randn(96, CHUNK, width, generator=rng)
    if jitter is not None:
        channels = torch.randperm(width, generator=rng)[:6]
        sizes = torch.linspace(12, 40, 6) * torch.where(torch.rand(6, generator=rng) < 0.5, -1, 1)
        states[..., channels] = sizes * (1 + jitter * states[..., channels])
    texts = [Texts(part, torch.zeros(*part.shape[:2], 0)) for part in states.split(48)]
    return Case(name, texts[0], texts[1], Limits(2.0, 4 / 128, 0.0))


def _split_texts(texts: Texts) -> tuple[Texts, Texts]:
    """Four fifths to fit, the rest held back."""
    cut = len(texts.states) * 4 // 5
    return Texts(texts.states[:cut], texts.features[:cut]), Texts(texts.states[cut:], texts.features[cut:])


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
    """Exponent mismatches against mantissa mean, with the corner that the published rule lets pass."""
    pyplot = open_plots()
    figure, axes = pyplot.subplots(2, (len(shown) + 1) // 2, figsize=(13, 6), squeeze=False, sharex=True, sharey=True)
    for axis, (name, scores) in zip(axes.flat, shown.items(), strict=False):
        axis.add_patch(pyplot.Rectangle((0, 0), 38, 10, color="tab:red", alpha=0.15))
        for kind, s in scores.items():
            axis.plot(s.exponents, np.minimum(s.means, 60), ".", markersize=3, label=kind, alpha=0.6)
        axis.set_title(name, fontsize=9)
    axes.flat[0].legend(fontsize=7)
    figure.supxlabel("exponent mismatches of 128 (shaded: the published rule lets pass)")
    figure.supylabel("mean mantissa error")
    save_picture(figure, "forgery.png")


if __name__ == "__main__":
    main()
