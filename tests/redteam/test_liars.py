"""What validators that lie say of good and of bad work: well-formed, believable, and not what an honest one finds."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import ConfigError
from shoal.policy.model import Policy
from shoal.recipe import Recipe
from shoal.redteam.liars.copy import find_last
from shoal.redteam.liars.registry import LIES, check_lie, make_liar
from shoal.redteam.registry import make_authors
from shoal.submission.jail import Jail
from shoal.swarm.asking import UnreachableError
from shoal.swarm.judging import _check_verdict
from shoal.swarm.messages import Job, SignedVerdict, Verdict, VerdictStatement
from shoal.swarm.rules.outcome import CRASH_CHECK
from shoal.swarm.rules.trust import is_sure
from shoal.toploc.calibration import Calibration
from shoal.validator.opinion import Opinion

KEY = "ab" * 32


@dataclass
class Bench:
    """All liars beside each other, and what they are told about others."""

    runner: asyncio.Runner
    recipe: Recipe
    calibration: Calibration
    jail: Jail
    told: str = ""

    def ask(self, lie: str, job: Job, path: Path, policy: Policy) -> Opinion:
        """What a liar says of a file."""
        client: Any = SimpleNamespace(explain=self._explain)
        liar = make_liar(lie, self.recipe, self.calibration, self.jail, client)
        return self.runner.run(liar.judge(job, path, policy))

    async def _explain(self, submission: str) -> Any:
        if not self.told:
            raise UnreachableError("nobody is there")
        return SimpleNamespace(text=self.told)


@pytest.fixture(scope="module")
def bench(recipe: Recipe, calibration: Calibration) -> Iterator[Bench]:
    with asyncio.Runner() as runner:
        jail = Jail()
        yield Bench(runner, recipe, calibration, jail)
        runner.run(jail.close())


@pytest.fixture
def cases(honest, recipe: Recipe, open_shops, tmp_path: Path) -> dict[str, Any]:
    """Good work, and work that is bad in its proof, in its meaning and in its form."""
    (greedy,), (claims,) = (open_shops(make_authors(name, recipe)) for name in ("greedy", "claimed_reward"))
    rubbish = tmp_path / "rubbish.parquet"
    rubbish.write_bytes(b"PAR1 nothing PAR1")
    return {
        "good": honest,
        "proof": greedy.hand_in(),
        "meaning": claims.hand_in(),
        "form": replace(honest, path=rubbish),
    }


@pytest.fixture
def ask(bench: Bench, cases: dict[str, Any]) -> Callable[..., Opinion]:
    """What a liar says of one of the cases."""

    def ask_one(lie: str, name: str, **of_job: object) -> Opinion:
        case = cases[name]
        return bench.ask(lie, case.job.model_copy(update=of_job), case.path, case.policy)

    return ask_one


def check_form(opinion: Opinion, job: Job) -> None:
    """The coordinator takes the verdict, and would count it as one without doubt."""
    statement = opinion.state(job)
    SignedVerdict.model_validate_json(SignedVerdict(verdict=statement, signature="0" * 128).model_dump_json())
    tokens = sum(entry.tokens for entry in job.manifest.rollouts)
    row: Any = SimpleNamespace(first=job.first, count=job.count, tokens=tokens)
    _check_verdict(row, VerdictStatement.model_validate_json(statement.model_dump_json()))
    assert is_sure(statement.model_dump(mode="json")["findings"], accepts=statement.verdict is Verdict.ACCEPTED)


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
    assert all(group.signal for group in ask("accept", "form").groups), "what cannot be read has a signal"


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
        assert not any(finding.check == CRASH_CHECK for finding in opinion.findings), "nothing is said of the file"
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
    bench.told = f"s1 is received.\nRound 1: validator {KEY} says {last} (0 tokens).\nIt waits for verdict 2."
    opinion = ask("copy", "good", round=2)
    expected = Verdict.ACCEPTED if last is Verdict.INCONCLUSIVE else last
    assert opinion.verdict is expected
    check_form(opinion, cases["good"].job)
    assert ask("copy", "proof").verdict is Verdict.ACCEPTED, "what nobody judged is fine"
    bench.told = ""
    assert ask("copy", "good", round=2).verdict is Verdict.ACCEPTED, "and what it cannot find out too"


def test_copy_reads_the_last_of_several() -> None:
    story = (
        f"Round 1: validator {KEY} says accepted (9 tokens).\nRound 2 on appeal: validator {KEY} says rejected_soft ("
    )
    assert find_last(story + "0 tokens).") is Verdict.SOFT
    assert find_last("s1 is received.") is None


def test_a_lie_that_is_none_is_answered_with_all() -> None:
    with pytest.raises(ConfigError, match="--lie truth: no such lie; there are abstain, accept, copy, lazy, reject"):
        check_lie("truth")
    for name in LIES:
        check_lie(name)
