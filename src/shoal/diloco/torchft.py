"""The engine on torchft's managed process groups, for sites that can reach and trust each other (extra `torchft`).

    quorum (lighthouse) -> healed if behind -> every peer's update to every peer (all-gather) -> commit or roll back

torchft tracks membership, rebuilds the process group when it changes, gives a new peer the state of another, and lets a
round count only if all of its peers completed it. torchft does not compute the mean: whole updates are exchanged, in
the run's codec, and every peer closes the round by itself with the same pure function as a reducer. So the guard
against bad updates, the named peers and the common hash apply here too. The traffic of a peer grows with the number of
peers; this engine is for a few sites with good connections.

Invariants:
- a round that did not commit has no effect: the update is kept, and goes into the next quorum;
- the aggregate's residual is not kept: a healed peer would not have it, and all must compute the same bits.
"""

import concurrent.futures
import importlib.util
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from shoal.diloco.http.messages import MessageError, UpdateOffer, count_payload, make_offer, read_message, read_update
from shoal.diloco.outer import DilocoPlan
from shoal.diloco.reduce import FinishedRound, close_round
from shoal.diloco.round import (
    AveragerUnavailableError,
    RefusedUpdateError,
    RoundKey,
    RoundOutcome,
    StaleRoundError,
    Update,
)
from shoal.diloco.state import OuterState, decode_state, encode_state
from shoal.errors import ConfigError

C10D: Any = distributed
"""its names are not declared as exported"""
HEAD_BYTES = 1 << 16
_NAME_BYTES = 64
_LENGTH_BYTES = 4


def explain_lack() -> str:
    """Why this engine cannot be used here; empty if it can."""
    if importlib.util.find_spec("torchft") is None:
        return "torchft is not installed; in a checkout, pip install '.[torchft]'"
    return ""


class TorchftAverager:
    """One peer's connection to the others through a lighthouse."""

    def __init__(
        self,
        plan: DilocoPlan,
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
            raise ConfigError(f"invalid peer name {peer[:80]!r}: expected 1 to {_NAME_BYTES} ASCII characters")
        self.plan, self.peer = plan, peer
        self._state, self._timeout_s = state, timeout_s
        self._rounds: dict[RoundKey, concurrent.futures.Future[RoundOutcome]] = {}
        self._is_closed = False
        self._group, self._manager, self._store = self._open_manager(lighthouse, min_peers, hostname)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "diloco-torchft")

    def submit(self, update: Update) -> None:
        """See `Averager.submit`."""
        if update.key != self.plan.name_round(self._state, update.key.fragment):
            raise StaleRoundError(update.key, "already closed, or starts from a different state")
        if update.key not in self._rounds:
            self._rounds[update.key] = self._thread.submit(self._persist, update)

    def collect(self, key: RoundKey, timeout_s: float) -> RoundOutcome | None:
        """See `Averager.collect`."""
        if not concurrent.futures.wait([self._rounds[key]], timeout_s).done:
            return None
        try:
            return self._rounds.pop(key).result()
        except TimeoutError:
            raise AveragerUnavailableError("timed out waiting for a quorum from the lighthouse") from None

    def fetch_state(self, timeout_s: float) -> OuterState:
        """The newest state that this peer has seen; a peer that is behind is healed in its next round."""
        return self._state

    def close(self) -> None:
        """See `Averager.close`."""
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

    def _persist(self, update: Update) -> RoundOutcome:
        """Join quorums until one commits."""
        while not self._is_closed:
            try:
                self._manager.start_quorum()
            except (TimeoutError, RuntimeError) as error:
                raise AveragerUnavailableError(f"no quorum: {error}") from error
            frames = self._gather_frames(update)
            if self._manager.should_commit():
                return self._close_round(update, frames)
        raise AveragerUnavailableError("closed")

    def _gather_frames(self, update: Update) -> list[bytes]:
        """Gather every peer's frame. Errors are reported to the manager, which then prevents the commit."""
        frame = torch.frombuffer(bytearray(self._frame_update(update)), dtype=torch.uint8)
        found = [torch.empty_like(frame) for _ in range(self._group.size())]
        try:
            work = self._group.allgather([found], [frame], C10D.distributed_c10d.AllgatherOptions())
            work.wait(timedelta(seconds=self._timeout_s))
        except (RuntimeError, TimeoutError) as error:
            self._manager.report_error(error)
            return []
        return [part.numpy().tobytes() for part in found]

    def _close_round(self, update: Update, frames: list[bytes]) -> RoundOutcome:
        fragment = update.key.fragment
        key = self.plan.name_round(self._state, fragment)
        updates = [found for frame in frames if (found := self._read_frame(frame)) is not None]
        names = [found.peer for found in updates]
        closed = close_round(self.plan, self._state, key, updates, members=names)
        if not isinstance(closed, FinishedRound):
            raise RefusedUpdateError(update.key, "no update of this round could be used")
        self._state = closed.state
        for refusal in closed.aggregate.refused:
            if refusal.peer == self.peer and key == update.key:
                raise RefusedUpdateError(key, refusal.reason)
        if key != update.key:
            raise StaleRoundError(update.key, "the other peers are ahead; their state was adopted")
        return closed.outcome

    def _frame_update(self, update: Update) -> bytes:
        head = make_offer(update).model_dump_json().encode()
        assert len(head) <= HEAD_BYTES, "bounded by its fields"
        name = update.peer.encode("ascii").ljust(_NAME_BYTES)
        return name + len(head).to_bytes(_LENGTH_BYTES, "little") + head.ljust(HEAD_BYTES) + update.payload

    def _read_frame(self, frame: bytes) -> Update | None:
        """The update in a frame; None if it does not fit this plan, for example if it is of another fragment."""
        start = _NAME_BYTES + _LENGTH_BYTES
        length = int.from_bytes(frame[_NAME_BYTES:start], "little")
        try:
            offer = read_message(frame[start : start + min(length, HEAD_BYTES)], UpdateOffer)
            name = frame[:_NAME_BYTES].decode("ascii").strip()
        except (MessageError, UnicodeDecodeError):
            return None
        payload = frame[start + HEAD_BYTES :]
        if offer.fragment >= len(self.plan.sizes) or len(payload) != count_payload(self.plan, offer.fragment):
            return None
        return read_update(offer, name, payload)
