"""The recipe of a run: all that a stranger needs, beside the weights, to make a rollout or to check one.

Invariants:
- it is data: names out of our own lists, numbers, hashes. Nothing in it is a path, an address or code;
- a recipe has one spelling, canonical JSON, so its hash names it: the hash stands in the run's genesis and descriptor,
  and the bytes may come from anywhere;
- `load_recipe(dump_recipe(recipe)) == recipe`, types included; all other bytes are a `RecipeError` of one sentence.

Canonical JSON has no floats. A float is written as the shortest text that reads back to it: plain where the field is
always one, as {"decimal": "0.5"} among options, where it must not be taken for a string.

Changing breaks: the genesis of every run.
"""

import hashlib
import math
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError, model_validator

from shoal.canonical import CanonicalError, decode_canonical, encode_canonical
from shoal.config import Option, Settings
from shoal.errors import ConfigError
from shoal.schema import explain_errors
from shoal.tasks.base import Family
from shoal.tasks.registry import load_family

FORMAT = 1
MAX_RECIPE_BYTES = 1 << 16
MAX_OPTIONS = 64
_MAX_DECIMAL_CHARS = 32
_MAX_ERROR_CHARS = 300
_MARK = "decimal"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class RecipeError(ValueError):
    """Bytes that are no recipe, or a recipe for something that is not known here."""


class Recipe(Settings):
    """How the rollouts of a run are made."""

    family: Name
    """task family"""
    options: Annotated[dict[Name, Option], Field(max_length=MAX_OPTIONS)]
    """of the family, where they differ from its defaults"""
    group_size: Annotated[int, Field(ge=1, le=2**16)]
    """rollouts per task"""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """longest completion"""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """of sampling"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """in which the weights are loaded"""
    model: Digest
    """hash of the model's configuration (`toploc.calibration.hash_model`)"""
    weights: Digest
    """root of version 0"""
    calibration: Digest
    """SHA-256 of the calibration file"""
    seeded: bool = True
    """whether tokens are drawn by the rollout's seed; False for engines that cannot"""

    @model_validator(mode="after")
    def _is_known(self) -> "Recipe":
        self.open_family()
        return self

    def open_family(self) -> Family:
        """The tasks, with their options."""
        return load_family(self.family, self.options)


def dump_recipe(recipe: Recipe) -> bytes:
    """The one spelling of a recipe; ConfigError for an option that has none."""
    body = recipe.model_dump() | {
        "format": FORMAT,
        "options": {name: _mark_option(value) for name, value in recipe.options.items()},
        "temperature": repr(recipe.temperature),
    }
    try:
        data = encode_canonical(body)
    except CanonicalError as error:
        raise ConfigError(f"tasks.options: {error}") from None
    if len(data) > MAX_RECIPE_BYTES:
        raise ConfigError(f"tasks.options: {len(data)} bytes as a recipe, allowed are {MAX_RECIPE_BYTES}")
    return data


def load_recipe(data: bytes) -> Recipe:
    """The recipe that these bytes spell."""
    try:
        body = decode_canonical(data, max_bytes=MAX_RECIPE_BYTES)
        return Recipe.model_validate(_read_body(body))
    except ValidationError as error:
        raise RecipeError(_shorten(f"not a recipe: {explain_errors(Recipe, error)}")) from None
    except ValueError as error:  # CanonicalError, and what `_read_body` finds
        raise RecipeError(_shorten(f"not a recipe: {error}")) from None


def hash_recipe(recipe: Recipe) -> str:
    """SHA-256 of the recipe's bytes, in hex."""
    return hashlib.sha256(dump_recipe(recipe)).hexdigest()


def _read_body(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict) or set(body) != {"format", *Recipe.model_fields}:
        raise ValueError("its keys are not those of one")
    if body["format"] != FORMAT or isinstance(body["format"], bool):
        raise ValueError("of another format")
    options = body["options"]
    if not isinstance(options, dict) or len(options) > MAX_OPTIONS:
        raise ValueError(f"options: must be a table of at most {MAX_OPTIONS} values")
    values = {name: _read_option(name, value) for name, value in options.items()}
    temperature = _parse_decimal("temperature", body["temperature"])
    fields = {name: body[name] for name in Recipe.model_fields}
    return fields | {"options": values, "temperature": temperature}


def _mark_option(value: Option) -> Any:
    return {_MARK: repr(value)} if isinstance(value, float) else value


def _read_option(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {_MARK}:
        raise ValueError(f"options.{name[:40]}: a table that is no decimal")
    return _parse_decimal(f"options.{name[:40]}", value[_MARK])


def _parse_decimal(key: str, text: Any) -> float:
    """A finite float from its shortest spelling and from no other, or one recipe would have two hashes."""
    if isinstance(text, str) and len(text) <= _MAX_DECIMAL_CHARS:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and repr(value) == text:
            return value
    raise ValueError(f"{key}: must be a decimal number in its shortest form, such as 1.0")


def _shorten(text: str) -> str:
    """What a stranger wrote may be part of it."""
    return ascii(text)[1:-1][:_MAX_ERROR_CHARS]
