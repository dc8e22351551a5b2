"""Names of files that others may choose: one plain part of a path, and nothing else."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.shardcast.format.layout import MAX_NAME_CHARS, check_name


@pytest.mark.parametrize(
    "name", ["a", "0", "model.safetensors", "model-00001-of-00014.safetensors", "A_b..c", "x" * 128]
)
def test_plain_names_are_taken(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", ".hidden", "-rf", "_x", "a/b", "../a", "/etc/passwd", "a\\b", "a b", "a\n", "a\0", "\u00e9",
        "a:b", "x" * 129, None, 7, b"a", ["a"],
    ],
)  # fmt: skip
def test_everything_else_is_refused_with_a_short_message(name: object) -> None:
    with pytest.raises(ValueError, match="invalid file name") as caught:
        check_name(name)
    assert len(str(caught.value)) < 400


def test_a_refusal_shows_only_the_beginning_of_a_long_name() -> None:
    with pytest.raises(ValueError) as caught:
        check_name("/" * 10_000_000)
    assert len(str(caught.value)) < 400


@given(st.text(max_size=MAX_NAME_CHARS + 2))
def test_a_name_that_is_taken_stays_right_inside_of_the_folder(name: str) -> None:
    try:
        path = Path("/data/folder") / check_name(name)
    except ValueError:
        return
    assert path.parent == Path("/data/folder")
    assert path.name == name
