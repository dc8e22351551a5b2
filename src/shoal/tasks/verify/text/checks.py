"""Instructions about the form of a text, each a function of text and settings that returns whether it is followed.

Names and settings are those of IFEval (Zhou et al. 2023, arXiv 2311.07911), so that its tasks can be used unchanged;
the checks are our own. Checks that depend on a natural language are left out, and a sentence is text that ends in a
full stop, a question mark or an exclamation mark before a blank. Every check takes linear time.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shoal.tasks.verify.extract import is_deep

_WORD = re.compile(r"\w+")
_SENTENCE_END = re.compile(r"(?<![.!?])[.!?]++(?=\s|$)")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]+\]")
_BULLET = re.compile(r"^[ \t]*[*-][ \t]+\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*\*[^\n*]+\*\*|\*[^\n*]+\*")
_TITLE = re.compile(r"<<[^<>\n]+>>")
_LEAST, _LESS = "at least", "less than"
_CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SIX, _THREE = "******", "***"

Settings = Mapping[str, Any]
Check = Callable[[str, Settings], bool]


def compare_count(found: int, wanted: int, relation: str) -> bool:
    """`at least` or `less than`."""
    return found >= wanted if relation == _LEAST else found < wanted


def find_words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.lower())


def has_keywords(text: str, settings: Settings) -> bool:
    return all(_count_phrase(text, word) > 0 for word in settings["keywords"])


def repeats_keyword(text: str, settings: Settings) -> bool:
    return compare_count(_count_phrase(text, settings["keyword"]), settings["frequency"], settings["relation"])


def avoids_words(text: str, settings: Settings) -> bool:
    return all(_count_phrase(text, word) == 0 for word in settings["forbidden_words"])


def repeats_letter(text: str, settings: Settings) -> bool:
    count = text.lower().count(settings["letter"].lower())
    return compare_count(count, settings["let_frequency"], settings["let_relation"])


def counts_sentences(text: str, settings: Settings) -> bool:
    return compare_count(len(_SENTENCE_END.findall(text)), settings["num_sentences"], settings["relation"])


def counts_words(text: str, settings: Settings) -> bool:
    return compare_count(len(find_words(text)), settings["num_words"], settings["relation"])


def counts_paragraphs(text: str, settings: Settings) -> bool:
    parts = [part.strip() for part in text.split(_THREE)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])] if len(parts) > 1 else parts
    return all(parts) and len(parts) == settings["num_paragraphs"]


def starts_paragraph(text: str, settings: Settings) -> bool:
    parts = [part for part in text.split("\n\n") if part.strip()]
    place = settings["nth_paragraph"] - 1
    if len(parts) != settings["num_paragraphs"] or not 0 <= place < len(parts):
        return False
    return find_words(parts[place])[:1] == [settings["first_word"].lower()]


def has_placeholders(text: str, settings: Settings) -> bool:
    return len(_PLACEHOLDER.findall(text)) >= settings["num_placeholders"]


def has_postscript(text: str, settings: Settings) -> bool:
    marker = "".join(settings["postscript_marker"].lower().split())
    return any("".join(line.lower().split()).startswith(marker) for line in text.splitlines())


def counts_bullets(text: str, settings: Settings) -> bool:
    return len(_BULLET.findall(text)) == settings["num_bullets"]


def has_highlights(text: str, settings: Settings) -> bool:
    found = [part for part in _HIGHLIGHT.findall(text) if part.strip("* ")]
    return len(found) >= settings["num_highlights"]


def has_sections(text: str, settings: Settings) -> bool:
    pattern = re.compile(rf"^[ \t]*{re.escape(settings['section_spliter'])}[ \t]+\d+", re.MULTILINE | re.IGNORECASE)
    return len(pattern.findall(text)) >= settings["num_sections"]


def is_json(text: str, settings: Settings) -> bool:
    body = text.strip().removeprefix("```json").removeprefix("```JSON").removeprefix("```").removesuffix("```")
    try:
        return not is_deep(json.loads(body))
    except (ValueError, RecursionError):
        return False


def gives_two(text: str, settings: Settings) -> bool:
    parts = [part.strip() for part in text.split(_SIX)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def repeats_prompt(text: str, settings: Settings) -> bool:
    return text.strip().lower().startswith(settings["prompt_to_repeat"].strip().lower())


def ends_with(text: str, settings: Settings) -> bool:
    return text.strip().strip('"').lower().endswith(settings["end_phrase"].strip().lower())


def is_quoted(text: str, settings: Settings) -> bool:
    text = text.strip()
    return len(text) > 2 and text[0] == text[-1] == '"'


def counts_capitals(text: str, settings: Settings) -> bool:
    count = sum(word.isupper() for word in _WORD.findall(text))
    return compare_count(count, settings["capital_frequency"], settings["capital_relation"])


def _count_phrase(text: str, phrase: str) -> int:
    """How often a phrase occurs as whole words."""
    return len(re.findall(rf"(?<!\w){re.escape(phrase.lower())}(?!\w)", text.lower()))


_TEXT, _COUNT, _TEXTS = "a text", "a count", "a list of texts"
_RELATION = f"{_LEAST!r} or {_LESS!r}"
CHECKS: dict[str, tuple[Check, dict[str, str]]] = {
    "keywords:existence": (has_keywords, {"keywords": _TEXTS}),
    "keywords:frequency": (repeats_keyword, {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION}),
    "keywords:forbidden_words": (avoids_words, {"forbidden_words": _TEXTS}),
    "keywords:letter_frequency": (
        repeats_letter,
        {"letter": _TEXT, "let_frequency": _COUNT, "let_relation": _RELATION},
    ),
    "length_constraints:number_sentences": (counts_sentences, {"num_sentences": _COUNT, "relation": _RELATION}),
    "length_constraints:number_words": (counts_words, {"num_words": _COUNT, "relation": _RELATION}),
    "length_constraints:number_paragraphs": (counts_paragraphs, {"num_paragraphs": _COUNT}),
    "length_constraints:nth_paragraph_first_word": (
        starts_paragraph,
        {"num_paragraphs": _COUNT, "nth_paragraph": _COUNT, "first_word": _TEXT},
    ),
    "detectable_content:number_placeholders": (has_placeholders, {"num_placeholders": _COUNT}),
    "detectable_content:postscript": (has_postscript, {"postscript_marker": _TEXT}),
    "detectable_format:number_bullet_lists": (counts_bullets, {"num_bullets": _COUNT}),
    "detectable_format:number_highlighted_sections": (has_highlights, {"num_highlights": _COUNT}),
    "detectable_format:multiple_sections": (has_sections, {"section_spliter": _TEXT, "num_sections": _COUNT}),
    "detectable_format:json_format": (is_json, {}),
    "detectable_format:title": (lambda text, _: any(title.strip("<> ") for title in _TITLE.findall(text)), {}),
    "detectable_format:constrained_response": (lambda text, _: sum(map(text.count, _CHOICES)) == 1, {}),
    "combination:two_responses": (gives_two, {}),
    "combination:repeat_prompt": (repeats_prompt, {"prompt_to_repeat": _TEXT}),
    "startend:end_checker": (ends_with, {"end_phrase": _TEXT}),
    "startend:quotation": (is_quoted, {}),
    "change_case:capital_word_frequency": (
        counts_capitals,
        {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    ),
    "change_case:english_capital": (lambda text, _: text.isupper(), {}),
    "change_case:english_lowercase": (lambda text, _: text.islower(), {}),
    "punctuation:no_comma": (lambda text, _: "," not in text, {}),
}
"""Checks by IFEval's names, with the settings that each needs."""


def is_fit(value: Any, kind: str) -> bool:
    """Whether a setting has the type that a check needs."""
    match kind:
        case "a text":
            return isinstance(value, str) and bool(value.strip())
        case "a count":
            return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1_000_000
        case "a list of texts":
            return isinstance(value, list) and bool(value) and all(is_fit(part, _TEXT) for part in value)
    return value in (_LEAST, _LESS)
