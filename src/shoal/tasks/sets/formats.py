"""Rows of known datasets as records.

shoal        our own columns (record.py) and any others, which verifiers and reward functions see as well
intellect2   prompt, verification_info (JSON), task_type, problem_id, solve_rate_*: INTELLECT-2-RL-Dataset
gsm8k        question, answer with the result after `####`
humaneval    task_id, prompt, entry_point, canonical_solution, test
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.tasks.base import ChatMessage
from shoal.tasks.sets.record import KEYS, RecordError, TaskRecord, build_record, dump_record, parse_row
from shoal.tasks.sets.rows import SourceRow
from shoal.tasks.sets.taskset import SetError
from shoal.tasks.verify.base import NO_VERIFIER

RATE = "solve_rate_"
RESULT_MARK = "####"
"""of GSM8K: stands before the result of an answer"""
_ID_HEX = 16
_TYPES = {"verifiable_math": "math", "prime_rl_code": "code", "verifiable_code": "code"}
"""INTELLECT-2's names of task types, and ours; other names are kept"""
GSM8K_HINT = f"Give the final answer as a number after {RESULT_MARK}."
HUMANEVAL_HINT = "Complete this function. Answer with the whole function in one code block."


def read_row(row: SourceRow, name: str) -> TaskRecord:
    """The record of a row in the format of that name; SetError if the row is invalid."""
    try:
        return FORMATS[name](row)
    except RecordError as error:
        raise SetError(f"{row.place}: {error}") from None


def guess_format(row: SourceRow) -> str:
    """The format that matches a row; our own if no other does."""
    columns = set(row.values)
    if "verification_info" in columns:
        return "intellect2"
    if {"entry_point", "test"} <= columns:
        return "humaneval"
    return "gsm8k" if "question" in columns and RESULT_MARK in str(row.values.get("answer")) else "shoal"


def _read_own(row: SourceRow) -> TaskRecord:
    """A row with any columns. Of those that are not ours, `answer` belongs to info and the others to metadata."""
    values = {key: value for key, value in row.values.items() if value is not None or key not in KEYS}
    for key in ("info", "metadata", "difficulty", "prompt"):
        # Parquet has no column type for arbitrary JSON, so these are texts there; a prompt in chat form begins with [{.
        value = values.get(key)
        if isinstance(value, str) and (key != "prompt" or value.startswith('[{"')):
            text = b'{"value":' + value.encode(errors="surrogatepass") + b"}"
            values[key] = parse_row(text).get("value")
    rates = values.get("difficulty")
    if isinstance(rates, dict):  # in a Parquet table each row has the models of all rows
        values["difficulty"] = {model: rate for model, rate in rates.items() if rate is not None}
    if "prompt" not in values and values.get("question") is not None:
        values["prompt"] = values.pop("question")
    extra = {key: values.pop(key) for key in sorted(values.keys() - KEYS)}
    gold = {"answer": extra.pop("answer")} if "answer" in extra else {}
    for key, more in (("info", gold), ("metadata", extra)):
        table = values.setdefault(key, {})
        if isinstance(table, dict):
            if twice := sorted(table.keys() & more.keys()):
                raise RecordError(f"{twice[0]}: is both a column and a key of {key}")
            values[key] = table | more
    values.setdefault("task_type", NO_VERIFIER)
    if "id" in values:
        return build_record(values)
    record = build_record(values | {"id": "task"})
    digest = hashlib.sha256(dump_record(record)).hexdigest()
    return replace(record, id=f"task-{digest[:_ID_HEX]}")


def _read_intellect2(row: SourceRow) -> TaskRecord:
    values = row.values
    info = values.get("verification_info")
    info = parse_row(info.encode(errors="surrogatepass")) if isinstance(info, str) else info
    if not isinstance(info, dict):
        raise RecordError("verification_info: must be a JSON object")
    rates = {
        key.removeprefix(RATE): value
        for key, value in values.items()
        if key.startswith(RATE) and value is not None and value >= 0
    }
    kind = str(values.get("task_type"))
    name = _TYPES.get(kind, kind)
    prompt = values.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return build_record(
        {
            "id": str(values.get("problem_id")),
            "source": str(values.get("source") or kind),
            "task_type": name,
            "prompt": prompt,
            "info": _rename_info(name, info),
            "difficulty": rates,
        }
    )


def _rename_info(task_type: str, info: Mapping[str, Any]) -> dict[str, Any]:
    """INTELLECT-2's verification info under the keys of our verifiers."""
    truth = info.get("ground_truth")
    if task_type == "math" and isinstance(truth, str | int | float):
        return {"answer": str(truth)}
    if task_type == "code" and isinstance(truth, str):
        return parse_row(truth.encode(errors="surrogatepass"))
    return dict(info)


def _read_gsm8k(row: SourceRow) -> TaskRecord:
    question, answer = _take_text(row, "question"), _take_text(row, "answer")
    _, mark, result = answer.rpartition(RESULT_MARK)
    if not mark or not result.strip():
        raise RecordError(f"answer: has no result after {RESULT_MARK}")
    digest = hashlib.sha256(question.encode(errors="surrogatepass")).hexdigest()
    return TaskRecord(
        id=f"gsm8k-{digest[:_ID_HEX]}",
        source="gsm8k",
        task_type="math",
        prompt=(ChatMessage("user", f"{question}\n\n{GSM8K_HINT}"),),
        info={"answer": result.strip()},
        metadata={"solution": answer},
    )


def _read_humaneval(row: SourceRow) -> TaskRecord:
    prompt, test, name = _take_text(row, "prompt"), _take_text(row, "test"), _take_text(row, "entry_point")
    solution = row.values.get("canonical_solution")
    return build_record(
        {
            "id": _take_text(row, "task_id"),
            "source": "humaneval",
            "task_type": "code",
            "prompt": [{"role": "user", "content": f"{HUMANEVAL_HINT}\n\n```python\n{prompt}```"}],
            "info": {"prompt": prompt, "test": test, "entry_point": name},
            "metadata": {"solution": f"```python\n{prompt}{solution}```"} if isinstance(solution, str) else {},
        }
    )


def _take_text(row: SourceRow, key: str) -> str:
    value = row.values.get(key)
    if not isinstance(value, str) or not value:
        raise RecordError(f"column {key} is missing or not a text")
    return value


FORMATS: dict[str, Callable[[SourceRow], TaskRecord]] = {
    "shoal": _read_own,
    "intellect2": _read_intellect2,
    "gsm8k": _read_gsm8k,
    "humaneval": _read_humaneval,
}
