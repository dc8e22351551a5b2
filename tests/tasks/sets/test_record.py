"""Records of task sets: one encoding, and rejection of everything else in a few words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.tasks.base import ChatMessage
from shoal.tasks.sets.record import MAX_LINE_BYTES, RecordError, TaskRecord, dump_record, parse_record

BASE: dict[str, Any] = {"id": "a-1", "task_type": "math", "prompt": "1+1=", "info": {"answer": "2"}}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tables = st.dictionaries(texts, values, max_size=3)
prompts = texts | st.lists(
    st.builds(ChatMessage, st.sampled_from(["system", "user"]), texts), min_size=1, max_size=3
).map(tuple)


def spell(**changes: Any) -> bytes:
    return json.dumps(BASE | changes).encode()


@given(prompts, tables, tables, st.dictionaries(st.sampled_from(["m", "org/m"]), st.floats(0, 1)))
def test_a_record_comes_back_from_its_one_spelling(prompt, info, metadata, difficulty) -> None:
    record = TaskRecord(
        id="x/1", source="own", task_type="math", prompt=prompt, info=info, metadata=metadata, difficulty=difficulty
    )
    line = dump_record(record)
    assert parse_record(line) == record
    assert dump_record(parse_record(line)) == line
    assert line.isascii() and b"\n" not in line


def test_the_spelling_does_not_change() -> None:
    record = parse_record(spell(difficulty={"m": 0}, prompt=[{"role": "user", "content": "\u00e9"}]))
    assert dump_record(record) == (
        b'{"difficulty":{"m":0.0},"id":"a-1","info":{"answer":"2"},"metadata":{},'
        b'"prompt":[{"content":"\\u00e9","role":"user"}],"source":"unknown","task_type":"math"}'
    )


def test_keys_and_spaces_do_not_matter() -> None:
    loose = b'{ "task_type": "math", "prompt": "1+1=", "info": {"answer": "2"}, "id": "a-1" }'
    assert dump_record(parse_record(loose)) == dump_record(parse_record(spell()))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"\xff{}", "not UTF-8"),
        (b'{"id":"a","id":"b"}', "a duplicate key"),
        (b"{" * 50_000, "not JSON|nested"),
        (b'{"a":' * 50_000, "not JSON|nested"),
        (b'{"x": NaN}', "NaN"),
        (b'{"x": ' + b"9" * 5000 + b"}", "not JSON"),
        (b" " * (MAX_LINE_BYTES + 1), "allowed are"),
        (spell(info={"x": [[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]}), "nested more than"),
        (b'{"id":"a","task_type":"math","prompt":"x","info":{"x":1e999}}', "not finite"),
        (b'{"id":"a","task_type":"math","prompt":"\\ud800","info":{}}', "a lone surrogate"),
        (b'{"id":"a","task_type":"math","prompt":"x","info":{"\\ud800":1}}', "a lone surrogate"),
        (spell(path="/etc/passwd"), "unknown columns: 'path'"),
        (spell(id=None), "id 'NoneType'"),
        (spell(id="a b"), "id 'a b'"),
        (spell(id="a@3"), "id 'a@3'"),
        (spell(id="a" * 97), "id "),
        (spell(id="../\u202e"), "id "),
        (spell(task_type="Math"), "task_type"),
        (spell(task_type="os.system"), "task_type"),
        (spell(source="a b"), "source"),
        (spell(prompt=""), "prompt"),
        (spell(prompt=[]), "prompt"),
        (spell(prompt=[{"role": "tool", "content": "x"}]), "prompt"),
        (spell(prompt=[{"role": "user", "content": 1}]), "prompt"),
        (spell(prompt=[{"role": "user", "content": "x", "name": "y"}]), "prompt"),
        (spell(info="{}"), "info"),
        (spell(metadata=[1]), "metadata"),
        (spell(difficulty={"m": 1.5}), "difficulty"),
        (spell(difficulty={"m": True}), "difficulty"),
        (spell(difficulty={"m\n": 1}), "difficulty"),
    ],
)
def test_other_lines_are_refused_in_a_few_words(line: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason) as caught:
        parse_record(line)
    assert len(str(caught.value)) < 200 and str(caught.value).isprintable()


@given(st.binary(max_size=60))
def test_noise_is_refused(line: bytes) -> None:
    with pytest.raises(RecordError):
        parse_record(line)
