"""The engine's face: hand in an update and go on; a thread of its own does the talking.

    joined -> watching (presence) -> joined again if the reducer has forgotten us
    submitted -> offered -> sent -> waiting for the outcome -> collected
              -> reducer away: back off, begin again at the offer; the update is kept until the round is over

Invariants:
- `submit` never waits, `collect` and `fetch_state` never longer than told, `close` at most `CLOSE_S`;
- the update is kept until there is an outcome, or the round is known to have gone on; while the reducer is away it is
  offered again and again, with growing pauses, and what had arrived is not sent twice;
- a reducer that lost its state is offered the one that `hold_state` returns;
- of several addresses of one reducer the next is tried when one is away: all have the same key.
"""

import asyncio
import concurrent.futures
import hashlib
import random
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.diloco.averager import AveragerAwayError, RefusedUpdateError, StaleRoundError
from shoal.diloco.http.client import ReducerAwayError, ReducerClient
from shoal.diloco.http.messages import Holding, JoinAnswer, TalkError, make_offer
from shoal.diloco.plan import Plan
from shoal.diloco.round import Outcome, RoundKey, Update
from shoal.diloco.state import OuterState, encode_state
from shoal.keys import Key
from shoal.swarm.asking import RefusedError
from shoal.swarm.link import Deadlines, Place

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 3.0
CLOSE_S = 2.0
HOLD_PAUSE_S = 0.3
_STALE = frozenset({"stale", "wrong_base", "not_found"})
_AGAIN = frozenset({"unknown_node", "replay", "no_offer", "digest", "work"})
"""refusals after which the same thing may well be taken: the reducer was restarted, or something was lost"""

T = TypeVar("T")
_Failures = (ReducerAwayError, TalkError, OSError)


@dataclass
class _Parcel:
    """An update in the thread's hands."""

    update: Update
    done: "concurrent.futures.Future[Outcome]" = field(default_factory=concurrent.futures.Future)


def _pass_bug(ended: "concurrent.futures.Future[None]", parcel: _Parcel) -> None:
    """What nobody expected is raised where the outcome is collected."""
    if not ended.cancelled() and (error := ended.exception()) is not None and not parcel.done.done():
        parcel.done.set_exception(error)


class HttpAverager:
    """One peer's way to a reducer. Made and used by the training loop's thread."""

    def __init__(
        self,
        plan: Plan,
        key: Key,
        places: Sequence[Place],
        reducer: str,
        *,
        hold_state: Callable[[], OuterState | None] = lambda: None,
        deadlines: Deadlines | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.hold_state = hold_state
        """the state that the training loop holds; called from the engine's thread"""
        self.rounds: tuple[int, ...] = ()
        """rounds that every fragment has behind it, as far as heard"""
        self._clients = [ReducerClient(place, key, plan, reducer, deadlines) for place in places]
        self._note = note
        self._turn = 0
        self._trouble = "no reducer has answered yet"
        self._parcels: dict[RoundKey, _Parcel] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="diloco-http", daemon=True)
        self._thread.start()
        self._tasks: list[concurrent.futures.Future[None]] = [self._start(self._keep_presence())]

    def submit(self, update: Update) -> None:
        """As `Averager.submit`."""
        key = update.key
        if key in self._parcels:
            return
        if self._is_behind(key):
            raise StaleRoundError(key, "the others are further")
        for old in [old for old in self._parcels if old.fragment == key.fragment]:
            del self._parcels[old]  # a fragment has one round at a time; the caller went on to this one
        parcel = self._parcels[key] = _Parcel(update)
        self._tasks = [task for task in self._tasks if not task.done()]
        task = self._start(self._deliver(parcel))
        task.add_done_callback(lambda ended: _pass_bug(ended, parcel))
        self._tasks.append(task)

    def collect(self, key: RoundKey, timeout_s: float) -> Outcome | None:
        """As `Averager.collect`."""
        parcel = self._parcels.get(key)
        assert parcel is not None, "only what was submitted can be collected"
        try:
            outcome = parcel.done.result(timeout_s)
        except TimeoutError:
            if self._trouble:
                raise AveragerAwayError(self._trouble) from None
            return None
        except (StaleRoundError, RefusedUpdateError):
            self._parcels.pop(key, None)
            raise
        self._parcels.pop(key, None)
        return outcome

    def fetch_state(self, timeout_s: float) -> OuterState:
        """As `Averager.fetch_state`."""
        try:
            return self._start(self._fetch_state(timeout_s)).result(timeout_s + CLOSE_S)
        except TimeoutError:
            raise AveragerAwayError(self._trouble or "the reducer has no state for this peer yet") from None
        except RefusedError as error:
            raise AveragerAwayError(str(error)) from error

    def close(self) -> None:
        """As `Averager.close`: say good-bye if somebody hears it, and end the thread."""
        if not self._thread.is_alive():
            return
        for task in self._tasks:
            task.cancel()
        farewell = self._start(self._leave())
        concurrent.futures.wait([farewell], timeout=CLOSE_S)
        farewell.cancel()
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
        """Join, and keep a request open by which the reducer sees that this peer lives."""
        try:
            self.rounds = (await self._persist(self._join)).rounds
            while True:
                self.rounds = await self._persist(self._watch, offers=True)
        except RefusedError as error:  # not invited, for one; who asks for anything hears it too
            self._note_trouble(error)

    # Each asks whichever reducer's turn it is at that moment.
    async def _join(self) -> JoinAnswer:
        return await self._client.join()

    async def _watch(self) -> tuple[int, ...]:
        return await self._client.watch(sum(self.rounds))

    async def _ask_state(self) -> OuterState:
        return await self._client.fetch_state()

    async def _deliver(self, parcel: _Parcel) -> None:
        """Bring an update to the reducer and its outcome back."""
        key = parcel.update.key
        try:
            outcome = await self._persist(lambda: self._exchange(parcel))
        except RefusedError as error:
            is_stale = error.refusal.code in _STALE
            failure = StaleRoundError(key, str(error)) if is_stale else RefusedUpdateError(key, error.refusal.text)
            parcel.done.set_exception(failure)
            return
        if parcel.update.peer not in outcome.peers and self._is_behind(key):
            # One outcome at a time a slow peer would never catch up with the others.
            parcel.done.set_exception(StaleRoundError(key, "the others are more than one round further"))
            return
        parcel.done.set_result(outcome)

    def _is_behind(self, key: RoundKey) -> bool:
        return bool(self.rounds) and self.rounds[key.fragment] > key.round + 1

    async def _exchange(self, parcel: _Parcel) -> Outcome:
        update, client = parcel.update, self._client
        offer = await asyncio.to_thread(make_offer, update)
        try:
            answer = await client.offer(offer)
            if answer.status == "open":
                await client.send_update(offer, update.payload, answer.missing)
        except RefusedError as error:
            if error.refusal.code != "stale":
                raise
            # The round closed without it, or with it before we heard so: its outcome says which.
        while True:
            if (outcome := await client.fetch_outcome(update.key)) is not None:
                return outcome
            self._trouble = ""

    async def _fetch_state(self, timeout_s: float) -> OuterState:
        async with asyncio.timeout(timeout_s):
            return await self._persist(self._ask_state)

    async def _leave(self) -> None:
        try:
            await self._client.leave()
        except (*_Failures, RefusedError):
            self._note("left without being heard")

    async def _persist(self, attempt: Callable[[], Awaitable[T]], *, offers: bool = False) -> T:
        """Try until it succeeds or is refused for good, with growing pauses; one task `offers` the state held."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                result = await attempt()
            except RefusedError as error:
                if error.refusal.code not in _AGAIN:
                    raise
                await self._rejoin(error)
            except _Failures as error:
                self._note_trouble(error)
                code = error.code if isinstance(error, ReducerAwayError) else ""
                if code == "rebuilding":
                    pause_s = await self._offer_state() if offers else HOLD_PAUSE_S
                elif code == "not_yet":
                    self._trouble, pause_s = "", FIRST_PAUSE_S
            else:
                self._trouble = ""
                return result
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _note_trouble(self, error: BaseException) -> None:
        text = str(error) or type(error).__name__
        if text != self._trouble:
            self._note(text)
        self._trouble = text
        if not isinstance(error, ReducerAwayError) or not error.code:
            self._turn += 1

    async def _rejoin(self, error: RefusedError) -> None:
        if error.refusal.code != "unknown_node":
            return
        try:
            await self._client.join()
        except RefusedError as refused:
            if refused.refusal.code not in _AGAIN:
                raise
            self._note(str(refused))  # its challenge was of before a restart, or too old: the next try asks anew
        except _Failures as failure:
            self._note_trouble(failure)

    async def _offer_state(self) -> float:
        """Give a reducer without a state the one that is held here, if it wants it; how long to wait then."""
        state = self.hold_state()
        if state is None:
            return LONGEST_PAUSE_S
        data = await asyncio.to_thread(encode_state, state)
        rounds = tuple(part.round for part in state.fragments)
        digest = hashlib.sha256(data).hexdigest()
        holding = Holding(hash=state.hash, size=len(data), digest=digest, rounds=rounds)
        try:
            answer = await self._client.hold(holding)
            if answer.status == "wanted":
                await self._client.send_holding(holding, data, answer.missing)
        except RefusedError as error:
            self._note(str(error))
        except _Failures as error:
            self._note_trouble(error)
        return HOLD_PAUSE_S
