"""The commands, flags and files mentioned in the docs exist."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from shoal.cli import list_commands, main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
GROUPS = "|".join(command.name for command in list_commands() if command.actions)


def read_example(page: str, language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)[number]


def test_the_example_for_nginx_is_one_that_nginx_takes(tmp_path: Path) -> None:
    nginx, openssl = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin"), shutil.which("openssl")
    if nginx is None or openssl is None:
        pytest.skip("needs nginx and openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "fullchain.pem"
    make = ["req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", "/CN=a", "-keyout", key, "-out", certificate]
    subprocess.run([openssl, *make], check=True, capture_output=True)
    server = read_example("coordinator.md", "nginx").replace("/etc/ssl/run", str(tmp_path))
    server = server.replace("listen 443 ssl", "listen 127.0.0.1:18443 ssl")
    places = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    log = f"access_log off; error_log {tmp_path}/log;\n"
    (tmp_path / "nginx.conf").write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{\n{places}{log}{server}\n}}\n")
    command = [nginx, "-t", "-e", f"{tmp_path}/log", "-c", f"{tmp_path}/nginx.conf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "warn" not in done.stderr, done.stderr


def test_the_example_for_caddy_is_one_that_caddy_takes(tmp_path: Path) -> None:
    caddy = shutil.which("caddy")
    if caddy is None:
        pytest.skip("needs caddy")
    (tmp_path / "Caddyfile").write_text(read_example("coordinator.md", "caddyfile"))
    subprocess.run([caddy, "validate", "--config", tmp_path / "Caddyfile"], check=True, capture_output=True)


def find_code(text: str) -> str:
    """The code on a page: fenced, or indented."""
    fenced = re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)
    return "\n".join([*fenced, *indented])


@cache
def read_help(words: str) -> str:
    shown = io.StringIO()
    with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(shown):
        main([*words.split(), "--help"])
    assert ended.value.code == 0, words
    return shown.getvalue()


@pytest.mark.parametrize("page", [*PAGES, "../README.md"])
def test_every_command_and_flag_of_the_pages_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    typed = re.findall(r"`(shoal [^`]+)`", text) + re.findall(r"^ *(shoal .*)$", find_code(text), re.MULTILINE)
    for line in typed:
        words = re.match(rf"shoal +(?:--?[a-z-]+ +)*((?:{GROUPS}) +[a-z]+\b|[a-z]+\b|)", line)
        assert words is not None, line
        flags = {*re.findall(r"--[a-z][a-z-]*", read_help(words[1])), "--version"}
        assert set(re.findall(r"(?<![a-z-])--[a-z][a-z-]*", line.partition("#")[0])) <= flags, line


def test_the_tutorial_writes_tasks_that_its_settings_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "-c", read_example("tutorial.md", "python")], check=True)
    (tmp_path / "roman.toml").write_text(read_example("tutorial.md", "toml"))
    assert main(["train", "roman.toml", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert (
        f'set = ["{tmp_path.resolve()}/roman.jsonl"]' in shown and [path.name for path in tmp_path.glob("runs")] == []
    )


def test_the_tutorial_converts_a_csv_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f'"what is {number}, doubled?",{2 * number}\n' for number in range(40))
    Path("trl.csv").write_text(f"prompt,answer\n{rows}")
    subprocess.run([sys.executable, "-c", read_example("tutorial.md", "python", 1)], check=True)
    assert main(["train", "tasks.set=tasks.jsonl", "sft.steps=1", "--dry-run"]) == 0


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_the_pages_name_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    for name in re.findall(r"`((?:tests|src)/[A-Za-z0-9_/.]+)`", text):
        assert (DOCS.parent / name).exists(), name
    for folder, names in re.findall(r"`((?:tests|src)/[a-z/]+)(?:test_)?\{([a-z,]+)\}\.py`", text):
        for name in names.split(","):
            found = [(DOCS.parent / folder / f"{start}{name}.py").exists() for start in ("", "test_")]
            assert any(found), f"{folder}{name}"
