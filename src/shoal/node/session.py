"""A role's dealings with its coordinator: found, joined, and kept alive by a heartbeat while the role works.

    find the run -> join -> heartbeats, while the role works -> stop in order

    async with open_session(url, folder, role=Role.WORKER) as session:
        session.describe = lambda: State(version=3)      # what each heartbeat says
        await session.run(worker.run())                  # ends when the work does, or when the session cannot go on

Invariants:
- the first heartbeat was answered when a session is open: `answer` is always there, and no older than the last one;
- a coordinator that is away costs heartbeats, not the role: the session goes on when it is back. One that does not know
  us any more is joined again. A full disk does not end the heartbeats, which say so (`room`). What is final (a ban, a
  revocation, a fork) ends the role with its sentence;
- the first signal sets `stopping`, which the role looks at; the second ends the process.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar, cast

from shoal import __version__
from shoal.disk import is_full
from shoal.errors import AwayError, ConfigError
from shoal.files import write_atomic
from shoal.node.identity import Identity, load_identity
from shoal.node.pins import find_run
from shoal.node.spans import SpanLog
from shoal.node.stop import catch_signals
from shoal.node.tasks import run_together
from shoal.node.waits import Note, RoleWaits, WaitError
from shoal.swarm.asking import Asker, Patience, RefusedError, UnreachableError
from shoal.swarm.client import NodeClient
from shoal.swarm.delegation import Scope
from shoal.swarm.descriptor import Descriptor
from shoal.swarm.head import ForkError
from shoal.swarm.keepsakes import KeepError
from shoal.swarm.link import parse_place
from shoal.swarm.messages import Heartbeat, HeartbeatAnswer, MetricName, NodeWait, Progress
from shoal.swarm.params import RunParams
from shoal.swarm.stores import Stores

T = TypeVar("T")
PATIENCE = Patience(tries=5, first_s=0.5, longest_s=5.0)
"""of one call: about 10 s. Whoever must have an answer asks again (`RoleWaits.insist`)"""
JOIN_S, ASK_S = 600.0, 60.0
"""deadlines; joining takes work"""
MAX_TEXT, MAX_REASON = 80, 160
MAX_BEAT_S = 60
"""longest pause between two heartbeats, whatever the coordinator asks for"""
_REJOIN = frozenset({"unknown_node", "left", "delegation"})
"""codes of refusals that joining again may cure"""


class Role(StrEnum):
    """What a node does."""

    WORKER = "worker"
    VALIDATOR = "validator"
    TRAINER = "trainer"

    @property
    def scope(self) -> Scope:
        """What its owner allows it."""
        return {Role.WORKER: Scope.WORK, Role.VALIDATOR: Scope.VALIDATE, Role.TRAINER: Scope.TRAIN}[self]


class SessionError(Exception):
    """Why a role cannot go on with its coordinator, in a sentence; starting again does not help."""


def end_session(error: RefusedError | ForkError | KeepError) -> SessionError | AwayError:
    """What a role ends with. A proof that failed may have been altered on the way: the next start asks again."""
    is_doubt = isinstance(error, ForkError) and not error.fork.convicts
    return AwayError(str(error)) if is_doubt else SessionError(str(error))


@dataclass(frozen=True, slots=True)
class State:
    """What a role says of itself in a heartbeat, beside what it waits for."""

    version: int = -1
    """newest version it holds"""
    leases: tuple[Progress, ...] = ()
    metrics: dict[str, int] = field(default_factory=dict)
    """names of `MetricName`"""


class Session:
    """An open session; made by `open_session`."""

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
        note: Note,
    ) -> None:
        self.client, self.descriptor, self.identity = client, descriptor, identity
        self.waits, self.spans, self.note = waits, spans, note
        self._role, self._joined_path = role, folder / "joined"
        self.stopping = asyncio.Event()
        self.describe: Callable[[], State] = State
        """the role's state, asked for before each heartbeat"""
        self.heard: Callable[[HeartbeatAnswer], None] = lambda _: None
        """called with each answer"""
        self.problem = ""
        """what is wrong between us and the coordinator, in a sentence; empty if nothing is"""
        self._answer: HeartbeatAnswer | None = None
        self._params: RunParams | None = None
        self._beats = RoleWaits("heartbeat", note=note)  # of their own: nobody is kept waiting by a heartbeat
        self._beat_now = asyncio.Event()

    @property
    def answer(self) -> HeartbeatAnswer:
        """The newest answer to a heartbeat."""
        assert self._answer is not None, "a session is open once a heartbeat was answered"
        return self._answer

    @property
    def params(self) -> RunParams:
        """The run's parameters at the start of the session."""
        assert self._params is not None, "read when the session was opened"
        return self._params

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of the role's work, with heartbeats beside it and signals caught."""
        with catch_signals(self.stopping, self.note):
            return await self.keep(work)

    async def keep(self, work: Coroutine[Any, Any, T]) -> T:
        """The same, without a look at signals: they are the business of who has several sessions in one process."""
        return await run_together(work, self._keep_beating())

    def beat_soon(self) -> None:
        """Send a heartbeat now rather than when it is due: there is news on either side."""
        self._beat_now.set()

    async def open(self) -> None:
        """Join if need be, and hear the first answer; as long as it takes."""
        self._answer = await self.waits.insist("joining", self._beat, for_whom="the coordinator", timeout_s=JOIN_S)
        self._params = await self.waits.insist(
            "parameters", self.client.read_params, for_whom="the coordinator", timeout_s=ASK_S
        )

    async def leave(self) -> None:
        """Leave the run for now, if the coordinator hears it; the next session joins again."""
        self._joined_path.unlink(missing_ok=True)
        try:
            await self.waits.bound("leaving", self.client.leave(), for_whom="the coordinator", timeout_s=ASK_S)
        except (RefusedError, UnreachableError, WaitError) as error:
            self.note(f"left without saying so: {error}")

    async def _keep_beating(self) -> None:
        while True:
            pause_s = min(max(self.answer.next_s, 1), MAX_BEAT_S)
            await _sleep_until(self._beat_now, pause_s)
            try:
                self._answer = await self._beats.bound(
                    "heartbeat", self._beat(), for_whom="the coordinator", timeout_s=JOIN_S
                )
            except (UnreachableError, WaitError) as error:
                self.problem = f"the coordinator does not answer: {error}"
                self.note(self.problem)
                continue
            except OSError as error:
                if not is_full(error):
                    raise
                continue  # the coordinator has heard us, and only what it said could not be kept
            self.problem = ""
            self.heard(self.answer)

    async def _beat(self) -> HeartbeatAnswer:
        """One heartbeat; joins first where that was not done, and where the coordinator does not know us any more."""
        try:
            if not self._has_joined():
                await self._join()
            try:
                return await self._send_beat()
            except RefusedError as error:
                if error.refusal.code not in _REJOIN:
                    raise
            await self._join()
            return await self._send_beat()
        except (RefusedError, ForkError, KeepError) as error:
            raise end_session(error) from None

    async def _join(self) -> None:
        """Joining takes work, so it is remembered; a delegation that was renewed has to be shown."""
        await self.client.join(self.identity.delegation, software=f"shoal {__version__}")
        write_atomic(self._joined_path, self.identity.digest.encode())

    def _has_joined(self) -> bool:
        return self._joined_path.exists() and self._joined_path.read_text() == self.identity.digest

    def _send_beat(self) -> Awaitable[HeartbeatAnswer]:
        state = self.describe()
        metrics = cast("dict[MetricName, int]", state.metrics)
        beat = Heartbeat(
            role=self._role.value,
            wait=self._describe_wait(),
            version=state.version,
            leases=state.leases,
            metrics=metrics,
        )
        return self.client.send_heartbeat(beat)

    def _describe_wait(self) -> NodeWait | None:
        """The longest wait, in the coordinator's time."""
        wait, offset_ms = self.waits.longest(), self.client.clock_offset_ms
        if wait is None:
            return None
        return NodeWait(
            name=_shorten(wait.name),
            for_whom=_shorten(wait.for_whom),
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
    note: Note = lambda _: None,
    asker: Asker | None = None,
    coordinator: str | None = None,
    authority: Path | None = None,
) -> AsyncIterator[Session]:
    """A session with the coordinator at an address, or of the descriptor in a file, for the node in `folder`.

    `coordinator` is the public key that it must have, `authority` a file of certificates to trust.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be used for a node ({error.strerror})") from None
    spans = SpanLog(folder / "spans.jsonl", role.value)
    try:
        waits = RoleWaits(role.value, spans=spans, note=note)
        descriptor, url = await find_run(source, folder, waits, coordinator=coordinator, authority=authority)
        identity = load_identity(folder, descriptor.run, role.scope, owner=owner)
        place = parse_place(url, authority)
        client = NodeClient(
            place,
            identity.key,
            run=descriptor.run,
            coordinator=descriptor.coordinator,
            folder=folder,
            asker=asker or Asker(PATIENCE),
            stores=Stores(descriptor.stores, place, note=note),
        )
        try:
            session = Session(
                client, descriptor, identity, role=role, folder=folder, waits=waits, spans=spans, note=note
            )
            await session.open()
            yield session
        finally:
            client.close()
    finally:
        spans.close()


def _shorten(text: str, most: int = MAX_TEXT) -> str:
    """As a message takes it: a heartbeat is not lost over a name."""
    return "".join(char if " " <= char <= "~" else "?" for char in text)[:most]


async def _sleep_until(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
