"""The flags of the trusted roles."""

import argparse
from pathlib import Path

import pytest

from shoal.cli import build_parser
from shoal.commands import roles
from shoal.errors import ConfigError


def parse(*args: str) -> argparse.Namespace:
    return build_parser().parse_args(args)


def test_the_flags_are_read() -> None:
    args = parse("trainer", "a.toml", "steps=2", "--coordinator", "http://a:1", "--origin", "o")
    assert (args.command, args.inputs, args.origin, args.owner) == (
        roles.run_trainer,
        ["a.toml", "steps=2"],
        Path("o"),
        None,
    )
    assert parse("evaluator", "runs/a").command is roles.run_evaluator
    assert parse("origin", "--data", "d", "--run", "r", "--key", "k").listen == "127.0.0.1:8600"


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--keep", "0"], "--keep: must be 1 or more"),
        (["--listen", "nowhere"], "--listen: invalid address 'nowhere', expected HOST:PORT"),
        (["--shard-size", "1B"], "shard_size = 1: must be from"),
    ],
)
def test_an_origin_refuses_flags_that_make_no_sense(tmp_path: Path, flags: list[str], reason: str) -> None:
    from shoal.identity.keys import Key

    Key.generate().save(tmp_path / "key")
    args = parse("origin", "--data", str(tmp_path / "d"), "--run", "demo", "--key", str(tmp_path / "key"), *flags)
    with pytest.raises(ConfigError, match=reason):
        args.command(args)


def test_a_trainer_that_contradicts_itself_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    args = parse(
        "trainer", f"out={tmp_path}", f"beacon={'a' * 64}", "--coordinator", "http://a:1", "--origin", str(tmp_path)
    )
    with pytest.raises(ConfigError, match="beacon"):
        args.command(args)
    assert list(tmp_path.iterdir()) == []
