"""The session of a role with its coordinator: find the run, join it, and send heartbeats while the role works.

    find the run -> join -> heartbeats while the role works -> orderly stop

    async with open_session(url, folder, role=Role.WORKER) as session:
        session.read_state = lambda: RoleState(version=3)    # what each heartbeat reports
        await session.run(worker.run())                  # ends when the work does, or when the session fails

Invariants:
- a session is open once its first heartbeat was answered, so `answer` is always set, and is the latest one;
- an unreachable coordinator costs heartbeats, not the role: the session continues when it is back. If the coordinator
  no longer knows the node, the node joins again. Heartbeats continue when the disk is full, and report it (`room`). A
  final condition (a ban, a revocation, a fork) ends the role with its message;
- a node that learned that its run is finished, from a signed answer or from the publisher's last version, remembers it:
  started again, it ends if the coordinator does not answer, instead of waiting for one that may be gone;
- the first signal sets `stopping`, which the role checks; the second ends the process.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from shoal import __version__
from shoal.errors import ConfigError, DiskError, UnavailableError, UnreachableError
from shoal.identity.delegation import Scope
from shoal.identity.keys import Key
from shoal.ledger.head import ForkError
from shoal.net.client import parse_endpoint
from shoal.net.retry import RefusedError, RetryingClient, RetryPolicy
from shoal.node.client import NodeClient
from shoal.node.disk_full import describe_full
from shoal.node.identity import Identity, load_identity
from shoal.node.known_run import find_run
from shoal.node.receipts import InvalidDocumentError
from shoal.node.transfer import BlobStores
from shoal.protocol.descriptor import Descriptor
from shoal.protocol.messages import (
    MAX_TOKENS_PER_S,
    Heartbeat,
    HeartbeatAnswer,
    LeaseProgress,
    NodeWait,
    RejectionNotice,
)
from shoal.protocol.params import RunParams
from shoal.util.aio import catch_signals, run_together
from shoal.util.disk import guard_disk
from shoal.util.files import LOCK_NAME, write_atomic
from shoal.util.spans import SpanLog
from shoal.util.waits import RoleWaits, Wait, WaitError

logger = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_POLICY = RetryPolicy(tries=5, first_s=0.5, longest_s=5.0)
"""of one call: about 10 s. Callers that need an answer ask again (`RoleWaits.retry_forever`)"""
JOIN_S, ASK_S = 600.0, 60.0
"""deadlines; joining includes a proof of work"""
SILENCE_S = 10.0
"""after which a heartbeat without an answer is shown as a problem; the request itself waits longer"""
MAX_TEXT, MAX_REASON = 80, 160
MAX_HEARTBEAT_S = 60
"""longest pause between two heartbeats, whatever the coordinator asks for"""
_JOINING = "joining"
_REJOIN = frozenset({"unknown_node", "left", "delegation"})
"""codes of refusals that joining again may resolve"""


class Role(StrEnum):
    """What a node does in a run."""

    WORKER = "worker"
    VALIDATOR = "validator"
    TRAINER = "trainer"

    @property
    def scope(self) -> Scope:
        """The scope that its owner must delegate."""
        return {Role.WORKER: Scope.WORK, Role.VALIDATOR: Scope.VALIDATE, Role.TRAINER: Scope.TRAIN}[self]


class SessionError(Exception):
    """Why a role cannot continue with its coordinator; restarting does not help."""

    def __init__(self, text: str, code: str = "") -> None:
        super().__init__(text)
        self.code = code
        """of the refusal, if it was one"""


class FinishedError(Exception):
    """The run is finished, and its coordinator does not answer any more: nothing is left to do."""


def end_session(error: RefusedError | ForkError | InvalidDocumentError) -> SessionError | UnavailableError:
    """The error a role ends with. A failed proof may have been altered in transit: the next start asks again."""
    is_doubt = isinstance(error, ForkError) and not error.fork.convicts
    if is_doubt:
        return UnavailableError(str(error))
    return SessionError(str(error), error.refusal.code if isinstance(error, RefusedError) else "")


@dataclass(frozen=True, slots=True)
class RoleState:
    """What a role reports in a heartbeat, besides what it waits for."""

    version: int = -1
    """newest version on this machine"""
    leases: tuple[LeaseProgress, ...] = ()
    tokens_per_s: int = 0
    """generated or replayed"""


class Session:
    """An open session; created by `open_session`."""

    def __init__(
        self,
        client: NodeClient,
        descriptor: Descriptor,
        identity: Identity,
        *,
        role: Role,
        folder: Path,
        waits: RoleWaits,
        spans: SpanLog,
        authority: Path | None = None,
    ) -> None:
        self.authority = authority
        self.client, self.descriptor, self.identity = client, descriptor, identity
        self.waits, self.spans = waits, spans
        self._role, self._joined_path, self._finished_path = role, folder / "joined", folder / "finished"
        self.stopping = asyncio.Event()
        self.read_state: Callable[[], RoleState] = RoleState
        """the role's state, read before each heartbeat"""
        self.on_heartbeat: Callable[[HeartbeatAnswer], None] = lambda _: None
        """called with each answer"""
        self._is_open = False
        """whether a heartbeat was answered"""
        self._problem = ""
        self._full: Wait | None = None
        """since answers cannot be stored"""
        self._asked_s = 0.0
        """when the heartbeat without an answer was sent; 0: there is none"""
        self.answer: HeartbeatAnswer
        """the latest heartbeat answer; set once the session is open, as are the parameters"""
        self.params: RunParams
        """the run's parameters at the start of the session"""
        self._heartbeat_waits = RoleWaits("heartbeat")  # separate: a heartbeat blocks no work
        self._is_due = asyncio.Event()

    @property
    def problem(self) -> str:
        """Problem with the coordinator, in one sentence; empty if there is none."""
        silent_s = time.monotonic() - self._asked_s if self._asked_s else 0.0
        if silent_s > SILENCE_S:
            return f"the coordinator does not answer: no response for {silent_s:.0f} s"
        return self._problem

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run the role's work with concurrent heartbeats and signal handling; returns its result."""
        with catch_signals(self.stopping):
            return await self.keep(work)

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """The same without signal handling, for callers with several sessions in one process."""
        return await run_together(work, self._send_heartbeats())

    def heartbeat_now(self) -> None:
        """Send a heartbeat now instead of when it is due: one side has news."""
        self._is_due.set()

    async def open(self) -> None:
        """Join if needed and wait for the first answer, however long that takes."""
        self.answer = await self.waits.retry_forever(
            _JOINING, self._heartbeat, waiting_for="the coordinator", timeout_s=JOIN_S
        )
        self._is_open = True
        self.params = await self.ask_coordinator("parameters", self.client.read_params)
        node, owner = self.identity.key.public, self.identity.owner
        logger.info(f"joined run {self.descriptor.run} as node {node} of owner {owner}")
        self._report_rejections(())

    def note_finished(self) -> None:
        """Remember that the run needs no more work."""
        if not self._finished_path.exists():
            write_atomic(self._finished_path, b"")

    async def ask_coordinator(
        self, name: str, call: Callable[[], Awaitable[T]], *, timeout_s: float = ASK_S, reported: bool = True
    ) -> T:
        """The coordinator's answer; retries until there is one (`RoleWaits.retry_forever`).

        Raises `RefusedError` for a final refusal. A fork or a forged document ends the session.
        """
        try:
            return await self.waits.retry_forever(
                name, call, waiting_for="the coordinator", timeout_s=timeout_s, reported=reported
            )
        except (ForkError, InvalidDocumentError) as error:
            raise end_session(error) from None

    async def leave(self) -> bool:
        """Leave the run, which returns its leases; False if the coordinator could not be reached.

        The next session joins again."""
        self._joined_path.unlink(missing_ok=True)
        try:
            await self.waits.with_timeout(
                "leaving", self.client.leave(), waiting_for="the coordinator", timeout_s=ASK_S
            )
        except (RefusedError, UnreachableError, WaitError) as error:
            logger.warning(f"left the run without notifying the coordinator: {error}")
            return False
        return True

    async def _send_heartbeats(self) -> None:
        while True:
            pause_s = min(max(self.answer.next_s, 1), MAX_HEARTBEAT_S)
            await _sleep_until(self._is_due, pause_s)
            known = self.answer.rejected
            try:
                with guard_disk(self._joined_path.parent):
                    self.answer = await self._heartbeat_waits.with_timeout(
                        "heartbeat", self._heartbeat(), waiting_for="the coordinator", timeout_s=JOIN_S
                    )
            except (UnreachableError, WaitError) as error:
                self._problem = f"the coordinator does not answer: {error}"
                self.waits.report_failure("heartbeat", error, self._problem)
                continue
            except DiskError as error:
                if not error.is_full:
                    raise
                # The coordinator got the heartbeat; its answer could not be stored. The next ones say so: work that
                # waits for what an answer brings writes nothing, and would never find the disk full itself.
                self._full = self._full or describe_full(self._role.value, error)
                continue
            self._problem, self._full = "", None
            self.waits.note_success("heartbeat")
            self._report_rejections(known)
            self.on_heartbeat(self.answer)

    def _report_rejections(self, known: tuple[RejectionNotice, ...]) -> None:
        """Log which submissions were rejected, and how to see why."""
        for notice in self.answer.rejected:
            if notice not in known:
                look = f"shoal explain {self.client.url} {notice.submission}"
                logger.warning(f"{notice.submission} was rejected ({notice.state}, {notice.because}): {look}")

    async def _heartbeat(self) -> HeartbeatAnswer:
        """Send one heartbeat; join first if not joined yet or no longer known to the coordinator."""
        try:
            if not self._has_joined():
                await self._join()
            try:
                return await self._send_heartbeat()
            except RefusedError as error:
                if error.refusal.code not in _REJOIN:
                    raise
            await self._join()
            return await self._send_heartbeat()
        except UnreachableError as error:
            raise error if self._is_open else self._explain_silence(error) from None
        except (RefusedError, ForkError, InvalidDocumentError) as error:
            raise end_session(error) from None

    def _explain_silence(self, error: UnreachableError) -> Exception:
        """What the silence of the coordinator means for a node that starts."""
        if self._finished_path.exists():
            text = f"run {self.descriptor.run} is finished, and its coordinator does not answer any more"
            return FinishedError(f"{text}: {error}")
        if self._has_joined():  # nothing here tells an outage from the end of a run that the node did not see
            return UnreachableError(f"{error}; if it stays away, ask the operator whether the run is over")
        return error

    async def _join(self) -> None:
        """Joining takes work, so it is recorded on disk; a renewed delegation must be presented again."""
        await self.client.join(self.identity.delegation, software=f"shoal {__version__}")
        write_atomic(self._joined_path, self.identity.digest.encode())

    async def join_again(self) -> None:
        """Do the proof of work again, as the coordinator asks of owners whose work was rejected repeatedly."""
        await self.ask_coordinator("joining again", self._join, timeout_s=JOIN_S)

    def _has_joined(self) -> bool:
        return self._joined_path.exists() and self._joined_path.read_text() == self.identity.digest

    async def _send_heartbeat(self) -> HeartbeatAnswer:
        state = self.read_state()
        beat = Heartbeat(
            role=self._role.value,
            wait=self._describe_wait(),
            version=state.version,
            leases=state.leases,
            tokens_per_s=min(state.tokens_per_s, MAX_TOKENS_PER_S),
        )
        self._asked_s = time.monotonic()
        try:
            answer = await self.client.send_heartbeat(beat)
        finally:
            self._asked_s = 0.0
        if answer.finished:
            self.note_finished()
        return answer

    def _describe_wait(self) -> NodeWait | None:
        """The longest current wait, in coordinator time."""
        wait, offset_ms = self._full or self.waits.longest(), self.client.clock_offset_ms
        if wait is None or wait.name == _JOINING:
            return None  # a node that sends a heartbeat has joined
        return NodeWait(
            name=_shorten(wait.name),
            for_whom=_shorten(wait.waiting_for),
            since_ms=max(0, wait.since_ms + offset_ms),
            deadline_ms=max(0, wait.deadline_ms + offset_ms),
            reason=_shorten(wait.detail, MAX_REASON),
        )


@asynccontextmanager
async def open_session(
    source: str,
    folder: Path,
    *,
    role: Role,
    owner: Path | None = None,
    asker: RetryingClient | None = None,
    coordinator: str | None = None,
    authority: Path | None = None,
) -> AsyncIterator[Session]:
    """A session with the coordinator at an address or of a descriptor file, for the node in `folder`.

    `coordinator` is the expected public key, `authority` a file of certificates to trust.
    """
    with _open_folder(folder) as ready, closing(SpanLog(folder / "spans.jsonl", role.value)) as spans:
        if owner is not None:
            Key.load(owner)  # a wrong path is reported now, not when the coordinator answers
        waits = RoleWaits(role.value, spans=spans)
        descriptor, url = await find_run(source, folder, waits, coordinator=coordinator, authority=authority)
        identity = load_identity(folder, descriptor.run, role.scope, owner=owner)
        place = parse_endpoint(url, authority)
        client = NodeClient(
            place,
            identity.key,
            run=descriptor.run,
            coordinator=descriptor.coordinator,
            folder=folder,
            asker=asker or RetryingClient(RETRY_POLICY),
            stores=BlobStores(descriptor.stores, place),
        )
        with closing(client):
            session = Session(
                client, descriptor, identity, role=role, folder=folder, waits=waits, spans=spans, authority=authority
            )
            await session.open()
            ready()
            yield session


@contextmanager
def _open_folder(folder: Path) -> Iterator[Callable[[], None]]:
    """A node's folder. A new one is removed if the block fails before it calls the function: nobody joined with it.

    So is one without a key if the block is cancelled. With a key the node may have joined already.
    """
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    is_disposable = not names - {LOCK_NAME}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used as a node folder ({error.strerror})") from None

    def keep() -> None:
        nonlocal is_disposable
        is_disposable = False

    try:
        yield keep
    except (ConfigError, UnavailableError, SessionError, asyncio.CancelledError) as error:
        if is_disposable and not (isinstance(error, asyncio.CancelledError) and (folder / "node.key").exists()):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _shorten(text: str, most: int = MAX_TEXT) -> str:
    """Shorten to the limit of a message: a long name must not lose the heartbeat."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:most]


async def _sleep_until(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    event.clear()
