"""The recipe of a run: everything besides the weights that a node needs to generate or check a rollout.

Invariants:
- a recipe is data: names from our own lists, numbers, hashes, and the sentence that states a target length. It holds no
  paths, addresses or code;
- tasks come from a family with its options, or from a task set named by its hash, with filter, weights and schedule.
  The bytes of the set may come from anywhere; `bring_set` accepts them if they have the right hash;
- it names the verifiers that score, with their versions. A version mismatch is reported before any work starts;
- a recipe has one encoding, canonical JSON, so its hash identifies it. The hash is in the run's genesis and descriptor,
  and the bytes may come from anywhere;
- `load_recipe(dump_recipe(recipe)) == recipe`, types included; any other bytes raise a `RecipeError` of one sentence.

Canonical JSON has no floats. A float is written as the shortest text that parses back to it: as a plain string in
fields that are always floats, and as {"decimal": "0.5"} among the options, where a string would be ambiguous.

Gold answers are in the task set, and every node of the run has it: workers score their own rollouts, and validators
score them again.

Changing breaks: the genesis of every run.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import Field, PrivateAttr, StringConstraints, ValidationError, model_validator

from shoal.config.help import explain_errors
from shoal.config.run import FilterConfig, LengthConfig, Option, Settings
from shoal.config.tasks import MAX_STAGES, ScheduleStage, check_stages
from shoal.errors import ConfigError
from shoal.tasks.base import Family, stamp_family
from shoal.tasks.length import aim_family
from shoal.tasks.registry import load_family
from shoal.tasks.sets.family import SetFamily
from shoal.tasks.sets.taskset import MAX_SET_BYTES, TaskSet
from shoal.tasks.verify.base import list_verifiers
from shoal.util.canonical import CanonicalError, decode_canonical, encode_canonical

FORMAT = 4
MAX_RECIPE_BYTES = 1 << 16
MAX_OPTIONS = 64
_MAX_DECIMAL_CHARS = 32
_MAX_ERROR_CHARS = 300
_MARK = "decimal"

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")]


class RecipeError(ValueError):
    """Bytes that are not a recipe, or a recipe that this program does not support."""


class SetTerms(Settings):
    """A task set, and which of its tasks are drawn how often."""

    hash: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")] = ""
    """hash of its canonical form; empty if the tasks come from a family"""
    size: Annotated[int, Field(ge=0, le=MAX_SET_BYTES)] = 0
    """size of its canonical form in bytes"""
    filter: FilterConfig = FilterConfig()
    weights: dict[str, int] = Field(default={}, max_length=MAX_OPTIONS)
    """weight of each source"""
    schedule: Annotated[
        list[ScheduleStage],
        Field(max_length=MAX_STAGES, json_schema_extra={"allowed": f"a list of up to {MAX_STAGES} stages"}),
    ] = Field(default=[])
    """which tasks are drawn at which steps; empty: all tasks at all steps"""

    @model_validator(mode="after")
    def _covers_steps(self) -> "SetTerms":
        check_stages(self.schedule, self.filter)
        return self


class Recipe(Settings):
    """How the rollouts of a run are generated."""

    family: Name
    """task family; `set` for a task set"""
    options: Annotated[dict[Name, Option], Field(max_length=MAX_OPTIONS)]
    """options of the family that differ from its defaults"""
    set: SetTerms = SetTerms()
    length: LengthConfig = LengthConfig()
    verifiers: dict[Name, str] = Field(default={}, max_length=MAX_OPTIONS)
    """verifiers that score, with the versions of all their scores depend on; empty for families scored by shoal"""
    group_size: Annotated[int, Field(ge=1, le=2**16)]
    """rollouts per task"""
    filter: bool = True
    """whether a group whose rewards are all equal is replaced by another one instead of trained on"""
    max_tokens: Annotated[int, Field(ge=1, le=2**31)]
    """longest completion"""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """sampling temperature"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """data type in which the weights are loaded"""
    model: Digest
    """hash of the model's configuration (`toploc.calibration.hash_model`)"""
    weights: Digest
    """root hash of version 0"""
    calibration: Digest
    """SHA-256 of the calibration file"""
    seeded: bool = True
    """whether tokens are drawn with the rollout's seed; False for engines that do not support it"""

    _family: Family | None = PrivateAttr(default=None)
    """the family of a task set, once the set is loaded"""

    @model_validator(mode="after")
    def _is_known(self) -> "Recipe":
        if not self.set.hash:
            self.open_family()
        elif self.family != SetFamily.name or self.options:
            raise ValueError(f"family: must be {SetFamily.name}, without options, if the recipe has a task set")
        elif unknown := sorted(set(self.verifiers) - set(list_verifiers())):
            raise ValueError(f"verifiers.{unknown[0]}: unknown verifier")
        return self

    def open_family(self) -> Family:
        """The tasks, with their options and target lengths; for a task set, only after `bring_set`."""
        if self._family is not None:
            return self._family
        if self.set.hash:
            raise ConfigError("the task set of the recipe is not loaded yet")
        return self._aim(load_family(self.family, self.options))

    def bring_set(self, data: bytes) -> "Recipe":
        """The same recipe with its task set loaded; ConfigError if these are not its bytes."""
        tasks = TaskSet.from_bytes(data, self.set.hash, name="the task set of the recipe")
        loaded = self.model_copy()
        family = SetFamily(tasks, self.set.filter, self.set.weights, self.set.schedule)
        loaded._family = loaded._aim(family)
        family.check_tasks()  # untrusted bytes: this check bounds what a verifier has to process
        return loaded

    def _aim(self, family: Family) -> Family:
        """The family with target lengths and with the verifiers that the recipe names."""
        found = stamp_family(family)
        for name in sorted({*found, *self.verifiers}):
            if found.get(name) != self.verifiers.get(name):
                named, here = self.verifiers.get(name, "none"), found.get(name, "none")
                raise ConfigError(f"verifiers.{name}: the recipe requires {named[:80]!r}, installed is {here!r}")
        return aim_family(family, self.length)


def dump_recipe(recipe: Recipe) -> bytes:
    """The canonical bytes of a recipe; ConfigError for an option that has no canonical form."""
    options = {
        name: {_MARK: repr(value)} if isinstance(value, float) else value for name, value in recipe.options.items()
    }
    body = _map_floats(Recipe, recipe.model_dump(), lambda _, value: repr(float(value)))
    try:
        data = encode_canonical(body | {"format": FORMAT, "options": options})
    except CanonicalError as error:
        raise ConfigError(f"tasks.options: {error}") from None
    if len(data) > MAX_RECIPE_BYTES:
        raise ConfigError(f"tasks.options: {len(data)} bytes as a recipe, at most {MAX_RECIPE_BYTES} are allowed")
    return data


def load_recipe(data: bytes) -> Recipe:
    """Parse the bytes of a recipe."""
    try:
        body = decode_canonical(data, max_bytes=MAX_RECIPE_BYTES)
        return Recipe.model_validate(_read_body(body))
    except ValidationError as error:
        raise RecipeError(_shorten(f"invalid recipe: {explain_errors(Recipe, error)}")) from None
    except ValueError as error:  # CanonicalError, and what `_read_body` raises
        raise RecipeError(_shorten(f"invalid recipe: {error}")) from None


def _read_body(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict) or set(body) != {"format", *Recipe.model_fields}:
        raise ValueError("unknown or missing keys")
    if body["format"] != FORMAT or isinstance(body["format"], bool):
        raise ValueError("unsupported format version")
    options = body["options"]
    if not isinstance(options, dict) or len(options) > MAX_OPTIONS:
        raise ValueError(f"options: must be a table of at most {MAX_OPTIONS} values")
    values = {name: _read_option(name, value) for name, value in options.items()}
    fields = {name: body[name] for name in Recipe.model_fields}
    return _map_floats(Recipe, fields, _parse_decimal) | {"options": values}


def _map_floats(
    model: type[Settings], values: Any, convert: Callable[[str, Any], Any], prefix: str = ""
) -> dict[str, Any]:
    """Convert the fields that are always floats, from or to their shortest text, including those of nested models.

    A missing key is an error: a default would be filled in, and the recipe would have two encodings.
    """
    if not isinstance(values, dict) or set(values) != set(model.model_fields):
        raise ValueError(f"{prefix or 'recipe'}: unknown or missing keys")
    mapped = dict(values)
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        if field.annotation is float:
            mapped[name] = convert(key, values[name])
        elif isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            mapped[name] = _map_floats(field.annotation, values[name], convert, key)
        elif (listed := _find_listed(field.annotation)) is not None:
            if not isinstance(values[name], list):
                raise ValueError(f"{key}: must be a list")
            mapped[name] = [_map_floats(listed, value, convert, key) for value in values[name]]
    return mapped


def _find_listed(annotation: Any) -> type[Settings] | None:
    """The model of a list's items if the field is a list of models."""
    (item, *_) = get_args(annotation) or (None,)
    is_model = get_origin(annotation) is list and isinstance(item, type) and issubclass(item, Settings)
    return item if is_model else None


def _read_option(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {_MARK}:
        raise ValueError(f'options.{name[:40]}: a table must have the form {{"decimal": "0.5"}}')
    return _parse_decimal(f"options.{name[:40]}", value[_MARK])


def _parse_decimal(key: str, text: Any) -> float:
    """A finite float from its shortest spelling only; otherwise one recipe would have two hashes."""
    if isinstance(text, str) and len(text) <= _MAX_DECIMAL_CHARS:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isfinite(value) and repr(value) == text:
            return value
    raise ValueError(f"{key}: must be a decimal number in its shortest form, such as 1.0")


def _shorten(text: str) -> str:
    """Bound the length: the text may quote untrusted bytes."""
    return ascii(text)[1:-1][:_MAX_ERROR_CHARS]
