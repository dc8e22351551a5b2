"""Options of task families: fields of a strict dataclass, from which the help table and the errors are derived."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from shoal.config.run import Option
from shoal.errors import ConfigError
from shoal.rollout import Score
from shoal.tasks.base import Task, match_answer

T = TypeVar("T")

STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
"""Configuration of every family's dataclass: types are not converted, unknown options are errors."""


@dataclass(frozen=True, slots=True)
class OptionCard:
    """One option as shown on the command line."""

    name: str
    default: Option
    allowed: str
    doc: str


class AnswerFamily:
    """Base of families whose tasks have one right answer, `info["answer"]`."""

    def __post_init__(self) -> None:
        """Reject a range `min_x` to `max_x` whose minimum exceeds its maximum."""
        for name, low in vars(self).items():
            high_name = name.replace("min_", "max_")
            if name.startswith("min_") and low > (high := getattr(self, high_name)):
                raise ValueError(f"{name} = {low} must be at most {high_name} = {high}")

    def demonstrate(self, task: Task) -> str:
        return str(task.info["answer"])

    def score(self, task: Task, completion: str) -> Score:
        return match_answer(completion, task.info["answer"])


def list_options(family: type[Any]) -> tuple[OptionCard, ...]:
    """The options of a family's class, in the order of its fields."""
    fields = TypeAdapter(family).json_schema()["properties"]
    return tuple(
        OptionCard(name, field["default"], _describe_range(field), field["description"])
        for name, field in fields.items()
    )


def apply_options(family: type[T], options: Mapping[str, Option]) -> T:
    """Build a family; ConfigError of one sentence for an invalid option."""
    cards = {card.name: card for card in list_options(family)}
    unknown = next((key for key in options if key not in cards), None)
    if unknown is not None:
        raise ConfigError(f"tasks.options.{unknown}: no such option; allowed are {', '.join(cards)}")
    try:
        return family(**options)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if not first["loc"]:  # raised by __post_init__, whose messages begin with the option's name
            raise ConfigError(f"tasks.options.{first['ctx']['error']}") from None
        card = cards[str(first["loc"][0])]
        raise ConfigError(f"tasks.options.{card.name} = {first['input']!r}: allowed are {card.allowed}") from None


def _describe_range(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(field["enum"])
    if field["type"] == "boolean":
        return "true, false"
    return f"whole numbers {field['minimum']} to {field['maximum']}"
