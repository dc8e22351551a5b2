"""A peer's requests to a reducer, one method for each; responses are checked before they are returned.

Invariants:
- each attempt is signed separately, and every route tolerates repeated requests;
- every answer is signed by the reducer for the request it answers; anything else counts as no answer. Outcomes and
  states also carry a signature that outlives the connection, and are verified by their hashes. Their lengths follow
  from the plan, so a response never decides how much is read;
- every wait has a deadline. A final refusal raises `RefusedError`; no response raises `ReducerUnavailableError`, and
  the caller decides whether to retry.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence

from shoal.diloco.http.messages import (
    CHUNK_BYTES,
    MAX_DOCUMENT_BYTES,
    HeldState,
    JoinAnswer,
    MessageError,
    ReducerInfo,
    StateHead,
    UpdateOffer,
    WantedChunks,
    WatchAnswer,
    count_chunks,
    join_outcome,
    open_message,
    read_card,
    read_message,
    sign_message,
    split_outcome,
)
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.round import RoundKey, RoundOutcome
from shoal.diloco.state import MAX_HEADER_BYTES, OuterState, StateError, decode_state
from shoal.identity.documents import Tag
from shoal.identity.keys import Key
from shoal.identity.proof_of_work import make_stamp
from shoal.identity.signer import RequestSigner
from shoal.net.client import Endpoint, HttpClient, HttpClientError, HttpDeadlines
from shoal.net.retry import RefusedError, is_final, read_refusal

IN_FLIGHT = 4
"""chunks in flight at a time, to hide the round-trip time"""
WAIT_S = 10
MAX_WORK = 1 << 26
_DEADLINES = HttpDeadlines(connect_s=5.0, answer_s=30.0, rest_s=10.0, window_s=15.0, min_rate=2 * 1024)
_PREFIX = "/v1/diloco"
_MAX_HEAD_BYTES = MAX_DOCUMENT_BYTES + 4


class ReducerUnavailableError(Exception):
    """No usable response. `code` is the reducer's error code, if it sent one."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


async def fetch_card(place: Endpoint, reducer: str | None) -> tuple[str, DilocoPlan]:
    """Fetch a reducer's plan and its signer; `MessageError` if `reducer` is given and did not sign it."""
    link = HttpClient(place, _DEADLINES)
    try:
        answer = await link.ask("GET", f"{_PREFIX}/plan", [], b"", MAX_DOCUMENT_BYTES)
    except HttpClientError as error:
        raise ReducerUnavailableError(str(error)) from error
    finally:
        link.close()
    if answer.status != 200:
        raise ReducerUnavailableError(f"{place}: answered with status {answer.status}")
    signer, card = open_message(reducer, Tag.PLAN, answer.body, ReducerInfo)
    return signer, read_card(card)


class ReducerClient:
    """One peer's connection to one reducer. Use from one event loop."""

    def __init__(
        self, place: Endpoint, key: Key, plan: DilocoPlan, reducer: str, deadlines: HttpDeadlines | None = None
    ) -> None:
        self.peer = key.public
        self._key, self._plan, self._reducer = key, plan, reducer
        self._link = HttpClient(place, deadlines or _DEADLINES)
        self._signer = RequestSigner(key, plan.run, reducer)

    def close(self) -> None:
        """Close idle connections."""
        self._link.close()

    async def join(self) -> JoinAnswer:
        """Join the run, or confirm that this peer is still a member."""
        challenge = await self._ask("GET", f"challenges/{self.peer}", b"", 1024)
        try:
            stamp = await make_stamp(challenge.decode("ascii", "replace"), self.peer, MAX_WORK)
        except ValueError as error:
            raise MessageError(str(error)) from None
        return read_message(await self._ask("POST", "join", b"", 1 << 16, stamp=stamp), JoinAnswer)

    async def leave(self) -> None:
        """Leave: rounds need not wait for this peer."""
        await self._ask("POST", "leave", b"", 1024)

    async def watch(self, known: int) -> tuple[int, ...]:
        """Completed rounds of every fragment, once their sum differs from `known` or a while has passed."""
        body = await self._ask("GET", f"watch/{known}?wait={WAIT_S}", b"", 1 << 16)
        return read_message(body, WatchAnswer).rounds

    async def offer(self, offer: UpdateOffer) -> WantedChunks:
        """Announce an update."""
        document = sign_message(self._key, Tag.UPDATE, offer)
        return read_message(await self._ask("POST", "offers", document, 1 << 20), WantedChunks)

    async def send_update(self, offer: UpdateOffer, payload: bytes, missing: Sequence[tuple[int, int]]) -> None:
        """Send the missing chunks of an update."""
        place = f"updates/{offer.fragment}/{offer.round}/{offer.digest}"
        await self._send_chunks(place, payload, missing)

    async def hold(self, holding: HeldState) -> WantedChunks:
        """Announce which state this peer holds."""
        body = holding.model_dump_json().encode()
        return read_message(await self._ask("POST", "holdings", body, 1 << 20), WantedChunks)

    async def send_holding(self, holding: HeldState, data: bytes, missing: Sequence[tuple[int, int]]) -> None:
        """Send the missing chunks of a state."""
        await self._send_chunks(f"holdings/{holding.hash}", data, missing)

    async def fetch_outcome(self, key: RoundKey) -> RoundOutcome | None:
        """The outcome of a round; None if it is still open after a while."""
        place = f"outcomes/{key.fragment}/{key.round}/{key.base}"
        first = await self._ask("GET", f"{place}/0?wait={WAIT_S}", b"", CHUNK_BYTES)
        if not first:
            return None
        head, start = split_outcome(first, self._reducer, self._plan)
        if head.key != key:
            raise MessageError("the reducer sent the outcome of a different round")
        data = await self._fetch_rest(place, first, start + head.size)
        return await asyncio.to_thread(join_outcome, head, data[start:])

    async def fetch_state(self) -> OuterState:
        """The newest outer state, once this peer is a member."""
        document = await self._ask("GET", f"state?wait={WAIT_S}", b"", _MAX_HEAD_BYTES)
        _, head = open_message(self._reducer, Tag.STATE, document, StateHead)
        arrays = 8 * sum(self._plan.sizes)
        if not arrays < head.size <= arrays + MAX_HEADER_BYTES + 4:
            raise MessageError("the state's size does not match the plan")
        data = await self._fetch_rest(f"states/{head.hash}", b"", head.size)
        return await asyncio.to_thread(self._open_state, head, data)

    def _open_state(self, head: StateHead, data: bytes) -> OuterState:
        if hashlib.sha256(data).hexdigest() != head.digest:
            raise MessageError("the state does not match its signed digest")
        try:
            state = decode_state(data, self._plan.sizes)
        except StateError as error:
            raise MessageError(str(error)) from None
        if state.hash != head.hash:
            raise MessageError("the state does not match its signed hash")
        return state

    async def _fetch_rest(self, place: str, first: bytes, size: int) -> bytes:
        """Fetch the chunks that follow `first`."""
        data = bytearray(size)
        data[: len(first)] = first

        async def fetch_chunk(index: int) -> None:
            start = index * CHUNK_BYTES
            piece = await self._ask("GET", f"{place}/{index}", b"", CHUNK_BYTES)
            if len(piece) != min(CHUNK_BYTES, size - start):
                raise MessageError("wrong chunk length")
            data[start : start + len(piece)] = piece

        await _run_all(fetch_chunk, range(1 if first else 0, count_chunks(size)))
        return bytes(data)

    async def _send_chunks(self, place: str, data: bytes, missing: Sequence[tuple[int, int]]) -> None:
        async def send_chunk(index: int) -> None:
            await self._ask("PUT", f"{place}/{index}", data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES], 1024)

        total = count_chunks(len(data))
        await _run_all(send_chunk, [i for first, end in missing for i in range(min(first, total), min(end, total))])

    async def _ask(self, method: str, place: str, body: bytes, max_bytes: int, stamp: str = "") -> bytes:
        """Send one request. Retries at once if only the clock or a stale connection was the problem."""
        target = f"{_PREFIX}/{place}"
        for _ in range(3):
            headers = self._signer.sign_request(method, target, body)
            if stamp:
                headers.append(("Shoal-Work", stamp))
            try:
                answer = await self._link.ask(method, target, headers, body, max_bytes)
            except HttpClientError as error:
                if error.is_stale:
                    continue
                raise ReducerUnavailableError(str(error)) from error
            if not self._signer.check_answer(method, target, headers, answer).is_signed:
                raise ReducerUnavailableError("the reducer did not sign this answer to this request")
            if answer.status == 200:
                self._signer.note_success()
                return answer.body
            refusal = read_refusal(answer)
            if refusal.code == "clock" and self._signer.correct_clock(refusal):
                continue
            if not is_final(refusal):
                raise ReducerUnavailableError(refusal.text, refusal.code)
            raise RefusedError(refusal)
        raise ReducerUnavailableError("the reducer closed every connection")


async def _run_all(work: Callable[[int], Awaitable[None]], indexes: Sequence[int]) -> None:
    """Run all, a few at a time; the first failure cancels the others."""
    queue = iter(indexes)

    async def take_turns() -> None:
        for index in queue:
            await work(index)

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(IN_FLIGHT, len(indexes)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
