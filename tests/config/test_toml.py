import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config.run import RunConfig, dump_config, load_config
from shoal.config.toml import dump_toml, parse_value
from shoal.errors import ConfigError

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
TABLES = st.recursive(st.dictionaries(TEXT, VALUES), lambda inner: st.dictionaries(TEXT, VALUES | inner), max_leaves=8)


def show_types(value: object) -> object:
    """The value with its types spelled out, for `True == 1 == 1.0`."""
    if isinstance(value, dict):
        return {key: show_types(inner) for key, inner in value.items()}
    return type(value).__name__, repr(value)


@given(TABLES)
def test_what_is_dumped_is_read_back(table: dict[str, object]) -> None:
    assert show_types(tomllib.loads(dump_toml(table))) == show_types(table)


@given(options=st.dictionaries(TEXT, VALUES), path=TEXT, lr=st.floats(0, 1, exclude_min=True))
def test_a_configuration_is_read_back_equal(options: dict[str, bool | int | float | str], path: str, lr: float) -> None:
    finite = {key: value for key, value in options.items() if value not in (float("inf"), float("-inf"))}
    config = RunConfig.model_validate({"tasks": {"options": finite}, "policy": {"path": path}, "learner": {"lr": lr}})
    assert RunConfig.model_validate(tomllib.loads(dump_config(config))) == config


@pytest.mark.parametrize(
    "value", [1e-06, 1e16, 1e22, 5e-324, 0.1, -0.0, 2**70, True, 'a\x00b\x7f"\\\n\r\tz', "\u00e9\U0001f41f"]
)
def test_an_awkward_value_is_read_back_with_its_type(value: object) -> None:
    read = tomllib.loads(dump_toml({"v": value}))["v"]
    assert (read, type(read)) == (value, type(value))


def test_dumped_settings_are_a_file_that_loads(tmp_path: Path) -> None:
    config = load_config(None, ["tasks.options.length=6", 'tasks.options."odd key"=1', "learner.lr=1e-06"])
    (tmp_path / "a.toml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "a.toml") == config


def test_a_file_of_tasks_in_the_place_of_settings_is_refused_with_the_setting_for_it(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "1 + 1 =", "answer": "2"}')
    with pytest.raises(ConfigError, match=f"expected a TOML file .* tasks.set={path}"):
        load_config(path)
    assert load_config(None, [f"tasks.set={path}"]).tasks.set == [str(path)]


@given(st.text())
def test_any_text_is_some_value(text: str) -> None:
    parse_value(text)
