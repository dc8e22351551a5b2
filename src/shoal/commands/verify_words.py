"""What `shoal verify` says: each finding beside the ledger's, and what follows."""

from collections.abc import Iterator, Sequence
from typing import Any

from shoal.commands.swarm_call import Outcome
from shoal.swarm.messages import Evidence, Finding, SubmissionState, Verdict
from shoal.swarm.params import MILLION
from shoal.swarm.rules.outcome import REJECTIONS
from shoal.validator.review import Line, Match, Review, find_outcome

EXIT_DIFFERS = 4
_HEAD = ("check", "ledger", "here", "threshold", "where")
_WIDTHS = (18, 12, 12, 12, 34)


def conclude_review(where: str, evidence: Evidence, reviews: Sequence[Review]) -> Outcome:
    """The end of a review: 0 if it agrees with the ledger."""
    match = find_outcome(reviews, evidence.state)
    job = evidence.job
    lines = [
        f"{job.submission} is {evidence.state}. It was checked again here, with v{job.version} and the same file: "
        f"{job.manifest.size} bytes, SHA-256 {job.manifest.blob}."
    ]
    for sitting, review in zip(evidence.sittings, reviews, strict=True):
        lines += _tell_review(review, sitting.validator, sitting.check_ppm)
    lines.append(_tell_match(match, where, evidence, reviews))
    data = {
        "submission": job.submission,
        "state": evidence.state.value,
        "match": None if match is None else match.value,
        "rounds": [_list_review(review, own.validator) for own, review in zip(evidence.sittings, reviews, strict=True)],
    }
    return Outcome(EXIT_DIFFERS if match is Match.DIFFERS else 0, "\n".join(lines), data)


def _tell_review(review: Review, validator: str, check_ppm: int) -> Iterator[str]:
    said, found = review.said, review.found
    share = f"{100 * check_ppm / MILLION:g} % of the rollouts replayed"
    yield f"Round {said.round}, validator {validator[:16]}, {share}: {said.verdict} there, {found.verdict} here."
    if review.is_trouble:
        yield f"  The validator could not look: {said.findings[0].where}. That is about its machine, and not compared."
        return
    if (said.tokens, len(said.groups)) != (found.tokens, len(found.groups)):
        yield f"  {said.tokens} tokens in {len(said.groups)} groups there, {found.tokens} in {len(found.groups)} here."
    yield "  " + _align(_HEAD)
    for line in review.lines:
        yield "  " + _align(_spell_line(line)) + f"{_tell_passed(line):8} {_tell_gap(line)}"


def _spell_line(line: Line) -> tuple[str, ...]:
    said, found = line.said, line.found
    own = found or said
    assert own is not None, "a line is of one finding at least"
    places = dict.fromkeys(finding.where for finding in (said, found) if finding is not None)
    return (line.check, _spell_number(said), _spell_number(found), own.threshold, " / ".join(places))


def _spell_number(finding: Finding | None) -> str:
    return "none" if finding is None else finding.statistic


def _tell_passed(line: Line) -> str:
    own = line.said or line.found
    assert own is not None, "a line is of one finding at least"
    return "passed" if own.passed else "FAILED"


def _tell_gap(line: Line) -> str:
    return f"{line.match}, {line.gap:.2g} thresholds apart" if line.match is Match.CLOSE else line.match.value


def _align(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:{width}} " for cell, width in zip(cells, _WIDTHS, strict=True))


def _tell_match(match: Match | None, where: str, evidence: Evidence, reviews: Sequence[Review]) -> str:
    if match is None:
        return "No validator could look at it, so there is nothing to compare."
    if match is Match.EQUAL:
        return "This agrees with the ledger, in every number."
    if match is Match.CLOSE:
        gap = max(line.gap for review in reviews for line in review.lines if line.match is Match.CLOSE)
        return (
            "This agrees with the ledger. Some numbers differ, as those of other machines do, by at most "
            f"{gap:.2g} thresholds, and none is on the other side of its threshold."
        )
    return f"This DIFFERS from what the ledger says. {_advise(where, evidence, reviews)}"


def _advise(where: str, evidence: Evidence, reviews: Sequence[Review]) -> str:
    name = evidence.job.submission
    if evidence.state.value in REJECTIONS:
        return (
            f"Its owner may have others judge it: shoal appeal {where} {name} --owner KEY; until when, and what the "
            f"validators found, says: shoal explain {where} {name}"
        )
    if evidence.state is SubmissionState.ACCEPTED and any(
        review.found.verdict is not Verdict.ACCEPTED for review in reviews
    ):
        return "It was accepted, and is not here: let the run's operator know, with what --save writes and the file."
    return f"What became of it says: shoal explain {where} {name}"


def _list_review(review: Review, validator: str) -> dict[str, Any]:
    return {
        "round": review.said.round,
        "validator": validator,
        "compared": not review.is_trouble,
        "ledger": review.said.verdict.value,
        "here": review.found.verdict.value,
        "match": review.match.value,
        "findings": [_list_line(line) for line in review.lines],
    }


def _list_line(line: Line) -> dict[str, Any]:
    both = {"ledger": line.said, "here": line.found}
    shown = {name: None if own is None else own.model_dump(mode="json") for name, own in both.items()}
    return {"check": line.check, "match": line.match.value, **shown}
