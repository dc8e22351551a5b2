"""Recovery of a reducer without a state: it takes the one that most of its peers hold, checked by its hash.

    asked -> peers announce what they hold -> one is chosen -> a holder sends it -> its hash is right -> serving
                                                            -> wrong or stalled -> the next holder sends it

Symbols: n peers that announced what they hold, c how many of them hold a state, w the window.

    chosen when n >= expected > 1 or w has passed, and 2 c > n; after 2 w also with 2 c >= n, the one with more rounds

A state that none of its holders could deliver is not chosen again, and a state that no peer holds any more is not
waited for.

Two states that honest peers of one run hold differ by at most one round: some peers had the last outcome when the
reducer died, others did not. A peer that holds a different state than the chosen one fetches the latter. Only named
peers join a reducer without a state, so a majority of them decides.
"""

import math
import re
from collections import Counter
from collections.abc import Callable

from shoal.diloco.http.messages import HeldState, Payload, WantedChunks
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.round import MAX_TOKENS
from shoal.diloco.state import MAX_HEADER_BYTES, OuterState, StateError, decode_state
from shoal.net.api_error import ApiError

WINDOW_S = 2.0
STALL_S = 2.0
"""a holder that sends nothing for this long is skipped"""
MAX_HOLDERS = 256
_PUBLIC = re.compile(r"[0-9a-f]{64}")


class StateRecovery:
    """The search for a state, until one is found."""

    def __init__(self, plan: DilocoPlan, expected: int, clock_s: Callable[[], float]) -> None:
        self._plan, self._expected, self._clock_s = plan, expected, clock_s
        self._holdings: dict[str, HeldState] = {}
        self._broken: set[HeldState] = set()
        """states whose holders sent something else"""
        self._first_s = math.inf
        self._chosen: HeldState | None = None
        self._payload: Payload | None = None
        self._attempt = 0
        self._liars: set[str] = set()
        self._moved_s = 0.0

    @property
    def num_offers(self) -> int:
        """Number of peers that announced what they hold."""
        return len(self._holdings)

    def take_holding(self, peer: str, holding: HeldState) -> WantedChunks:
        """Note what a peer holds; the answer states whether it should send it."""
        self._check_size(holding)
        now_s = self._clock_s()
        if peer not in self._holdings and len(self._holdings) >= MAX_HOLDERS:
            raise ApiError(503, "full", "too many peers offer a state; try later", retry_after_s=5)
        self._holdings[peer] = holding
        self._first_s = min(self._first_s, now_s)
        if not self.list_holders():
            self._chosen = self._payload = None
        if self._chosen is None:
            self._choose(now_s)
        if self._chosen is None or self._payload is None:
            return WantedChunks(status="waiting")
        if now_s - self._moved_s > STALL_S:
            self._ask_next_holder(now_s)
        if self._find_source() != peer:
            return WantedChunks(status="waiting")
        return WantedChunks(status="wanted", missing=self._payload.list_missing())

    def find_payload(self, peer: str, digest: str) -> Payload:
        """The buffer for a chunk of the state that this peer was asked for."""
        if self._chosen is None or self._payload is None or self._chosen.hash != digest or self._find_source() != peer:
            raise ApiError(409, "no_offer", "this peer was not asked for this state")
        self.note_progress()
        return self._payload

    def note_progress(self) -> None:
        """Note that part of the state arrived."""
        self._moved_s = self._clock_s()

    def open_state(self, payload: Payload) -> OuterState | None:
        """The state, once it is complete and valid; otherwise the next holder is asked."""
        chosen = self._chosen
        if chosen is None or payload is not self._payload:
            return None  # a different state was chosen since, or a different holder asked
        data = payload.open()
        try:
            state = None if data is None else decode_state(data, self._plan.sizes)
        except StateError:
            state = None
        if state is None or state.hash != chosen.hash or not _fits_plan(state, self._plan):
            self._give_up_source(payload)
            return None
        return state

    def list_holders(self) -> list[str]:
        """The peers that hold the chosen state."""
        return sorted(peer for peer, holding in self._holdings.items() if holding == self._chosen)

    def _check_size(self, holding: HeldState) -> None:
        arrays = 8 * sum(self._plan.sizes)
        if not arrays < holding.size <= arrays + MAX_HEADER_BYTES or len(holding.rounds) != len(self._plan.sizes):
            raise ApiError(422, "length", "the state's size does not match the plan")

    def _choose(self, now_s: float) -> None:
        waited_s = now_s - self._first_s
        # The first peer to answer is not a majority: if no number of peers is configured, the window decides.
        if waited_s < WINDOW_S and not 1 < self._expected <= len(self._holdings):
            return
        counts = Counter(holding for holding in self._holdings.values() if holding not in self._broken)
        if not counts:
            return
        best = max(counts, key=lambda holding: (counts[holding], sum(holding.rounds), holding.hash))
        share, total = 2 * counts[best], counts.total()
        if share > total or (share == total and waited_s >= 2 * WINDOW_S):
            self._chosen, self._payload = best, Payload(best.size, best.digest)
            self._attempt, self._moved_s, self._liars = 0, now_s, set()

    def _find_source(self) -> str:
        holders = self.list_holders()
        return holders[self._attempt % len(holders)] if holders else ""

    def _give_up_source(self, payload: Payload) -> None:
        """Drop a holder whose state does not match its announcement; without holders left, give up the state."""
        if self._chosen is None or payload is not self._payload:
            return
        self._liars.add(self._find_source())
        if self._liars.issuperset(self.list_holders()) and len(self._broken) < MAX_HOLDERS:
            self._broken.add(self._chosen)
            self._chosen = self._payload = None
            return
        self._ask_next_holder(self._clock_s())

    def _ask_next_holder(self, now_s: float) -> None:
        """Ask the next holder for the whole state: it is unknown which chunk of the previous one was wrong."""
        assert self._chosen is not None
        self._attempt += 1
        self._payload = Payload(self._chosen.size, self._chosen.digest)
        self._moved_s = now_s


def _fits_plan(state: OuterState, plan: DilocoPlan) -> bool:
    """Whether outcomes can continue from this state: everything in it fits into messages."""
    counts = (state.step, *state.lanes, *(part.round for part in state.fragments))
    is_named = all(_PUBLIC.fullmatch(name) for name in state.members)
    return len(state.lanes) == plan.num_lanes and is_named and max(counts) <= MAX_TOKENS
