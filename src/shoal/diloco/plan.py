"""What all peers of a run have agreed on before the first round.

Changing any of it during a run breaks the run: peers would hold other bits after the next round.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from shoal.config import Count, Settings
from shoal.diloco.outer import OuterRule
from shoal.diloco.round import RoundKey
from shoal.diloco.state import OuterState

CodecName = Literal["fp32", "fp16", "int8", "int4", "topk"]


class Guard(Settings):
    """What keeps one bad peer from spoiling the mean."""

    mode: Literal["mean", "trimmed", "median"] = "trimmed"
    """of each coordinate: token-weighted mean; the same without the outermost quarter; middle value"""
    clip: Annotated[float, Field(gt=0.0)] = 3.0
    """longest norm, and largest token weight, in medians over the peers"""


class Rules(Settings):
    """The agreed settings."""

    interval: Count = 50
    """H: inner steps between two rounds of a fragment"""
    codec: CodecName = "int4"
    """how pseudo-gradients are written, both ways"""
    dynamic: bool = True
    """whether slow peers take fewer inner steps, by measured speed; what they compute then depends on the clock"""
    outer: OuterRule = OuterRule()
    guard: Guard = Guard()


@dataclass(frozen=True, slots=True)
class Plan:
    """The agreed settings of one run, with its name and the sizes of its fragments."""

    run: str
    sizes: tuple[int, ...]
    """elements per fragment"""
    rules: Rules = field(default_factory=Rules)
    num_lanes: int = 0
    """data lanes; 0 where the data are none of the averager's business"""
    seed: int = 0
    """of the data's order, which all peers must share for every sequence to be read once in an epoch"""

    def name_round(self, state: OuterState, fragment: int) -> RoundKey:
        """The round of a fragment that starts from this state."""
        part = state.fragments[fragment]
        return RoundKey(self.run, part.round, fragment, part.hash)

    def find_step(self, number: int, fragment: int) -> int:
        """The step of the inner schedule at which a round of a fragment is due: they take turns within H steps."""
        interval = self.rules.interval
        return number * interval + interval * (fragment + 1) // len(self.sizes)

    def span_steps(self, number: int, fragment: int) -> int:
        """Steps of the inner schedule from this round's turn to the next fragment's."""
        following = (number, fragment + 1) if fragment + 1 < len(self.sizes) else (number + 1, 0)
        return self.find_step(*following) - self.find_step(number, fragment)

    def next_turn(self, state: OuterState, handed_in: Collection[int] = ()) -> int:
        """The fragment whose round is due next: the one that is furthest behind, with what is handed in already."""
        return min(range(len(self.sizes)), key=lambda i: (state.fragments[i].round + (i in handed_in), i))
