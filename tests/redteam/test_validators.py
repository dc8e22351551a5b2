"""Verdicts of lying validators on good and bad work: well-formed, plausible, and different from honest ones."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.coordinator.decide.verdicts import _check_verdict
from shoal.coordinator.rules.validator_trust import is_sure
from shoal.errors import ConfigError, UnreachableError
from shoal.policy.model import Policy
from shoal.protocol.messages import Job, SignedVerdict, Verdict, VerdictStatement
from shoal.protocol.outcome import CRASH_CHECK
from shoal.recipe import Recipe
from shoal.redteam import registry
from shoal.redteam.registry import check_lie, make_behaviours
from shoal.redteam.validators import LIES, find_last, make_lying_judge
from shoal.submission.read import ParserPool
from shoal.toploc.calibration import Calibration
from shoal.validator.finding import Assessment

KEY = "ab" * 32


@dataclass
class Bench:
    """All lying validators, and the explanations they get from the coordinator."""

    runner: asyncio.Runner
    recipe: Recipe
    calibration: Calibration
    jail: ParserPool
    told: str = ""

    def ask(self, lie: str, job: Job, path: Path, policy: Policy) -> Assessment:
        """A lying validator's assessment of a file."""
        client: Any = SimpleNamespace(explain=self._explain)
        liar = make_lying_judge(lie, self.recipe, self.calibration, self.jail, client)
        return self.runner.run(liar.judge(job, path, policy))

    async def _explain(self, submission: str) -> Any:
        if not self.told:
            raise UnreachableError("nobody is there")
        return SimpleNamespace(text=self.told)


@pytest.fixture(scope="module")
def bench(recipe: Recipe, calibration: Calibration) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        jail = ParserPool()
        yield Bench(runner, recipe, calibration, jail)
        runner.run(jail.close())


@pytest.fixture
def cases(honest, recipe: Recipe, open_lease_workers, tmp_path: Path) -> dict[str, Any]:
    """Good work, and work with a bad proof, bad content and a bad form."""
    (greedy,), (pads,) = (open_lease_workers(make_behaviours(name, recipe)) for name in ("greedy", "padding"))
    rubbish = tmp_path / "rubbish.parquet"
    rubbish.write_bytes(b"PAR1 nothing PAR1")
    return {
        "good": honest,
        "proof": greedy.hand_in(),
        "meaning": pads.hand_in(),
        "form": replace(honest, path=rubbish),
    }


@pytest.fixture
def ask(bench: Bench, cases: dict[str, Any]) -> Callable[..., Assessment]:
    """A lying validator's assessment of one of the cases."""

    def ask_one(lie: str, name: str, **of_job: object) -> Assessment:
        case = cases[name]
        return bench.ask(lie, case.job.model_copy(update=of_job), case.path, case.policy)

    return ask_one


def check_form(opinion: Assessment, job: Job) -> None:
    """The coordinator accepts the verdict, and counts it as certain."""
    statement = opinion.state(job)
    SignedVerdict.model_validate_json(SignedVerdict(verdict=statement, signature="0" * 128).model_dump_json())
    tokens = sum(entry.tokens for entry in job.manifest.rollouts)
    row: Any = SimpleNamespace(first=job.first, count=job.count, tokens=tokens)
    _check_verdict(row, VerdictStatement.model_validate_json(statement.model_dump_json()))
    assert is_sure(statement.findings, accepts=statement.verdict is Verdict.ACCEPTED)


def test_honest_validators_tell_the_cases_apart(cases: dict[str, Any]) -> None:
    verdicts = {name: case.opinion().verdict for name, case in cases.items()}
    assert verdicts == {
        "good": Verdict.ACCEPTED,
        "proof": Verdict.HARD,
        "meaning": Verdict.SOFT,
        "form": Verdict.FORM,
    }


def test_accept_accepts_all_and_sees_in_good_work_what_honest_ones_see(ask, cases: dict[str, Any]) -> None:
    for name, case in cases.items():
        opinion = ask("accept", name)
        assert opinion.verdict is Verdict.ACCEPTED, name
        check_form(opinion, case.job)
    own, other = ask("accept", "good"), cases["good"].opinion()
    assert (own.tokens, own.groups) == (other.tokens, other.groups)
    assert all(group.signal for group in ask("accept", "form").groups), "an unreadable file counts as having a signal"


def test_reject_rejects_all_with_evidence_that_it_made_up(ask, cases: dict[str, Any]) -> None:
    for name, case in cases.items():
        opinion = ask("reject", name)
        assert opinion.verdict is Verdict.HARD, name
        (finding,) = opinion.findings
        assert not finding.passed and float(finding.statistic) > 100 * float(finding.threshold) > 0
        check_form(opinion, case.job)


def test_abstain_says_of_nothing_what_it_is_and_the_coordinator_takes_it(ask, cases: dict[str, Any]) -> None:
    for name, case in cases.items():
        opinion = ask("abstain", name)
        assert (opinion.verdict, opinion.tokens, opinion.groups) == (Verdict.INCONCLUSIVE, 0, ()), name
        assert not any(finding.check == CRASH_CHECK for finding in opinion.findings), "no claim about the file"
        check_form(opinion, case.job)


def test_lazy_is_right_about_all_but_what_only_the_proof_shows(ask, cases: dict[str, Any]) -> None:
    found = {name: ask("lazy", name) for name in cases}
    assert {name: opinion.verdict for name, opinion in found.items()} == {
        "good": Verdict.ACCEPTED,
        "proof": Verdict.ACCEPTED,
        "meaning": Verdict.SOFT,
        "form": Verdict.FORM,
    }
    for name, opinion in found.items():
        check_form(opinion, cases[name].job)
        assert opinion.replayed.rollouts == 0
    assert found["good"].groups == cases["good"].opinion().groups


@pytest.mark.parametrize("last", [Verdict.HARD, Verdict.SOFT, Verdict.FORM, Verdict.ACCEPTED, Verdict.INCONCLUSIVE])
def test_copy_says_again_what_was_said_before(bench: Bench, ask, cases: dict[str, Any], last: Verdict) -> None:
    bench.told = f"s1 is received.\nRound 1, validator {KEY}: verdict {last} (0 tokens).\nIt waits for verdict 2."
    opinion = ask("copy", "good", round=2)
    expected = Verdict.ACCEPTED if last is Verdict.INCONCLUSIVE else last
    assert opinion.verdict is expected
    check_form(opinion, cases["good"].job)
    assert ask("copy", "proof").verdict is Verdict.ACCEPTED, "without another verdict it accepts"
    bench.told = ""
    assert ask("copy", "good", round=2).verdict is Verdict.ACCEPTED, "also if the coordinator is unreachable"


def test_copy_reads_the_last_of_several() -> None:
    story = f"Round 1, validator {KEY}: verdict accepted (9 tokens).\n"
    story += f"Round 2 on appeal, validator {KEY}: verdict rejected_soft ("
    assert find_last(story + "0 tokens).") is Verdict.SOFT
    assert find_last("s1 is received.") is None


def test_a_lie_that_is_none_is_answered_with_all() -> None:
    with pytest.raises(ConfigError, match="--lie truth: unknown lie; available: abstain, accept, copy, lazy, reject"):
        check_lie("truth")
    assert tuple(LIES) == registry.LIES
