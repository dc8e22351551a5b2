"""Exact and fuzzy match, IFEval's instructions, JSON of a given shape."""

import random
import time

import pytest

from shoal.errors import ConfigError
from shoal.tasks.verify.text.checks import CHECKS
from shoal.tasks.verify.text.match import MAX_FUZZY_CHARS, ExactVerifier, FuzzyVerifier, measure_distance
from shoal.tasks.verify.text.rules import RulesVerifier
from shoal.tasks.verify.text.schema import SchemaVerifier

LONG = "x" * 60_000


def test_exact_match_is_letter_by_letter_after_the_thoughts():
    score = ExactVerifier().score
    assert score({"answer": "abc"}, "", " abc\n").value == 1.0
    assert score({"answer": "abc"}, "", "<think>no</think>abc").value == 1.0
    assert score({"answer": "abc"}, "", "Abc").value == 0.0
    assert score({"answer": "abc", "ignore_case": True}, "", "Abc").value == 1.0
    assert score({"answer": "abc"}, "", "<think>abc").value == 0.0


def count_slowly(left, right):
    row = list(range(len(right) + 1))
    for i, one in enumerate(left):
        last, row[0] = row[0], i + 1
        for j, other in enumerate(right):
            last, row[j + 1] = row[j + 1], min(row[j] + 1, row[j + 1] + 1, last + (one != other))
    return row[-1]


def test_the_distance_is_levenshteins():
    rng = random.Random(0)
    assert measure_distance("kitten", "sitting") == 3
    for _ in range(500):
        left, right = ("".join(rng.choice("abc") for _ in range(rng.randrange(24))) for _ in range(2))
        assert measure_distance(left, right) == count_slowly(left, right)


def test_fuzzy_match_is_one_division():
    score = FuzzyVerifier().score
    assert score({"answer": "kitten"}, "", "sitting").value == 4 / 7
    assert score({"answer": "kitten", "least": 0.6}, "", "sitting").value == 0.0
    assert score({"answer": "kitten"}, "", "").value == 0.0
    assert score({"answer": "kitten"}, "", LONG).value == 0.0
    start = time.process_time()
    assert score({"answer": "ab" * (MAX_FUZZY_CHARS // 2)}, "", "ba" * (MAX_FUZZY_CHARS // 2)).value > 0.9
    assert time.process_time() - start < 1.0


FOLLOWED = [
    ("keywords:existence", {"keywords": ["red", "blue fish"]}, "A red, a BLUE FISH.", "A reddish blue fish."),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "at least"}, "a b a", "a ab"),
    ("keywords:frequency", {"keyword": "a", "frequency": 2, "relation": "less than"}, "a b ab", "a a"),
    ("keywords:forbidden_words", {"forbidden_words": ["no"]}, "not now", "Oh no!"),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Eel", "el"),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two!", "3.14 is it."),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo", "one\n***\n***\ntwo"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Then"},
        "First.\n\nthen, this.",
        "Then.\n\nfirst",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] and [place]", "[name] and []"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Text.\nP. S. more", "Text P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n- b", "* a\n- b\n* c"),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSECTION 2\nb",
        "Section 1\na",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', '{"a": [1}'),
    ("detectable_format:title", {}, "<<A title>>\ntext", "<< >> text"),
    ("detectable_format:constrained_response", {}, "My answer is yes.", "My answer is yes. My answer is no."),
    ("combination:two_responses", {}, "one******two", "one******one"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say this"}, "say this: ok", "ok, say this"),
    (
        "startend:end_checker",
        {"end_phrase": "The end."},
        '"So THE end."',
        "The end. Or not",
    ),
    ("startend:quotation", {}, '"all of it"', '"half" of it'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "GO THERE now",
        "GO there",
    ),
    ("change_case:english_capital", {}, "ALL OF IT", "ALL of it"),
    ("change_case:english_lowercase", {}, "all of it", "All of it"),
    ("punctuation:no_comma", {}, "no such sign", "one, two"),
]


@pytest.mark.parametrize(("name", "settings", "right", "wrong"), FOLLOWED, ids=[row[0] for row in FOLLOWED])
def test_an_instruction_is_followed_or_not(name, settings, right, wrong):
    verifier, info = RulesVerifier(), {"instruction_id_list": [name], "kwargs": [settings | {"unused": None}]}
    verifier.check_info(info)
    assert verifier.score(info, "", right).value == 1.0
    assert verifier.score(info, "", wrong).value == 0.0
    assert verifier.score(info, "", " ").value == 0.0


def test_every_instruction_is_tested():
    assert {row[0] for row in FOLLOWED} == set(CHECKS)


HOSTILE = ["." * 60_000, "*" * 60_000, "[" * 60_000, "<" * 60_000, LONG, "* " * 30_000, "\n" * 60_000, "a." * 30_000]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_makes_an_instruction_take_long(text):
    start = time.process_time()
    for name, settings, _, _ in FOLLOWED:
        RulesVerifier().score({"instruction_id_list": [name], "kwargs": [settings]}, "", text)
    assert time.process_time() - start < 1.0


def test_all_instructions_count_unless_a_share_is_wanted():
    info = {"instruction_id_list": ["punctuation:no_comma", "change_case:english_capital", "startend:quotation"]}
    info["kwargs"] = [{}, {}, {}]
    assert RulesVerifier().score(info, "", "NO COMMA").value == 0.0
    assert RulesVerifier().score(info | {"partial": True}, "", "NO COMMA").value == 2 / 3


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"instruction_id_list": [], "kwargs": []},
        {"instruction_id_list": ["language:response_language"], "kwargs": [{"language": "de"}]},
        {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
        {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]},
        {"instruction_id_list": ["keywords:frequency"], "kwargs": [{"keyword": "a", "frequency": 1, "relation": "x"}]},
    ],
)
def test_instructions_that_cannot_be_checked_are_refused(info):
    with pytest.raises(ConfigError):
        RulesVerifier().check_info(info)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 200},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "id": {"anyOf": [{"type": "null"}, {"const": 7}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"name": "x", "age": 3}', 1.0),
        ('So:\n```json\n{"name": "x", "age": 3.0, "tags": ["a", "b"], "id": 7.0}\n```', 1.0),
        ('{"name": "x", "age": 3, "id": null}', 1.0),
        ('{"name": "", "age": 3}', 0.0),
        ('{"name": "x"}', 0.0),
        ('{"name": "x", "age": true}', 0.0),
        ('{"name": "x", "age": 200}', 0.0),
        ('{"name": "x", "age": 3.5}', 0.0),
        ('{"name": "x", "age": 3, "more": 1}', 0.0),
        ('{"name": "x", "age": 3, "tags": ["a", "c"]}', 0.0),
        ('{"name": "x", "age": 3, "tags": ["a", "b", "a"]}', 0.0),
        ('{"name": "x", "age": 3, "id": 8}', 0.0),
        ('{"name": "x", "age": 3, "age": 4}', 0.0),
        ('{"name": "x", "age": NaN}', 0.0),
        ('{"name": "x", "age": 1e999}', 0.0),
        ('{"name": "x", "age": ' + "9" * 5000 + "}", 0.0),
        ("[" * 50_000, 0.0),
        ("", 0.0),
        ('{"name": "x", "age": 3} and more', 0.0),
    ],
)
def test_json_is_of_its_shape_or_not(text, value):
    verifier = SchemaVerifier()
    verifier.check_info({"schema": PERSON})
    assert verifier.score({"schema": PERSON}, "", text).value == value


def test_a_check_that_would_take_long_is_refused_by_its_steps():
    schema = {"anyOf": [{"const": 1}]}
    for _ in range(12):
        schema = {"anyOf": [schema, schema]}
    with pytest.raises(ConfigError):
        SchemaVerifier().check_info({"schema": schema})
    wide = {"items": {"allOf": [{"type": "integer"}] * 200}}
    assert SchemaVerifier().score({"schema": wide}, "", str([1] * 20_000)).reason == "too many steps"


@pytest.mark.parametrize(
    "schema", [{"$ref": "#"}, {"pattern": "(a+)+$"}, {"type": "text"}, {"minItems": -1}, {"properties": {"a": 1}}, 1]
)
def test_a_schema_that_is_not_understood_is_refused(schema):
    with pytest.raises(ConfigError):
        SchemaVerifier().check_info({"schema": schema})


@pytest.mark.parametrize(("depth", "value"), [(60, 1.0), (66, 0.0), (900, 0.0), (30_000, 0.0)])
def test_json_counts_as_deep_as_every_python_reads_it(depth, value):
    text = "[" * depth + "]" * depth
    assert SchemaVerifier().score({"schema": {"type": "array"}}, "", text).value == value
    rule = {"instruction_id_list": ["detectable_format:json_format"], "kwargs": [{}]}
    assert RulesVerifier().score(rule, "", text).value == value


def test_long_lists_of_a_schema_are_steps_too():
    schema = {"items": {"enum": [str(number) for number in range(20_000)]}}
    assert SchemaVerifier().score({"schema": schema}, "", '["19999"]').value == 1.0
    score = SchemaVerifier().score({"schema": schema}, "", '["19999", "19999", "19999"]')
    assert (score.value, score.reason) == (0.0, "too many steps")
