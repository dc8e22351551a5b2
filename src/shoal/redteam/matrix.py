"""What became of each attempt, by the ledger alone, held against the fate that the registry says it must meet.

Words: a piece is a submission; it was judged if an honest validator gave a verdict on it, and found if that verdict was
a rejection. What was accepted on a liar's word alone is counted apart: it says nothing of the checks.

How many pieces it took is counted from the first that was bad. Most attacks cheat from the beginning. Of those that
need something first the ledger shows when they had it (`_skip_honest`).
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.redteam.crew import Attempt
from shoal.redteam.rate import Rate
from shoal.redteam.registry import ATTACKS, Fate
from shoal.redteam.tally import Piece, Tally
from shoal.swarm.messages import Standing, SubmissionState, Verdict
from shoal.swarm.rules.outcome import REJECTIONS

MOST_PIECES = 3
"""within which a newcomer that cheats must be convicted"""
SLACK, USUAL = 0.25, 12
"""by how much more than honest work of the same size what is not caught may earn, of so many submissions: tasks differ
in length, and so do the answers of one version and the next. Of fewer the mean is less sure"""
TOLERANCE = 0.05
"""by which what an honest worker is paid may differ from what its work deserves"""
COLUMNS = {
    "form": ("form", "reader", "crash", "file"),
    "lease": ("manifest", "groups", "task", "request"),
    "copy": ("copy",),
    "ending": ("termination", "eos_probability", "hazard"),
    "reward": ("reward",),
    "toploc": (),
    "logprob": ("logprob",),
    "sampling": ("sampling",),
    "sequence": ("sequence",),
    "shape": ("shape",),
    "tail": ("tail",),
    "history": (),
    "other": (),
}
"""checks by columns of the matrix; all whose names begin with that of a column belong to it too"""
_REJECTED = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)
_DECIDED = (*_REJECTED, SubmissionState.ACCEPTED)
_MILD = {Fate.SOFT: SubmissionState.SOFT, Fate.FORM: SubmissionState.FORM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One attempt."""

    attempt: Attempt
    states: Counter[str]
    """how its pieces ended"""
    judged: int
    """bad pieces on which an honest validator gave a verdict"""
    found: int
    """of these, how many it rejected"""
    checks: Counter[str]
    """in how many of these each check failed"""
    columns: Counter[str]
    """the same by columns of the matrix, in which several checks share one"""
    convicted: bool
    until: int | None
    """bad pieces decided until the first rejection, those accepted on a liar's word alone left out"""
    until_tokens: int
    """of all pieces handed in until then"""
    by_liar: int
    """pieces that were accepted on a liar's word alone"""
    peak: int
    left: int
    deserved: int
    """what honest work of the same size would have earned; credit is in micro-credits"""
    fault: str = ""
    """why it did not meet its fate"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All attempts of one attack."""

    name: str
    fate: Fate | None
    """None for a sleeper, whose fate is a number of pieces"""
    outcomes: Sequence[Outcome]
    checks: Counter[str]
    columns: Counter[str]

    @property
    def met(self) -> bool:
        return not any(outcome.fault for outcome in self.outcomes)

    @property
    def caught(self) -> bool:
        """Whether each attempt was found out."""
        return all(outcome.until is not None for outcome in self.outcomes)

    @property
    def detection(self) -> Rate:
        """Of its bad pieces that honest validators judged."""
        return Rate(self.sum("found"), self.sum("judged"))

    @property
    def until(self) -> int | None:
        """The most pieces that an attempt took."""
        return max((outcome.until or 0 for outcome in self.outcomes), default=0) if self.caught else None

    @property
    def until_tokens(self) -> int:
        return max((outcome.until_tokens for outcome in self.outcomes), default=0)

    def sum(self, name: str) -> int:
        """A number of all outcomes together."""
        return sum(getattr(outcome, name) for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """The honest workers together."""

    workers: int
    pieces: int
    rollouts: int
    """that were decided"""
    alarms: int
    """pieces that an honest validator rejected"""
    punished: tuple[str, ...]
    """workers that are banned or limited, or lost credit"""
    ratios: Mapping[str, float]
    """of each worker, what it earned over what its work deserves"""
    pay: float
    """micro-credits for a group, mean"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The field in numbers."""

    rows: Sequence[Row]
    honest: Honest
    holds: bool
    ledger: str
    liars: Mapping[str, str]
    """standing of each validator that lies"""

    @property
    def columns(self) -> list[str]:
        """The columns in which a check ever failed, cheap to dear."""
        return [name for name in COLUMNS if any(row.columns[name] for row in self.rows)]

    @property
    def faults(self) -> list[str]:
        """What is not as it must be."""
        told = [
            f"{outcome.attempt.name}: {outcome.fault}" for row in self.rows for outcome in row.outcomes if outcome.fault
        ]
        told += [f"{name}: honest, and punished" for name in self.honest.punished]
        told += [
            f"{name}: honest, and paid {ratio:.1%} of what its work deserves"
            for name, ratio in self.honest.ratios.items()
            if abs(ratio - 1.0) > TOLERANCE
        ]
        return told if self.holds else [*told, f"the ledger is broken: {self.ledger}"]


def build_matrix(
    tally: Tally, attempts: Sequence[Attempt], *, honest: Mapping[str, str], liars: Mapping[str, str]
) -> Matrix:
    """From a ledger and who is who in it: owners of honest workers, and nodes of validators that lie, with names."""
    workers = _sum_honest(tally, honest, liars)
    judge = _Judge(tally, liars, workers.pay)
    groups: dict[str, list[Outcome]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.name.rpartition("-")[0], []).append(judge.judge(attempt))
    rows = [_make_row(name, outcomes) for name, outcomes in groups.items()]
    order = {name: number for number, name in enumerate(ATTACKS)}
    rows.sort(key=lambda row: (row.fate is None, order[row.name.partition("@")[0]]))
    standings = {name: _find_standing(tally, tally.nodes.get(node, "")) for node, name in liars.items()}
    return Matrix(rows=rows, honest=workers, holds=tally.holds, ledger=tally.summary, liars=standings)


def _make_row(name: str, outcomes: Sequence[Outcome]) -> Row:
    checks, columns = Counter[str](), Counter[str]()
    for outcome in outcomes:
        checks += outcome.checks
        columns += outcome.columns
    fate = None if "@" in name else ATTACKS[name].fate
    return Row(name=name, fate=fate, outcomes=outcomes, checks=checks, columns=columns)


def find_column(check: str) -> str:
    """The column of a check."""
    return next((name for name, own in COLUMNS.items() if check in own or check.startswith(name)), "other")


class _Judge:
    """Reads what became of attempts."""

    def __init__(self, tally: Tally, liars: Collection[str], pay: float) -> None:
        self._tally, self._liars, self._pay = tally, liars, pay

    def judge(self, attempt: Attempt) -> Outcome:
        """All about one attempt; of several owners the first one's pieces, and the credit of all but helpers."""
        scripted = ATTACKS[attempt.attack].scripted
        owners = attempt.owners if scripted else attempt.owners[:1]
        pieces = self._tally.find_pieces(owners)
        bad = self._skip_honest(attempt, pieces)
        judged = [piece for piece in bad if _list_honest(piece, self._liars)]
        found = [piece for piece in judged if _is_found(piece, self._liars)]
        until = _count_until(bad, self._liars)
        purses = [self._tally.purses[owner] for owner in owners if owner in self._tally.purses]
        outcome = Outcome(
            attempt=attempt,
            states=Counter(piece.state.value for piece in pieces),
            judged=len(judged),
            found=len(found),
            checks=Counter(name for piece in found for name in _list_failed(piece, self._liars)),
            columns=Counter(name for piece in found for name in {*map(find_column, _list_failed(piece, self._liars))}),
            convicted=any(piece.state is SubmissionState.HARD for piece in pieces)
            and any(self._tally.standings.get(owner) is Standing.BANNED for owner in owners),
            until=until,
            until_tokens=_sum_tokens(pieces, found[0] if found else None),
            by_liar=sum(_is_liars(piece, self._liars) for piece in bad),
            peak=sum(purse.peak for purse in purses),
            left=sum(purse.now for purse in purses),
            deserved=self._find_deserved(attempt, pieces),
        )
        return replace(outcome, fault=_find_fault(outcome, self._tally, owners))

    def _skip_honest(self, attempt: Attempt, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Without those before an attack had what it needs, at which it was an honest worker."""
        others = self._tally.find_pieces(attempt.owners[1:])
        match attempt.attack:
            case "stale":  # with the weights of the first version that it holds there is nothing stale
                same = (piece for piece in pieces if self._tally.is_same(piece.version, pieces[0].version))
                first = {piece.submission for piece in same}
            case "previous":  # with the first version that it holds there is no other
                first = {
                    piece.submission
                    for piece in pieces
                    if piece.version == pieces[0].version or self._tally.is_same(piece.version, piece.version - 1)
                }
            case "own_old":
                return pieces[1:]
            case "copy_all" | "copy_one" | "copy_encoded":  # nothing leaks before somebody has written something
                begin = min((int(piece.submission[1:]) for piece in others), default=None)
                if begin is None:
                    return []
                first = {piece.submission for piece in pieces if int(piece.submission[1:]) < begin}
            case _:
                return pieces
        # What was rejected among the first was none of these: two versions were loaded before the first lease was had,
        # or what leaked was handed in before who leaked it had done so.
        return [piece for piece in pieces if piece.submission not in first or _is_found(piece, self._liars)]

    def _find_deserved(self, attempt: Attempt, pieces: Sequence[Piece]) -> int:
        """What honest work of the same size earned on the average; where all that is accepted is honest work, exactly
        that, each place once."""
        attack = ATTACKS[attempt.attack]
        if attack.fate is Fate.REFUSED:
            accepted = {piece.place: piece.tokens for piece in pieces if piece.state is SubmissionState.ACCEPTED}
            return self._tally.price * sum(accepted.values())
        granted = sum(self._tally.granted.get(owner, 0) for owner in attempt.owners)
        return round(self._pay * (granted if attack.scripted else sum(piece.groups for piece in pieces)))


def _find_fault(outcome: Outcome, tally: Tally, owners: Sequence[str]) -> str:
    """Why an attempt did not meet its fate; empty if it did."""
    attempt = outcome.attempt
    if attempt.ended == "failed":
        return f"could not be tried: {attempt.text}"
    if not attempt.owners:
        return "nobody joined"
    if attempt.share < 1.0:
        return "" if outcome.convicted else f"not convicted in {outcome.judged} judged submissions"
    fate = ATTACKS[attempt.attack].fate
    faults: dict[Fate, Callable[[], str]] = {
        Fate.HARD: lambda: _check_hard(outcome),
        Fate.SOFT: lambda: _check_mild(outcome, fate, tally, owners),
        Fate.FORM: lambda: _check_mild(outcome, fate, tally, owners),
        Fate.REFUSED: lambda: _check_refused(outcome),
        Fate.FRUITLESS: lambda: _check_allowed(outcome),
        Fate.BOUNDED: lambda: _check_allowed(outcome),
    }
    return faults[fate]()


def _check_hard(outcome: Outcome) -> str:
    if not outcome.convicted or outcome.until is None:
        return f"not convicted; {outcome.judged} of its submissions were judged, {_describe(outcome.states)}"
    if outcome.until > MOST_PIECES:
        return f"convicted only by its submission {outcome.until}"
    return f"kept {outcome.left} micro-credits" if outcome.left else ""


def _check_mild(outcome: Outcome, fate: Fate, tally: Tally, owners: Sequence[str]) -> str:
    wanted = _MILD[fate]
    decided = Counter({state: outcome.states[state] for state in _DECIDED if outcome.states[state]})
    decided[SubmissionState.ACCEPTED] -= outcome.by_liar
    others = [state for state, count in decided.items() if count > 0 and state is not wanted]
    if others or not decided[wanted]:
        return f"not rejected each time as {wanted.value}: {_describe(outcome.states)}"
    if any(tally.standings.get(owner) is Standing.BANNED for owner in owners):
        return "banned, for what an old program could have caused"
    return "" if outcome.by_liar or not outcome.left else f"kept {outcome.left} micro-credits"


def _check_refused(outcome: Outcome) -> str:
    if outcome.attempt.taken:
        return f"not refused: {'; '.join(outcome.attempt.taken[:3])}"
    if not outcome.attempt.trials:
        return "it tried nothing"
    return _check_gain(outcome)


def _check_allowed(outcome: Outcome) -> str:
    """Who had no lease and handed nothing in has gained nothing, and shown nothing."""
    return _check_gain(outcome) if outcome.deserved else "it tried nothing"


def _check_gain(outcome: Outcome) -> str:
    number = min(max(sum(outcome.states.values()), 1), USUAL)
    if outcome.left > (1 + SLACK * math.sqrt(USUAL / number)) * outcome.deserved:
        return f"earned {outcome.left} micro-credits, honest work of its size {outcome.deserved}"
    return ""


def _describe(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no submissions"


def _list_honest(piece: Piece, liars: Collection[str]) -> list[Verdict]:
    """What honest validators said of a piece."""
    said = [word.verdict for word in piece.words if word.validator not in liars]
    return [verdict for verdict in said if verdict is not Verdict.INCONCLUSIVE]


def _is_found(piece: Piece, liars: Collection[str]) -> bool:
    return any(verdict in REJECTIONS for verdict in _list_honest(piece, liars))


def _is_liars(piece: Piece, liars: Collection[str]) -> bool:
    return piece.state is SubmissionState.ACCEPTED and not _list_honest(piece, liars)


def _list_failed(piece: Piece, liars: Collection[str]) -> set[str]:
    return {name for word in piece.words if word.validator not in liars for name in word.failed}


def _count_until(bad: Sequence[Piece], liars: Collection[str]) -> int | None:
    """Bad pieces that honest validators judged up to the first that was rejected; None if none was."""
    judged = [piece for piece in bad if _list_honest(piece, liars)]
    return next((number for number, piece in enumerate(judged, start=1) if piece.state in _REJECTED), None)


def _sum_tokens(pieces: Sequence[Piece], last: Piece | None) -> int:
    """Tokens of pieces up to one of them, or of all."""
    total = 0
    for piece in pieces:
        total += piece.tokens
        if piece is last:
            break
    return total


def _find_standing(tally: Tally, owner: str) -> str:
    standing = tally.standings.get(owner)
    return "never joined" if standing is None else standing.value


def _sum_honest(tally: Tally, honest: Mapping[str, str], liars: Collection[str]) -> Honest:
    pieces = [piece for piece in tally.find_pieces(honest) if piece.state in (*_DECIDED, SubmissionState.INCONCLUSIVE)]
    paid = sum(piece.paid for piece in pieces)
    groups = sum(piece.groups for piece in pieces if piece.state is SubmissionState.ACCEPTED)
    return Honest(
        workers=len(honest),
        pieces=len(pieces),
        rollouts=tally.group_size * sum(piece.groups for piece in pieces),
        alarms=sum(_is_found(piece, liars) for piece in pieces),
        punished=tuple(name for owner, name in honest.items() if _is_punished(tally, owner)),
        ratios={name: _compare_pay(pieces, owner, tally.price) for owner, name in honest.items()},
        pay=paid / groups if groups else 0.0,
    )


def _is_punished(tally: Tally, owner: str) -> bool:
    """Whether an owner is banned or limited now, or ever had more credit than it has."""
    purse = tally.purses.get(owner)
    is_poorer = purse is not None and purse.now < purse.peak
    return is_poorer or tally.standings.get(owner) in (Standing.BANNED, Standing.LIMITED)


def _compare_pay(pieces: Sequence[Piece], owner: str, price: int) -> float:
    """What an owner was paid over the price of its tokens, which is what honest work deserves."""
    own = [piece for piece in pieces if piece.owner == owner]
    deserved = price * sum(piece.tokens for piece in own)
    return sum(piece.paid for piece in own) / deserved if deserved else math.nan
