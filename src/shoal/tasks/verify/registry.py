"""Verifiers by task type, each imported when it is first asked for.

A type is a name of the wire: task sets carry it, and a run descriptor carries `stamp` beside it.
"""

from importlib import import_module
from typing import Any

from shoal.errors import ConfigError
from shoal.tasks.verify.base import Verifier

_PACKAGE = "shoal.tasks.verify"
_PLACES = {
    "family": "family:FamilyVerifier",
    "gym": "gym:GymVerifier",
    "math": "math.verifier:MathVerifier",
    "code": "code.verifier:CodeVerifier",
    "text_exact": "text.match:ExactVerifier",
    "text_fuzzy": "text.match:FuzzyVerifier",
    "text_rules": "text.rules:RulesVerifier",
    "json_schema": "text.schema:SchemaVerifier",
}


def list_verifiers() -> tuple[str, ...]:
    """The names of all task types, sorted."""
    return tuple(sorted(_PLACES))


def open_verifier(task_type: str, **options: Any) -> Verifier:
    """The verifier of a task type; ConfigError where there is none, or where this machine cannot run it safely."""
    if task_type not in _PLACES:
        raise ConfigError(f"task type {task_type!r}: no such verifier; allowed are {', '.join(list_verifiers())}")
    module, _, name = _PLACES[task_type].partition(":")
    verifier: Verifier = getattr(import_module(f"{_PACKAGE}.{module}"), name)(**options)
    return verifier
