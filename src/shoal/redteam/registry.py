"""Registry of attacks. Each is declared where it is implemented, in one of the modules of `shoal.redteam.attacks`.

    @attack("int8", expect=Expected.HARD, text="weights rounded to 255 levels per row")
    class Int8Behaviour(AlteredBehaviour): ...                        a worker that cheats in what it submits

    @attack("copy_all", expect=Expected.HARD, text="...")
    def copy_all(recipe: Recipe) -> tuple[WorkerBehaviour, ...]: ...  several workers together; the first one gains

    @attack("late", expect=Expected.REFUSED, text="...")
    async def submit_late(session: AttackSession) -> None: ...        a script that calls the coordinator itself

Invariants:
- names are unique; a scripted attack is a coroutine function, everything else creates worker behaviours;
- `expect` is the strict expectation of the tests and of the matrix.

`find_attack`, `list_attacks` and `make_behaviours` import the family modules, and with them torch. `read_attacks` and
`list_names` read the declarations from their source, so that a list or a mistyped name is reported immediately.
"""

import ast
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.recipe import Recipe
    from shoal.redteam.scripted import AttackSession
    from shoal.worker.behaviour import WorkerBehaviour

Target = TypeVar("Target", bound="Callable[..., object]")
WORKER_FAMILIES = ("weights", "sampling", "proofs", "rewards", "copies", "files")
SCRIPTED_FAMILIES = ("leases", "requests")
LIES = ("abstain", "accept", "copy", "lazy", "reject")
"""of validators; `shoal.redteam.validators` has the judge of each"""


class Expected(StrEnum):
    """The expected outcome of an attack, in the order of the reports."""

    HARD = "hard"
    """convicted by two validators (weights, seeds or rules other than stated), and banned"""
    SOFT = "soft"
    """rejected every time and unpaid; no conviction, because an outdated version could cause it too"""
    FORM = "form"
    """rejected as malformed, unpaid"""
    FRUITLESS = "fruitless"
    """allowed, but earns no more than honest work of the same size"""
    REFUSED = "refused"
    """refused by the coordinator: there is nothing to judge"""
    BOUNDED = "bounded"
    """indistinguishable from honest work; its effect is bounded and measured"""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack."""

    name: str
    """as typed by the user"""
    expect: Expected
    text: str
    behave: "Callable[[Recipe], WorkerBehaviour | tuple[WorkerBehaviour, ...]] | None" = None
    """creates the workers of the attack"""
    script: "Callable[[AttackSession], Awaitable[None]] | None" = None
    """runs the attack against a coordinator"""

    @property
    def scripted(self) -> bool:
        return self.script is not None


_declared: dict[str, Attack] = {}


def attack(name: str, *, expect: Expected, text: str) -> Callable[[Target], Target]:
    """Declare an attack: a behaviour class, a function that creates several behaviours, or a coroutine function."""

    def declare(target: Target) -> Target:
        assert name not in _declared, f"duplicate attack name {name}"
        role = "script" if inspect.iscoroutinefunction(target) else "behave"
        _declared[name] = Attack(name, expect, text, **{role: target})  # type: ignore[arg-type]
        return target

    return declare


@cache
def list_attacks() -> dict[str, Attack]:
    """All attacks by name, ordered by expectation."""
    for family in (*WORKER_FAMILIES, *SCRIPTED_FAMILIES):
        import_module(f"shoal.redteam.attacks.{family}")
    return {name: _declared[name] for name in read_attacks()}  # whichever module was imported first


def read_attacks(families: Sequence[str] = (*WORKER_FAMILIES, *SCRIPTED_FAMILIES)) -> dict[str, Attack]:
    """The same without what they do, from the source of their modules, which are not imported."""
    order = list(Expected)
    found = [each for family in families for each in _read_family(family)]
    return {each.name: each for each in sorted(found, key=lambda each: order.index(each.expect))}


def _read_family(family: str) -> Iterator[Attack]:
    source = (Path(__file__).parent / "attacks" / f"{family}.py").read_text("utf-8")
    for statement in ast.parse(source).body:
        for call in getattr(statement, "decorator_list", ()):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == attack.__name__:
                given = {word.arg: word.value for word in call.keywords}
                expect = Expected[ast.unparse(given["expect"]).removeprefix(f"{Expected.__name__}.")]
                yield Attack(ast.literal_eval(call.args[0]), expect, ast.literal_eval(given["text"]))


def find_attack(name: str) -> Attack:
    """An attack by its name."""
    check_attack(name)
    return list_attacks()[name]


def list_names(families: Sequence[str]) -> list[str]:
    """Names of the attacks of some families."""
    return sorted(read_attacks(families))


def check_attack(name: str) -> None:
    """Reject an unknown attack."""
    names = list_names((*WORKER_FAMILIES, *SCRIPTED_FAMILIES))
    if name not in names:
        raise ConfigError(f"--attack {name}: unknown attack; available: {', '.join(names)}")


def check_worker_attack(name: str) -> None:
    """Reject an attack that a worker cannot carry out."""
    check_attack(name)
    if name not in list_names(WORKER_FAMILIES):
        raise ConfigError(f"--attack {name}: not a worker attack; run it with `shoal redteam --attack {name}`")


def check_lie(name: str) -> None:
    """Reject an unknown lie of a validator."""
    if name not in LIES:
        raise ConfigError(f"--lie {name}: unknown lie; available: {', '.join(LIES)}")


def make_behaviours(name: str, recipe: "Recipe") -> "tuple[WorkerBehaviour, ...]":
    """The behaviours of the workers of an attack; the first one is the one that should gain."""
    check_worker_attack(name)
    behave = find_attack(name).behave
    assert behave is not None, "not a worker attack"
    made = behave(recipe)
    return made if isinstance(made, tuple) else (made,)
