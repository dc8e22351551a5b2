"""Record what must not change when code is moved: `python tests/recorded/record.py OUT`.

A swarm of tests/tiny.toml with a cheat is run to its end by the launcher, and `shoal train` with the same beacons.
What test_recorded.py reads is copied from both, without anything that names a path of this machine or is a secret.

    OUT/machine.json               on what the numbers were computed
    OUT/settings.json              every setting and its default
    OUT/toploc.json                proofs of fixed states
    OUT/request.json               the headers of a signed request
    OUT/golden.json                weights of all versions, metrics of all steps
    OUT/run/                       ledger, papers, signed documents and two submissions of the swarm
    OUT/cast/                      v0, and the delta and manifest of v1
    OUT/trained/tiny-seed0/        the run directory of `shoal train` after step 2
"""

import asyncio
import base64
import gzip
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import BaseModel

from shoal.config.run import RunConfig
from shoal.coordinator.service import ServiceConfig
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.settings import DilocoConfig
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.launch.settings import LaunchConfig
from shoal.protocol.params import RunParams
from shoal.submission.limits import SubmissionLimits
from shoal.submission.read import ParserPool, SubmissionContents, read_submission
from shoal.toploc.build import build_proofs
from shoal.util.files import hash_file

TINY = Path(__file__).parents[1] / "tiny.toml"
SWARM = ("tiny.toml", "out=runs", "swarm.calibration=128", 'swarm.cheats=["int8"]')
NAME = "tiny-seed0"
MODELS: dict[str, type[BaseModel]] = {
    "train": RunConfig,
    "run": LaunchConfig,
    "params": RunParams,
    "coordinator": ServiceConfig,
    "diloco": DilocoConfig,
    "reducer": ReducerConfig,
}
PATIENCE_S = 120.0


def record_all(out: Path) -> None:
    out.mkdir(parents=True)
    write_json(out / "machine.json", describe_machine())
    write_json(out / "settings.json", record_settings())
    write_json(out / "toploc.json", record_proofs())
    write_json(out / "request.json", record_request())
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        shutil.copy(TINY, work)
        run_swarm(work)
        root = work / "runs" / NAME
        secret = (root / "coordinator" / "beacon.secret").read_text()
        beacons = (f"beacon={secret}", "checkpoint.every=1", "checkpoint.keep=9")
        run_command(work, "train", "tiny.toml", "out=alone", *beacons)
        record_run(root, out / "run")
        record_cast(root, out / "cast")
        record_training(work / "alone" / NAME, out / "trained" / NAME)
        write_json(out / "golden.json", record_golden(root, work / "alone" / NAME, secret))


def describe_machine() -> dict[str, str]:
    """Bits of floats are the same where all of this is; see test_recorded.py, which computes it in the same way."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "flags": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "pyarrow": version("pyarrow"),
    }


def record_settings() -> dict[str, dict[str, Any]]:
    return {name: dict(walk_settings(model, None, "")) for name, model in MODELS.items()}


def walk_settings(model: type[BaseModel], default: object, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every setting by its dotted key, with its default; as test_recorded.py does it."""
    for name, field in model.model_fields.items():
        value = (
            field.get_default(call_default_factory=True)
            if not isinstance(default, BaseModel)
            else getattr(default, name)
        )
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from walk_settings(field.annotation, value, f"{prefix}{name}.")
        else:
            yield prefix + name, "REQUIRED" if field.is_required() else json.loads(json.dumps(value, default=str))


def record_proofs() -> dict[str, Any]:
    """States that follow from integers alone: 40 tokens of width 24, of exponents around that of 1."""
    numbers = (np.arange(40 * 24, dtype=np.uint64) * 2654435761 % 2**32 >> 16).astype(np.uint16)
    bits = (numbers & 0x83FF) | 0x3C00
    states = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).reshape(40, 24)
    cases = []
    for chunk_size, topk in ((32, 128), (16, 8)):
        proofs = [proof.hex() for proof in build_proofs(states, chunk_size=chunk_size, topk=topk)]
        cases.append({"chunk_size": chunk_size, "topk": topk, "proofs": proofs})
    return {"shape": [40, 24], "bfloat16": base64.b64encode(bits.astype("<u2").tobytes()).decode(), "cases": cases}


def record_request() -> dict[str, Any]:
    seed, nonce, clock_ms, body = b"\x05" * 32, b"\x07", 1_794_961_093_754, b'{"request_key":"a"}'
    key = Key(Ed25519PrivateKey.from_private_bytes(seed))
    signer = RequestSigner(key, NAME, "ab" * 32, clock_ms=lambda: clock_ms, draw_bytes=lambda count: nonce * count)
    return {
        "seed": seed.hex(),
        "public": key.public,
        "nonce_byte": nonce.hex(),
        "clock_ms": clock_ms,
        "run": NAME,
        "audience": "ab" * 32,
        "body": body.decode(),
        "with_body": signer.sign_request("POST", "/v1/leases?wait=1", body),
        "without": signer.sign_request("GET", "/v1/status"),
    }


def run_swarm(work: Path) -> None:
    """First the cheat alone, so that it is sure to be caught; then an honest worker to the end."""
    command = [sys.executable, "-m", "shoal", "run", *SWARM]
    log = work / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen([*command, "swarm.workers=0"], cwd=work, env=ENV, stdout=sink, stderr=sink)
    deadline = time.monotonic() + PATIENCE_S
    while "cheat-1 ended for good" not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 130, log.read_text()
    run_command(work, "run", *SWARM, "swarm.workers=1")


ENV = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"}


def run_command(work: Path, *words: str) -> str:
    command = [sys.executable, "-m", "shoal", *words]
    return subprocess.run(command, cwd=work, env=ENV, check=True, stdout=subprocess.PIPE, text=True).stdout


def record_run(root: Path, out: Path) -> None:
    """The ledger, what was handed out beside it, and what nodes kept of the coordinator's word."""
    out.mkdir()
    ledger = (root / "coordinator" / "ledger.db").read_bytes()
    (out / "ledger.db.gz").write_bytes(gzip.compress(ledger, 9, mtime=0))
    for name in ("recipe.json", "calibration.json", "settings.toml"):
        shutil.copy(root / "launch" / name, out)
    for name in ("descriptor.json", "head.json", "delegation.json"):
        shutil.copy(root / "worker-1" / name, out)
    batch = json.loads((root / "batches" / "step-000001.json").read_text())
    (out / "batch.json").write_text(batch["document"])
    verdicts = sorted((root / "validator-1" / "verdicts").glob("*.json"))
    shutil.copy(verdicts[0], out / "verdict.json")
    for part, name in (("worker-1", "honest"), ("cheat-1", "cheat")):
        receipt = next(path for path in sorted((root / part / "receipts").glob("*.json")) if is_first(root, part, path))
        record_submission(root, part, json.loads(receipt.read_text())["body"], out, name)
    words = ("ledger", "show", str(root / "coordinator"), "--json")
    size = json.loads(run_command(root, *words))["size"]
    events = json.loads(run_command(root, *words, "--from", "0", "--count", str(size)))["events"]
    write_json(out / "events.json", list({event["kind"]: event for event in reversed(events)}.values())[::-1])
    tasks = run_command(root, "ledger", "tasks", str(root / "coordinator"), "--recipe", str(out / "recipe.json"))
    (out / "tasks.txt").write_text(tasks)
    verified = run_command(root, "ledger", "verify", str(root / "coordinator"), "--json")
    write_json(out / "verified.json", json.loads(verified))


def is_first(root: Path, part: str, receipt: Path) -> bool:
    """Whether the work is of the first step, which is that of v0."""
    lease = json.loads(receipt.read_text())["body"]["lease"]
    step: int = json.loads((root / part / "grants" / f"{lease}.json").read_text())["body"]["step"]
    return step == 1


def record_submission(root: Path, part: str, receipt: dict[str, Any], out: Path, name: str) -> None:
    """A submission's file, its manifest and what the reader finds in it; lease and receipt as they were signed."""
    blob, lease_name = receipt["blob"], receipt["lease"]
    path = out / f"{name}.parquet"
    shutil.copy(root / "coordinator" / "blobs" / blob[:2] / blob, path)
    path.chmod(0o644)
    shutil.copy(root / part / "grants" / f"{lease_name}.json", out / f"{name}_lease.json")
    shutil.copy(root / part / "receipts" / f"{receipt['submission']}.json", out / f"{name}_receipt.json")
    lease = json.loads((out / f"{name}_lease.json").read_text())["body"]
    size = lease["group_size"]
    vocab = json.loads((root / "launch" / "v0" / "config.json").read_text())["vocab_size"]
    bounds = {"max_rollouts": lease["count"] * size, "group_size": size, "max_tokens": lease["max_tokens"]}
    bounds |= {"vocab_size": vocab}
    contents = asyncio.run(read_file(path, SubmissionLimits(**bounds)))
    with sqlite3.connect(root / "coordinator" / "ledger.db") as connection:
        rows = connection.execute("select body from event where kind = 'sub.commit'").fetchall()
    manifest = next(body for body in (json.loads(row[0]) for row in rows) if body.get("blob") == blob)
    verdict = "accepted" if name == "honest" else "rejected_hard"
    write_json(
        out / f"{name}.json",
        {
            "submission": receipt["submission"],
            "bounds": bounds,
            "manifest": manifest,
            "verdict": verdict,
            "contents": describe_contents(contents),
        },
    )


async def read_file(path: Path, bounds: SubmissionLimits) -> SubmissionContents:
    async with ParserPool(size=1) as jail:
        return await read_submission(jail, path, bounds)


def describe_contents(contents: SubmissionContents) -> list[dict[str, Any]]:
    """One entry for each rollout, as test_recorded.py makes it."""
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


def record_cast(root: Path, out: Path) -> None:
    shutil.copytree(root / "versions" / "v000000", out / "v0")
    (source,) = (root / "origin").glob("v1-*")
    shutil.copy(source / "delta", out / "v1.delta")
    shutil.copy(source / "manifest.ndjson", out / "v1.ndjson")


def record_training(root: Path, out: Path) -> None:
    """The run directory as it was after step 2."""
    name = Path("checkpoints") / "step-000002"
    shutil.copytree(root / name, out / name)
    shutil.copy(root / "config.toml", out)
    lines = (root / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))


def record_golden(root: Path, alone: Path, secret: str) -> dict[str, Any]:
    """The weights of the swarm, which must be those of `shoal train`, and the latter's metrics."""
    models = {step: root / "versions" / f"v{step:06d}" / "model.safetensors" for step in range(4)}
    hashes = {step: hash_file(path) for step, path in models.items()}
    for step, known in hashes.items():
        own = alone / "checkpoints" / f"step-{step:06d}" / "policy" / "model.safetensors"
        assert hash_file(own) == known, f"swarm and `shoal train` differ after step {step}"
    lines = [json.loads(line) for line in (alone / "metrics.jsonl").read_text().splitlines()]
    return {"beacon": secret, "weights": hashes, "metrics": [strip_time(line) for line in lines]}


def strip_time(line: dict[str, Any]) -> dict[str, Any]:
    """Metrics without what a clock says."""
    return {key: value for key, value in line.items() if key != "time" and not key.startswith("perf/")}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    record_all(Path(sys.argv[1]).absolute())
