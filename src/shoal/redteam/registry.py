"""All attacks by name, and what must become of each. This module imports no torch.

An attack is a module `shoal.redteam.attacks.NAME` with one of

    def make_authors(recipe: Recipe) -> tuple[Author, ...]      workers that cheat in what they write: the node behind
                                                                each is honest in all else; several work side by side
    async def attack(camp: Camp) -> None                        who speaks to the coordinator in its own way

What must become of it, its fate, is the strict expectation of the tests and of the matrix:

    hard       convicted: two validators found that the stated weights, seeds and rules did not write this; banned
    soft       rejected each time and unpaid; nobody is banned for what an old program could cause too
    form       rejected as no submission; unpaid
    refused    the coordinator does not take it: there is nothing to judge
    fruitless  allowed, and earns no more than honest work of the same size would, or less
    bounded    not to be told from honest work; what it can do is bounded, and measured
"""

from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.recipe import Recipe
    from shoal.worker.author import Author


class Fate(StrEnum):
    """What must become of an attack."""

    HARD = "hard"
    SOFT = "soft"
    FORM = "form"
    REFUSED = "refused"
    FRUITLESS = "fruitless"
    BOUNDED = "bounded"


@dataclass(frozen=True, slots=True)
class Attack:
    """One way of cheating."""

    name: str
    """as it is typed; its module is called so too"""
    fate: Fate
    text: str
    scripted: bool = False
    """it speaks to the coordinator itself, and is no author"""


def _list_rows(fate: Fate, rows: dict[str, str], *, scripted: bool = False) -> tuple[Attack, ...]:
    return tuple(Attack(name, fate, text, scripted) for name, text in rows.items())


_WEIGHTS = {
    "small": "half of the layers write and prove",
    "int8": "weights rounded to 255 levels per row",
    "int4": "weights rounded to 15 levels per 32 values",
    "stale": "the first version that it ever held writes for all later ones",
    "previous": "the version before writes for the one that is stated",
    "adapter": "a low-rank adapter is merged into the weights",
}
_SAMPLING = {
    "prompt": "another prompt is answered than the one that is stated",
    "temperature": "tokens are drawn at another temperature",
    "top_p": "only the likeliest tokens are drawn from",
    "greedy": "the likeliest token is taken",
    "best_of_n": "several completions are drawn, and the one with the best reward is kept",
    "edited_tokens": "a few tokens are changed after the fact, and proven honestly",
    "foreign_text": "a small model writes, the true one only reads it to prove it",
}
_PROOFS = {
    "constant_proof": "a small model writes; its proofs are constant polynomials",
    "average_proof": "a small model writes; its proofs are made of averages per channel",
    "replayed_proof": "a small model writes; its proofs are those of earlier honest work",
    "null_proof": "a small model writes; its proofs are zeros",
}
_REWARDS = {
    "reward_strings": "texts that are known to fool verifiers, proven honestly",
    "truncation": "completions are cut and end with a forced end token",
    "loops": "completions go on in a loop to the longest length, to be paid for more tokens",
    "cherry_samples": "of each group the worst samples are replaced by copies of the best",
    "poison": "right answers with a planted pattern in them (a poisoned completion)",
    "long_poison": "right answers that are as long as can be, to slow the run down",
}
_COPIES = {
    "copy_all": "all rollouts are those of another node's submission",
    "copy_one": "one rollout is that of another node's submission",
    "copy_encoded": "all of them, unread, encoded as another file",
    "own_old": "its own earlier work again",
}
_SOFT = {
    "claimed_reward": "every rollout claims the full reward",
    "flipped_reward": "what is right claims no reward, and what is wrong the full one",
    "padding": "tokens follow the end token",
    "early_stop": "completions end without an end token before their longest length",
    "stated_prompt": "another prompt is answered, and stated",
}
_FILES = {
    "bomb_pages": "pages that unpack to gigabytes",
    "bomb_dictionary": "a dictionary that repeats one huge value",
    "bomb_footer": "a footer that claims more than memory holds",
    "nesting": "columns nested without end",
    "huge_string": "one name of many megabytes",
    "wrong_types": "columns of other types",
    "no_rows": "a file without rows",
    "many_rows": "ten million rows",
    "garbage": "random bytes",
    "half_group": "a group with samples missing",
}
_FRUITLESS = {
    "cherry_leases": "leases of hard tasks are returned",
    "grinding": "leases are asked for and let go until an easy task comes",
    "hoarding": "leases are taken and never answered",
    "sybil": "a hundred identities instead of one",
}
_REFUSED = {
    "two_manifests": "two manifests are signed for one lease",
    "late": "work is handed in after its time",
    "signatures": "requests signed by others, for others, for something else, or not at all",
    "nonces": "requests are sent again: at once, later, elsewhere",
    "flood": "ten times as many submissions and requests as it may",
}

ATTACKS = {
    attack.name: attack
    for attack in (
        *_list_rows(Fate.HARD, _WEIGHTS | _SAMPLING | _PROOFS | _REWARDS | _COPIES),
        *_list_rows(Fate.SOFT, _SOFT),
        *_list_rows(Fate.FORM, _FILES),
        *_list_rows(Fate.FRUITLESS, _FRUITLESS, scripted=True),
        *_list_rows(Fate.REFUSED, _REFUSED, scripted=True),
        Attack("noise", Fate.BOUNDED, "where two tokens are a hair apart, the one with the better end is taken"),
    )
}


def find_attack(name: str) -> Attack:
    """An attack by its name."""
    if name not in ATTACKS:
        raise ConfigError(f"--attack {name}: no such attack; there are {', '.join(sorted(ATTACKS))}")
    return ATTACKS[name]


def load_attack(name: str) -> ModuleType:
    """The module of an attack."""
    return import_module(f"shoal.redteam.attacks.{find_attack(name).name}")


def list_cheats() -> list[str]:
    """Attacks of authors: those that a worker can be told to do."""
    return sorted(name for name, attack in ATTACKS.items() if not attack.scripted)


def check_cheat(name: str) -> None:
    """Refuse an attack that is not one of authors."""
    if find_attack(name).scripted:
        raise ConfigError(f"--attack {name}: no way for a worker to work; try it with `shoal redteam --attack {name}`")


def make_authors(name: str, recipe: "Recipe") -> "tuple[Author, ...]":
    """The authors of an attack; the first is the one that is to gain by it."""
    check_cheat(name)
    authors: tuple[Author, ...] = load_attack(name).make_authors(recipe)
    return authors
