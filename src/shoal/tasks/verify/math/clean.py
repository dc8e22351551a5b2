"""Normalise the spelling of an answer before it is parsed."""

import re

from shoal.tasks.verify.math.units import spell_rates

_FRACTIONS = (("\u00bd", 1, 2), ("\u2153", 1, 3), ("\u2154", 2, 3), ("\u00bc", 1, 4), ("\u00be", 3, 4))
_SIGNS = str.maketrans(
    {
        sign: meaning
        for signs, meaning in (
            *(("\u2212\u2013", "-"), ("\u00d7\u00b7\u22c5", "*"), ("\u00f7\u2044", "/"), ("\u221a", r"\sqrt ")),
            *(("\u00b2", "^2"), ("\u00b3", "^3"), ("\u03c0", r"\pi "), ("\u221e", r"\infty "), ("\u222a", r"\cup ")),
            *(("\u00b1", r"\pm "), ("\u00b0", " degrees"), ("\u00a0\u202f\u2009", " ")),
            *((sign, rf"\frac{{{top}}}{{{low}}}") for sign, top, low in _FRACTIONS),
            *(("\u00a3", r"\pounds "), ("\u20ac", r"\euro ")),
        )
        for sign in signs
    }
)
"""signs with several spellings"""
_GONE = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|quad|qquad|bigl?|bigr|Bigl?|Bigr)(?![A-Za-z])|\\[,!;: ]|~"
)
_SAME = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:cdot|times|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])"), " degrees"),
    (re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\s+"), " "),
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"))


def clean_answer(text: str) -> str:
    """Normalise an answer: remove surrounding dollars and LaTeX spaces, unify spellings of the same sign. ASCII only:
    digits of other scripts are not digits here."""
    text = _unwrap(text.translate(_SIGNS).strip())
    text = _GONE.sub("", text)
    for pattern, meaning in _SAME:
        text = pattern.sub(meaning, text)
    text = spell_rates(text.strip())
    return text[:-1].rstrip() if text.endswith(".") else text


def _unwrap(text: str) -> str:
    text = text.rstrip(". ") if text.endswith(("$.", "`.", "*.")) else text
    for left, right in _WRAPPERS:
        inner = text[len(left) : -len(right)]
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right) and left not in inner:
            return _unwrap(inner.strip())
    return text
