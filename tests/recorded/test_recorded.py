"""What an earlier tree wrote is still read, verified and written again: ledger, files, messages, weights, settings.

The files are those of record.py. Floats are equal to the bit where they were recorded, and close elsewhere.
"""

import asyncio
import base64
import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from shoal.cli import main
from shoal.config.run import RunConfig
from shoal.coordinator.service import ServiceConfig
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.settings import DilocoConfig
from shoal.identity.delegation import open_delegation
from shoal.identity.documents import Tag, open_document
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.launch.prepare import find_root
from shoal.launch.settings import LaunchConfig
from shoal.ledger.event import Event, Posting
from shoal.node.receipts import SignedDocumentStore
from shoal.node.weights import open_version
from shoal.protocol.descriptor import Descriptor, open_descriptor
from shoal.protocol.messages import Job, Lease, Manifest, Receipt, VerdictRecord
from shoal.protocol.params import RunParams
from shoal.recipe import dump_recipe, load_recipe
from shoal.shardcast.delta.delta import apply_chain, encode_delta
from shoal.shardcast.format.manifest import ManifestLog
from shoal.submission.limits import SubmissionLimits
from shoal.submission.read import ParserPool, SubmissionContents, read_submission
from shoal.submission.write import write_submission
from shoal.toploc.build import build_proofs
from shoal.toploc.calibration import load_calibration
from shoal.toploc.verify import verify_proofs
from shoal.util.canonical import encode_canonical
from shoal.util.files import hash_file
from shoal.validator.judge import Judge

DATA = Path(__file__).parent / "data"
RUN, CAST = DATA / "run", DATA / "cast"
TINY = Path(__file__).parents[1] / "tiny.toml"
NAME = "tiny-seed0"
MODELS: dict[str, type[BaseModel]] = {
    "train": RunConfig,
    "run": LaunchConfig,
    "params": RunParams,
    "coordinator": ServiceConfig,
    "diloco": DilocoConfig,
    "reducer": ReducerConfig,
}
SUBMISSIONS = pytest.mark.parametrize("name", ["honest", "cheat"])


def read_json(*parts: str) -> Any:
    return json.loads(DATA.joinpath(*parts).read_text())


def read_descriptor() -> Descriptor:
    return open_descriptor((RUN / "descriptor.json").read_bytes())


def describe_machine() -> dict[str, str]:
    """As record.py does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "pyarrow": version("pyarrow"),
    }


def is_same_machine() -> bool:
    """Whether floats have the same bits here."""
    return bool(describe_machine() == read_json("machine.json"))


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recorded") / "ledger.db"
    path.write_bytes(gzip.decompress((RUN / "ledger.db.gz").read_bytes()))
    return str(path)


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    code = main(words)
    shown = capsys.readouterr()
    assert code == 0, shown.out + shown.err
    return shown.out


def list_events(capsys: pytest.CaptureFixture[str], ledger: str, kind: str) -> list[dict[str, Any]]:
    """All events of a kind."""
    shown = json.loads(ask(capsys, "ledger", "show", ledger, "--json", "--from", "0", "--count", "10000"))
    return [event for event in shown["events"] if event["kind"] == kind]


# The ledger


def test_the_ledger_still_verifies(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(ask(capsys, "ledger", "verify", ledger, "--json"))
    assert report == read_json("run", "verified.json")
    assert report["holds"] and report["root"]


def test_the_ledger_extends_the_head_that_a_node_kept(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--head", str(RUN / "head.json"), "--coordinator", read_descriptor().coordinator)
    assert ": holds" in ask(capsys, "ledger", "verify", ledger, *words)


def test_an_event_of_each_kind_is_shown_as_it_was(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    events = read_json("run", "events.json")
    assert len(events) > 15
    for event in events:
        assert json.loads(ask(capsys, "ledger", "show", ledger, str(event["seq"]), "--json")) == event


def test_events_have_the_canonical_bytes_and_hashes_that_they_had() -> None:
    for fields in read_json("run", "events.json"):
        given = dict(fields)
        body, postings = given.pop("body"), given.pop("postings")
        signature, prev_hash, known = (bytes.fromhex(given.pop(name)) for name in ("signature", "prev_hash", "hash"))
        event = Event(
            **given,
            body=encode_canonical(body),
            signature=signature,
            prev_hash=prev_hash,
            hash=known,
            postings=tuple(Posting(entry["account"], entry["amount"]) for entry in postings),
        )
        assert event.compute_hash() == known, event.kind


def test_an_event_of_the_ledger_is_still_proven_to_a_stranger(
    ledger: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    proof = tmp_path / "proof.json"
    ask(capsys, "ledger", "prove", ledger, "17", "--out", str(proof))
    told = ask(capsys, "ledger", "check", str(proof), "--descriptor", str(RUN / "descriptor.json"))
    assert f"in the ledger of run {NAME}" in told


def test_the_tasks_of_the_ledger_are_told_as_they_were(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = ask(capsys, "ledger", "tasks", ledger, "--recipe", str(RUN / "recipe.json"))
    assert told == (RUN / "tasks.txt").read_text()


# Papers and signed documents


def test_the_recipe_is_the_one_that_the_descriptor_names_and_is_written_with_the_same_bytes() -> None:
    data = (RUN / "recipe.json").read_bytes()
    recipe = load_recipe(data)
    assert dump_recipe(recipe) == data
    assert hashlib.sha256(data).hexdigest() == read_descriptor().tasks


def test_the_calibration_is_the_one_that_the_recipe_names_and_is_written_with_the_same_bytes(tmp_path: Path) -> None:
    path = RUN / "calibration.json"
    recipe = load_recipe((RUN / "recipe.json").read_bytes())
    assert hash_file(path) == recipe.calibration
    policy = open_version(0, CAST / "v0", recipe)
    load_calibration(path, policy.model).save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("honest_lease", Lease),
        ("cheat_lease", Lease),
        ("honest_receipt", Receipt),
        ("cheat_receipt", Receipt),
        ("verdict", VerdictRecord),
    ],
)
def test_a_node_still_takes_the_documents_that_the_coordinator_signed(
    tmp_path: Path, file: str, kind: type[Lease | Receipt | VerdictRecord]
) -> None:
    document = (RUN / f"{file}.json").read_text()
    message = kind.model_validate_json(json.dumps(json.loads(document)["body"]))
    SignedDocumentStore(tmp_path, NAME, read_descriptor().coordinator).keep("x", message, document)  # type: ignore[type-var]
    assert [path.read_text() for path in tmp_path.glob("*/x.json")] == [document]


def test_the_document_of_a_batch_still_verifies() -> None:
    body = open_document(read_descriptor().coordinator, Tag.BATCH, (RUN / "batch.json").read_bytes())
    assert body["run"] == NAME and body["step"] == 1


def test_a_delegation_still_verifies_and_has_the_name_under_which_its_node_joined(
    ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    delegation = open_delegation((RUN / "delegation.json").read_bytes())
    node = read_json("run", "honest_lease.json")["body"]["node"]
    assert delegation.grant.node == node and delegation.grant.run == NAME
    (joined,) = [event for event in list_events(capsys, ledger, "node.join") if event["subject"] == node]
    assert delegation.digest == joined["body"]["digest"]


def test_a_request_is_signed_with_the_same_headers() -> None:
    known = read_json("request.json")
    key = Key(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(known["seed"])))
    nonce = bytes.fromhex(known["nonce_byte"])
    signer = RequestSigner(
        key,
        known["run"],
        known["audience"],
        clock_ms=lambda: int(known["clock_ms"]),
        draw_bytes=lambda count: nonce * count,
    )
    assert key.public == known["public"]
    with_body = signer.sign_request("POST", "/v1/leases?wait=1", known["body"].encode())
    without = signer.sign_request("GET", "/v1/status")
    assert [list(pair) for pair in with_body] == known["with_body"]
    assert [list(pair) for pair in without] == known["without"]


# Submissions


async def read_parquet(path: Path, bounds: SubmissionLimits) -> SubmissionContents:
    async with ParserPool(size=1) as jail:
        return await read_submission(jail, path, bounds)


def read_contents(name: str) -> SubmissionContents:
    return asyncio.run(
        read_parquet(RUN / f"{name}.parquet", SubmissionLimits(**read_json("run", f"{name}.json")["bounds"]))
    )


def describe_contents(contents: SubmissionContents) -> list[dict[str, Any]]:
    """As record.py does."""
    return [
        {
            "group": group.index,
            "task": group.task_id,
            "id": rollout.id,
            "prompt_ids": rollout.prompt_ids.tolist(),
            "token_ids": rollout.token_ids.tolist(),
            "logprobs": rollout.logprobs.tolist(),
            "finish": rollout.finish.value,
            "version": rollout.version,
            "temperature": rollout.temperature,
            "seed": rollout.seed,
            "reward": score.value,
            "reason": score.reason,
            "proofs": [proof.hex() for proof in contents.proofs[rollout.id]],
        }
        for group in contents.groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
    ]


@SUBMISSIONS
def test_a_submission_is_still_read_and_says_what_it_said(name: str) -> None:
    contents, known = read_contents(name), read_json("run", f"{name}.json")
    assert describe_contents(contents) == known["contents"]
    manifest = Manifest.model_validate_json(json.dumps(known["manifest"]))
    assert contents.entries == manifest.rollouts
    assert hash_file(RUN / f"{name}.parquet") == manifest.blob


@SUBMISSIONS
def test_a_submission_that_is_written_again_has_the_same_bytes(tmp_path: Path, name: str) -> None:
    if version("pyarrow") != read_json("machine.json")["pyarrow"]:
        pytest.skip("another pyarrow may write other bytes")
    contents = read_contents(name)
    written = write_submission(tmp_path / "again", contents.groups, contents.proofs)
    assert (tmp_path / "again").read_bytes() == (RUN / f"{name}.parquet").read_bytes()
    assert written.sha256 == read_json("run", f"{name}.json")["manifest"]["blob"]


@SUBMISSIONS
def test_a_validator_still_says_of_a_submission_what_the_ledger_says(name: str) -> None:
    known, lease = read_json("run", f"{name}.json"), read_json("run", f"{name}_lease.json")["body"]
    fields = {key: lease[key] for key in ("step", "first", "count", "group_size", "max_tokens", "seeds")}
    fields |= {"submission": known["submission"], "round": 1, "version": 0, "manifest": known["manifest"]}
    fields |= {"check_ppm": 1_000_000, "check_seed": "00" * 32, "duplicates": [], "deadline_ms": 0}
    fields["bounded"] = name == "cheat"
    job = Job.model_validate_json(json.dumps(fields))
    recipe = load_recipe((RUN / "recipe.json").read_bytes())

    async def judge() -> str:
        async with ParserPool(size=1) as jail:
            judge = Judge(recipe, load_calibration(RUN / "calibration.json"), jail)
            opinion = await judge.judge(job, RUN / f"{name}.parquet", open_version(0, CAST / "v0", recipe))
            return opinion.verdict.value

    assert asyncio.run(judge()) == known["verdict"]


def test_proofs_of_the_same_states_have_the_same_bytes_and_verify() -> None:
    known = read_json("toploc.json")
    bits = np.frombuffer(base64.b64decode(known["bfloat16"]), dtype="<u2").astype(np.uint16)
    states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(known["shape"])
    for case in known["cases"]:
        sizes = {"chunk_size": case["chunk_size"], "topk": case["topk"]}
        proofs = [bytes.fromhex(text) for text in case["proofs"]]
        assert build_proofs(states, **sizes) == proofs
        for result in verify_proofs(states, proofs, **sizes):
            assert result.fault is None and result.exp_mismatches == 0 and result.mant_err_mean == 0


# Weights


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the recorded delta makes of the recorded v0."""
    folder = tmp_path_factory.mktemp("recorded") / "v1"
    apply_chain(CAST / "v0", [CAST / "v1.delta"], folder)
    return folder


def test_the_manifest_of_a_version_still_verifies_and_is_of_the_root_in_the_ledger(
    v1: Path, ledger: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = ManifestLog(read_descriptor().publisher, NAME)
    for line in (CAST / "v1.ndjson").read_bytes().splitlines(keepends=True):
        log.feed(line)
    assert log.ended and log.head.version == 1
    root = log.compute_end().root.hex()
    assert root == find_root(v1)
    assert root == list_events(capsys, ledger, "version.publish")[1]["body"]["root"]


def test_v0_has_the_root_that_the_recipe_names() -> None:
    assert find_root(CAST / "v0") == load_recipe((RUN / "recipe.json").read_bytes()).weights


def test_a_delta_makes_the_version_that_the_swarm_trained(v1: Path) -> None:
    weights = read_json("golden.json")["weights"]
    assert hash_file(CAST / "v0" / "model.safetensors") == weights["0"]
    assert hash_file(v1 / "model.safetensors") == weights["1"]


def test_the_delta_between_the_same_versions_has_the_same_bytes(v1: Path, tmp_path: Path) -> None:
    path = tmp_path / "delta"
    with path.open("wb") as out:
        encode_delta(CAST / "v0", v1, out)
    assert path.read_bytes() == (CAST / "v1.delta").read_bytes()


# Training


def read_metrics(root: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("perf/")} for line in lines]


def check_curve(root: Path) -> None:
    """The metrics of a run are the recorded ones."""
    metrics, known = read_metrics(root), read_json("golden.json")["metrics"]
    assert [list(line) for line in metrics] == [list(line) for line in known]
    for own, line in zip(metrics, known, strict=True):
        assert own == (line if is_same_machine() else pytest.approx(line, rel=1e-4, abs=1e-5)), line["step"]


def check_weights(root: Path, *steps: int) -> None:
    weights = read_json("golden.json")["weights"]
    for step in steps if is_same_machine() else ():
        path = root / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"
        assert hash_file(path) == weights[str(step)], f"step {step}"


def test_training_with_the_beacons_of_the_swarm_gives_its_weights_and_the_golden_curve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beacon = f"beacon={read_json('golden.json')['beacon']}"
    ask(capsys, "train", str(TINY), f"out={tmp_path}", beacon, "checkpoint.every=1", "checkpoint.keep=9")
    check_curve(tmp_path / NAME)
    check_weights(tmp_path / NAME, 0, 1, 2, 3)


def test_a_checkpoint_still_opens_and_training_goes_on_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DATA / "trained", tmp_path, dirs_exist_ok=True)
    beacon = f"beacon={read_json('golden.json')['beacon']}"
    ask(capsys, "train", str(TINY), f"out={tmp_path}", beacon)
    assert "resuming after step 2" in (tmp_path / NAME / "log.txt").read_text()
    check_curve(tmp_path / NAME)
    check_weights(tmp_path / NAME, 3)


# Settings


def walk_settings(model: type[BaseModel], default: object, prefix: str) -> Iterator[tuple[str, Any]]:
    """As record.py does."""
    for name, field in model.model_fields.items():
        is_table = isinstance(default, BaseModel)
        value = getattr(default, name) if is_table else field.get_default(call_default_factory=True)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from walk_settings(field.annotation, value, f"{prefix}{name}.")
        else:
            yield prefix + name, "REQUIRED" if field.is_required() else json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize("name", MODELS)
def test_settings_have_the_keys_and_the_defaults_that_they_had(name: str) -> None:
    assert dict(walk_settings(MODELS[name], None, "")) == read_json("settings.json")[name]


@pytest.mark.parametrize("command", ["train", "run"])
def test_help_lists_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help", "all"])
    assert ended.value.code == 0
    words = set(capsys.readouterr().out.split())
    assert set(read_json("settings.json")[command]) <= words


def test_the_settings_of_the_swarm_still_load_and_are_told_as_they_were(capsys: pytest.CaptureFixture[str]) -> None:
    path = RUN / "settings.toml"
    assert ask(capsys, "run", str(path), "--dry-run").strip() == path.read_text().strip()
