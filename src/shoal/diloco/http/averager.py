"""The interface of the HTTP engine: submit an update and continue; a background thread communicates with the reducer.

    joined -> watching (presence) -> joined again if the reducer has forgotten us
    submitted -> offered -> sent -> waiting for the outcome -> collected
              -> reducer unavailable: back off, begin again at the offer; the update is kept until the round is over

Invariants:
- `submit` never waits, `collect` and `fetch_state` never longer than their timeout, `close` at most `CLOSE_S`;
- the update is kept until there is an outcome, or the round is known to have closed. While the reducer is unavailable
  it is offered repeatedly, with growing pauses; chunks that have arrived are not sent twice;
- a reducer that lost its state is offered the one that `hold_state` returns;
- if a reducer has several addresses, the next one is tried when one is unavailable: all have the same key.
"""

import asyncio
import concurrent.futures
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from shoal.diloco.http.client import ReducerClient, ReducerUnavailableError
from shoal.diloco.http.messages import HeldState, MessageError, make_offer
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.round import (
    AveragerUnavailableError,
    RefusedUpdateError,
    RoundKey,
    RoundOutcome,
    StaleRoundError,
    Update,
)
from shoal.diloco.state import OuterState, encode_state
from shoal.identity.keys import Key
from shoal.net.client import Endpoint, HttpDeadlines
from shoal.net.retry import RefusedError
from shoal.util.aio import Backoff

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
CLOSE_S = 2.0
HOLD_PAUSE_S = 0.3
_STALE = frozenset({"stale", "wrong_base", "not_found"})
_AGAIN = frozenset({"unknown_node", "no_offer", "digest", "work"})
"""refusals after which the same request may succeed: the reducer was restarted, or something was lost"""

T = TypeVar("T")
_Failures = (ReducerUnavailableError, MessageError, OSError)


class HttpAverager:
    """One peer's connection to a reducer. Created and used by the training loop's thread."""

    def __init__(
        self,
        plan: DilocoPlan,
        key: Key,
        places: Sequence[Endpoint],
        reducer: str,
        *,
        deadlines: HttpDeadlines | None = None,
    ) -> None:
        self.hold_state: Callable[[], OuterState | None] = lambda: None
        """the state that the training loop holds; called from the engine's thread"""
        self.rounds: tuple[int, ...] = ()
        """completed rounds of every fragment, as last reported"""
        self._clients = [ReducerClient(place, key, plan, reducer, deadlines) for place in places]
        self._turn = 0
        self._trouble = "no response from the reducer yet"
        self._pending: dict[RoundKey, concurrent.futures.Future[RoundOutcome]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="diloco-http", daemon=True)
        self._thread.start()
        self._start(self._keep_presence())

    def submit(self, update: Update) -> None:
        """See `Averager.submit`."""
        key = update.key
        if key in self._pending:
            return
        if self._is_behind(key):
            raise StaleRoundError(key, "the other peers are ahead")
        for old in [old for old in self._pending if old.fragment == key.fragment]:
            del self._pending[old]  # a fragment has one round at a time; the caller moved on to this one
        self._pending[key] = self._start(self._deliver(update))

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        """See `Averager.collect`."""
        pending = self._pending[key]
        if not concurrent.futures.wait([pending], timeout_s).done:
            if self._trouble:
                raise AveragerUnavailableError(self._trouble)
            return None
        del self._pending[key]
        return pending.result()

    def fetch_state(self, timeout_s: float) -> OuterState:
        """See `Averager.fetch_state`."""
        fetching = self._start(self._persist(ReducerClient.fetch_state))
        try:
            return fetching.result(timeout_s)
        except TimeoutError:
            fetching.cancel()
            raise AveragerUnavailableError(self._trouble or "the reducer has no state for this peer yet") from None
        except RefusedError as error:
            raise AveragerUnavailableError(str(error)) from error

    def close(self) -> None:
        """See `Averager.close`: leave the run if the reducer is reachable, and end the thread."""
        if not self._thread.is_alive():
            return
        leaving = self._start(self._leave())
        concurrent.futures.wait([leaving], timeout=CLOSE_S)
        leaving.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            for client in self._clients:
                client.close()
            self._loop.close()

    def _start(self, work: "Awaitable[T]") -> "concurrent.futures.Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)  # type: ignore[arg-type]

    @property
    def _client(self) -> ReducerClient:
        return self._clients[self._turn % len(self._clients)]

    async def _keep_presence(self) -> None:
        """Join, and keep a request open that shows the reducer this peer is alive."""
        try:
            self.rounds = (await self._persist(ReducerClient.join)).rounds
            while True:
                self.rounds = await self._persist(self._watch, offers=True)
        except RefusedError as error:  # for example not invited; later calls report it too
            self._note_trouble(error)

    async def _watch(self, client: ReducerClient) -> tuple[int, ...]:
        return await client.watch(sum(self.rounds))

    async def _deliver(self, update: Update) -> RoundOutcome:
        """Deliver an update to the reducer and return its outcome."""
        key = update.key
        try:
            outcome = await self._persist(partial(self._exchange, update))
        except RefusedError as error:
            if error.refusal.code in _STALE:
                raise StaleRoundError(key, str(error)) from None
            raise RefusedUpdateError(key, error.refusal.text) from None
        if update.peer not in outcome.peers and self._is_behind(key):
            # With one outcome at a time, a slow peer would never catch up with the others.
            raise StaleRoundError(key, "the other peers are more than one round ahead")
        return outcome

    def _is_behind(self, key: RoundKey) -> bool:
        return bool(self.rounds) and self.rounds[key.fragment] > key.round + 1

    async def _exchange(self, update: Update, client: ReducerClient) -> RoundOutcome:
        offer = await asyncio.to_thread(make_offer, update)
        try:
            answer = await client.offer(offer)
            if answer.status == "open":
                await client.send_update(offer, update.payload, answer.missing)
        except RefusedError as error:
            if error.refusal.code != "stale":
                raise
            # The round closed without the update, or with it before we were informed: its outcome shows which.
        while True:
            if (outcome := await client.fetch_outcome(update.key)) is not None:
                return outcome
            self._trouble = ""

    async def _leave(self) -> None:
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        try:
            await self._client.leave()
        except RefusedError as error:
            logger.debug(f"the reducer refused when this site left: {error}")  # it was no member
        except _Failures:
            logger.warning("no response from the reducer when leaving the run")

    async def _persist(self, attempt: Callable[[ReducerClient], Awaitable[T]], *, offers: bool = False) -> T:
        """Ask the reducer's addresses in turn until one answers or refuses for good, with growing pauses.

        Only the task with `offers` offers the held state.
        """
        backoff, number, least_s = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S), 0, 0.0
        is_known = True
        while True:
            try:
                if not is_known:
                    await self._client.join()
                    is_known = True
                result = await attempt(self._client)
            except RefusedError as error:
                if error.refusal.code not in _AGAIN:
                    raise
                # The challenge may be from before a restart, or too old: the next attempt requests a new one.
                is_known = is_known and error.refusal.code != "unknown_node"
            except _Failures as error:
                self._note_trouble(error)
                code = error.code if isinstance(error, ReducerUnavailableError) else ""
                if code == "rebuilding":
                    number, least_s = 0, await self._offer_state() if offers else HOLD_PAUSE_S
                elif code == "not_yet":
                    self._trouble, number = "", 0
            else:
                self._trouble = ""
                return result
            await asyncio.sleep(backoff.pause_s(number, least_s))
            number, least_s = number + 1, 0.0

    def _note_trouble(self, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if text != self._trouble:
            logger.warning(text)
        self._trouble = text
        if not isinstance(error, ReducerUnavailableError) or not error.code:
            self._turn += 1

    async def _offer_state(self) -> float:
        """Offer the held state to a reducer that has none, and send it if wanted; returns the next pause."""
        state = self.hold_state()
        if state is None:
            return LONGEST_PAUSE_S
        data = await asyncio.to_thread(encode_state, state)
        digest = hashlib.sha256(data).hexdigest()
        holding = HeldState(hash=state.hash, size=len(data), digest=digest, rounds=state.rounds)
        try:
            answer = await self._client.hold(holding)
            if answer.status == "wanted":
                await self._client.send_holding(holding, data, answer.missing)
        except RefusedError as error:
            logger.warning(str(error))
        except _Failures as error:
            self._note_trouble(error)
        return HOLD_PAUSE_S
