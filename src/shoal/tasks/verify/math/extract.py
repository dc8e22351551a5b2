"""The one answer of a completion, or why there is none.

    thoughts are dropped; then boxes and lines `#### x` are answers; without either, sentences `answer is x`

All answers must agree: a completion with two different answers has none. The last number of a text is not an answer,
nor is a box that is never closed. What touches a box belongs to it: `\\boxed{50}\\%` is 50%, and `-\\boxed{5}`,
`\\boxed{5}^2` or `\\boxed{5}` million are not 5. Sentences around a box do not belong to it.
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
_AROUND_CHARS, _SHOWN_CHARS = 100, 20
_BEFORE = re.compile(
    r"(?:^|\s|[=:,.;*$&\"'`>\u2192]|\\[\[(\\]|(?:^|[\s=:$])\("
    r"|\\(?:approx|quad|qquad|implies|Rightarrow|Longrightarrow|rightarrow|to|therefore|displaystyle|textstyle|left|boldsymbol)"
    r"|\\(?:text|textbf|mathrm|mbox)\{[ A-Za-z][^{}]*\})\Z"
)
"""what may stand before a box: the start, a blank, punctuation, an equals sign, a delimiter, an arrow, or words"""
_JOINS_BEFORE = re.compile(
    r"(?:[-+/^_<|!\u2212\u00d7]|(?<![=\-A-Za-z])>|(?<![A-Za-z*])\*|[0-9](?:\s*x)?|\\(?:pm|mp|times|cdot|div|neq|ne|lt|gt|leq?|geq?|sqrt)"
    r"|\b(?:not|minus|negative|plus|times|twice|half|double))\s*\}?\s*(?:\$|\\\(|\*\*)?\Z",
    re.IGNORECASE,
)
"""what a box belongs to, also across a blank"""
_DASH = re.compile(r"(?:^\s*[-+*>|]|[A-Za-z.:)*]\s*[-*\u2212])\s+(?:\$|\\\(|\*\*)?\Z")
"""the sign of a list, or a dash after a word"""
_AFTER = re.compile(
    r"[ \t]*(?:[$*)\]]|\\[)\]])*[ \t]*(?:\\?%|\b(?:per ?cent|hundred|thousand|[a-z]*illion|dozen|hal(?:f|ves)|quarter"
    r"|thirds?\b|[a-z]+(?:four|fif|six|seven|eigh|nin|ten|leven|twelf|teen|tie|dred|sand|illion)ths?\b"
    r"|(?:four|fif|six|seven|eigh|nin|ten|eleven|twelf)ths?\b|squared|cubed|doubled|tripled|factorial|minus|plus|times"
    r"|or less|or more)[a-z]*)",
    re.IGNORECASE,
)
_TOUCHES = re.compile(
    r"[ \t]*(?:\\?%|[-+*/^_!=<>|{:][ \t]*[0-9\\({$a-z]|!(?=[$]|\\[)\]])|[$]?[ \t]*x[ \t]*[$]?10\b|\(?mod\b|[0-9]"
    r"|\\(?!(?:end|qed|q?quad|hfill|[hv]space|newline|tag|label|(?:black)?square|checkmark|implies|iff|therefore|because"
    r"|(?:long)?(?:right|left)arrow|right|big[lr]?)(?![a-z]))[a-z]+)"
    r"|\.\\(?:overline|bar|dot)|[$][ \t]*[$]?\\(?:times|cdot|div|pm|over|frac)|[a-z(]|[.,][0-9]",
    re.IGNORECASE,
)
"""what belongs to a box before it: an operation, a digit, a letter, or any command except those that print no value"""
_NARROW, _SPACES = re.compile(r"\\[,;:!]"), re.compile(r"\\ |~|\$[ \t]+\$")
_OPENS = re.compile(r"(?<!\\)\(\Z")
_TAG = re.compile(r"<[^<>\s]*>\Z")
_PROSE = re.compile(r"[ \t]*(?:[-+*=<>]|\*\*)[ \t]+[A-Za-z]{2}|\*\*|\*[ \t]")
_END = re.compile(r"\$|\\[)\]]|\n|[.,;:](?![0-9]|\\[a-z])|\\\\")
_LINE_BREAK = re.compile(
    r"\n[ \t]*(?:\n[ \t]*)?"
    r"(?=(?:\\?%|(?:percent|hundred|thousand|[a-z]{1,9}illion|dozen|halves|thirds|quarters|squared|cubed)\b))"
)
"""a line break within an answer: 5, and million in the next line"""
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


class NoAnswerError(Exception):
    """A completion has no answer; the text gives the reason."""


def find_answer(completion: str, is_same: Callable[[str, str], bool]) -> str:
    """The answer as written, or NoAnswerError; `is_same` decides whether two spellings are the same."""
    text = _LINE_BREAK.sub(" ", drop_thoughts(completion))
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
        yield _read_around(text, match.start(), match.end(), end)
        place = end


def _read_around(text: str, start: int, inner: int, end: int) -> str:
    """The answer in a box, with what touches the box."""
    line = text.rfind("\n", 0, start) + 1
    around = text[max(line, start - _AROUND_CHARS) : start], text[end + 1 : end + 1 + _AROUND_CHARS]
    before, after = (_SPACES.sub(" ", _NARROW.sub("", part.replace("{,}", ","))) for part in around)
    before, answer = _TAG.sub(" ", before), text[inner:end]
    is_point = _OPENS.search(before) is not None and not after.startswith(")")
    if (is_point or _BEFORE.search(before) is None or _JOINS_BEFORE.search(before)) and not _DASH.search(before):
        answer = before[-_SHOWN_CHARS:].strip() + " " + answer
    if match := _AFTER.match(after):
        return answer + " " + match.group().strip(" \t$*)]")
    if _TOUCHES.match(after) and not _PROSE.match(after):
        return answer + _END.split(after.lstrip("$"), maxsplit=1)[0]
    return answer


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
