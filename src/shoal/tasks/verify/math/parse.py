"""Parse an answer that is more than a number into a tree: expressions, tuples, sets, lists, intervals and their unions.

    answer = item ("," item)*            a list, in any order, if there are several
    item   = group ("\\cup" group)* | sum
    group  = ( or [ items ) or ]          a point, or an interval, by its brackets | \\{ items \\}  a set
    sum    = [+-] term ([+-] term)*       term = factor ([*/] factor)*, and factors side by side
    factor = base [^ base] [!]

A tree is a list whose first entry is its kind, so that it can be sent to a sandbox unchanged. Numbers stay texts.
Nothing is computed here, and Python names are unreachable: an unknown word is rejected.
"""

import re
from typing import Any

MAX_TOKENS = 256
MAX_DEPTH = 32
FUNCTIONS = ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log", "exp", "sqrt", "abs")
_GREEK = "alpha beta gamma delta epsilon theta lambda mu nu rho sigma tau phi omega".split()  # noqa: SIM905
_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"|(?P<word>\\?[A-Za-z]+)|(?P<sign>\\[{}]|[-+*/^!()\[\]{},|_]))"
)
_OPENING, _CLOSING = ("(", "[", "\\{"), (")", "]", "\\}")
_MAX_DIGITS = 128

Tree = list[Any]


class ParseError(ValueError):
    """A text that does not match this grammar."""


def parse_answer(text: str) -> Tree:
    """The tree of a cleaned answer."""
    reader = _TokenReader(_split_tokens(text))
    items = reader.read_items(end=None)
    return items[0] if len(items) == 1 else ["list", *items]


def list_symbols(tree: Any) -> set[str]:
    """The variables of a tree."""
    if not isinstance(tree, list):
        return set()
    if tree[0] == "symbol":
        return {tree[1]}
    return set().union(*(list_symbols(part) for part in tree[1:]))


def count_nodes(tree: Any) -> int:
    """The number of nodes of a tree."""
    return 1 + sum(count_nodes(part) for part in tree[1:]) if isinstance(tree, list) else 0


def is_scalar(tree: Tree) -> bool:
    """Whether it is a single value, neither a collection nor infinite."""
    return tree[0] not in ("list", "set", "group", "union", "infinity")


def _split_tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    place = depth = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or len(tokens) >= MAX_TOKENS:
            raise ParseError("a sign that is not known" if match is None else "too long")
        kind = str(match.lastgroup)
        value = match.group(kind)
        depth += (value in _OPENING) - (value in _CLOSING)
        if kind == "number" and depth > 0:
            value = value.partition(",")[0]  # inside brackets a comma separates two numbers: [0,100]
        place = match.start(kind) + len(value)
        tokens += _split_word(value) if kind == "word" else [(kind, value)]
    return tokens


def _split_word(word: str) -> list[tuple[str, str]]:
    name = word.removeprefix("\\")
    if name in FUNCTIONS:
        return [("function", name)]
    if name in ("pi", "infty", "frac", "cup", *_GREEK) and (word.startswith("\\") or name == "pi"):
        return [("name", name)]
    if len(word) == 1:
        return [("letter", word)]
    raise ParseError("a word that is not known")


class _TokenReader:
    """Tokens, read from left to right."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens, self._place, self._depth = tokens, 0, 0

    def read_items(self, end: str | tuple[str, ...] | None) -> list[Tree]:
        """Items up to a closing sign, which is not consumed, or to the end."""
        items = [self._read_item()]
        while self._take(","):
            items.append(self._read_item())
        if end is None and self._place < len(self._tokens):
            raise ParseError("something after the answer")
        return items

    def _read_item(self) -> Tree:
        first = self._read_sum()
        if self._peek() != ("name", "cup"):
            return first
        parts = [first]
        while self._peek() == ("name", "cup"):
            self._place += 1
            parts.append(self._read_sum())
        if any(part[0] not in ("group", "set") for part in parts):
            raise ParseError("a union of what are no sets")
        return ["union", *parts]

    def _read_sum(self) -> Tree:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ParseError("nested too deep")
        tree = self._read_signed()
        while (sign := self._peek()) in (("sign", "+"), ("sign", "-")):
            self._place += 1
            other = self._read_term()
            tree = ["add", _scalar(tree), _scalar(other if sign[1] == "+" else ["neg", other])]
        self._depth -= 1
        return tree

    def _read_signed(self) -> Tree:
        if self._take("-"):
            tree = self._read_term()
            return ["infinity", -1] if tree == ["infinity", 1] else ["neg", _scalar(tree)]
        self._take("+")
        return self._read_term()

    def _read_term(self) -> Tree:
        tree = self._read_factor()
        while True:
            if self._take("*"):
                tree = ["mul", _scalar(tree), _scalar(self._read_factor())]
            elif self._take("/"):
                tree = ["div", _scalar(tree), _scalar(self._read_factor())]
            elif self._starts_factor():
                tree = ["mul", _scalar(tree), _scalar(self._read_factor())]
            else:
                return tree

    def _starts_factor(self) -> bool:
        kind, value = self._peek()
        if kind == "number":
            return False  # "2 3" is not a product
        return kind in ("letter", "function") or (kind == "name" and value != "cup") or (kind, value) == ("sign", "(")

    def _read_factor(self) -> Tree:
        tree = self._read_base()
        if self._take("^"):
            tree = ["pow", _scalar(tree), _scalar(self._read_exponent())]
        while self._take("!"):
            tree = ["factorial", _scalar(tree)]
        return tree

    def _read_exponent(self) -> Tree:
        if self._take("-"):
            return ["neg", self._read_base()]
        return self._read_base()

    def _read_base(self) -> Tree:
        kind, value = self._next()
        match kind, value:
            case "number", _:
                return _number(value)
            case "letter", _:
                return self._read_symbol(value)
            case "function", _:
                return self._read_function(value)
            case "name", "frac":
                return ["div", self._read_braced(), self._read_braced()]
            case "name", "pi":
                return ["constant", "pi"]
            case "name", "infty":
                return ["infinity", 1]
            case "name", name if name != "cup":
                return self._read_symbol(name)
            case "sign", ("(" | "[" | "\\{" | "{" | "|"):
                return self._read_group(value)
        raise ParseError("a sign where a value should be")

    def _read_symbol(self, name: str) -> Tree:
        if not self._take("_"):
            return ["constant", "e"] if name == "e" else ["symbol", name]
        kind, value = self._next()
        if (kind, value) == ("sign", "{"):
            kind, value = self._next()
            self._expect("}")
        if kind not in ("number", "letter"):
            raise ParseError("an index of no known kind")
        return ["symbol", f"{name}_{value}"]

    def _read_function(self, name: str) -> Tree:
        if name == "sqrt" and self._take("["):
            root = self._read_sum()
            self._expect("]")
            return ["pow", self._read_braced(), ["div", _number("1"), _scalar(root)]]
        power = self._read_exponent() if self._take("^") else None
        if power == ["neg", _number("1")]:
            raise ParseError("an inverse function or a reciprocal")
        kind, value = self._peek()
        is_closed = kind == "sign" and value in ("(", "{", "|")
        inner = _scalar(self._read_base() if is_closed or name == "sqrt" else self._read_factor())
        tree = ["function", name, inner]
        return tree if power is None else ["pow", tree, _scalar(power)]

    def _read_braced(self) -> Tree:
        """{..}, or a single digit or letter, as in LaTeX."""
        kind, value = self._peek()
        if kind == "number" and len(value) > 1 and "." not in value and "," not in value:
            self._tokens[self._place] = (kind, value[1:])
            return _number(value[0])
        return _scalar(self._read_base())

    def _read_group(self, opening: str) -> Tree:
        if opening == "|":
            inner = self._read_sum()
            self._expect("|")
            return ["function", "abs", _scalar(inner)]
        items = self.read_items(end=opening)
        _, closing = self._next()
        if opening == "\\{" and closing == "\\}":
            return ["set", *items]
        if opening == "{" and closing == "}" and len(items) == 1:
            return items[0]
        if opening not in "([" or closing not in (")", "]"):
            raise ParseError("brackets that do not match")
        if len(items) == 1 and (opening, closing) == ("(", ")"):
            return items[0]
        return ["group", opening + closing, *items]

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")

    def _next(self) -> tuple[str, str]:
        token = self._peek()
        self._place += 1
        return token

    def _take(self, sign: str) -> bool:
        is_there = self._peek() == ("sign", sign)
        self._place += is_there
        return is_there

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise ParseError(f"no {sign}")


def _number(text: str) -> Tree:
    if len(text) > _MAX_DIGITS:
        raise ParseError("a number that is too long")
    return ["number", text.replace(",", "")]


def _scalar(tree: Tree) -> Tree:
    if not is_scalar(tree):
        raise ParseError("a collection where a value should be")
    return tree
