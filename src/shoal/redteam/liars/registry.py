"""All lies by name. This module imports no torch.

A lie is a module `shoal.redteam.liars.NAME` with

    def make_liar(recipe, calibration, jail, client) -> Judge      what stands in a validator where its judge would
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.recipe import Recipe
    from shoal.submission.jail import Jail
    from shoal.swarm.client import NodeClient
    from shoal.toploc.calibration import Calibration
    from shoal.validator.judge import Judge

LIES = {
    "abstain": "nothing is ever certain: everything is inconclusive",
    "accept": "everything is accepted, with the numbers that its file states",
    "copy": "what another validator said first is said again; what nobody judged is accepted",
    "lazy": "form and meaning are looked at, the proof never is",
    "reject": "everything is rejected as faked, with evidence that is made up",
}


def check_lie(name: str) -> None:
    """Refuse a lie that is none."""
    if name not in LIES:
        raise ConfigError(f"--lie {name}: no such lie; there are {', '.join(sorted(LIES))}")


def make_liar(name: str, recipe: "Recipe", calibration: "Calibration", jail: "Jail", client: "NodeClient") -> "Judge":
    """The judge that lies in one way."""
    check_lie(name)
    liar: Judge = import_module(f"shoal.redteam.liars.{name}").make_liar(recipe, calibration, jail, client)
    return liar
