"""Rollouts as they were written, for the report: a few groups of the first batch and of the last."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tokenizers import Tokenizer

from shoal.console import clean_text

GROUPS = 3
"""shown of a batch"""
ROLLOUTS = 4
"""shown of a group"""
MAX_CHARS = 400
"""shown of a prompt, its end, and of a completion, its beginning"""
_COLUMNS = ["group", "prompt_ids", "token_ids", "reward", "versions"]


def show_rollouts(folder: Path, start: Path) -> list[str]:
    """A text for the first batch of a run and one for its last; `folder` has their files, `start` a tokenizer."""
    files = sorted(folder.glob("step-*.parquet")) if folder.is_dir() else []
    path = start / "tokenizer.json"
    if not files or not path.exists():
        return []
    tokenizer = Tokenizer.from_file(str(path))
    return [_show_batch(file, tokenizer) for file in dict.fromkeys((files[0], files[-1]))]


def _show_batch(file: Path, tokenizer: Tokenizer) -> str:
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in pq.read_table(file, columns=_COLUMNS).to_pylist():
        groups.setdefault(row["group"], []).append(row)
    parts = [f"step {int(file.stem.partition('-')[2])}"]
    for rows in list(groups.values())[:GROUPS]:
        parts += ["", *_show_group(rows, tokenizer)]
    return "\n".join(parts)


def _show_group(rows: list[dict[str, Any]], tokenizer: Tokenizer) -> list[str]:
    prompt = tokenizer.decode(rows[0]["prompt_ids"], skip_special_tokens=False)
    cut = f"... {prompt[-MAX_CHARS:]}" if len(prompt) > MAX_CHARS else prompt
    solved = sum(row["reward"] >= 1.0 for row in rows)
    lines = [f"prompt: {_quote(cut)}", f"{solved} of {len(rows)} pass, the first {min(ROLLOUTS, len(rows))}:"]
    for row in rows[:ROLLOUTS]:
        text = tokenizer.decode(row["token_ids"], skip_special_tokens=False)
        lines.append(f"  v{row['versions'][0]['version']}  reward {row['reward']:.2f}  {_quote(text[:MAX_CHARS])}")
    return lines


def _quote(text: str) -> str:
    """On one line, whatever a model wrote."""
    return clean_text(text.replace("\\", "\\\\").replace("\n", "\\n"))
