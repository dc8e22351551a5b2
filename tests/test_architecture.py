"""docs/architecture.md names only what exists: its paths, the modules of each package, the names that a change starts
from."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "shoal"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([^`]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|toml))")
NAMED = re.compile(r"`([\w.]+)`[^`|;]{0,20} (?:in|of) (?:the file of its group in )?`(\S+?\.py)`")
MODULE = re.compile(r"[a-z_]+/?")
MAX_WORDS = 30


def read_rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading."""
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def list_paths() -> list[str]:
    rows = read_rows("Layers and packages")
    inner = {name for row in rows for name in CODE.findall(row[1])}
    words = [word for text in CODE.findall(PAGE) for word in text.split()]
    return sorted({word for word in words if PATH.fullmatch(word)} - inner)


def list_modules() -> list[tuple[str, str]]:
    """Each package of the table with each module that the table names in it."""
    rows = [(CODE.findall(packages), CODE.findall(contents)) for packages, contents in read_rows("Layers and packages")]
    found = [(packages[-1], name) for packages, names in rows for name in names if MODULE.fullmatch(name)]
    return [(package, name) for package, name in found if package.endswith("/")]


def list_names() -> list[tuple[str, str]]:
    return sorted(set(NAMED.findall(PAGE)))


def find_path(path: str) -> bool:
    return (SRC / path).exists() or (ROOT / path).exists()


@pytest.mark.parametrize("path", list_paths())
def test_every_path_exists(path: str) -> None:
    assert find_path(path)


@pytest.mark.parametrize(("package", "name"), list_modules())
def test_every_module_of_a_package_exists(package: str, name: str) -> None:
    assert (SRC / package / name).is_dir() or (SRC / package / f"{name}.py").is_file()


@pytest.mark.parametrize(("name", "path"), list_names())
def test_every_name_is_defined_in_its_file(name: str, path: str) -> None:
    source = (SRC / path).read_text(encoding="utf-8")
    for part in name.split("."):
        assert re.search(rf"^\s*(?:(?:async )?def |class )?{part}\b\s*(?:[:=(]|$)", source, re.MULTILINE), part


def test_every_package_is_in_the_table() -> None:
    packages = {path.name for path in SRC.iterdir() if (path / "__init__.py").exists()}
    modules = {path.name for path in SRC.glob("*.py")} - {"__init__.py", "__main__.py"}
    named = {name.rstrip("/") for row in read_rows("Layers and packages") for name in CODE.findall(row[0])}
    assert packages | modules == named


def test_every_package_has_a_box_in_the_picture() -> None:
    labels = (
        (ROOT / "bench" / "architecture.py").read_text(encoding="utf-8").partition("LABELS = {")[2].partition("}")[0]
    )
    packages = {path.stem for path in SRC.iterdir() if path.suffix in ("", ".py") and not path.stem.startswith("__")}
    assert set(re.findall(r'"(\w+)": "', labels)) == packages


def test_the_page_is_read_and_the_glossary_is_short() -> None:
    assert len(list_paths()) > 60 and len(list_modules()) > 25 and len(list_names()) > 12
    words = [row[0] for row in read_rows("Glossary")]
    assert len(words) == len(set(words)) <= MAX_WORDS
