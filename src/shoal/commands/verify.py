"""`shoal verify`: an accused owner repeats the checks by which its submission was judged.

    evidence (from the coordinator, or saved) -> file -> weights -> the validator's checks -> compare with the verdicts

Exit codes in addition to the common ones: 4, the result here differs from the ledger.
"""

import argparse
import asyncio
import hashlib
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.commands import common
from shoal.commands.common import CliCommand, CommandParser, CommandResult
from shoal.errors import ConfigError, UnavailableError
from shoal.util.files import write_output
from shoal.util.units import count_things

if TYPE_CHECKING:
    from shoal.policy.model import Policy
    from shoal.protocol.descriptor import Descriptor
    from shoal.protocol.messages import Evidence, EvidenceAnswer
    from shoal.recipe import Recipe
    from shoal.toploc.calibration import Calibration
    from shoal.validator.review import CheckComparison, Match, Review

logger = logging.getLogger(__name__)
EXIT_DIFFERS = 4
_PULL_S = 600.0
_HEAD = ("check", "ledger", "here", "threshold", "where")
_WIDTHS = (18, 12, 12, 12, 34)


def _add_verify(parser: CommandParser) -> None:
    add = parser.add_argument
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--owner", type=Path, metavar="FILE", help="the key of the submission's owner")
    text = "folder of one of the owner's nodes; its weights are used if it has the version"
    who.add_argument("--folder", type=Path, metavar="DIR", help=text)
    who.add_argument("--case", type=Path, metavar="DIR", help="what the owner wrote with --save, for third parties")
    add("--save", type=Path, metavar="DIR", help="write evidence and file to DIR (default: not written)")
    text = "the submission's file (default: in the folder of --case, or from the coordinator, if kept)"
    add("--file", type=Path, metavar="FILE", help=text)
    add("--weights", type=Path, metavar="DIR", help="the version's weights (default: from the relays, if kept)")
    add("--threads", type=int, default=1, metavar="N", help="torch threads (%(default)s)")


async def _verify(args: argparse.Namespace) -> CommandResult:
    """Check a decided submission again and compare with the ledger; -v lists every value."""
    common.check_submission(args.submission)
    common.check_least("--threads", args.threads, 1)
    if args.owner is not None:
        common.load_key(args.owner)
    for name in ("folder", "case", "weights"):
        path = getattr(args, name)
        if path is not None and not path.is_dir():
            raise ConfigError(f"{path}: no such folder")
    async with common.open_client(args.where, args.ca) as client:
        descriptor, _ = await common.fetch_descriptor(client)
        recipe_bytes, calibration_bytes = await client.read_recipe(), await client.read_calibration()
        recipe = _read_recipe(recipe_bytes, descriptor)
        if recipe.set.hash:
            recipe = recipe.bring_set(await client.read_tasks(recipe.set.size))
    logger.info(f"checking {args.submission} again; loading libraries first")
    from shoal.util.process import tune_process

    tune_process(args.threads)
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        answer, path = await _find_evidence(args, descriptor, folder)
        if args.save is not None:
            _save_case(args.save, answer, path)
        calibration = _read_calibration(calibration_bytes, recipe, folder)
        policy = await _find_policy(args, descriptor, answer.evidence, recipe, folder)
        previous = await _find_previous(descriptor, answer.evidence, recipe, calibration, folder)
        reviews = await _judge_again(answer, path, policy, recipe, calibration, previous)
    return conclude_review(args.where, answer.evidence, reviews, in_full=bool(args.verbose))


async def _find_evidence(
    args: argparse.Namespace, descriptor: "Descriptor", folder: Path
) -> "tuple[EvidenceAnswer, Path]":
    """The evidence, and the path of the submission's file."""
    from shoal.net.retry import RetryingClient
    from shoal.node.owner_client import OwnerClient, load_evidence

    run, coordinator = descriptor.run, descriptor.coordinator
    if args.case is not None:
        evidence, file = _name_case(args.case, args.submission)
        answer = load_evidence(evidence, args.submission, run=run, coordinator=coordinator)
        return answer, _check_file(args.file or file, answer.evidence)
    key = common.load_key(args.owner if args.owner is not None else args.folder / "node.key")
    place = common.find_endpoint(args.where, args.ca)
    asker = RetryingClient(common.quick_retries())
    with closing(OwnerClient(place, key, run=run, coordinator=coordinator, asker=asker)) as client:
        answer = await client.read_evidence(args.submission)
        if args.file is not None:
            return answer, _check_file(args.file, answer.evidence)
        manifest, path = answer.evidence.job.manifest, folder / "submission"
        await client.fetch_file(args.submission, manifest.blob, manifest.size, path)
        return answer, path


def _name_case(folder: Path, submission: str) -> tuple[Path, Path]:
    """Where a folder of --save has the evidence and the file."""
    return folder / f"{submission}.json", folder / f"{submission}.parquet"


def _save_case(folder: Path, answer: "EvidenceAnswer", path: Path) -> None:
    """Write what others need to repeat the check, and say so at once: what follows may fail."""
    from shoal.node.owner_client import save_evidence

    evidence, file = _name_case(folder, answer.evidence.job.submission)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used as a folder ({error.strerror})") from None
    save_evidence(evidence, answer)
    write_output(file, path.read_bytes())
    print(f"shoal: wrote {evidence} and {file}", file=sys.stderr)


def _check_file(path: Path, evidence: "Evidence") -> Path:
    from shoal.util.files import hash_file

    try:
        found = hash_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if found != evidence.job.manifest.blob:
        given, name = evidence.job.manifest.blob, evidence.job.submission
        raise ConfigError(f"{path}: not the file of {name}: SHA-256 is {found}, expected {given}")
    return path


def _read_recipe(data: bytes, descriptor: "Descriptor") -> "Recipe":
    from shoal.recipe import RecipeError, load_recipe

    if hashlib.sha256(data).hexdigest() != descriptor.tasks:
        raise ConfigError("the coordinator's recipe does not match the run's descriptor")
    try:
        return load_recipe(data)
    except RecipeError as error:
        raise ConfigError(f"run {descriptor.run}: {error}; a different version of shoal may support it") from None


def _read_calibration(data: bytes, recipe: "Recipe", folder: Path) -> "Calibration":
    from shoal.toploc.calibration import load_calibration

    if hashlib.sha256(data).hexdigest() != recipe.calibration:
        raise ConfigError("the coordinator's calibration does not match the run's recipe")
    path = folder / "calibration.json"
    path.write_bytes(data)
    return load_calibration(path)


async def _find_policy(
    args: argparse.Namespace, descriptor: "Descriptor", evidence: "Evidence", recipe: "Recipe", folder: Path
) -> "Policy":
    """The weights of the claimed version, checked against the root in the ledger."""
    from shoal.launch.prepare import find_root
    from shoal.node.weights import open_version

    version = evidence.job.version
    if args.weights is None:
        held = None if args.folder is None else await asyncio.to_thread(_find_held, args.folder, evidence)
        place = held or await _pull_weights(descriptor, version, folder / "weights")
    else:
        place = args.weights
        try:
            root = await asyncio.to_thread(find_root, place)
        except ConfigError as error:
            raise ConfigError(f"--weights: not the folder of one version: {error}") from None
        if root != evidence.weights:
            raise ConfigError(f"{place}: not v{version}: root is {root}, expected {evidence.weights}")
    await asyncio.to_thread(_check_base, place, recipe)
    return await asyncio.to_thread(open_version, version, place, recipe)


def _check_base(place: Path, recipe: "Recipe") -> None:
    """Check the base beside an adapter: the root in the ledger covers only the adapter."""
    from shoal.launch.prepare import find_root
    from shoal.policy.adapter import find_base, is_adapter

    if is_adapter(place) and (root := find_root(base := find_base(place))) != recipe.weights:
        raise ConfigError(f"{base}: not v0: root is {root}, expected {recipe.weights}")


def _find_held(node: Path, evidence: "Evidence") -> Path | None:
    """The weights in a node's folder, if it has the version. A node at work may remove them at any time."""
    from shoal.launch.prepare import find_root

    place = node / "weights" / f"v{evidence.job.version}"
    try:
        return place if place.is_dir() and find_root(place) == evidence.weights else None
    except (ConfigError, OSError):
        return None


async def _find_previous(
    descriptor: "Descriptor", evidence: "Evidence", recipe: "Recipe", calibration: "Calibration", folder: Path
) -> "Policy | None":
    """The version before the claimed one, which work is compared with in bfloat16; None if that is not needed."""
    from shoal.node.weights import open_version
    from shoal.toploc.rivals import Rival

    version = evidence.job.version - 1
    if version < 0 or Rival.PREVIOUS not in calibration.rivals:
        return None
    place = await _pull_weights(descriptor, version, folder / "previous")
    return await asyncio.to_thread(open_version, version, place, recipe)


async def _pull_weights(descriptor: "Descriptor", version: int, folder: Path) -> Path:
    from shoal.node.weights import describe_relays
    from shoal.shardcast.client import ShardcastClient
    from shoal.shardcast.fetch.upstreams import GoneError

    if not descriptor.publisher or not descriptor.relays:
        raise ConfigError("the run's descriptor lists no relays; give the version's weights with --weights")
    logger.info(f"downloading v{version} from the run's relays")
    client = await ShardcastClient.open(
        folder, descriptor.relays, run=descriptor.run, publisher=descriptor.publisher, only=version
    )
    async with client:
        try:
            async with asyncio.timeout(_PULL_S):
                return await client.pull(version)
        except (GoneError, TimeoutError):
            give = (
                f"give its weights with --weights DIR: weights/v{version} in the folder of a worker or validator that "
                f"still has it, or, from the run's operator, versions/v{version:06d} in the trainer's run directory"
            )
            if all(relay.listed for relay in client.puller.upstreams.all):
                raise ConfigError(f"v{version} is no longer available from the run's relays; {give}") from None
            silent = f"v{version} was not received: not every relay answers ({describe_relays(client)})"
            raise UnavailableError(f"{silent}. Try again later, or {give}") from None


async def _judge_again(
    answer: "EvidenceAnswer",
    path: Path,
    policy: "Policy",
    recipe: "Recipe",
    calibration: "Calibration",
    previous: "Policy | None",
) -> "list[Review]":
    """Each verdict, compared with the result of the same job here."""
    from shoal.submission.read import ParserPool
    from shoal.validator.judge import Judge
    from shoal.validator.review import review_verdict

    async with ParserPool() as parsers:
        judge = Judge(recipe, calibration, parsers)
        judge.previous = previous
        reviews = []
        for job, signed in zip(answer.evidence.list_jobs(), answer.verdicts, strict=True):
            opinion = await judge.judge(job, path, policy)
            reviews.append(review_verdict(signed.verdict, opinion.state(job)))
        return reviews


def conclude_review(
    where: str, evidence: "Evidence", reviews: "Sequence[Review]", *, in_full: bool = False
) -> CommandResult:
    """Conclude the review; exit code 0 if it agrees with the ledger."""
    from shoal.validator.review import Match, find_outcome

    match = find_outcome(reviews, evidence.state)
    job = evidence.job
    lines = [
        f"{job.submission} {evidence.state.phrase}. It was checked again here, with v{job.version} and the same file: "
        f"{job.manifest.size} bytes, SHA-256 {job.manifest.blob}.",
        _describe_match(match, where, evidence, reviews),
    ]
    earlier: dict[tuple[str, ...], int] = {}
    for sitting, review in zip(evidence.sittings, reviews, strict=True):
        head, *table = _describe_review(review, sitting.validator, sitting.check_ppm, in_full=in_full)
        known = earlier.setdefault(tuple(table), review.said.round)
        lines += [head, *table] if known == review.said.round else [head, f"  The same numbers as in round {known}."]
    data = {
        "submission": job.submission,
        "state": evidence.state.value,
        "match": None if match is None else match.value,
        "rounds": [_list_review(review, own.validator) for own, review in zip(evidence.sittings, reviews, strict=True)],
    }
    return CommandResult(EXIT_DIFFERS if match is Match.DIFFERS else 0, "\n".join(lines), data)


def _describe_review(review: "Review", validator: str, check_ppm: int, *, in_full: bool) -> Iterator[str]:
    from shoal.protocol.params import MILLION

    said, found = review.said, review.found
    share = f"{100 * check_ppm / MILLION:g} % of the rollouts replayed"
    yield f"Round {said.round}, validator {validator[:16]}, {share}: {said.verdict} there, {found.verdict} here."
    if review.is_trouble:
        yield f"  The validator failed to check it: {said.findings[0].where}. A local failure is not compared."
        return
    if (said.tokens, len(said.groups)) != (found.tokens, len(found.groups)):
        there = f"{count_things(said.tokens, 'token')} in {count_things(len(said.groups), 'group')}"
        yield f"  {there} there, {found.tokens} in {len(found.groups)} here."
    yield "  " + _align(_HEAD)
    for check in dict.fromkeys(line.check for line in review.lines):
        own = [line for line in review.lines if line.check == check]
        if in_full or len(own) == 1:
            yield from map(_describe_line, own)
        else:
            yield f"{_describe_line(max(own, key=_rank_line))}, the worst of {len(own)}"


def _rank_line(line: "CheckComparison") -> tuple[bool, float, float]:
    """How much a comparison matters: one that differs, then the largest gap, then the value farthest from passing."""
    from shoal.validator.review import Match

    finding = line.said or line.found
    assert finding is not None, "a comparison has at least one finding"
    distance = abs(float(finding.statistic) - float(finding.threshold))
    return line.match is Match.DIFFERS, line.gap, -distance if finding.passed else distance


def _describe_line(line: "CheckComparison") -> str:
    from shoal.validator.review import Match

    findings = [finding for finding in (line.said, line.found) if finding is not None]  # at least one of them
    numbers = ["none" if finding is None else finding.statistic for finding in (line.said, line.found)]
    places = " / ".join(dict.fromkeys(finding.where for finding in findings))
    passed = "passed" if findings[0].passed else "FAILED"
    gap = f"{line.match}, {line.gap:.2g} thresholds apart" if line.match is Match.CLOSE else line.match.value
    return f"  {_align((line.check, *numbers, findings[-1].threshold, places))}{passed:8} {gap}"


def _align(cells: tuple[str, ...]) -> str:
    return "".join(f"{cell:{width}} " for cell, width in zip(cells, _WIDTHS, strict=True))


def _describe_match(match: "Match | None", where: str, evidence: "Evidence", reviews: "Sequence[Review]") -> str:
    from shoal.validator.review import Match

    if match is None:
        return "No validator could check it, so there is nothing to compare."
    if match is Match.EQUAL:
        return "This agrees with the ledger, in every number."
    if match is Match.CLOSE:
        gap = max(line.gap for review in reviews for line in review.lines if line.match is Match.CLOSE)
        return (
            "This agrees with the ledger. Some numbers differ, as expected between machines, by at most "
            f"{gap:.2g} thresholds, and none crosses its threshold."
        )
    return f"This DIFFERS from the ledger. {_advise(where, evidence, reviews)}"


def _advise(where: str, evidence: "Evidence", reviews: "Sequence[Review]") -> str:
    from shoal.protocol.messages import SubmissionState, Verdict
    from shoal.protocol.outcome import REJECTIONS

    name = evidence.job.submission
    if evidence.state.value in REJECTIONS:
        return (
            f"Its owner can appeal: shoal owner appeal {where} {name} --owner FILE. Deadline and findings: "
            f"shoal explain {where} {name}"
        )
    is_accepted_here = all(review.found.verdict is Verdict.ACCEPTED for review in reviews)
    if evidence.state is SubmissionState.ACCEPTED and not is_accepted_here:
        return "It was accepted, but fails here: tell the run's operator, with the file and what --save writes."
    return f"For the outcome, see: shoal explain {where} {name}"


def _list_review(review: "Review", validator: str) -> dict[str, Any]:
    return {
        "round": review.said.round,
        "validator": validator,
        "compared": not review.is_trouble,
        "ledger": review.said.verdict.value,
        "here": review.found.verdict.value,
        "match": review.match.value,
        "findings": [_list_line(line) for line in review.lines],
    }


def _list_line(line: "CheckComparison") -> dict[str, Any]:
    both = {"ledger": line.said, "here": line.found}
    shown = {name: None if own is None else own.model_dump(mode="json") for name, own in both.items()}
    return {"check": line.check, "match": line.match.value, **shown}


COMMANDS = (CliCommand("verify", _verify, (*common.QUERY, common.SUBMISSION, _add_verify)),)
