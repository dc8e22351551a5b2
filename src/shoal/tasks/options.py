"""Options of task families: fields of a strict dataclass, with the table and the errors made from them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.config import Option
from shoal.errors import ConfigError

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
"""Configuration of every family's dataclass: types are not converted, unknown options not ignored."""


@dataclass(frozen=True, slots=True)
class OptionCard:
    """One option as the command line shows it."""

    name: str
    default: Option
    allowed: str
    doc: str


def check_order(low_name: str, low: int, high_name: str, high: int) -> None:
    """Refuse a range whose lower end lies above its upper end."""
    if low > high:
        raise ValueError(f"{low_name} = {low} must be at most {high_name} = {high}")


def list_options(family: type[Any]) -> tuple[OptionCard, ...]:
    """The options of a family's class, in the order of its fields."""
    fields = TypeAdapter(family).json_schema()["properties"]
    return tuple(
        OptionCard(name, field["default"], _describe_range(field), field["description"])
        for name, field in fields.items()
    )


def apply_options(family: type[T], options: Mapping[str, Option]) -> T:
    """Build a family; an option it cannot use is a ConfigError of one sentence."""
    cards = {card.name: card for card in list_options(family)}
    unknown = next((key for key in options if key not in cards), None)
    if unknown is not None:
        raise ConfigError(f"tasks.options.{unknown}: no such option; allowed are {', '.join(cards)}")
    try:
        return family(**options)
    except ValidationError as error:
        raise ConfigError(_explain_error(error, cards)) from None


def _describe_range(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(field["enum"])
    if field["type"] == "boolean":
        return "true, false"
    return f"whole numbers {field['minimum']} to {field['maximum']}"


def _explain_error(error: ValidationError, cards: Mapping[str, OptionCard]) -> str:
    first = error.errors(include_url=False)[0]
    if not first["loc"]:  # raised by __post_init__, whose sentences begin with the option's name
        return f"tasks.options.{first['ctx']['error']}"
    card = cards[str(first["loc"][0])]
    return f"tasks.options.{card.name} = {first['input']!r}: allowed are {card.allowed}"
