"""What is measured without a swarm, on the weights and the calibration of one: more trials than a swarm has time for.

power      of each hard attack, how many of its bad rollouts a check finds: the `d` of the dial
careers    how long owners of good record last that cheat in a few of their submissions
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.launch.prepare import Note, Prepared, build_params
from shoal.redteam.power import Ground, Power, measure_power, open_ground
from shoal.redteam.registry import ATTACKS, Fate
from shoal.redteam.sleepers import Career, measure_sleepers

LEASES, GROUPS = 8, 2
COPIES = ("copy_all", "copy_one", "copy_encoded")
"""take somebody to copy from, and are as good as `own_old`, which copies from itself"""
VERSIONS = 3
"""the last ones of a run are ground enough"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Indoors:
    """What was found."""

    powers: Sequence[Power] = ()
    careers: Sequence[Career] = ()


def measure_indoors(prepared: Prepared, attacks: Sequence[str], sleepers: Sequence[str], note: Note) -> Indoors:
    """The power of the checks against attacks, and careers of sleepers, at the end of a run."""
    ground = _find_ground(prepared.layout.root)
    tried = [name for name in attacks if ATTACKS[name].fate is Fate.HARD and name not in COPIES]
    powers = []
    for name in tried:
        note(f"offline: {name}")
        powers.append(measure_power(name, ground, leases=LEASES, groups=GROUPS))
    careers = []
    for name in sleepers:
        note(f"offline: sleepers, {name}")
        careers += measure_sleepers(name, ground, build_params(prepared))
    return Indoors(powers=powers, careers=careers)


def _find_ground(root: Path) -> Ground:
    ground = open_ground(root)
    kept = sorted(ground.folders)[-VERSIONS:]
    return Ground(
        recipe=ground.recipe,
        folders={version: ground.folders[version] for version in kept},
        calibration=ground.calibration,
    )
