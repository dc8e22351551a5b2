"""The outcome of each attempt, read from the ledger alone and compared with the attack's declared expectation.

- A submission counts as judged if an honest validator gave a verdict on it, and as found if that verdict was a
  rejection. Work accepted only on a lying validator's verdict is counted separately: it says nothing about the checks.
- Submissions until caught are counted from the first bad one. Most attacks cheat from the beginning. For those that
  need something first, the ledger shows when they had it (`_skip_honest`).
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.protocol.messages import Standing, SubmissionState, Verdict
from shoal.protocol.outcome import REJECTIONS
from shoal.redteam.campaign import AttackAttempt
from shoal.redteam.ledger_summary import LedgerSummary, SubmissionSummary
from shoal.redteam.registry import Expected, find_attack, list_attacks
from shoal.train.eval import estimate_share


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of trials with its 95 % Wilson interval."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.trials:
            return 0.0, 1.0
        share = estimate_share(self.hits, self.trials)
        return share.low, share.high


MAX_SUBMISSIONS = 3
"""a new owner that cheats must be convicted within this many submissions"""
SLACK, USUAL_SUBMISSIONS = 0.25, 12
"""allowed gain over honest work of the same size for an attack that is not caught, at that many submissions: tasks
differ in length, and so do the answers of successive versions. With fewer submissions the mean is less certain"""
TOLERANCE = 0.05
"""allowed relative deviation of an honest worker's pay from the value of its work"""
COLUMNS = {
    "form": ("form", "reader", "crash", "file"),
    "lease": ("manifest", "groups", "task", "request"),
    "copy": ("copy",),
    "ending": ("termination", "eos_probability", "hazard"),
    "reward": ("reward", "reward_low"),
    "rival": ("rival",),
    "toploc": (),
    "logprob": ("logprob",),
    "sampling": ("sampling",),
    "sequence": ("sequence",),
    "shape": ("shape",),
    "tail": ("tail",),
    "history": (),
    "other": (),
}
"""checks by column of the matrix; checks whose names start with that of a column belong to it too"""
_REJECTED = (SubmissionState.FORM, SubmissionState.SOFT, SubmissionState.HARD)
_DECIDED = (*_REJECTED, SubmissionState.ACCEPTED)
_REJECTION = {Expected.SOFT: SubmissionState.SOFT, Expected.FORM: SubmissionState.FORM}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOutcome:
    """One attempt."""

    attempt: AttackAttempt
    states: Counter[str]
    """number of submissions by final state"""
    judged: int
    """bad submissions with a verdict by an honest validator"""
    found: int
    """how many of these were rejected"""
    checks: Counter[str]
    """how many of these failed each check"""
    columns: Counter[str]
    """the same by column of the matrix; several checks can share one"""
    convicted: bool
    until: int | None
    """bad submissions decided until the first rejection, without those accepted only on a lying validator's verdict"""
    until_tokens: int
    """all submissions until then"""
    by_liar: int
    """submissions accepted only on a lying validator's verdict"""
    peak: int
    left: int
    deserved: int
    """what honest work of the same size would have earned; in micro-credits"""
    fault: str = ""
    """why the outcome is not the expected one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackRow:
    """All attempts of one attack."""

    name: str
    expect: Expected | None
    """None for a sleeper, which must be convicted eventually"""
    outcomes: Sequence[AttemptOutcome]

    @property
    def checks(self) -> Counter[str]:
        return sum((outcome.checks for outcome in self.outcomes), Counter())

    @property
    def columns(self) -> Counter[str]:
        return sum((outcome.columns for outcome in self.outcomes), Counter())

    @property
    def met(self) -> bool:
        return not any(outcome.fault for outcome in self.outcomes)

    @property
    def caught(self) -> bool:
        """Whether every attempt was caught."""
        return all(outcome.until is not None for outcome in self.outcomes)

    @property
    def detection(self) -> Proportion:
        """Share of its bad submissions, among those judged by honest validators, that were rejected."""
        return Proportion(self.sum("found"), self.sum("judged"))

    @property
    def until(self) -> int | None:
        """The largest number of submissions until an attempt was caught."""
        return max((outcome.until or 0 for outcome in self.outcomes), default=0) if self.caught else None

    @property
    def until_tokens(self) -> int:
        return max((outcome.until_tokens for outcome in self.outcomes), default=0)

    def sum(self, name: str) -> int:
        """Sum of a field over all outcomes."""
        return sum(getattr(outcome, name) for outcome in self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HonestSummary:
    """Totals of the honest workers."""

    workers: int
    submissions: int
    rollouts: int
    """decided submissions"""
    alarms: int
    """submissions that an honest validator rejected"""
    punished: tuple[str, ...]
    """workers that are banned or limited, or that lost credit"""
    ratios: Mapping[str, float]
    """pay of each worker relative to the value of its work"""
    pay: float
    """mean micro-credits per group"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """The red-team run in numbers."""

    rows: Sequence[AttackRow]
    honest: HonestSummary
    holds: bool
    ledger: str
    liars: Mapping[str, str]
    """standing of each lying validator"""

    @property
    def columns(self) -> list[str]:
        """The columns in which a check failed at least once, cheapest first."""
        return [name for name in COLUMNS if any(row.columns[name] for row in self.rows)]

    @property
    def faults(self) -> list[str]:
        """Everything that is not as expected."""
        outcomes = [outcome for row in self.rows for outcome in row.outcomes if outcome.fault]
        faults = [f"{outcome.attempt.name}: {outcome.fault}" for outcome in outcomes]
        faults += [f"{name}: honest, but penalised" for name in self.honest.punished]
        wrong = {name: ratio for name, ratio in self.honest.ratios.items() if abs(ratio - 1.0) > TOLERANCE}
        faults += [f"{name}: honest, but paid {ratio:.1%} of the value of its work" for name, ratio in wrong.items()]
        return faults if self.holds else [*faults, f"the ledger is broken: {self.ledger}"]


def build_matrix(
    ledger: LedgerSummary, attempts: Sequence[AttackAttempt], *, honest: Mapping[str, str], liars: Mapping[str, str]
) -> Matrix:
    """Build the matrix from a ledger, the owners of honest workers and the nodes of lying validators, with names."""
    workers = _sum_honest(ledger, honest, liars)
    reader = _OutcomeReader(ledger, liars, workers.pay)
    groups: dict[str, list[AttemptOutcome]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.name.rpartition("-")[0], []).append(reader.read(attempt))
    expected = {name: None if "@" in name else find_attack(name).expect for name in groups}
    rows = [AttackRow(name=name, expect=expected[name], outcomes=outcomes) for name, outcomes in groups.items()]
    order = {name: number for number, name in enumerate(list_attacks())}
    rows.sort(key=lambda row: (row.expect is None, order[row.name.partition("@")[0]]))
    found = {name: ledger.standings.get(ledger.nodes.get(node, "")) for node, name in liars.items()}
    standings = {name: standing.value if standing else "never joined" for name, standing in found.items()}
    return Matrix(rows=rows, honest=workers, holds=ledger.holds, ledger=ledger.summary, liars=standings)


def find_column(check: str) -> str:
    """The column of a check."""
    return next((name for name, own in COLUMNS.items() if check in own or check.startswith(name)), "other")


class _OutcomeReader:
    """Reads the outcomes of attempts."""

    def __init__(self, ledger: LedgerSummary, liars: Collection[str], pay: float) -> None:
        self._ledger, self._liars, self._pay = ledger, liars, pay

    def read(self, attempt: AttackAttempt) -> AttemptOutcome:
        """Everything about one attempt: its first owner's submissions, and the credit of all owners but helpers."""
        scripted = find_attack(attempt.attack).scripted
        owners = attempt.owners if scripted else attempt.owners[:1]
        submissions = self._ledger.list_submissions(owners)
        bad = self._skip_honest(attempt, submissions)
        judged = [each for each in bad if _list_honest(each, self._liars)]
        found = [each for each in judged if _is_found(each, self._liars)]
        last = submissions.index(found[0]) + 1 if found else None
        balances = [self._ledger.balances[owner] for owner in owners if owner in self._ledger.balances]
        outcome = AttemptOutcome(
            attempt=attempt,
            states=Counter(each.state.value for each in submissions),
            judged=len(judged),
            found=len(found),
            checks=Counter(name for each in found for name in _list_failed(each, self._liars)),
            columns=Counter(name for each in found for name in {*map(find_column, _list_failed(each, self._liars))}),
            convicted=any(each.state is SubmissionState.HARD for each in submissions)
            and any(self._ledger.standings.get(owner) is Standing.BANNED for owner in owners),
            until=next((number for number, each in enumerate(judged, start=1) if each.state in _REJECTED), None),
            until_tokens=sum(each.tokens for each in submissions[:last]),
            by_liar=sum(each.state is SubmissionState.ACCEPTED for each in bad if each not in judged),
            peak=sum(balance.peak for balance in balances),
            left=sum(balance.now for balance in balances),
            deserved=self._find_deserved(attempt, submissions),
        )
        return replace(outcome, fault=_find_fault(outcome, self._ledger, owners))

    def _skip_honest(
        self, attempt: AttackAttempt, submissions: Sequence[SubmissionSummary]
    ) -> Sequence[SubmissionSummary]:
        """Drop honest work: from before the attack had what it needs, and where it found nothing to change."""
        others = self._ledger.list_submissions(attempt.owners[1:])
        match attempt.attack:
            case "stale":  # the weights of the first version it fetched are not stale
                same = (each for each in submissions if self._ledger.is_same(each.version, submissions[0].version))
                first = {each.submission for each in same}
            case "previous":  # there is nothing before the first version it fetched
                first = {
                    each.submission
                    for each in submissions
                    if each.version == submissions[0].version or self._ledger.is_same(each.version, each.version - 1)
                }
            case "own_old":
                return submissions[1:]
            case "copy_all" | "copy_one" | "copy_encoded":  # nothing leaks before another worker has finished something
                begin = min((int(each.submission[1:]) for each in others), default=None)
                if begin is None:
                    return []
                first = {each.submission for each in submissions if int(each.submission[1:]) < begin}
            case _:
                first = {each.submission for each in submissions if each.lease in attempt.unchanged}
        # A rejected submission among these was not honest: two versions were loaded before the first lease, or
        # the leaked work was submitted before the worker that wrote it submitted it.
        return [each for each in submissions if each.submission not in first or _is_found(each, self._liars)]

    def _find_deserved(self, attempt: AttackAttempt, submissions: Sequence[SubmissionSummary]) -> int:
        """Average pay of honest work of the same size. If everything accepted is honest work, exactly its pay, each
        group once."""
        attack = find_attack(attempt.attack)
        if attack.expect is Expected.REFUSED:
            accepted = {each.place: each.tokens for each in submissions if each.state is SubmissionState.ACCEPTED}
            return self._ledger.price * sum(accepted.values())
        granted = sum(self._ledger.granted.get(owner, 0) for owner in attempt.owners)
        return round(self._pay * (granted if attack.scripted else sum(each.groups for each in submissions)))


def _find_fault(outcome: AttemptOutcome, ledger: LedgerSummary, owners: Sequence[str]) -> str:
    """Why an outcome is not the expected one; empty if it is."""
    attempt = outcome.attempt
    if attempt.ended == "failed":
        return f"the attempt failed: {attempt.text}"
    if attempt.ended == "refused":
        return f"no validator saw its work: {attempt.text}"
    if not attempt.owners:
        return "nobody joined"
    if attempt.share < 1.0:
        return "" if outcome.convicted else f"not convicted in {outcome.judged} judged submissions"
    expect = find_attack(attempt.attack).expect
    if expect is Expected.HARD:
        return _check_hard(outcome)
    if expect in _REJECTION:
        return _check_rejected(outcome, _REJECTION[expect], ledger, owners)
    if expect is Expected.REFUSED and attempt.taken:
        return f"not refused: {'; '.join(attempt.taken[:3])}"
    # An attack without a trial, a lease or a submission gained nothing, but also showed nothing.
    has_tried = attempt.trials if expect is Expected.REFUSED else outcome.deserved
    return _check_gain(outcome) if has_tried else "nothing was attempted"


def _check_hard(outcome: AttemptOutcome) -> str:
    if not outcome.convicted or outcome.until is None:
        return f"not convicted; {outcome.judged} of its submissions were judged, {_describe(outcome.states)}"
    if outcome.until > MAX_SUBMISSIONS:
        return f"convicted only at submission {outcome.until}"
    return f"kept {outcome.left} micro-credits" if outcome.left else ""


def _check_rejected(
    outcome: AttemptOutcome, wanted: SubmissionState, ledger: LedgerSummary, owners: Sequence[str]
) -> str:
    decided = Counter({state: outcome.states[state] for state in _DECIDED if outcome.states[state]})
    decided[SubmissionState.ACCEPTED] -= outcome.by_liar
    others = [state for state, count in decided.items() if count > 0 and state is not wanted]
    if others or not decided[wanted]:
        return f"not always rejected as {wanted.value}: {_describe(outcome.states)}"
    if decided[wanted] < ledger.repeated and any(ledger.standings.get(owner) is Standing.BANNED for owner in owners):
        return "banned for something that an outdated version could cause"
    return "" if outcome.by_liar or not outcome.left else f"kept {outcome.left} micro-credits"


def _check_gain(outcome: AttemptOutcome) -> str:
    number = min(max(sum(outcome.states.values()), 1), USUAL_SUBMISSIONS)
    if outcome.left > (1 + SLACK * math.sqrt(USUAL_SUBMISSIONS / number)) * outcome.deserved:
        return f"earned {outcome.left} micro-credits, honest work of the same size earns {outcome.deserved}"
    return ""


def _describe(states: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "no submissions"


def _list_honest(submission: SubmissionSummary, liars: Collection[str]) -> list[Verdict]:
    """The verdicts of honest validators on a submission."""
    said = [said.verdict for said in submission.verdicts if said.validator not in liars]
    return [verdict for verdict in said if verdict is not Verdict.INCONCLUSIVE]


def _is_found(submission: SubmissionSummary, liars: Collection[str]) -> bool:
    return any(verdict in REJECTIONS for verdict in _list_honest(submission, liars))


def _list_failed(submission: SubmissionSummary, liars: Collection[str]) -> set[str]:
    return {name for said in submission.verdicts if said.validator not in liars for name in said.failed}


def _sum_honest(ledger: LedgerSummary, honest: Mapping[str, str], liars: Collection[str]) -> HonestSummary:
    ended = (*_DECIDED, SubmissionState.INCONCLUSIVE)
    submissions = [each for each in ledger.list_submissions(honest) if each.state in ended]
    paid = sum(each.paid for each in submissions)
    groups = sum(each.groups for each in submissions if each.state is SubmissionState.ACCEPTED)
    return HonestSummary(
        workers=len(honest),
        submissions=len(submissions),
        rollouts=ledger.group_size * sum(each.groups for each in submissions),
        alarms=sum(_is_found(each, liars) for each in submissions),
        punished=tuple(name for owner, name in honest.items() if _is_punished(ledger, owner)),
        ratios={name: _compare_pay(submissions, owner, ledger.price) for owner, name in honest.items()},
        pay=paid / groups if groups else 0.0,
    )


def _is_punished(ledger: LedgerSummary, owner: str) -> bool:
    """Whether an owner is banned or limited now, or once had more credit than it has."""
    balance = ledger.balances.get(owner)
    has_lost = balance is not None and balance.now < balance.peak
    return has_lost or ledger.standings.get(owner) in (Standing.BANNED, Standing.LIMITED)


def _compare_pay(submissions: Sequence[SubmissionSummary], owner: str, price: int) -> float:
    """An owner's pay relative to the price of its tokens, which is what honest work earns."""
    own = [each for each in submissions if each.owner == owner]
    deserved = price * sum(each.tokens for each in own)
    return sum(each.paid for each in own) / deserved if deserved else math.nan
