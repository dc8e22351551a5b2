"""No wait without a deadline: whatever a role awaits outside its own process has a name, somebody and an end.

Every `await` in the roles is looked at. Those of the role's own coroutines, and those within the process that another
task ends, are allowed by name; all others must go through `RoleWaits.bound` or `RoleWaits.insist`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
ROLES = ("worker", "validator", "trainer")
SHARED = ("node", "submission")
BOUNDED = {"bound", "insist"}
WITHIN = {
    "asyncio.gather",
    "asyncio.shield",
    "asyncio.sleep",
    "asyncio.to_thread",
    "asyncio.wait",
    "run_blocking",
    "run_together",
    "self._done.get",
    "self._queue.get",
    "self._queue.join",
    "self._news.wait",
    "self._session.stopping.wait",
    "stack.enter_async_context",
    "wait_answer",
}
"""what ends by a timer, a thread or a task of the same process, or has a deadline of its own"""
SERVERS = {"trainer/origin"}
"""which wait for whoever comes"""


def list_files(packages: tuple[str, ...]) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).glob("*.py"))]


def list_coroutines(packages: tuple[str, ...]) -> set[str]:
    """Names of all coroutines that these packages define."""
    trees = [ast.parse(path.read_text()) for path in list_files(packages)]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)}


def list_awaits(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of what is awaited."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Await):
            called = node.value.func if isinstance(node.value, ast.Call) else node.value
            yield node.lineno, ast.unparse(called)


def name_file(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", [path for path in list_files(ROLES) if name_file(path) not in SERVERS], ids=name_file)
def test_every_wait_of_a_role_has_a_deadline(path: Path) -> None:
    own = list_coroutines(ROLES + SHARED)
    free = [
        f"line {line}: {text}"
        for line, text in list_awaits(path)
        if text not in WITHIN and text.rpartition(".")[2] not in BOUNDED | own
    ]
    assert not free


def test_the_look_finds_waits_that_have_none(tmp_path: Path) -> None:
    path = tmp_path / "role.py"
    path.write_text(
        "async def work(client, waits):\n    await client.ask()\n    await waits.bound('x', client.ask())\n"
    )
    assert [text for _, text in list_awaits(path)] == ["client.ask", "waits.bound"]


def test_roles_register_waits_by_name() -> None:
    names = set()
    for path in list_files((*ROLES, "node")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in BOUNDED:
                names |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    assert {"lease", "commit", "upload", "weights", "job", "verdict", "joining", "heartbeat"} <= names
