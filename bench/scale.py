"""The learner in several ranks: equal gradients, memory per rank, seconds of a step, of a checkpoint and of publishing.

    python bench/scale.py [--quick] [--json] [--only PART ...]

Real processes under torchrun, over gloo, one thread each. Parts:
  gradients   relative L2 difference of the gradient, one process against 2 and 3 ranks, for five kinds of models; the
              control averages over ranks instead of summing
  memory      peak memory of a rank above that of the same process before it loads the model, 2 ranks against one, with
              layers computed again in the backward pass; seconds of a step; a checkpoint begun and finished; publishing
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from common import ROOT, build_parser
from shoal.policy.model import Policy, save_policy
from shoal.policy.tokenizer import build_tokenizer

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama, tied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama, grouped queries": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "qwen3, bfloat16": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 100}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 16_000}
QUICK_LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "vocab_size": 8_000}
ALPHABET = "0123456789abcdef"
Result = list[dict[str, float]]
"""one object per rank"""
Figures = dict[str, float]


def main() -> None:
    parser = build_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure (all)")
    flags = parser.parse_args()
    tables, figures = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in flags.only:
            table, found = PARTS[name](flags, Path(folder))
            tables.append(table)
            figures |= found
    if not flags.json:
        print("\n\n".join(tables))
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))


def compare_gradients(flags: argparse.Namespace, folder: Path) -> tuple[str, Figures]:
    """The equality table and its control."""
    rows = ["| model | 2 ranks | 3 ranks | control: averaged over 2 |", "|---|---|---|---|"]
    worst, control = 0.0, 1.0
    for name in list(MODELS)[: 2 if flags.quick else None]:
        precision = "bfloat16" if "bfloat16" in name else "float32"
        job = {"model": str(save_model(folder / name, MODELS[name] | SMALL)), "vocabulary": SMALL["vocab_size"]}
        job |= {"steps": 1, "gradients": True, "learner": {"micro_tokens": 60, "precision": precision}}
        own = {size: run_job(folder, job | {"name": f"{name}-{size}"}, size) for size in (1, 2, 3)}
        assert len(own[3]) == 3, "every rank has a result"
        run_job(folder, job | {"name": f"{name}-averaged", "averaged": True}, 2)
        differences = [measure_difference(folder, name, other) for other in ("2", "3", "averaged")]
        rows.append(f"| {name} | {differences[0]:.1e} | {differences[1]:.1e} | {differences[2]:.2f} |")
        worst, control = max(worst, *differences[:2]), min(control, differences[2])
    return "\n".join(rows), {"grad_diff_2_ranks": worst, "grad_diff_averaged": control}


def compare_memory(flags: argparse.Namespace, folder: Path) -> tuple[str, Figures]:
    """Memory and seconds of one process and of two ranks."""
    shape = QUICK_LARGE if flags.quick else LARGE
    model = save_model(folder / "large", MODELS["llama"] | shape | {"num_attention_heads": 8, "num_key_value_heads": 4})
    size = (model / "model.safetensors").stat().st_size
    job = {"model": str(model), "vocabulary": shape["vocab_size"], "steps": 2, "checkpoint": True}
    job["learner"] = {"micro_tokens": 256, "gradient_checkpointing": True}
    found = {ranks: run_job(folder, job | {"name": f"memory-{ranks}"}, ranks) for ranks in (1, 2)}
    rows = [f"model of {size / 1e9:.2f} GB in float32", ""]
    rows += ["| ranks | loaded, GB above the start | peak | step, s | checkpoint begun, s | finished | published |"]
    rows += ["|---|---|---|---|---|---|---|"]
    for ranks, results in found.items():
        loaded, peak = (max(own[name] - own["base"] for own in results) / 1e9 for name in ("loaded", "peak"))
        times = [max(own[name] for own in results) for name in ("step_s", "begin_s", "finish_s", "publish_s")]
        rows.append(f"| {ranks} | {loaded:.2f} | {peak:.2f} | " + " | ".join(f"{value:.1f}" for value in times) + " |")
    peaks = [max(own["peak"] - own["base"] for own in found[ranks]) for ranks in (1, 2)]
    return "\n".join(rows), {"rss_ratio_2_ranks": peaks[1] / peaks[0]}


PARTS: dict[str, Callable[[argparse.Namespace, Path], tuple[str, Figures]]] = {
    "gradients": compare_gradients,
    "memory": compare_memory,
}


def save_model(folder: Path, settings: dict[str, Any]) -> Path:
    """A random model whose gradients are far from zero, with a tokenizer."""
    settings = {"num_attention_heads": 4, "max_position_embeddings": 256, "pad_token_id": None} | settings
    config = AutoConfig.for_model(**{"tie_word_embeddings": False} | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    save_policy(Policy(model=model, tokenizer=build_tokenizer(ALPHABET)), folder, shard_bytes=1 << 40)
    return folder


def run_job(folder: Path, job: dict[str, Any], ranks: int) -> Result:
    """Run bench/scale_rank.py: a plain process for one, else torchrun."""
    path = folder / f"{job['name']}.job.json"
    path.write_text(json.dumps(job))
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)) if ranks > 1 else ()
    done = subprocess.run(
        [sys.executable, *torchrun, str(ROOT / "bench" / "scale_rank.py"), str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return [json.loads((folder / f"{job['name']}-{rank}.json").read_text()) for rank in range(ranks)]


def measure_difference(folder: Path, name: str, other: str) -> float:
    """Relative L2 difference of the whole gradient from that of one process."""
    one, two = (load_file(folder / f"{name}-{which}.safetensors") for which in ("1", other))
    assert one.keys() == two.keys(), "the same tensors have gradients"
    squares = [(one[key].double() - two[key].double()).square().sum() for key in one]
    total = sum(one[key].double().square().sum() for key in one)
    return float((sum(squares) / total) ** 0.5)


if __name__ == "__main__":
    main()
