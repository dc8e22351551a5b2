"""The one answer of a completion, or why there is none.

    thoughts are dropped; then boxes and lines `#### x` are answers; without either, sentences `answer is x`

All that stand there must agree: whoever writes two different answers has given none. The last number of a text is no
answer, nor is a box that never closes.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shoal.tasks.verify.answers import drop_thoughts

MAX_ANSWER_CHARS = 512
MAX_ANSWERS = 64
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_SENTENCE = re.compile(r"\banswer\b[*_\s]*(?:is|:|=)[*_:\s]*([^\n]+)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_AROUND_BOX = "$*. \t\r"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a completion has no answer."""

    reason: str


def find_answer(completion: str, is_same: Callable[[str, str], bool]) -> str | Refusal:
    """The answer as it is written; `is_same` tells whether two ways of writing say the same."""
    text = drop_thoughts(completion)
    found = _take(_find_boxes(text)) + _take(_find_lines(text))
    if not found:
        found = _take(_find_sentences(text))
    if not found:
        return Refusal("no answer")
    if len(found) > MAX_ANSWERS:
        return Refusal("several answers")
    last = found[-1].strip()
    if not last or max(map(len, found)) > MAX_ANSWER_CHARS:
        return Refusal("an empty answer" if not last else "an answer that is too long")
    if any(other.strip() != last and not is_same(other, last) for other in found):
        return Refusal("several answers")
    return last


def _take(answers: Iterator[str]) -> list[str]:
    return [answer for answer, _ in zip(answers, range(MAX_ANSWERS + 1), strict=False)]


def _find_boxes(text: str) -> Iterator[str]:
    place = 0
    while match := _BOX.search(text, place):
        end = _find_close(text, match.end())
        if end is None:
            return
        yield text[match.end() : end]
        place = end


def _find_lines(text: str) -> Iterator[str]:
    """Of lines `#### x`; where x is but a box, that was found as one."""
    for match in _HASHES.finditer(text):
        line = match.group(1).strip(_AROUND_BOX)
        opening = _BOX.match(line)
        if opening is None or _find_close(line, opening.end()) != len(line) - 1:
            yield match.group(1)


def _find_close(text: str, start: int) -> int | None:
    """Where the brace that was opened before `start` is closed."""
    depth = 1
    for match in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None


def _find_sentences(text: str) -> Iterator[str]:
    for match in _SENTENCE.finditer(text):
        yield _SENTENCE_END.split(match.group(1), maxsplit=1)[0].strip("*_ ")
