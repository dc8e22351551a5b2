"""The engine on torchft's managed process groups, for sites that reach and trust each other (extra `torchft`).

    quorum (lighthouse) -> healed if behind -> every peer's update to every peer (all-gather) -> commit or roll back

torchft says who is there, rebuilds the process group when that changes, gives a newcomer the state of another peer, and
lets a round count only if all of its peers got through it. The mean is not torchft's: whole updates go around, in the
run's codec, and every peer closes the round by itself with the same pure function as a reducer, so the guard against
bad updates, the named peers and the one hash for all hold here too. Traffic of a peer grows with the number of peers;
this is for a few sites with good lines.

Invariants:
- a round that did not commit left nothing: the update is kept, and goes into the next quorum;
- no residual of the aggregate is kept: a healed peer would not have it, and all must compute the same bits.
"""

import concurrent.futures
import importlib.util
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from shoal.diloco.averager import AveragerAwayError, RefusedUpdateError, StaleRoundError
from shoal.diloco.http.messages import Offer, TalkError, count_payload, make_offer, read_message, read_update
from shoal.diloco.plan import Plan
from shoal.diloco.reduce import Closed, close_round
from shoal.diloco.round import Outcome, RoundKey, Update
from shoal.diloco.state import OuterState, decode_state, encode_state
from shoal.errors import ConfigError

C10D: Any = distributed
"""whose names are not declared as exported"""
HEAD_BYTES = 1 << 16
_NAME_BYTES = 64
_LENGTH_BYTES = 4


def explain_lack() -> str:
    """Why this engine cannot be used here; empty: it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed; pip install 'shoal[torchft]'"
    return ""


class TorchftAverager:
    """One peer's way to the others through a lighthouse."""

    def __init__(
        self,
        plan: Plan,
        peer: str,
        state: OuterState,
        *,
        lighthouse: str,
        min_peers: int = 1,
        timeout_s: float = 60.0,
        hostname: str = "127.0.0.1",
    ) -> None:
        if reason := explain_lack():
            raise ConfigError(f"engine torchft: {reason}")
        if not peer.isascii() or not 0 < len(peer) <= _NAME_BYTES:
            raise ConfigError(f"{peer[:80]!r}: a peer's name is 1 to {_NAME_BYTES} ASCII characters")
        self.plan, self.peer = plan, peer
        self._state, self._timeout_s = state, timeout_s
        self._rounds: dict[RoundKey, concurrent.futures.Future[Outcome]] = {}
        self._is_closed = False
        self._group, self._manager, self._store = self._open_manager(lighthouse, min_peers, hostname)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "diloco-torchft")

    def submit(self, update: Update) -> None:
        """As `Averager.submit`."""
        if update.key != self.plan.name_round(self._state, update.key.fragment):
            raise StaleRoundError(update.key, "it is over, or starts from another state")
        if update.key not in self._rounds:
            self._rounds[update.key] = self._thread.submit(self._persist, update)

    def collect(self, key: RoundKey, timeout_s: float) -> Outcome | None:
        """As `Averager.collect`."""
        future = self._rounds[key]
        try:
            outcome = future.result(timeout_s)
        except TimeoutError:
            if not future.done():
                return None
            del self._rounds[key]
            raise AveragerAwayError("the lighthouse gave no quorum in time") from None
        except (StaleRoundError, RefusedUpdateError, AveragerAwayError):
            del self._rounds[key]
            raise
        del self._rounds[key]
        return outcome

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The newest state that this peer has seen; one that is behind is healed in its next round."""
        return self._state

    def close(self) -> None:
        """As `Averager.close`."""
        self._is_closed = True
        self._manager.shutdown(wait=False)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open_manager(self, lighthouse: str, min_peers: int, hostname: str) -> tuple[Any, Any, Any]:
        from torchft import Manager, ProcessGroupGloo

        limit = timedelta(seconds=self._timeout_s)
        store: Any = C10D.TCPStore(hostname, 0, is_master=True, wait_for_workers=False)
        group: Any = ProcessGroupGloo(timeout=limit)
        manager: Any = Manager(
            pg=group,
            load_state_dict=self._load_healed,
            state_dict=self._dump_state,
            min_replica_size=min_peers,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            rank=0,
            world_size=1,
            store_addr=hostname,
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id=self.peer,
            hostname=hostname,
        )
        return group, manager, store

    def _dump_state(self) -> dict[str, torch.Tensor]:
        return {"state": torch.frombuffer(bytearray(encode_state(self._state)), dtype=torch.uint8)}

    def _load_healed(self, found: dict[str, torch.Tensor]) -> None:
        self._state = decode_state(found["state"].numpy().tobytes(), self.plan.sizes)

    def _persist(self, update: Update) -> Outcome:
        """Go into quorums until one commits."""
        while not self._is_closed:
            try:
                self._manager.start_quorum()
            except (TimeoutError, RuntimeError) as error:
                raise AveragerAwayError(f"no quorum: {error}") from error
            frames = self._gather_frames(update)
            if self._manager.should_commit():
                return self._close_round(update, frames)
        raise AveragerAwayError("closed")

    def _gather_frames(self, update: Update) -> list[bytes]:
        """Every peer's frame; what goes wrong is told to the manager, which then lets nobody commit."""
        frame = torch.frombuffer(bytearray(self._frame_update(update)), dtype=torch.uint8)
        found = [torch.empty_like(frame) for _ in range(self._group.size())]
        try:
            work = self._group.allgather([found], [frame], C10D.distributed_c10d.AllgatherOptions())
            work.wait(timedelta(seconds=self._timeout_s))
        except (RuntimeError, TimeoutError) as error:
            self._manager.report_error(error)
            return []
        return [part.numpy().tobytes() for part in found]

    def _close_round(self, update: Update, frames: list[bytes]) -> Outcome:
        fragment = update.key.fragment
        key = self.plan.name_round(self._state, fragment)
        updates = [found for frame in frames if (found := self._read_frame(frame)) is not None]
        names = [found.peer for found in updates]
        closed = close_round(self.plan, self._state, key, updates, members=names)
        if not isinstance(closed, Closed):
            raise RefusedUpdateError(update.key, "no update of this round could be used")
        self._state = closed.state
        for refusal in closed.aggregate.refused:
            if refusal.peer == self.peer and key == update.key:
                raise RefusedUpdateError(key, refusal.reason)
        if key != update.key:
            raise StaleRoundError(update.key, "the others are further; the state was taken from them")
        return closed.outcome

    def _frame_update(self, update: Update) -> bytes:
        head = make_offer(update).model_dump_json().encode()
        assert len(head) <= HEAD_BYTES, "bounded by its fields"
        name = update.peer.encode("ascii").ljust(_NAME_BYTES)
        return name + len(head).to_bytes(_LENGTH_BYTES, "little") + head.ljust(HEAD_BYTES) + update.payload

    def _read_frame(self, frame: bytes) -> Update | None:
        """The update in a frame; None if it is none of this plan, as with a peer of another fragment's turn."""
        start = _NAME_BYTES + _LENGTH_BYTES
        length = int.from_bytes(frame[_NAME_BYTES:start], "little")
        try:
            offer = read_message(frame[start : start + min(length, HEAD_BYTES)], Offer)
            name = frame[:_NAME_BYTES].decode("ascii").strip()
        except (TalkError, UnicodeDecodeError):
            return None
        payload = frame[start + HEAD_BYTES :]
        if offer.fragment >= len(self.plan.sizes) or len(payload) != count_payload(self.plan, offer.fragment):
            return None
        return read_update(offer, name, payload)
