"""JSON with a given schema: 1 if a completion's last fenced block, or all of it, is JSON that `info["schema"]` allows.

A subset of JSON Schema that can be checked in bounded time: no references (they can loop) and no patterns (they can
take exponential time). Unknown keywords are rejected when the tasks are loaded, never ignored.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.verify.base import Info, Verifier
from shoal.tasks.verify.extract import drop_thoughts, find_block, is_deep

MAX_SCHEMA_NODES = 512
MAX_DEPTH = 32
MAX_STEPS = 50_000
_MAX_DIGITS = 400
_NOTES = ("title", "description", "$schema", "default", "examples")
_LISTS, _SCHEMAS = ("allOf", "anyOf", "oneOf"), ("items", "not")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_LOOKED_THROUGH = ("enum", "required")
"""lists of any length that a value is compared with"""
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


class _StepsError(Exception):
    """A check that would take too long."""


class SchemaVerifier(Verifier):
    """Answers in JSON."""

    name = "json_schema"
    version = 2

    def check_info(self, info: Info) -> None:
        if "schema" not in info:
            raise ConfigError("info of a JSON task: needs schema")
        _check_schema(info["schema"], MAX_DEPTH, [MAX_SCHEMA_NODES])

    def score(self, info: Info, prompt: str, completion: str) -> Score:
        text = drop_thoughts(completion)
        block = find_block(text, "json")
        try:
            value = json.loads(
                text if block is None else block,
                parse_constant=_refuse_constant,
                parse_int=_read_integer,
                parse_float=_read_float,
                object_pairs_hook=_read_object,
            )
            if is_deep(value):
                return Score(0.0, "nested too deep")
            is_right = _Checker().allows(info["schema"], value, MAX_DEPTH)
        except (ValueError, RecursionError) as error:
            return Score(0.0, f"not JSON: {type(error).__name__}")
        except _StepsError:
            return Score(0.0, "too many steps")
        return Score(1.0, "as the schema has it") if is_right else Score(0.0, "not as the schema has it")


class _Checker:
    """One check, with its count of steps: the same on every machine."""

    def __init__(self) -> None:
        self._left = MAX_STEPS

    def allows(self, schema: Any, value: Any, depth: int) -> bool:
        self._left -= 1 if isinstance(schema, bool) else 1 + sum(len(schema.get(key, ())) for key in _LOOKED_THROUGH)
        if self._left < 0 or depth < 0:
            raise _StepsError
        if isinstance(schema, bool):
            return schema
        if not _allows_plain(schema, value) or not self._allows_combined(schema, value, depth):
            return False
        if isinstance(value, list):
            return "items" not in schema or all(self.allows(schema["items"], part, depth - 1) for part in value)
        return not isinstance(value, dict) or self._allows_object(schema, value, depth)

    def _allows_combined(self, schema: Mapping[str, Any], value: Any, depth: int) -> bool:
        def count(key: str) -> int:
            return sum(self.allows(part, value, depth - 1) for part in schema[key])

        return (
            ("allOf" not in schema or count("allOf") == len(schema["allOf"]))
            and ("anyOf" not in schema or count("anyOf") > 0)
            and ("oneOf" not in schema or count("oneOf") == 1)
            and ("not" not in schema or not self.allows(schema["not"], value, depth - 1))
        )

    def _allows_object(self, schema: Mapping[str, Any], value: dict[str, Any], depth: int) -> bool:
        parts, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if any(key not in value for key in schema.get("required", ())):
            return False
        return all(self.allows(parts.get(key, more), part, depth - 1) for key, part in value.items())


def _allows_plain(schema: Mapping[str, Any], value: Any) -> bool:
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_type(value, kind) for kind in kinds):
        return False
    if "const" in schema and not same_json(schema["const"], value):
        return False
    if "enum" in schema and not any(same_json(one, value) for one in schema["enum"]):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _is_between(schema, value)
    name = {"str": "Length", "list": "Items", "dict": "Properties"}.get(type(value).__name__)
    return name is None or schema.get(f"min{name}", 0) <= len(value) <= schema.get(f"max{name}", len(value))


def _is_between(schema: Mapping[str, Any], value: float) -> bool:
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or schema["exclusiveMinimum"] < value)
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


def _is_type(value: Any, kind: str) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return is_number and value == int(value)
        case "number":
            return is_number
    return isinstance(value, {"string": str, "array": list, "object": dict}[kind])


def same_json(left: Any, right: Any) -> bool:
    """Equality in JSON: 1 equals 1.0, and true is not a number."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same_json, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_json(left[key], right[key]) for key in left)
    return bool(left == right)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _read_integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("an integer that is too long")
    return int(digits)


def _read_float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError("a number that is too large")
    return value


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key twice")  # parsers differ in which one wins
    return found


def _check_schema(schema: Any, depth: int, budget: list[int]) -> None:
    budget[0] -= 1
    if budget[0] < 0 or depth < 0:
        raise ConfigError(f"schema: more than {MAX_SCHEMA_NODES} parts, or nested deeper than {MAX_DEPTH}")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ConfigError("schema: must be an object, true or false")
    for key, value in schema.items():
        if not _is_known(key, value):
            raise ConfigError(f"schema: {str(key)[:40]!r} is unknown, or has the wrong type")
    for part in _list_parts(schema):
        _check_schema(part, depth - 1, budget)


def _is_known(key: str, value: Any) -> bool:
    if key in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if key in _BOUNDS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    match key:
        case "type":
            kinds = [value] if isinstance(value, str) else value
            return isinstance(kinds, list) and bool(kinds) and all(kind in _TYPES for kind in kinds)
        case "required":
            return isinstance(value, list) and all(isinstance(name, str) for name in value)
        case "properties":
            return isinstance(value, dict)
        case "enum" | "allOf" | "anyOf" | "oneOf":
            return isinstance(value, list) and bool(value)
    return key in (*_NOTES, *_SCHEMAS, "const", "additionalProperties")


def _list_parts(schema: Mapping[str, Any]) -> list[Any]:
    parts = [schema[key] for key in (*_SCHEMAS, "additionalProperties") if key in schema]
    parts += [part for key in _LISTS for part in schema.get(key, [])]
    return parts + list(schema.get("properties", {}).values())
