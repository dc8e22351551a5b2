"""A reducer without a state takes its peers': the one that most of them hold, checked by its hash.

    asked -> peers say what they hold -> one is chosen -> a holder sends it -> its hash is right -> serving
                                                       -> it is wrong, or stands still -> the next holder sends it

Symbols: n peers that said what they hold, c how many of them hold a state, w the window.

    chosen when n >= expected or w has passed, and 2 c > n; after 2 w also with 2 c >= n, the one with more rounds

Between two states of one run that honest peers hold lies one round at most: those who had the last outcome when the
reducer died, and those who had not. Who holds another one than the chosen fetches it. Whoever can bring a majority of
peers decides what is chosen: name the peers of a run (`peers`) where that matters.
"""

import math
from collections import Counter
from collections.abc import Callable

from shoal.diloco.http.messages import Holding, HoldingAnswer
from shoal.diloco.http.parcel import Parcel
from shoal.diloco.plan import Plan
from shoal.diloco.state import MAX_HEADER_BYTES, OuterState, StateError, decode_state
from shoal.swarm.refusal import AuthError

WINDOW_S = 2.0
STALL_S = 2.0
"""a holder that sends nothing for so long is passed over"""
MAX_HOLDERS = 256


class Rebuild:
    """The search for a state, until one is found."""

    def __init__(self, plan: Plan, expected: int, clock_s: Callable[[], float], window_s: float = WINDOW_S) -> None:
        self._plan, self._expected, self._clock_s, self._window_s = plan, expected, clock_s, window_s
        self._holdings: dict[str, Holding] = {}
        self._first_s = math.inf
        self._chosen: Holding | None = None
        self._parcel: Parcel | None = None
        self._attempt = 0
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
        self._moved_s = self._clock_s()
        return self._parcel

    def open_state(self, parcel: Parcel) -> OuterState | None:
        """The state, once all of it is here and right; else the next holder is asked."""
        assert self._chosen is not None, "chunks come of what was chosen"
        data = parcel.open()
        try:
            state = None if data is None else decode_state(data, self._plan.sizes)
        except StateError:
            state = None
        is_sound = state is not None and state.hash == self._chosen.hash and len(state.lanes) == self._plan.num_lanes
        if not is_sound:
            self._pass_on(self._clock_s())
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
        if len(self._holdings) < self._expected and waited_s < self._window_s:
            return
        counts = Counter(self._holdings.values())
        best = max(counts, key=lambda holding: (counts[holding], sum(holding.rounds), holding.hash))
        share = 2 * counts[best]
        if share > len(self._holdings) or (share == len(self._holdings) and waited_s >= 2 * self._window_s):
            self._chosen, self._parcel = best, Parcel(best.size, best.digest)
            self._moved_s = now_s

    def _find_source(self) -> str:
        holders = self.list_holders()
        return holders[self._attempt % len(holders)]

    def _pass_on(self, now_s: float) -> None:
        assert self._chosen is not None
        self._attempt += 1
        self._parcel = Parcel(self._chosen.size, self._chosen.digest)
        self._moved_s = now_s
