"""A reducer without a state takes its peers': the one that most of them hold, checked by its hash.

    asked -> peers say what they hold -> one is chosen -> a holder sends it -> its hash is right -> serving
                                                       -> it is wrong, or stands still -> the next holder sends it

Symbols: n peers that said what they hold, c how many of them hold a state, w the window.

    chosen when n >= expected > 1 or w has passed, and 2 c > n; after 2 w also with 2 c >= n, the one with more rounds

What all of its holders were asked for in vain is not chosen again, and nor is what nobody holds any more waited for.

Between two states of one run that honest peers hold lies one round at most: those who had the last outcome when the
reducer died, and those who had not. Who holds another one than the chosen fetches it. Whoever can bring a majority of
peers decides what is chosen: name the peers of a run (`peers`) where that matters.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

from shoal.diloco.http.messages import Holding, HoldingAnswer
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.plan import Plan
from shoal.diloco.round import MAX_TOKENS
from shoal.diloco.state import MAX_HEADER_BYTES, OuterState, StateError, decode_state
from shoal.swarm.refusal import AuthError

WINDOW_S = 2.0
STALL_S = 2.0
"""a holder that sends nothing for so long is passed over"""
MAX_HOLDERS = 256
_PUBLIC = re.compile(r"[0-9a-f]{64}")


class Rebuild:
    """The search for a state, until one is found."""

    def __init__(self, plan: Plan, expected: int, clock_s: Callable[[], float], window_s: float = WINDOW_S) -> None:
        self._plan, self._expected, self._clock_s, self._window_s = plan, expected, clock_s, window_s
        self._holdings: dict[str, Holding] = {}
        self._broken: set[Holding] = set()
        """what its holders sent something else for"""
        self._first_s = math.inf
        self._chosen: Holding | None = None
        self._parcel: Parcel | None = None
        self._attempt = 0
        self._liars: set[str] = set()
        self._moved_s = 0.0

    @property
    def num_offers(self) -> int:
        """Peers that said what they hold."""
        return len(self._holdings)

    def take_holding(self, peer: str, holding: Holding) -> HoldingAnswer:
        """A peer says what it holds; whether it is asked to send it."""
        self._check_size(holding)
        now_s = self._clock_s()
        if peer not in self._holdings and len(self._holdings) >= MAX_HOLDERS:
            raise AuthError(503, "full", "more peers offer a state than are looked at; try later", retry_after_s=5)
        self._holdings[peer] = holding
        self._first_s = min(self._first_s, now_s)
        if not self.list_holders():
            self._chosen = self._parcel = None
        if self._chosen is None:
            self._choose(now_s)
        if self._chosen is None or self._parcel is None:
            return HoldingAnswer(status="waiting")
        if now_s - self._moved_s > STALL_S:
            self._pass_on(now_s)
        if self._find_source() != peer:
            return HoldingAnswer(status="waiting")
        return HoldingAnswer(status="wanted", missing=self._parcel.list_missing())

    def find_parcel(self, peer: str, digest: str) -> Parcel:
        """Where a chunk of the state goes that this peer was asked for."""
        if self._chosen is None or self._parcel is None or self._chosen.hash != digest or self._find_source() != peer:
            raise AuthError(409, "no_offer", "this state is not asked of this peer")
        self.note_progress()
        return self._parcel

    def note_progress(self) -> None:
        """Something of the state came in."""
        self._moved_s = self._clock_s()

    def open_state(self, parcel: Parcel) -> OuterState | None:
        """The state, once all of it is here and right; else the next holder is asked."""
        chosen = self._chosen
        if chosen is None or parcel is not self._parcel:
            return None  # another state was chosen since, or another holder asked
        data = parcel.open()
        try:
            state = None if data is None else decode_state(data, self._plan.sizes)
        except StateError:
            state = None
        if state is None or state.hash != chosen.hash or not _fits_plan(state, self._plan):
            self._give_up_source(parcel)
            return None
        return state

    def list_holders(self) -> list[str]:
        """Who holds the chosen state."""
        return sorted(peer for peer, holding in self._holdings.items() if holding == self._chosen)

    def _check_size(self, holding: Holding) -> None:
        arrays = 8 * sum(self._plan.sizes)
        if not arrays < holding.size <= arrays + MAX_HEADER_BYTES or len(holding.rounds) != len(self._plan.sizes):
            raise AuthError(422, "length", "a state of another size than this plan's")

    def _choose(self, now_s: float) -> None:
        waited_s = now_s - self._first_s
        # The first to speak is nobody's majority: where no number of peers was named, the window decides who is heard.
        if waited_s < self._window_s and not 1 < self._expected <= len(self._holdings):
            return
        counts = Counter(holding for holding in self._holdings.values() if holding not in self._broken)
        if not counts:
            return
        best = max(counts, key=lambda holding: (counts[holding], sum(holding.rounds), holding.hash))
        share, total = 2 * counts[best], counts.total()
        if share > total or (share == total and waited_s >= 2 * self._window_s):
            self._chosen, self._parcel = best, Parcel(best.size, best.digest)
            self._attempt, self._moved_s, self._liars = 0, now_s, set()

    def _find_source(self) -> str:
        holders = self.list_holders()
        return holders[self._attempt % len(holders)] if holders else ""

    def _give_up_source(self, parcel: Parcel) -> None:
        """What came is not what was said; once that is so of every holder, the state is given up."""
        if self._chosen is None or parcel is not self._parcel:
            return
        self._liars.add(self._find_source())
        if self._liars.issuperset(self.list_holders()) and len(self._broken) < MAX_HOLDERS:
            self._broken.add(self._chosen)
            self._chosen = self._parcel = None
            return
        self._pass_on(self._clock_s())

    def _pass_on(self, now_s: float) -> None:
        """Ask the next holder for all of it: nobody knows which chunk of the last one's was wrong."""
        assert self._chosen is not None
        self._attempt += 1
        self._parcel = Parcel(self._chosen.size, self._chosen.digest)
        self._moved_s = now_s


def _fits_plan(state: OuterState, plan: Plan) -> bool:
    """Whether outcomes can go on from it: nothing in it that a message does not take."""
    counts = (state.step, *state.lanes, *(part.round for part in state.fragments))
    is_named = all(_PUBLIC.fullmatch(name) for name in state.members)
    return len(state.lanes) == plan.num_lanes and is_named and max(counts) <= MAX_TOKENS
