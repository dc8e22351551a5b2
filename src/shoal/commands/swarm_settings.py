"""The settings of a coordinator: from a TOML file, with `key=value` and flags laid over it.

The models know what is allowed; here their complaints become sentences.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from shoal.config import Settings, lay_override
from shoal.errors import ConfigError
from shoal.keys import check_public
from shoal.runname import check_run
from shoal.schema import explain_errors
from shoal.swarm.params import RunParams, turn_dial
from shoal.swarm.rules.dial import ValidationConfig
from shoal.toml import read_toml

if TYPE_CHECKING:
    from shoal.swarm.service import ServiceConfig

_KEYS = ("params.trainers", "params.validators", "trainers", "validators")
_LISTS = ("urls", *_KEYS)


class _Dial(Settings):
    """The table of a file that is about how much is checked."""

    validation: ValidationConfig


def load_service(path: Path | None, overrides: Sequence[str], flags: dict[str, Any]) -> "ServiceConfig":
    """The settings of a file (None: the defaults), overrides over it, flags over all; a flag of None says nothing."""
    from shoal.swarm.service import ServiceConfig

    data = {} if path is None else read_toml(path)
    for override in overrides:
        lay_override(ServiceConfig, data, override, example="params.steps=10")
    data |= {name: value for name, value in flags.items() if value is not None}
    _take_dial(data)
    if "run" not in data:
        raise ConfigError("run: every run has a name; give --run NAME, or run = NAME in the settings")
    return _validate(ServiceConfig, data)


def parse_changes(overrides: Sequence[str]) -> dict[str, Any]:
    """Changes of parameters, `name=value` each."""
    changes: dict[str, Any] = {}
    for override in overrides:
        lay_override(RunParams, changes, override, example="price=2")
    return changes


def explain_params(data: dict[str, Any]) -> RunParams:
    """Parameters from plain values; ConfigError says what is wrong with them."""
    return _validate(RunParams, data)


def describe_service() -> str:
    """Every setting with its default and meaning, a line for each."""
    from shoal.swarm.service import ServiceConfig

    settings = [*_list_settings(ServiceConfig, ""), *_list_settings(ValidationConfig, "validation.")]
    return "".join(f"  {key:<28} {text}\n" for key, text in settings)


def _take_dial(data: dict[str, Any]) -> None:
    """Put what the table `[validation]` says where the ledger has it, among the parameters."""
    if "validation" not in data:
        return
    dial = turn_dial(_validate(_Dial, {"validation": data.pop("validation")}).validation)
    params = data.setdefault("params", {})
    if isinstance(params, dict):  # else it is refused with the rest
        if said := sorted(dial.keys() & params.keys()):
            raise ConfigError(f"params.{said[0]}: [validation] says the same in other words; keep one of the two")
        params.update(dial)


def _list_settings(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _list_settings(field.annotation, f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else _show_default(field.default)
        yield prefix + name, f"{default:<12} {field.description or ''}".rstrip()


def _show_default(value: object) -> str:
    if isinstance(value, tuple):
        return "[]"
    return str(value).lower() if isinstance(value, bool) else str(value) or '""'


def _validate(model: type[Any], data: dict[str, Any]) -> Any:
    """As JSON, in which a list may be a tuple and everything else is as strict as in Python."""
    _check_lists(data)
    _check_names(data)
    try:
        return model.model_validate_json(json.dumps(data, default=str))
    except ValidationError as error:
        raise ConfigError(explain_errors(model, error)) from None


def _check_lists(data: dict[str, Any]) -> None:
    params = data.get("params")
    values = data | ({f"params.{name}": value for name, value in params.items()} if isinstance(params, dict) else {})
    for name in _LISTS:
        value = values.get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f'{name}: must be a list of texts, ["...", "..."]')
        for item in value if name in _KEYS else ():
            check_public(item)
    for url in values.get("urls", []):
        if not url.startswith(("http://", "https://")) or url.count("/") != 2 or not url.isprintable() or " " in url:
            raise ConfigError(f"urls: {url[:80]!r} is no address, which is https://HOST or http://HOST:PORT")
    if len(values.get("urls", [])) > 8:
        raise ConfigError("urls: at most 8 addresses")


def _check_names(data: dict[str, Any]) -> None:
    run, operator = data.get("run"), data.get("operator")
    if isinstance(run, str):
        try:
            check_run(run)
        except ValueError as error:
            raise ConfigError(f"run: {error}") from None
    if isinstance(operator, str) and operator:
        check_public(operator)
