"""A peer's requests to a reducer, one method for each; what it says is checked before it is returned.

Invariants:
- each try is signed anew, and every route bears being asked twice;
- an outcome and a state are the reducer's by its signature, and whole by their hashes; their lengths follow from the
  plan, so nothing that an answer says decides how much is read;
- every wait has a deadline. What is refused for good is a `RefusedError`; no answer is a
  `ReducerAwayError`, and whether to ask again is for the caller.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

from shoal.diloco.http.messages import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    Card,
    Holding,
    HoldingAnswer,
    JoinAnswer,
    Offer,
    OfferAnswer,
    StateHead,
    TalkError,
    WatchAnswer,
    count_chunks,
    join_outcome,
    open_message,
    read_card,
    read_message,
    sign_message,
    split_outcome,
)
from shoal.diloco.plan import Plan
from shoal.diloco.round import Outcome, RoundKey
from shoal.diloco.state import MAX_HEADER_BYTES, OuterState, StateError, decode_state
from shoal.keys import Key
from shoal.swarm.asking import RETRY_STATUSES, RefusedError, read_refusal
from shoal.swarm.client_auth import RequestSigner
from shoal.swarm.link import Answer, Deadlines, Link, LinkError, Place
from shoal.swarm.refusal import AuthError
from shoal.swarm.tags import Tag
from shoal.swarm.wire import BULK_BYTES
from shoal.swarm.work import read_challenge, solve_challenge

IN_FLIGHT = 4
"""chunks that go at a time, so that the way there and back does not count"""
WAIT_S = 10
MAX_WORK = 1 << 26
_DEADLINES = Deadlines(connect_s=5.0, answer_s=30.0, rest_s=10.0, window_s=15.0, min_rate=2 * 1024)
_PREFIX = "/v1/diloco"
_MAX_HEAD_BYTES = MAX_DOCUMENT_BYTES + 4


class ReducerAwayError(Exception):
    """No usable answer. `code` is the reducer's word for it, if it said one."""

    def __init__(self, reason: str, code: str = "", retry_after_s: int | None = None) -> None:
        super().__init__(reason)
        self.code, self.retry_after_s = code, retry_after_s


async def fetch_card(place: Place, reducer: str | None) -> tuple[str, Plan]:
    """The plan that a reducer shows and who signed it; `TalkError` if that is not `reducer`, where given."""
    link = Link(place, _DEADLINES)
    try:
        answer = await link.ask("GET", f"{_PREFIX}/plan", [], b"", MAX_DOCUMENT_BYTES)
    except LinkError as error:
        raise ReducerAwayError(str(error)) from error
    finally:
        link.close()
    if answer.status != 200:
        raise ReducerAwayError(f"{place}: answered with status {answer.status}")
    signer, card = open_message(reducer, Tag.PLAN, answer.body, Card)
    return signer, read_card(card)


class ReducerClient:
    """One peer's talk with one reducer. Use from one event loop."""

    def __init__(self, place: Place, key: Key, plan: Plan, reducer: str, deadlines: Deadlines | None = None) -> None:
        self.peer = key.public
        self._key, self._plan, self._reducer = key, plan, reducer
        self._link = Link(place, deadlines or _DEADLINES, held_bytes=BULK_BYTES)
        self._signer = RequestSigner(key, plan.run, reducer)

    def close(self) -> None:
        """Close the connections that are idle."""
        self._link.close()

    async def join(self) -> JoinAnswer:
        """Become a peer of the run, or show that one still is."""
        challenge = await self._ask("GET", f"challenges/{self.peer}", b"", 1024)
        try:
            read = read_challenge(challenge.decode("ascii", "replace"), self.peer, MAX_WORK)
        except ValueError as error:
            raise TalkError(str(error)) from None
        stamp = await asyncio.to_thread(solve_challenge, read, lambda: False)
        assert stamp is not None, "nobody stops it"
        return read_message(await self._ask("POST", "join", b"", 1 << 16, stamp=stamp), JoinAnswer)

    async def leave(self) -> None:
        """Say that rounds need not wait for this peer."""
        await self._ask("POST", "leave", b"", 1024)

    async def watch(self, known: int) -> tuple[int, ...]:
        """Rounds of every fragment, once their sum is not `known` or a while has passed."""
        body = await self._ask("GET", f"watch/{known}?wait={WAIT_S}", b"", 1 << 16)
        return read_message(body, WatchAnswer).rounds

    async def offer(self, offer: Offer) -> OfferAnswer:
        """Announce an update."""
        document = sign_message(self._key, Tag.UPDATE, offer)
        return read_message(await self._ask("POST", "offers", document, 1 << 20), OfferAnswer)

    async def send_update(self, offer: Offer, payload: bytes, missing: Sequence[tuple[int, int]]) -> None:
        """Send the chunks that are wanted."""
        place = f"updates/{offer.fragment}/{offer.round}/{offer.digest}"
        await self._send_chunks(place, payload, missing)

    async def hold(self, holding: Holding) -> HoldingAnswer:
        """Say what state this peer holds."""
        body = holding.model_dump_json().encode()
        return read_message(await self._ask("POST", "holdings", body, 1 << 20), HoldingAnswer)

    async def send_holding(self, holding: Holding, data: bytes, missing: Sequence[tuple[int, int]]) -> None:
        """Send the chunks of a state that are wanted."""
        await self._send_chunks(f"holdings/{holding.hash}", data, missing)

    async def fetch_outcome(self, key: RoundKey) -> Outcome | None:
        """The outcome of a round; None if it is still open after a while."""
        place = f"outcomes/{key.fragment}/{key.round}/{key.base}"
        first = await self._ask("GET", f"{place}/0?wait={WAIT_S}", b"", CHUNK_BYTES)
        if not first:
            return None
        head, start = split_outcome(first, self._reducer, self._plan)
        if RoundKey(head.run, head.round, head.fragment, head.base) != key:
            raise TalkError("the reducer sent another round's outcome")
        data = await self._fetch_rest(place, first, start + head.size)
        return await asyncio.to_thread(join_outcome, head, data[start:])

    async def fetch_state(self) -> OuterState:
        """The newest outer state, once this peer is a member."""
        document = await self._ask("GET", f"state?wait={WAIT_S}", b"", _MAX_HEAD_BYTES)
        _, head = open_message(self._reducer, Tag.STATE, document, StateHead)
        arrays = 8 * sum(self._plan.sizes)
        if not arrays < head.size <= arrays + MAX_HEADER_BYTES + 4:
            raise TalkError("a state of another size than the plan's")
        data = await self._fetch_rest(f"states/{head.hash}", b"", head.size)
        return await asyncio.to_thread(self._open_state, head, data)

    def _open_state(self, head: StateHead, data: bytes) -> OuterState:
        if hashlib.sha256(data).hexdigest() != head.digest:
            raise TalkError("the state is not the one that was signed")
        try:
            state = decode_state(data, self._plan.sizes)
        except StateError as error:
            raise TalkError(str(error)) from None
        if state.hash != head.hash:
            raise TalkError("the state does not have the hash that was signed")
        return state

    async def _fetch_rest(self, place: str, first: bytes, size: int) -> bytes:
        """The bytes of which `first` is the beginning, in chunks."""
        data = bytearray(size)
        data[: len(first)] = first

        async def fetch_chunk(index: int) -> None:
            start = index * CHUNK_BYTES
            piece = await self._ask("GET", f"{place}/{index}", b"", CHUNK_BYTES)
            if len(piece) != min(CHUNK_BYTES, size - start):
                raise TalkError("a chunk of another length than it must have")
            data[start : start + len(piece)] = piece

        await _run_all(fetch_chunk, range(1 if first else 0, count_chunks(size)))
        return bytes(data)

    async def _send_chunks(self, place: str, data: bytes, missing: Sequence[tuple[int, int]]) -> None:
        async def send_chunk(index: int) -> None:
            await self._ask("PUT", f"{place}/{index}", data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES], 1024)

        total = count_chunks(len(data))
        await _run_all(send_chunk, [i for first, end in missing for i in range(min(first, total), min(end, total))])

    async def _ask(self, method: str, place: str, body: bytes, max_bytes: int, stamp: str = "") -> bytes:
        """One request; tried again at once where only the clock or a connection from before was the trouble."""
        target = f"{_PREFIX}/{place}"
        for _ in range(3):
            headers = self._signer.sign_request(method, target, body)
            if stamp:
                headers.append(("Shoal-Work", stamp))
            try:
                answer = await self._link.ask(method, target, headers, body, max_bytes)
            except LinkError as error:
                if error.is_stale:
                    continue
                raise ReducerAwayError(str(error)) from error
            if answer.status == 200:
                self._signer.note_success()
                return answer.body
            refusal = read_refusal(answer)
            if not (refusal.code == "clock" and self._signer.correct_clock(refusal)):
                raise _explain(answer, refusal)
        raise ReducerAwayError("the reducer closed every connection")


def _explain(answer: Answer, refusal: AuthError) -> Exception:
    if answer.status in RETRY_STATUSES:
        return ReducerAwayError(refusal.text, refusal.code, refusal.retry_after_s)
    return RefusedError(refusal)


async def _run_all(work: Callable[[int], Awaitable[None]], indexes: Sequence[int]) -> None:
    """Do all, a few at a time; the first failure ends the others."""
    queue = iter(indexes)

    async def take_turns() -> None:
        for index in queue:
            await work(index)

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(IN_FLIGHT, len(indexes)))]
    try:
        for done in asyncio.as_completed(tasks):
            await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
