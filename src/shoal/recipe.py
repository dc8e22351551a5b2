"""The recipe of a run: all that a stranger needs, beside the weights, to make a rollout or to check one.

Invariants:
- it is data: names out of our own lists, numbers, hashes, and the sentence that tells a target length. Nothing in it is
  a path, an address or code;
- tasks are those of a family with its options, or of a task set by its hash, with filter, weights and schedule. The
  set's bytes may come from anywhere; `bring_set` takes them if they have the hash;
- the verifiers that score, with their versions, are named. Where another version is at hand it is said before any work;
- a recipe has one spelling, canonical JSON, so its hash names it: the hash stands in the run's genesis and descriptor,
  and the bytes may come from anywhere;
- `load_recipe(dump_recipe(recipe)) == recipe`, types included; all other bytes are a `RecipeError` of one sentence.

Canonical JSON has no floats. A float is written as the shortest text that reads back to it: plain where the field is
always one, as {"decimal": "0.5"} among options, where it must not be taken for a string.

Gold answers are in the task set, and whoever works on the run has it: workers score their own rollouts, validators
score them again.

Changing breaks: the genesis of every run.
"""

import hashlib
import math
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, PrivateAttr, StringConstraints, ValidationError, model_validator

from shoal.canonical import CanonicalError, decode_canonical, encode_canonical
from shoal.config import FilterConfig, LengthConfig, Option, Settings, Stage
from shoal.errors import ConfigError
from shoal.schema import explain_errors
from shoal.settings import MAX_STAGES, check_stages
from shoal.tasks.base import Family
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets import SetFamily, TaskSet
from shoal.tasks.sets.taskset import MAX_SET_BYTES
from shoal.tasks.source import build_set_family
from shoal.tasks.verify.registry import list_verifiers

FORMAT = 4
MAX_RECIPE_BYTES = 1 << 16
MAX_OPTIONS = 64
_MAX_DECIMAL_CHARS = 32
_MAX_ERROR_CHARS = 300
_MARK = "decimal"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class RecipeError(ValueError):
    """Bytes that are no recipe, or a recipe for something that is not known here."""


class SetTerms(Settings):
    """A task set, and which of its tasks are drawn how often."""

    hash: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""
    """of its canonical form; empty: the tasks are a family's"""
    size: Annotated[int, Field(ge=0, le=MAX_SET_BYTES)] = 0
    """bytes of its canonical form"""
    filter: FilterConfig = FilterConfig()
    weights: dict[str, int] = Field(default={}, max_length=MAX_OPTIONS)
    """of its sources"""
    schedule: Annotated[
        list[Stage], Field(max_length=MAX_STAGES, json_schema_extra={"allowed": f"a list of up to {MAX_STAGES} stages"})
    ] = Field(default=[])
    """which of them are drawn at which steps; empty: all, at all steps"""

    @model_validator(mode="after")
    def _covers_steps(self) -> "SetTerms":
        check_stages(self.schedule, self.filter)
        return self


class Recipe(Settings):
    """How the rollouts of a run are made."""

    family: Name
    """task family; `set` for a task set"""
    options: Annotated[dict[Name, Option], Field(max_length=MAX_OPTIONS)]
    """of the family, where they differ from its defaults"""
    set: SetTerms = SetTerms()
    length: LengthConfig = LengthConfig()
    verifiers: dict[Name, str] = Field(default={}, max_length=MAX_OPTIONS)
    """that score, with the versions of all that scores depend on; families whose scores are our own code have none"""
    group_size: Annotated[int, Field(ge=1, le=2**16)]
    """rollouts per task"""
    filter: bool = True
    """whether a group whose rewards are all alike is replaced by a further one, and not trained on"""
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

    _family: Family | None = PrivateAttr(default=None)
    """of a task set, once that is at hand"""

    @model_validator(mode="after")
    def _is_known(self) -> "Recipe":
        if not self.set.hash:
            self.open_family()
        elif self.family != SetFamily.name or self.options:
            raise ValueError(f"family: must be {SetFamily.name} and without options where there is a task set")
        elif unknown := sorted(set(self.verifiers) - set(list_verifiers())):
            raise ValueError(f"verifiers.{unknown[0]}: no such verifier here")
        return self

    def open_family(self) -> Family:
        """The tasks, with their options and target lengths; of a task set only once it was brought."""
        if self._family is not None:
            return self._family
        if self.set.hash:
            raise ConfigError("the recipe's task set was not brought yet")
        return self._aim(load_family(self.family, self.options))

    def bring_set(self, data: bytes) -> "Recipe":
        """The same recipe with its task set at hand; ConfigError if these are not its bytes."""
        tasks = TaskSet.from_bytes(data, self.set.hash, name="the task set of the recipe")
        brought = self.model_copy()
        family = build_set_family(tasks, self.set.filter, self.set.weights, self.set.schedule)
        brought._family = brought._aim(family)
        family.check_tasks()  # the bytes are a stranger's, and what a verifier takes is bounded by what it checks there
        return brought

    def _aim(self, family: Family) -> Family:
        """With target lengths, and by the verifiers that the recipe names."""
        found = stamp_family(family)
        for name in sorted({*found, *self.verifiers}):
            if found.get(name) != self.verifiers.get(name):
                named, here = self.verifiers.get(name, "none"), found.get(name, "none")
                raise ConfigError(f"verifiers.{name}: the recipe was made with {named[:80]!r}, here is {here!r}")
        return aim_family(family, self.length)


def stamp_family(family: Family) -> dict[str, str]:
    """The verifiers of a family by name, with their versions; none where its score is our own code alone."""
    stamps: dict[str, str] = getattr(family, "stamp_verifiers", dict)()
    return stamps


def dump_recipe(recipe: Recipe) -> bytes:
    """The one spelling of a recipe; ConfigError for an option that has none."""
    body = _spell_floats(Recipe, recipe.model_dump()) | {
        "format": FORMAT,
        "options": {name: _mark_option(value) for name, value in recipe.options.items()},
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
    fields = {name: body[name] for name in Recipe.model_fields}
    return _read_floats(Recipe, fields, "") | {"options": values}


def _spell_floats(model: type[Settings], values: dict[str, Any]) -> dict[str, Any]:
    """Fields that are always floats as their shortest text, in the models within as well."""
    spelled = dict(values)
    for name, field in model.model_fields.items():
        if field.annotation is float:
            spelled[name] = repr(float(values[name]))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            spelled[name] = _spell_floats(field.annotation, values[name])
        elif (listed := _find_listed(field.annotation)) is not None:
            spelled[name] = [_spell_floats(listed, value) for value in values[name]]
    return spelled


def _read_floats(model: type[Settings], values: Any, prefix: str) -> dict[str, Any]:
    """The same the other way round. No key may be missing: it would be filled in, and the recipe have two spellings."""
    if not isinstance(values, dict) or set(values) != set(model.model_fields):
        raise ValueError(f"{prefix or 'recipe'}: its keys are not those of one")
    read = dict(values)
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        if field.annotation is float:
            read[name] = _parse_decimal(key, values[name])
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            read[name] = _read_floats(field.annotation, values[name], key)
        elif (listed := _find_listed(field.annotation)) is not None:
            if not isinstance(values[name], list):
                raise ValueError(f"{key}: must be a list")
            read[name] = [_read_floats(listed, value, key) for value in values[name]]
    return read


def _find_listed(annotation: Any) -> type[Settings] | None:
    """The model of a list's items, if a field is a list of models."""
    (item, *_) = get_args(annotation) or (None,)
    is_model = get_origin(annotation) is list and isinstance(item, type) and issubclass(item, Settings)
    return item if is_model else None


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
