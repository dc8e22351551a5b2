"""The one answer of a completion, or why there is none.

    thoughts are dropped; then boxes and lines `#### x` are answers; without either, sentences `answer is x`

All answers must agree: a completion with two different answers has none. The last number of a text is not an answer,
nor is a box that is never closed.
"""

import re
from collections.abc import Callable, Iterator
from itertools import islice

from shoal.tasks.verify.extract import drop_thoughts

MAX_ANSWER_CHARS = 512
MAX_ANSWERS = 64
_ENOUGH = MAX_ANSWERS + 1
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE)
_SENTENCE = re.compile(r"\banswer\b[*_\s]*(?:is|:|=)[*_:\s]*([^\n]+)", re.IGNORECASE)
_SENTENCE_END = re.compile(r"\.(?:\s|$)")
_AROUND_BOX = "$*. \t\r"
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


class NoAnswerError(Exception):
    """A completion has no answer; the text gives the reason."""


def find_answer(completion: str, is_same: Callable[[str, str], bool]) -> str:
    """The answer as written, or NoAnswerError; `is_same` decides whether two spellings are the same."""
    text = drop_thoughts(completion)
    found = [*islice(_find_boxes(text), _ENOUGH), *islice(_find_lines(text), _ENOUGH)]
    if not found:
        sentences = (_SENTENCE_END.split(match[1], maxsplit=1)[0] for match in _SENTENCE.finditer(text))
        found = [sentence.strip("*_ ") for sentence in islice(sentences, _ENOUGH)]
    if not found:
        raise NoAnswerError("no answer")
    if len(found) > MAX_ANSWERS:
        raise NoAnswerError("several answers")
    last = found[-1].strip()
    if not last or max(map(len, found)) > MAX_ANSWER_CHARS:
        raise NoAnswerError("an empty answer" if not last else "an answer that is too long")
    if any(other.strip() != last and not is_same(other, last) for other in found):
        raise NoAnswerError("several answers")
    return last


def _find_boxes(text: str) -> Iterator[str]:
    place = 0
    while match := _BOX.search(text, place):
        end = _find_close(text, match.end())
        if end is None:
            return
        yield text[match.end() : end]
        place = end


def _find_lines(text: str) -> Iterator[str]:
    """Answers of lines `#### x`; if x is only a box, it was already found as one."""
    for match in _HASHES.finditer(text):
        line = match.group(1).strip(_AROUND_BOX)
        opening = _BOX.match(line)
        if opening is None or _find_close(line, opening.end()) != len(line) - 1:
            yield match.group(1)


def _find_close(text: str, start: int) -> int | None:
    """The position of the brace that closes the one opened before `start`."""
    depth = 1
    for match in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0:
            return match.start()
    return None
