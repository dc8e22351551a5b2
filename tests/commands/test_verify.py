"""`shoal verify`: mistakes are one-line errors, the result comes first, and what others need is written as it says."""

import argparse
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.cli import main
from shoal.commands import verify
from shoal.errors import ConfigError, UnavailableError
from shoal.identity.keys import Key
from shoal.launch.prepare import find_root
from shoal.protocol.messages import EvidenceAnswer, Verdict
from shoal.validator.review import review_verdict

URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("12", "--owner", "owner.key"), "invalid submission id '12', expected s followed by a number"),
        (("../s1", "--owner", "owner.key"), "invalid submission id"),
        (("s1", "--owner", "owner.key", "--threads", "0"), "--threads: must be 1 or more"),
        (("s1", "--owner", "nosuch.key"), "nosuch.key: cannot be read"),
        (("s1", "--folder", "nosuch"), "nosuch: no such folder"),
        (("s1", "--case", ".", "--weights", "nosuch"), "nosuch: no such folder"),
    ],
)
def test_a_mistake_is_a_one_line_error(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert main(["verify", URL, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1 and told in error


def test_an_identity_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["verify", URL, "s1"])
    assert end.value.code == 2 and "--owner --folder --case is required" in capsys.readouterr().err


def test_an_unreachable_address_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Key.generate().save(tmp_path / "owner.key")
    assert main(["verify", URL, "s1", "--owner", str(tmp_path / "owner.key")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("shoal: ") and error.count("\n") == 1


def test_relays_that_do_not_answer_may_still_have_the_weights(tmp_path: Path) -> None:
    descriptor: Any = SimpleNamespace(run="demo", publisher=Key.generate().public, relays=(URL,))
    with pytest.raises(UnavailableError, match=rf"v0 was not received: not every relay answers \({URL}: .*refused"):
        asyncio.run(verify._pull_weights(descriptor, 0, tmp_path / "weights"))


@pytest.fixture
def convicted(world: Any) -> EvidenceAnswer:
    """The evidence about a submission that two validators rejected for many rollouts, with the same numbers."""
    name = world.submit("w1", world.lease("w1"))
    for judge in ("judge-a", "judge-b"):
        said = world.describe_verdict(world.take(judge), Verdict.HARD)
        (finding,) = said.findings
        many = [finding.model_copy(update={"where": f"g0.{place}", "statistic": f"0.{place}"}) for place in range(3, 9)]
        world.post(judge, said.model_copy(update={"findings": tuple(many)}))
    return world.run(world.coordinator.show_evidence(world.owner_id("ann"), name))


def conclude(answer: EvidenceAnswer, *, in_full: bool = False) -> list[str]:
    reviews = [review_verdict(signed.verdict, signed.verdict) for signed in answer.verdicts]
    return verify.conclude_review(URL, answer.evidence, reviews, in_full=in_full).text.splitlines()


def test_the_result_comes_first_and_no_table_twice(convicted: EvidenceAnswer) -> None:
    start, match, first, head, line, second, same = conclude(convicted)
    assert start.startswith("s") and match == "This agrees with the ledger, in every number."
    assert first.startswith("Round 1, ") and head.split()[:3] == ["check", "ledger", "here"]
    assert line.split()[:3] == ["toploc", "0.8", "0.8"] and line.endswith("FAILED   equal, the worst of 6")
    assert second.startswith("Round 2, ") and same == "  The same numbers as in round 1."


def test_in_full_every_value_is_listed(convicted: EvidenceAnswer) -> None:
    assert sum("toploc" in line for line in conclude(convicted, in_full=True)) == 6


def test_what_is_saved_is_announced_and_is_what_others_need(
    world: Any, convicted: EvidenceAnswer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = convicted.evidence.job
    name, file = job.submission, tmp_path / "submission"
    file.write_bytes(world.blobs.blobs[job.manifest.blob])
    verify._save_case(tmp_path / "case", convicted, file)
    evidence, kept = tmp_path / "case" / f"{name}.json", tmp_path / "case" / f"{name}.parquet"
    assert capsys.readouterr().err == f"shoal: wrote {evidence} and {kept}\n"
    args = argparse.Namespace(case=tmp_path / "case", file=None, submission=name)
    descriptor: Any = SimpleNamespace(run="demo", coordinator=world.key.public)
    assert asyncio.run(verify._find_evidence(args, descriptor, tmp_path)) == (convicted, kept)
    kept.write_bytes(b"other")
    with pytest.raises(ConfigError, match=f"not the file of {name}"):
        asyncio.run(verify._find_evidence(args, descriptor, tmp_path))


def test_the_weights_of_the_nodes_own_folder_are_used_if_they_are_the_right_ones(
    convicted: EvidenceAnswer, tmp_path: Path
) -> None:
    place = tmp_path / "weights" / f"v{convicted.evidence.job.version}"
    assert verify._find_held(tmp_path, convicted.evidence) is None
    place.mkdir(parents=True)
    (place / "model.safetensors").write_bytes(b"weights")
    (place / "config.json").write_bytes(b"{}")
    assert verify._find_held(tmp_path, convicted.evidence) is None, "other weights"
    evidence = convicted.evidence.model_copy(update={"weights": find_root(place)})
    assert verify._find_held(tmp_path, evidence) == place
