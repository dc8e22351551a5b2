"""`shoal verify`: the accused checks again what its submission was judged by.

    evidence (from the coordinator, or kept) -> file -> weights -> the validator's own check -> beside the verdicts

Exit codes beside those of all commands: 4, what is found here is not what the ledger says.
"""

import argparse
import asyncio
import hashlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.commands.serving import check_least
from shoal.commands.swarm_call import QUICK, Outcome, fetch_descriptor, find_place, open_client, run_work
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.policy.model import Policy
    from shoal.recipe import Recipe
    from shoal.swarm.descriptor import Descriptor
    from shoal.swarm.messages import Evidence, EvidenceAnswer
    from shoal.toploc.calibration import Calibration
    from shoal.validator.review import Review

_PULL_S = 600.0
_SUBMISSION = "no id of a submission, which is s and a number"


def run_verify(args: argparse.Namespace) -> int:
    """Check again, print both, and say whether they agree."""
    if not (args.submission[:1] == "s" and args.submission[1:].isdecimal() and len(args.submission) < 20):
        raise ConfigError(f"{args.submission[:40]!r}: {_SUBMISSION}")
    if args.case is not None and args.file is None:
        raise ConfigError("--case: the submission's file is needed too, for the coordinator gives it to its owner only")
    check_least("--threads", args.threads, 1)
    from shoal.runtime import tune_process

    tune_process(args.threads)
    return run_work(_verify(args), as_json=args.json)


async def _verify(args: argparse.Namespace) -> Outcome:
    from shoal.commands.verify_words import conclude_review
    from shoal.swarm.accused import save_evidence

    async with open_client(args.where, args.ca) as client:
        descriptor, _ = await fetch_descriptor(client)
        recipe_bytes, calibration_bytes = await client.read_recipe(), await client.read_calibration()
        recipe = _read_recipe(recipe_bytes, descriptor)
        if recipe.set.hash:
            recipe = recipe.bring_set(await client.read_tasks(recipe.set.size))
    with tempfile.TemporaryDirectory(prefix="shoal-verify-") as name:
        folder = Path(name)
        answer, path = await _find_evidence(args, descriptor, folder)
        if args.save is not None:
            save_evidence(args.save, answer)
        calibration = _read_calibration(calibration_bytes, recipe, folder)
        policy = await _find_policy(args, descriptor, answer.evidence, recipe, folder)
        reviews = await _judge_again(answer, path, policy, recipe, calibration)
    return conclude_review(args.where, answer.evidence, reviews)


async def _find_evidence(
    args: argparse.Namespace, descriptor: "Descriptor", folder: Path
) -> "tuple[EvidenceAnswer, Path]":
    """The evidence, and a file that has the bytes it is about."""
    from shoal.keys import Key
    from shoal.swarm.accused import AccusedClient, load_evidence
    from shoal.swarm.asking import Asker

    run, coordinator = descriptor.run, descriptor.coordinator
    if args.case is not None:
        answer = load_evidence(args.case, args.submission, run=run, coordinator=coordinator)
        return answer, _check_file(args.file, answer.evidence)
    key = Key.load(args.owner if args.owner is not None else args.folder / "node.key")
    place = find_place(args.where, args.ca)
    client = AccusedClient(place, key, run=run, coordinator=coordinator, asker=Asker(QUICK))
    try:
        answer = await client.read_evidence(args.submission)
        if args.file is not None:
            return answer, _check_file(args.file, answer.evidence)
        manifest, path = answer.evidence.job.manifest, folder / "submission"
        await client.fetch_file(args.submission, manifest.blob, manifest.size, path)
        return answer, path
    finally:
        client.close()


def _check_file(path: Path, evidence: "Evidence") -> Path:
    from shoal.files import hash_file

    try:
        found = hash_file(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if found != evidence.job.manifest.blob:
        raise ConfigError(
            f"{path}: another file than {evidence.job.submission}: its SHA-256 is {found}, and "
            f"{evidence.job.manifest.blob} was handed in"
        )
    return path


def _read_recipe(data: bytes, descriptor: "Descriptor") -> "Recipe":
    from shoal.recipe import RecipeError, load_recipe

    if hashlib.sha256(data).hexdigest() != descriptor.tasks:
        raise ConfigError("the coordinator has another recipe than the run's descriptor says")
    try:
        return load_recipe(data)
    except RecipeError as error:
        raise ConfigError(f"run {descriptor.run}: {error}; another version of shoal may know it") from None


def _read_calibration(data: bytes, recipe: "Recipe", folder: Path) -> "Calibration":
    from shoal.toploc.calibration import load_calibration

    if hashlib.sha256(data).hexdigest() != recipe.calibration:
        raise ConfigError("the coordinator has another calibration than the run's recipe says")
    path = folder / "calibration.json"
    path.write_bytes(data)
    return load_calibration(path)


async def _find_policy(
    args: argparse.Namespace, descriptor: "Descriptor", evidence: "Evidence", recipe: "Recipe", folder: Path
) -> "Policy":
    """The weights that the work is said to be of: those that the ledger has under that version."""
    from shoal.launch.start import find_root
    from shoal.node.weights import open_version

    version = evidence.job.version
    if args.weights is None:
        place = await _pull_weights(descriptor, version, folder / "weights")
    else:
        place = args.weights
        if (root := await asyncio.to_thread(find_root, place)) != evidence.weights:
            raise ConfigError(f"{place}: not v{version}, whose root is {evidence.weights}: its own is {root}")
    return await asyncio.to_thread(open_version, version, place, recipe)


async def _pull_weights(descriptor: "Descriptor", version: int, folder: Path) -> Path:
    from shoal.shardcast.client import Client
    from shoal.shardcast.crew import GoneError

    note = partial(print, file=sys.stderr, flush=True)
    if not descriptor.publisher or not descriptor.relays:
        raise ConfigError("the run's descriptor names no relays of weights; say where they are with --weights")
    client = await Client.open(folder, descriptor.relays, run=descriptor.run, publisher=descriptor.publisher, note=note)
    async with client:
        try:
            async with asyncio.timeout(_PULL_S):
                return await client.pull(version)
        except (GoneError, TimeoutError):
            raise ConfigError(
                f"v{version} is not to be had from the run's relays any more; say where it is with --weights"
            ) from None


async def _judge_again(
    answer: "EvidenceAnswer", path: Path, policy: "Policy", recipe: "Recipe", calibration: "Calibration"
) -> "list[Review]":
    """Each verdict beside what the same job gives here."""
    from shoal.submission.jail import Jail
    from shoal.validator.judge import Judge
    from shoal.validator.review import review_verdict

    async with Jail() as jail:
        judge = Judge(recipe, calibration, jail)
        reviews = []
        for job, signed in zip(answer.evidence.list_jobs(), answer.verdicts, strict=True):
            opinion = await judge.judge(job, path, policy)
            reviews.append(review_verdict(signed.verdict, opinion.state(job)))
        return reviews
