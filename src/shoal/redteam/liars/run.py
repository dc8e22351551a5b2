"""A validator that lies, as a command: its session, claims and signatures are those of `shoal validator`."""

import argparse
from typing import TYPE_CHECKING

from shoal.commands.work import judge_work
from shoal.redteam.liars.registry import check_lie, make_liar

if TYPE_CHECKING:
    from shoal.node.session import Session
    from shoal.recipe import Recipe
    from shoal.submission.jail import Jail
    from shoal.toploc.calibration import Calibration
    from shoal.validator.judge import Judge

__all__ = ["check_lie", "lie_along"]


async def lie_along(args: argparse.Namespace) -> None:
    """Judge and lie until the run is finished, a signal comes, or the run does not want this node any more."""

    def make(session: "Session", recipe: "Recipe", calibration: "Calibration", jail: "Jail") -> "Judge":
        return make_liar(args.lie, recipe, calibration, jail, session.client)

    await judge_work(args, make)
