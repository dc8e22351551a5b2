"""A model of 1.1 billion parameters goes through a whole swarm on this machine: time, bytes and memory of every part.

    python bench/billion.py [--quick] [--json] [--keep DIR] [key=value ...]

The model has TinyLlama's shape and random weights in bfloat16. `shoal prepare` writes and calibrates v0; `shoal run`
starts coordinator, origin, relay, a trainer of 2 ranks (FSDP2, LoRA), a worker, a validator and the evaluator, and
trains 3 steps at async level 0: every version is published, pulled, sampled from, replayed by the validator beside its
rivals, and trained on. Further arguments override settings of the run.

Memory is the proportional set size (PSS) of all processes of the run together, in which a shared page counts once, read
once a second. Needs Linux, 20 GB of disk space, and as much memory as it reports. `--quick` is a model of 40 million.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from common import OUT, ROOT, build_parser, finish
from shoal.policy.model import Policy, save_settings, saved_tensors
from shoal.policy.weights import WeightsWriter, create_files, describe_tensors, finish_file, plan_layout
from shoal.tasks.sets.record import TaskRecord, dump_record

SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
QUICK = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
VOCABULARY = 32_000
CONTEXT = 2048
STEPS, GROUPS, SIZE, TOKENS = 3, 2, 4, 32
NUM_TASKS = 256
LETTER = "e"
SETTINGS = f"""
name = "billion"
steps = {STEPS}
async_level = 0
threads = 2

[policy]
dtype = "bfloat16"
publish_dtype = "bfloat16"
lora = {{ rank = 16 }}

[engine]
max_tokens = {TOKENS}
slots = 16

[batch]
groups = {GROUPS}
group_size = {SIZE}

[learner]
precision = "bfloat16"
gradient_checkpointing = true
micro_tokens = 512
updates = 1
lr = 3e-4

[eval]
tasks = 2
samples = 1
k = 1
every = 0

[validation]
promised = ["int4"]  # of int8, answers of {TOKENS} tokens show too little for a promise

[swarm]
workers = 1
validators = 1
relays = 1
trainer_ranks = 2
threads = 2
groups_per_lease = {GROUPS}
calibration = 64
calibration_tflop = 30
heartbeat_s = 15
lease_s = 1800
claim_s = 1800
"""


def main() -> None:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="folder for everything (default: removed at the end)")
    parser.add_argument("inputs", nargs="*", metavar="key=value", help="override settings of the run")
    flags = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if flags.keep is not None:
        flags.keep.mkdir(parents=True, exist_ok=True)
        measure(flags, flags.keep.resolve())
        return
    with tempfile.TemporaryDirectory(dir=OUT, prefix="billion-") as folder:
        measure(flags, Path(folder))


def measure(flags: argparse.Namespace, folder: Path) -> None:
    """Build the model, run the swarm, and print the tables."""
    begun = time.monotonic()
    parameters = build_model(folder / "model", QUICK if flags.quick else SHAPE)
    built_s = time.monotonic() - begun
    write_tasks(folder / "tasks.jsonl", folder / "model")
    (folder / "run.toml").write_text(SETTINGS)
    places = [f"policy.path={folder / 'model'}", f'tasks.set=["{folder / "tasks.jsonl"}"]', f"out={folder}"]
    inputs = [str(folder / "run.toml"), *places, *flags.inputs]
    prepared = watch_command(["prepare", *inputs, "-v"], folder / "prepare.log")
    ran = watch_command(["run", *inputs], folder / "run.log")
    root = folder / "billion-seed0"
    tables = [
        f"{parameters:,} parameters; peak {max(prepared.peak, ran.peak) / 1e9:.1f} GB, "
        f"{(prepared.seconds + ran.seconds) / 60:.1f} minutes, and {built_s:.0f} s for writing the random model",
        format_phases(prepared, ran, root),
        format_memory(prepared, ran),
        format_bytes(root),
    ]
    finish(flags, "\n\n".join(tables), collect_figures(prepared, ran, root))


def build_model(folder: Path, shape: Mapping[str, int]) -> int:
    """Random weights, written tensor by tensor, with a tokenizer; the number of parameters."""
    tokenizer = build_tokenizer()
    config = AutoConfig.for_model(
        "llama",
        **shape,
        vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    save_settings(Policy(model=model, tokenizer=tokenizer), folder, torch.bfloat16)
    specs = describe_tensors(saved_tensors(model))
    layout = plan_layout(specs, 1 << 29)
    rng = torch.Generator().manual_seed(0)
    create_files(folder, layout)
    with WeightsWriter(folder, layout) as writer:
        for file in layout.files:
            for place in file.tensors:
                size = place.spec.shape
                rows = torch.randn(size, generator=rng) * 0.02 if len(size) > 1 else torch.ones(size)
                writer.write_rows(place.spec.name, 0, rows)
            finish_file(folder, file, writer.close_file(file.name))
    return sum(torch.Size(spec.shape).numel() for spec in specs)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of this repository's text; what is missing of the vocabulary are names that no text contains."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    files = sorted(str(path) for name in ("src", "docs", "tests") for path in (ROOT / name).rglob("*.[pm][yd]"))
    trainer = BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "</s>"], show_progress=False)
    backend.train(files, trainer)
    missing = VOCABULARY - backend.get_vocab_size()
    backend.add_tokens([f"<unused{number}>" for number in range(missing)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


def write_tasks(path: Path, model: Path) -> None:
    """Tasks that about half of all random texts pass: fewer than so many of one letter."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    rng = random.Random(0)
    texts = [tokenizer.decode([rng.randrange(VOCABULARY) for _ in range(TOKENS)]) for _ in range(512)]
    middle = int(statistics.median(text.lower().count(LETTER) for text in texts))
    rule = {"letter": LETTER, "let_frequency": middle, "let_relation": "less than"}
    records = [
        TaskRecord(
            id=f"letter-{number}",
            source="letter",
            task_type="text_rules",
            prompt=f'Write about the number {number} with the letter "{LETTER}" fewer than {middle} times.',
            info={"instruction_id_list": ["keywords:letter_frequency"], "kwargs": [rule]},
        )
        for number in range(NUM_TASKS)
    ]
    path.write_bytes(b"".join(dump_record(record) + b"\n" for record in records))


@dataclass
class Watched:
    """What was seen of a command."""

    seconds: float = 0.0
    log: str = ""
    peak: int = 0
    """of all processes together, bytes"""
    at_peak: dict[str, int] = field(default_factory=dict)
    """bytes by part at that moment"""
    by_part: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """peak of each part"""
    samples: list[tuple[float, dict[str, int]]] = field(default_factory=list)


def watch_command(arguments: Sequence[str], log: Path) -> Watched:
    """Run a shoal command to its end, and read the memory of all its processes once a second."""
    found, begun = Watched(), time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )
        ended = threading.Event()
        watching = threading.Thread(target=_sample, args=(process.pid, found, begun, ended))
        watching.start()
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            ended.set()
            watching.join()
    found.seconds, found.log = time.monotonic() - begun, log.read_text()
    lines = [json.dumps({"s": round(at, 1), **parts}) for at, parts in found.samples]
    log.with_suffix(".memory.jsonl").write_text("\n".join(lines) + "\n")
    if code:
        raise SystemExit(f"shoal {arguments[0]} ended with {code}:\n{found.log[-4000:]}")
    return found


def _sample(pid: int, found: Watched, begun: float, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        parts: dict[str, int] = defaultdict(int)
        for name, size in read_memory(pid):
            parts[name] += size
        for name, size in parts.items():
            found.by_part[name] = max(found.by_part[name], size)
        if (total := sum(parts.values())) > found.peak:
            found.peak, found.at_peak = total, dict(parts)
        found.samples.append((time.monotonic() - begun, dict(parts)))


def read_memory(root: int) -> Iterator[tuple[str, int]]:
    """Part and PSS of a process and all that descend from it."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    children: dict[int, list[int]] = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    queue = [root]
    while queue:
        pid = queue.pop()
        queue += children[pid]
        try:
            name = _name_part(pid, parents, root)
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        yield name, 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def _name_part(pid: int, parents: Mapping[int, int], root: int) -> str:
    """What a process is called: the command that it, or the nearest process above it, runs; ranks are numbered."""
    above = pid
    while not (name := _read_command(above)):
        if above == root or above not in parents:
            return "other"
        above = parents[above]
    if name != "trainer":
        return name
    chain = [pid]
    while _read_command(parents[chain[-1]]) in ("", "trainer"):
        chain.append(parents[chain[-1]])
    if len(chain) == 1:
        return name
    ranks = sorted(other for other, parent in parents.items() if parent == chain[-1])
    return f"trainer, rank {ranks.index(chain[-2])}"


def _read_command(pid: int) -> str:
    """The command of shoal that a process runs; empty for others."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    after = words[words.index("shoal") + 1 :] if "shoal" in words else []
    return next((word for word in after if not word.startswith("-")), "")


def read_spans(root: Path) -> list[dict[str, Any]]:
    """Spans of all parts in which they were busy, in order of their beginnings."""
    lines = (line for path in root.glob("*/spans.jsonl") for line in path.read_text().splitlines())
    spans = [span for span in map(json.loads, lines) if span["kind"] == "busy"]
    return sorted(spans, key=lambda span: span["start_ms"])


def sum_phases(root: Path) -> dict[str, list[float]]:
    """Seconds of every span by part and name."""
    phases: dict[str, list[float]] = defaultdict(list)
    for span in read_spans(root):
        phases[f"{span['role']} {span['name']}"].append((span["end_ms"] - span["start_ms"]) / 1000)
    return phases


def format_phases(prepared: Watched, ran: Watched, root: Path) -> str:
    rows = ["| phase | times | s each | s |", "|---|---|---|---|"]
    rows.append(f"| prepare: v0 and its calibration | 1 | | {prepared.seconds:.0f} |")
    for name, seconds in sum_phases(root).items():
        each = ", ".join(f"{value:.1f}" for value in seconds)
        rows.append(f"| {name} | {len(seconds)} | {each} | {sum(seconds):.1f} |")
    rows.append(f"| run, from the command to its end | 1 | | {ran.seconds:.0f} |")
    return "\n".join(rows)


def format_memory(prepared: Watched, ran: Watched) -> str:
    rows = ["| part | peak, GB | at the peak of all, GB |", "|---|---|---|"]
    rows.append(f"| prepare | {prepared.peak / 1e9:.2f} | |")
    for name, size in sorted(ran.by_part.items(), key=lambda pair: -pair[1]):
        rows.append(f"| {name} | {size / 1e9:.2f} | {ran.at_peak.get(name, 0) / 1e9:.2f} |")
    rows.append(f"| run, all together | {ran.peak / 1e9:.2f} | {ran.peak / 1e9:.2f} |")
    return "\n".join(rows)


def format_bytes(root: Path) -> str:
    rows = ["| what | MB |", "|---|---|"]
    rows += [f"| {name} | {size / 1e6:,.1f} |" for name, size in list_bytes(root).items()]
    return "\n".join(rows)


def list_bytes(root: Path) -> dict[str, int]:
    """Bytes of versions and of their deltas, of submissions, and of all that parts keep on disk."""
    versions = sorted(path for path in (root / "versions").glob("v*") if path.is_dir())
    found = {f"version {path.name}": _sum_files(path) for path in versions}
    deltas = sorted((root / "origin").glob("v*/delta"))
    found |= {f"delta of {path.parent.name.partition('-')[0]}": path.stat().st_size for path in deltas}
    found["all submissions"] = _sum_files(root / "coordinator" / "blobs")
    parts = ("origin", "relay-1", "worker-1", "validator-1", "checkpoints", "coordinator")
    return found | {f"{name}, on disk": _sum_files(root / name) for name in parts}


def _sum_files(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def collect_figures(prepared: Watched, ran: Watched, root: Path) -> dict[str, float]:
    figures = {
        "billion_minutes": (prepared.seconds + ran.seconds) / 60,
        "billion_peak_gb": max(prepared.peak, ran.peak) / 1e9,
        "billion_prepare_s": prepared.seconds,
        "billion_run_s": ran.seconds,
        "billion_prepare_gb": prepared.peak / 1e9,
    }
    figures |= {f"billion_{_spell(name)}_gb": size / 1e9 for name, size in ran.by_part.items()}
    figures |= {f"billion_{_spell(name)}_s": sum(seconds) for name, seconds in sum_phases(root).items()}
    return figures | {f"billion_{_spell(name)}_mb": size / 1e6 for name, size in list_bytes(root).items()}


def _spell(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower()).replace("__", "_")


if __name__ == "__main__":
    main()
