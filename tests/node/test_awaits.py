"""No role waits for anything external without a name and a deadline: its code is scanned for unbounded awaits.

In a role's package an `await` may be of
- `with_timeout`, `retry_forever` or `ask_coordinator` (`BOUND`), which have names and deadlines;
- a coroutine of the role itself, which is checked where it is defined. One that is only ever passed to `with_timeout`
  or `retry_forever` has its deadline from there, so its own awaits are exempt;
- a few calls that end by what this process itself does (`LOCAL`).

`shoal.node`, which all roles are built on, is checked in the same way.
"""

import ast
from pathlib import Path

import pytest

import shoal

SOURCE = Path(shoal.__file__).parent
ROLES = ["node", "trainer", "validator", "worker"]
BOUND = {"with_timeout", "retry_forever", "ask_coordinator"}
LOCAL = {
    "run_blocking",  # a thread of ours
    "asyncio.to_thread",
    "asyncio.gather",  # of coroutines, each checked where it is defined
    "asyncio.shield",  # of such a thread
    "asyncio.wait",  # of tasks of ours
    "asyncio.sleep",
    "self._sleep",
    "run_together",
    "run_until_set",
    "writing",  # a task of ours around such a thread
    "outlast",
    "outlast_disk",
    "work",  # the coroutine passed in, which is checked where it is defined
    "self._queue.get",  # queues whose other end is in this process
    "self._queue.join",
    "self._done.get",
    "self._failed.get",
    "self._news.wait",  # events that tasks of ours set
    "self._session.stopping.wait",
    "event.wait",
    "inbox.serve",  # an origin waits for requests forever
    "server.start",  # to listen
    "stack.enter_async_context",
    "Store.open",  # folders of this machine
    "Client.open",
    "origin.publish",
    "session.open",  # has its deadlines in shoal.node, as have the next four
    "self._session.leave",
    "self._session.join_again",
    "read_recipe",
    "self._policies.find",
    "read_submission",  # has deadlines of its own: the sandbox's
}
"""calls that end by what this process does, as spelled in the code"""
CLIENTS = {"client.py", "owner_client.py", "public_client.py", "transfer.py"}
"""modules that make single calls with the deadlines of `net`; their callers bound the call"""
Place = tuple[str, str]
"""module and function"""


class Role:
    """The coroutines of a role's package, and where each is called."""

    def __init__(self, folder: Path) -> None:
        self.functions: dict[Place, ast.AsyncFunctionDef] = {}
        paths = [path for path in sorted(folder.glob("*.py")) if path.name not in CLIENTS]
        trees = {path.name: ast.parse(path.read_text()) for path in paths}
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.AsyncFunctionDef):
                    self.functions[module, node.name] = node
        self.names = {name for _, name in self.functions}
        self.callers: dict[Place, set[Place | None]] = {place: set() for place in self.functions}
        for module, tree in trees.items():
            self._note_calls(module, tree, (module, ""))

    def find_bare_awaits(self) -> list[str]:
        covered = self._find_covered()
        return [
            f"{module}:{node.lineno} in {name}: await {ast.unparse(node.value)}"
            for (module, name), function in self.functions.items()
            if (module, name) not in covered
            for node in ast.walk(function)
            if isinstance(node, ast.Await)
            and name_call(node.value) not in BOUND | self.names
            and spell_call(node.value) not in LOCAL
        ]

    def _note_calls(self, module: str, node: ast.AST, place: Place | None) -> None:
        """Record callers of calls; None for a call whose deadline is that of `with_timeout` or `retry_forever`."""
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, ast.AsyncFunctionDef):
                inner = module, child.name
            elif isinstance(child, ast.Call):
                for target in self._resolve(module, name_call(child)):
                    self.callers[target].add(place)
                inner = None if name_call(child) in BOUND else place
            elif isinstance(child, ast.Attribute) and not isinstance(node, ast.Call):
                for target in self._resolve(module, child.attr):  # passed on, to be called elsewhere
                    self.callers[target].add(place)
            self._note_calls(module, child, inner)

    def _resolve(self, module: str, name: str) -> list[Place]:
        if (module, name) in self.functions:
            return [(module, name)]
        return [place for place in self.functions if place[1] == name]

    def _find_covered(self) -> set[Place]:
        """Coroutines that run only inside `with_timeout` or `retry_forever`, or inside others that do."""
        covered: set[Place] = set()
        while True:
            more = {
                place
                for place, callers in self.callers.items()
                if callers and all(caller is None or caller in covered for caller in callers)
            }
            if more == covered:
                return covered
            covered = more


def name_call(node: ast.expr) -> str:
    """`self._client.cut_batch(step)` -> cut_batch."""
    if isinstance(node, ast.Call):
        return name_call(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def spell_call(node: ast.expr) -> str:
    """`self._client.cut_batch(step)` -> self._client.cut_batch."""
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_waits_for_nothing_outside_without_a_name_and_a_deadline(role: str) -> None:
    assert Role(SOURCE / role).find_bare_awaits() == []


def test_a_wait_without_a_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(
        """
async def run(self):
    await self.waits.with_timeout("a", self.poll(), waiting_for="b", timeout_s=1)
    await self.waits.retry_forever("a", lambda: self.ask(), waiting_for="b", timeout_s=1)
    await self.both()

async def poll(self):
    await self.client.fine()
    await self.deeper()

async def deeper(self):
    await self.client.fine_too()

async def ask(self):
    await self.client.fine_as_well()

async def both(self):
    await self._queue.get()
    await self.client.get()
    await self.client.forgotten()
"""
    )
    assert Role(tmp_path).find_bare_awaits() == [
        "loop.py:19 in both: await self.client.get()",
        "loop.py:20 in both: await self.client.forgotten()",
    ]


def test_roles_name_what_they_wait_for() -> None:
    names = set()
    for path in (path for role in ROLES for path in (SOURCE / role).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and name_call(node) in BOUND:
                names |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    assert {"lease", "commit", "upload", "weights", "job", "file", "verdict", "batch"} <= names
