"""The recipe of a run."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.config.run import FilterConfig, LengthConfig
from shoal.config.tasks import ScheduleStage
from shoal.errors import ConfigError
from shoal.recipe import MAX_RECIPE_BYTES, Recipe, RecipeError, SetTerms, dump_recipe, load_recipe
from shoal.tasks.sets.record import TaskRecord
from shoal.tasks.sets.sources import open_set
from shoal.tasks.sets.taskset import TaskSet
from shoal.tasks.split import train_task
from shoal.tasks.verify.base import open_verifier
from shoal.util.canonical import encode_canonical

BASE: dict[str, Any] = {
    "family": "sort",
    "options": {},
    "group_size": 8,
    "max_tokens": 64,
    "model": "a" * 64,
    "weights": "b" * 64,
    "calibration": "c" * 64,
}


SET: dict[str, Any] = {
    "hash": "",
    "size": 10,
    "filter": {"max": "1.0", "max_chars": 0, "min": "0.0", "model": ""},
    "weights": {},
    "schedule": [],
}
RATED: dict[str, Any] = SET | {"hash": "a" * 64, "filter": {"max": "1.0", "max_chars": 0, "min": "0.0", "model": "m"}}
STAGE: dict[str, Any] = {"step": 1, "min": "0.0", "max": "0.5"}
LENGTH: dict[str, Any] = {
    "alpha": "0.0003",
    "bound": "0.5",
    "mode": "none",
    "targets": [],
    "template": "{target}:{prompt}",
}


def spell(**changes: Any) -> bytes:
    """The bytes of a recipe with some of its JSON replaced; None takes a key away."""
    body = json.loads(dump_recipe(Recipe(**BASE))) | changes
    return encode_canonical({key: value for key, value in body.items() if value is not None})


temperatures = st.floats(min_value=0.0, max_value=10.0, exclude_min=True)


@given(
    temperatures,
    st.integers(1, 2**16),
    st.integers(1, 2**31),
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    st.integers(2, 12),
)
def test_a_recipe_comes_back_from_its_bytes(temperature, size, tokens, dtype, seeded, length):
    recipe = Recipe(
        **BASE
        | {"group_size": size, "max_tokens": tokens, "temperature": temperature, "dtype": dtype, "seeded": seeded}
        | {"options": {"max_length": length, "min_length": 1}}
    )
    data = dump_recipe(recipe)
    back = load_recipe(data)
    assert back == recipe
    assert dump_recipe(back) == data
    assert hashlib.sha256(data).hexdigest()


def test_the_bytes_of_a_recipe_do_not_change():
    recipe = Recipe(**BASE | {"options": {"min_length": 2}, "temperature": 0.7})
    assert dump_recipe(recipe) == (
        b'{"calibration":"' + b"c" * 64 + b'","dtype":"float32","family":"sort","filter":true,'
        b'"format":4,"group_size":8,'
        b'"length":{"alpha":"0.0003","bound":"0.5","mode":"none","targets":[],"template":'
        b'"{prompt}\\n\\nThink for {target} tokens before giving a response."},'
        b'"max_tokens":64,"model":"' + b"a" * 64 + b'","options":{"min_length":2},"seeded":true,'
        b'"set":{"filter":{"max":"1.0","max_chars":0,"min":"0.0","model":""},"hash":"",'
        b'"schedule":[],"size":0,"weights":{}},'
        b'"temperature":"0.7","verifiers":{},"weights":"' + b"b" * 64 + b'"}'
    )


def test_a_recipe_opens_its_tasks_with_their_options():
    family = load_recipe(spell(options={"min_length": 2, "max_length": 2})).open_family()
    assert family.name == "sort"
    assert family.min_length == family.max_length == 2


def test_types_of_options_survive(monkeypatch):
    """No family has an option of a type other than int or bool yet, so the check by families is disabled."""
    monkeypatch.setattr(Recipe, "open_family", lambda self: None)
    options = {"one": 1, "flag": True, "real": 1.0, "tiny": 1e-320, "text": "1.0", "minus": -0.0}
    back = load_recipe(dump_recipe(Recipe(**BASE | {"options": options}))).options
    assert {name: (type(value), repr(value)) for name, value in back.items()} == {
        name: (type(value), repr(value)) for name, value in options.items()
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"1.0",
        b"\xff\xfe",
        b"{" * 1000,
        b"[" * (MAX_RECIPE_BYTES - 1),
        b" " + dump_recipe(Recipe(**BASE)),
        dump_recipe(Recipe(**BASE)) + b"\n",
        dump_recipe(Recipe(**BASE)).replace(b'"1.0"', b"1.0"),
        spell(seeded=None),
        spell(path="/etc/passwd"),
        spell(format=1),
        spell(format=2),
        spell(format=3),
        spell(format=True),
        spell(format="1"),
        spell(family="no_such_family"),
        spell(family="../sort"),
        spell(family=["sort"]),
        spell(options=[]),
        spell(options={"no_such_option": 1}),
        spell(options={"min_length": 10**9}),
        spell(options={"min_length": True}),
        spell(options={"min_length": {"decimal": "2.0"}}),
        spell(options={"min_length": {"decimal": 2}}),
        spell(options={"min_length": {"decimal": "2.0", "more": 1}}),
        spell(options={"min_length": {}}),
        spell(options={"min_length": [2]}),
        spell(options={"Min": 1}),
        spell(options={"x" * 60_000: 1}),
        spell(options={"\u00e9\u202e\n" * 10_000: {}}),
        spell(options={"min_length": "\u202e\x00" * 9_000}),
        spell(options={f"o{number}": 1 for number in range(65)}),
        spell(group_size=0),
        spell(group_size=True),
        spell(group_size="8"),
        spell(max_tokens=2**31 + 1),
        spell(max_tokens=-1),
        spell(dtype="float64"),
        spell(model="A" * 64),
        spell(model="a" * 63),
        spell(weights="b" * 64 + "\n"),
        spell(calibration=""),
        spell(seeded=1),
        spell(temperature=1),
        spell(temperature="1"),
        spell(temperature="01.0"),
        spell(temperature=" 1.0"),
        spell(temperature="1.00"),
        spell(temperature="1_0.0"),
        spell(temperature="0.0"),
        spell(temperature="-1.0"),
        spell(temperature="nan"),
        spell(temperature="inf"),
        spell(temperature="1e400"),
        spell(temperature="9" * 60_000),
        spell(temperature={"decimal": "1.0"}),
        spell(set={}),
        spell(set=SET | {"hash": "a" * 63}),
        spell(set=SET | {"hash": "a" * 64}),
        spell(family="set"),
        spell(family="set", set=SET | {"hash": "a" * 64}, options={"min_length": 2}),
        spell(family="set", set=SET | {"hash": "a" * 64, "size": 1 << 40}),
        spell(family="set", set=SET | {"hash": "a" * 64, "path": "/etc/passwd"}),
        spell(family="set", set=SET | {"hash": "a" * 64, "weights": {"x": "1"}}),
        spell(family="set", set=SET | {"hash": "a" * 64, "filter": {}}),
        spell(family="set", set=SET | {"hash": "a" * 64}, verifiers={"os_system": "1"}),
        spell(family="set", set=SET | {"hash": "a" * 64, "schedule": [STAGE]}),
        spell(family="set", set=RATED | {"schedule": {}}),
        spell(family="set", set=RATED | {"schedule": "1"}),
        spell(family="set", set=RATED | {"schedule": [1]}),
        spell(family="set", set=RATED | {"schedule": [{}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"step": 2}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"step": 0}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"step": True}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"min": 0}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"min": "0"}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"min": "0.6"}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"max": "1.5"}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE, STAGE]}),
        spell(family="set", set=RATED | {"schedule": [STAGE, STAGE | {"step": 2**31}]}),
        spell(family="set", set=RATED | {"schedule": [STAGE | {"step": step} for step in range(1, 18)]}),
        spell(verifiers={"math": "math/1"}),
        spell(length={}),
        spell(length=LENGTH | {"mode": "exact"}),
        spell(length=LENGTH | {"mode": "exact", "targets": [0]}),
        spell(length=LENGTH | {"mode": "exact", "targets": [1] * 100}),
        spell(length=LENGTH | {"mode": "exact", "targets": [8], "bound": "1.0"}),
        spell(length=LENGTH | {"mode": "exact", "targets": [8], "bound": 0}),
        spell(length=LENGTH | {"mode": "exact", "targets": [8], "template": "{target}"}),
    ],
)
def test_other_bytes_are_refused_in_one_short_sentence(data):
    with pytest.raises(RecipeError) as caught:
        load_recipe(data)
    text = str(caught.value)
    assert text.startswith("invalid recipe: ")
    assert len(text) <= 300
    assert text.isascii()
    assert text.isprintable()


def test_more_bytes_than_allowed_are_refused_unread():
    data = spell(options={"x": "y" * MAX_RECIPE_BYTES})
    with pytest.raises(RecipeError, match="more than the 65536 allowed"):
        load_recipe(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_refused_or_another_recipe(place, byte):
    recipe = Recipe(**BASE | {"options": {"min_length": 2}, "temperature": 0.7})
    data = bytearray(dump_recipe(recipe))
    place %= len(data)
    changed = data[place] != byte
    data[place] = byte
    try:
        other = load_recipe(bytes(data))
    except RecipeError:
        return
    assert dump_recipe(other) == bytes(data)
    assert (other != recipe) == changed


@given(st.binary(max_size=100))
def test_noise_is_refused(data):
    with pytest.raises(RecipeError):
        load_recipe(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "nothing"},
        {"options": {"min_length": 0}},
        {"temperature": float("nan")},
        {"temperature": "1.0"},
        {"model": "short"},
        {"surplus": 1},
    ],
)
def test_a_recipe_for_nothing_known_cannot_be_made(changes):
    with pytest.raises(ValidationError):
        Recipe(**BASE | changes)


def test_an_option_without_a_spelling_is_the_operators_mistake(monkeypatch):
    monkeypatch.setattr(Recipe, "open_family", lambda self: None)
    with pytest.raises(ConfigError, match="64 bits"):
        dump_recipe(Recipe(**BASE | {"options": {"large": 2**63}}))
    with pytest.raises(ConfigError, match="at most 65536 are allowed"):
        dump_recipe(Recipe(**BASE | {"options": {"long": "x" * 70_000}}))


def test_a_recipe_takes_the_task_set_that_it_names_and_no_other():
    tasks, other = open_set(["family:sort:20"]), open_set(["family:sort:21"])
    terms = SetTerms(hash=tasks.hash, size=len(tasks.data), weights={"sort": 2})
    recipe = Recipe(**BASE | {"family": "set", "set": terms, "verifiers": {"family": "family/1"}})
    back = load_recipe(dump_recipe(recipe))
    assert back == recipe
    with pytest.raises(ConfigError, match="is not loaded yet"):
        back.open_family()
    with pytest.raises(ConfigError, match="has the hash"):
        back.bring_set(other.data)
    brought = back.bring_set(tasks.data)
    assert train_task(brought.open_family(), 3).id in {record.id for record in tasks.records}
    assert dump_recipe(brought) == dump_recipe(recipe)


def test_hostile_schedules_are_refused_for_what_they_say():
    assert load_recipe(spell(family="set", set=RATED | {"schedule": [STAGE]})).set.schedule[0].max == 0.5


def test_a_schedule_has_one_encoding_and_a_stage_without_tasks_is_reported_before_any_work():
    records = [replace(record, difficulty={"m": 0.25}) for record in open_set(["family:sort:20"]).records]
    tasks, rated = TaskSet(records), FilterConfig(model="m")
    stages = [ScheduleStage(step=1, min=0.2, max=1.0), ScheduleStage(step=30, min=0.0, max=0.5)]
    terms = SetTerms(hash=tasks.hash, filter=rated, schedule=stages)
    recipe = Recipe(**BASE | {"family": "set", "set": terms, "verifiers": {"family": "family/1"}})
    data = dump_recipe(recipe)
    assert b'"schedule":[{"max":"1.0","min":"0.2","step":1},{"max":"0.5","min":"0.0","step":30}]' in data
    back = load_recipe(data)
    assert back == recipe and dump_recipe(back) == data
    assert back.bring_set(tasks.data).open_family()
    late = terms.model_copy(update={"schedule": [stages[0], ScheduleStage(step=30, min=0.5, max=0.9)]})
    with pytest.raises(ConfigError, match=r"from step 30 on: .* keeps none of the 20 tasks"):
        recipe.model_copy(update={"set": late}).bring_set(tasks.data)


def test_tasks_of_a_stranger_are_checked_before_they_are_used():
    rules = {"instruction_id_list": ["punctuation:no_comma"] * 1000, "kwargs": [{}] * 1000}
    record = TaskRecord(id="a", source="s", task_type="text_rules", prompt="?", info=rules)
    tasks, verifiers = TaskSet([record]), {"text_rules": open_verifier("text_rules").stamp}
    recipe = Recipe(**BASE | {"family": "set", "set": SetTerms(hash=tasks.hash), "verifiers": verifiers})
    with pytest.raises(ConfigError, match="task a: info of a rules task"):
        recipe.bring_set(tasks.data)


def test_a_verifier_of_another_version_is_named():
    tasks = open_set(["family:sort:20"])
    recipe = Recipe(**BASE | {"family": "set", "set": SetTerms(hash=tasks.hash), "verifiers": {"family": "family/0"}})
    with pytest.raises(ConfigError, match="'family/0', installed is 'family/1'"):
        recipe.bring_set(tasks.data)


def test_target_lengths_of_a_recipe_are_in_its_prompts():
    length = LengthConfig(mode="max", targets=[5], alpha=0.1, template="{target}|{prompt}")
    family = load_recipe(dump_recipe(Recipe(**BASE | {"length": length}))).open_family()
    assert train_task(family, 0).prompt.startswith("5|")
