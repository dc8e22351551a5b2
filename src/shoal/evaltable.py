"""`shoal eval` of several models on several kinds of tasks: a table with a row for each model and a column for each.

Every cell is a held-out evaluation as `shoal eval` makes it (eval.py): pass@1 of sampled completions with its 95 %
interval over tasks. All models of a column get the same tasks and the same sampling seeds.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from shoal.config import RunConfig
from shoal.engine.torch import TorchEngine
from shoal.errors import ConfigError
from shoal.eval import EvalResult, draw_tasks, evaluate
from shoal.files import check_output, write_output
from shoal.learner.checkpoint import find_newest
from shoal.policy.model import Policy, open_policy
from shoal.runtime import tune_process
from shoal.tasks.base import Family
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets import SetFamily, SetFilter, open_set


@dataclass(frozen=True, slots=True)
class EvalTable:
    """Results by model, then by kind of tasks."""

    models: tuple[str, ...]
    columns: tuple[str, ...]
    results: tuple[tuple[EvalResult, ...], ...]
    """one row per model"""

    def to_markdown(self) -> str:
        lines = [f"| model | {' | '.join(self.columns)} |", "|---" * (1 + len(self.columns)) + "|"]
        for model, row in zip(self.models, self.results, strict=True):
            lines.append(f"| {model} | {' | '.join(str(result.pass_1) for result in row)} |")
        sizes = ", ".join(
            f"{name}: {result.num_tasks}" for name, result in zip(self.columns, self.results[0], strict=True)
        )
        return "\n".join([*lines, "", f"pass@1, sampled, with 95 % intervals; held-out tasks of {sizes}"]) + "\n"

    def to_json(self) -> str:
        cells = {
            model: {column: asdict(result) for column, result in zip(self.columns, row, strict=True)}
            for model, row in zip(self.models, self.results, strict=True)
        }
        return json.dumps(cells, indent=2) + "\n"


def run_table(
    config: RunConfig,
    models: Sequence[str],
    columns: Sequence[str],
    *,
    json_path: Path | None = None,
    markdown_path: Path | None = None,
) -> EvalTable:
    """Evaluate each model on each kind of tasks: names of families, or places of task sets."""
    tune_process(config.threads)
    for path in (json_path, markdown_path):
        if path is not None:
            check_output(path)
    families = [aim_family(open_column(column), config.length) for column in columns]
    for family in families:
        draw_tasks(family, config.eval, seed=config.seed)  # too few of them is said before anything is computed
    results = tuple(_evaluate_model(config, model, families) for model in models)
    table = EvalTable(tuple(_name_model(model) for model in models), tuple(columns), results)
    for path, text in ((json_path, table.to_json()), (markdown_path, table.to_markdown())):
        if path is not None:
            write_output(path, text.encode())
    return table


def open_column(name: str) -> Family:
    """A family by its name, or the task set of a place."""
    if ":" in name or Path(name).exists():
        family = SetFamily(open_set([name]), SetFilter(), {})
        family.check_tasks()
        return family
    return load_family(name, {})


def _evaluate_model(config: RunConfig, model: str, families: Sequence[Family]) -> tuple[EvalResult, ...]:
    policy = _open_model(model, config.policy.dtype)
    engine = TorchEngine(policy.model, eos_id=policy.eos_id, slots=config.engine.slots, version=0)
    max_tokens = config.engine.max_tokens
    return tuple(
        evaluate(engine, family, policy, config.eval, seed=config.seed, max_tokens=max_tokens) for family in families
    )


def _open_model(model: str, dtype: str) -> Policy:
    """Of a run directory the newest checkpoint, or else a folder or hub id."""
    newest = find_newest(Path(model) / "checkpoints")
    if newest is None and (Path(model) / "checkpoints").exists():
        raise ConfigError(f"{model}: holds no checkpoint yet")
    return open_policy(model if newest is None else newest / "policy", dtype=getattr(torch, dtype))


def _name_model(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2] or model
