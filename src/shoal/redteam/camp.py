"""What a scripted attacker has against a running coordinator: identities, honest work, raw requests, a budget.

    async with open_camp(url, folder) as camp:
        await run_script(camp, "late")                 # `attack(camp)` of shoal.redteam.attacks.late
    camp.owners, camp.evidence                         # whom to look up in the ledger, and what was answered

Invariants:
- it attacks a coordinator of this machine alone, unless the caller says in so many words that it may go elsewhere;
- whatever is sent to the coordinator is counted before it is sent, and never more than the budget says;
- all keys that it ever acts with belong to `owners`, or to the honest witness, which is in none of the attack's games;
- keys live in memory and clients are closed at the end: nothing can go on after the camp.

This module imports no torch; the engine is loaded when the first work is asked for.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError
from shoal.keys import Key
from shoal.node.identity import DAY_MS, MAX_LEASES, Identity
from shoal.node.pins import find_run
from shoal.node.recipe import fetch_recipe
from shoal.node.session import Role, Session
from shoal.node.spans import SpanLog
from shoal.node.waits import Note, RoleWaits
from shoal.recipe import Recipe
from shoal.redteam.budget import Budget, BudgetError, Purse
from shoal.redteam.evidence import Evidence
from shoal.redteam.raw import build_request, pour_raw, send_raw
from shoal.redteam.registry import load_attack
from shoal.redteam.witness import Witness
from shoal.swarm.asking import Asker, Patience, RefusedError
from shoal.swarm.client import MAX_WORK, NodeClient
from shoal.swarm.client_auth import Headers, RequestSigner
from shoal.swarm.clock import read_clock
from shoal.swarm.delegation import Grant, Scope, sign_delegation
from shoal.swarm.descriptor import Descriptor
from shoal.swarm.hosts import is_loopback
from shoal.swarm.intake import Intake
from shoal.swarm.link import Answer, Link, Place, parse_place
from shoal.swarm.messages import CommitAnswer, Lease, LeaseAnswer, ReceiptAnswer
from shoal.swarm.params import RunParams
from shoal.swarm.work import read_challenge
from shoal.worker.intake import WorkLimits, take_order

if TYPE_CHECKING:
    from shoal.redteam.workshop import Workshop
    from shoal.worker.outbox import Parcel

PATIENCE = Patience(tries=6, first_s=0.2, longest_s=5.0)
SOFTWARE = "shoal redteam"
LOOK_S = 1.0
"""between two looks whether there is a lease"""
OVERTAKEN = ("superseded", "lease_ended")
"""codes by which work is refused that others did meanwhile; nobody is blamed for it"""
ANNOUNCED_S, ANNOUNCED_TRIES = 0.5, 20
"""between two commits of a version that was broadcast and is not yet announced"""


@dataclass(frozen=True, slots=True)
class Recruit:
    """One identity of the attacker: a node, its owner, and the owner's word for it."""

    owner: Key
    key: Key
    delegation: bytes
    client: NodeClient
    folder: Path


class CountingClient(NodeClient):
    """A client that counts what it is asked to do for joining."""

    def __init__(self, *args: Any, evidence: Evidence, **options: Any) -> None:
        super().__init__(*args, **options)
        self._evidence = evidence

    async def read_challenge(self, node: str) -> str:
        """As `NodeClient.read_challenge`."""
        text = await super().read_challenge(node)
        self._evidence.count("join_hashes", read_challenge(text, node, MAX_WORK).work)
        self._evidence.count("joins")
        return text


class CountingLink(Link):
    """A link whose requests are counted, and not sent if there are too many."""

    def __init__(self, place: Place, purse: Purse) -> None:
        super().__init__(place)
        self._purse = purse

    async def ask(self, method: str, target: str, headers: Headers, body: bytes, max_bytes: int) -> Answer:
        """As `Link.ask`."""
        self._purse.spend_request()
        return await super().ask(method, target, headers, body, max_bytes)

    async def send_file(
        self, target: str, headers: Headers, path: Path, max_bytes: int, *, waits: bool = True
    ) -> Answer:
        """As `Link.send_file`."""
        self._purse.spend_request()
        return await super().send_file(target, headers, path, max_bytes, waits=waits)

    async def fetch(self, target: str, headers: Headers, intake: Intake, max_bytes: int) -> Answer:
        """As `Link.fetch`."""
        self._purse.spend_request()
        return await super().fetch(target, headers, intake, max_bytes)


class Camp:
    """The attacker's means; made by `open_camp`."""

    def __init__(
        self, place: Place, descriptor: Descriptor, folder: Path, budget: Budget, stack: AsyncExitStack, note: Note
    ) -> None:
        self.place, self.descriptor, self.folder = place, descriptor, folder
        self.purse, self.evidence = Purse(budget), Evidence()
        self.owners: list[str] = []
        """public keys of all owners that it acted for; what they earned is in the ledger"""
        self.params = RunParams()
        self._recipe: Recipe | None = None
        self._stack, self._tell = stack, note
        self._shop: Workshop | None = None
        self._shop_lock = asyncio.Lock()
        self._honest: Recruit | None = None
        # Not a member: for what everybody may ask, and to bring recipe and weights.
        self._scout = self._make(Key.generate())
        self._session = self._open_session(self._scout)

    @property
    def run(self) -> str:
        """The name of the run."""
        return self.descriptor.run

    @property
    def recipe(self) -> Recipe:
        """How the run's rollouts are made; ConfigError for a run without a recipe."""
        if self._recipe is None:
            raise ConfigError(f"run {self.run}: its descriptor names no recipe")
        return self._recipe

    @property
    def left_s(self) -> float:
        """Seconds that the attack may still take."""
        return self.purse.left_s

    # Identities

    def make_recruit(self, owner: Key | None = None, **terms: Any) -> Recruit:
        """An identity that has not joined: of a new owner, or one more of an owner. `terms` change the delegation."""
        owner = owner or Key.generate()
        if owner.public not in self.owners:
            self.owners.append(owner.public)
        return self._make(owner, **terms)

    async def join(self, owner: Key | None = None) -> Recruit:
        """An identity that did the work of joining, and has joined."""
        recruit = self.make_recruit(owner)
        await recruit.client.join(recruit.delegation, SOFTWARE)
        return recruit

    def sign_delegation(self, owner: Key, node: str, /, **terms: Any) -> bytes:
        """An owner's word for a node, for a day."""
        now_ms = read_clock()
        grant = Grant(node, self.run, now_ms - DAY_MS, now_ms + DAY_MS, frozenset({Scope.WORK}), MAX_LEASES)
        return sign_delegation(owner, replace(grant, **terms))

    # Work

    async def ask_lease(self, recruit: Recruit, key: str | None = None) -> LeaseAnswer:
        """Ask for work, and count what came of it."""
        answer = await recruit.client.ask_lease(key)
        self.evidence.count("leases" if answer.lease is not None else f"no_lease_{answer.code}")
        return answer

    async def take_lease(self, recruit: Recruit, key: str | None = None) -> Lease | None:
        """The next lease, waited for while there is time; None if none will come."""
        while self.left_s:
            answer = await self.ask_lease(recruit, key)
            if answer.lease is not None or answer.code == "finished":
                return answer.lease
            if answer.retry_after_s >= self.left_s:
                return None
            await self.sleep(min(answer.retry_after_s, LOOK_S))
        return None

    async def write_work(self, recruit: Recruit, lease: Lease) -> "Parcel":
        """Honest work for a lease, written down in the recruit's folder."""
        from shoal.worker.outbox import Outbox

        shop = await self._open_shop()
        work = await shop.write(take_order(lease, self.recipe, WorkLimits()))
        return await asyncio.to_thread(Outbox(recruit.folder).pack, work, lease.fence)

    async def commit(self, recruit: Recruit, parcel: "Parcel") -> CommitAnswer | None:
        """Commit to work; None if it is not wanted any more, as may happen to anybody."""
        for _ in range(ANNOUNCED_TRIES):
            try:
                return await recruit.client.commit(parcel.manifest)
            except RefusedError as error:
                if error.refusal.code in OVERTAKEN:
                    self.note(f"{parcel.manifest.lease}: {error}")
                    return None
                # Weights travel beside the announcement, and may be faster.
                if error.refusal.code != "version":
                    raise
            await asyncio.sleep(ANNOUNCED_S)
        raise ConfigError(f"run {self.run}: v{parcel.manifest.version} is out and was never announced")

    async def upload(self, recruit: Recruit, committed: CommitAnswer, parcel: "Parcel") -> ReceiptAnswer | None:
        """Upload what was committed; None if it is not wanted any more."""
        try:
            return await recruit.client.upload(committed, parcel.manifest, parcel.path)
        except RefusedError as error:
            if error.refusal.code not in OVERTAKEN:
                raise
            self.note(f"{parcel.manifest.lease}: {error}")
            return None

    async def hand_in(self, recruit: Recruit, parcel: "Parcel") -> ReceiptAnswer | None:
        """Both, as a worker does."""
        committed = await self.commit(recruit, parcel)
        return None if committed is None else await self.upload(recruit, committed, parcel)

    # Requests as bytes

    def sign(
        self, recruit: Recruit, method: str, target: str, body: bytes = b"", *, length: int = 0, **options: Any
    ) -> list[str]:
        """The lines of a request that a recruit signs, for a body of another `length` if one is given.

        `options` are those of `RequestSigner`.
        """
        signer = RequestSigner(
            recruit.key, options.pop("run", self.run), options.pop("audience", self.descriptor.coordinator), **options
        )
        if length:
            signed = signer.sign_stream(method, target, length, hashlib.sha256(body).digest())
        else:
            signed = signer.sign_request(method, target, body)
        return [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in signed)]

    async def send(self, lines: Sequence[str], body: bytes = b"", **options: Any) -> Answer:
        """Send a request as it is; `options` are those of `send_raw`."""
        self.purse.spend_request()
        return await send_raw(self.place, lines, body, **options)

    async def pour(self, requests: Sequence[tuple[list[str], bytes]], *, source: str = "") -> dict[int, int]:
        """Send many requests through one pipe; how many got which status."""
        self.purse.spend_request(len(requests))
        data = [build_request(self.place, lines, body) for lines, body in requests]
        return await pour_raw(self.place, data, source=source)

    def find_source(self, number: int) -> str:
        """One more address of this machine to call from; empty if there is but one."""
        return f"127.0.0.{10 + number % 200}" if self.place.url.host.startswith("127.") else ""

    # Evidence

    async def try_raw(
        self, what: str, wanted: Sequence[str], lines: Sequence[str], body: bytes = b"", **options: Any
    ) -> Answer:
        """Send a request that must be refused with one of these codes, and write down what it is answered."""
        answer = await self.send(lines, body, **options)
        self.evidence.record(what, tuple(wanted), answer)
        return answer

    def refused(self, *wanted: str, what: str, moot: tuple[str, ...] = ()) -> AbstractContextManager[None]:
        """Write down what becomes of a call that must be refused with one of these codes (`Evidence.refused`)."""
        return self.evidence.refused(*wanted, what=what, moot=moot)

    def note(self, text: str) -> None:
        """Write down what happened."""
        self.evidence.note(text)
        self._tell(text)

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[Witness]:
        """Have an honest node call all the while; what it found is kept in figures that begin with `name`."""
        if self._honest is None:
            self._honest = self._make(Key.generate(), patience=Patience(tries=1))
            await self._honest.client.join(self._honest.delegation, SOFTWARE)
        witness = Witness(self._honest.client)
        watching = asyncio.create_task(witness.watch())
        try:
            yield witness
        finally:
            watching.cancel()
            (ended,) = await asyncio.gather(watching, return_exceptions=True)
            if isinstance(ended, BudgetError):
                self.note(f"the witness stopped: {ended}")
            figures: dict[str, float] = {"answered": len(witness.waits_s), "unanswered": witness.unanswered}
            figures |= {f"p{share}_ms": round(1000 * witness.find_wait(share / 100), 1) for share in (50, 99)}
            self.evidence.figures |= {f"{name}_{key}": value for key, value in figures.items()}

    async def sleep(self, seconds: float) -> None:
        """Wait, but not longer than there is time."""
        await asyncio.sleep(min(seconds, self.left_s))

    # Inside

    async def _open(self) -> None:
        self.params = await self._scout.client.read_params()
        if self.descriptor.tasks:
            self._recipe = await fetch_recipe(self._session, self.folder)

    def _make(self, owner: Key, *, patience: Patience = PATIENCE, **terms: Any) -> Recruit:
        self.purse.spend_identity()
        folder = self.folder / "nodes" / str(self.purse.num_identities)
        key = terms.pop("key", None) or Key.generate()
        client = CountingClient(
            self.place,
            key,
            run=self.run,
            coordinator=self.descriptor.coordinator,
            folder=folder,
            link=CountingLink(self.place, self.purse),
            asker=Asker(patience),
            evidence=self.evidence,
        )
        self._stack.callback(client.close)
        return Recruit(owner, key, self.sign_delegation(owner, key.public, **terms), client, folder)

    def _open_session(self, recruit: Recruit) -> Session:
        return Session(
            recruit.client,
            self.descriptor,
            Identity(recruit.key, recruit.delegation),
            role=Role.WORKER,
            folder=recruit.folder,
            waits=RoleWaits("worker", note=self._tell),
            spans=SpanLog(None, "worker"),
            note=self._tell,
        )

    async def _open_shop(self) -> "Workshop":
        from shoal.redteam.workshop import open_workshop

        async with self._shop_lock:
            if self._shop is None:
                keep = self.params.async_level + 2
                opened = open_workshop(self._session, self.recipe, self.folder / "weights", keep=keep)
                self._shop = await self._stack.enter_async_context(opened)
            return self._shop


@asynccontextmanager
async def open_camp(
    source: str,
    folder: Path,
    *,
    budget: Budget | None = None,
    anywhere: bool = False,
    note: Note = lambda _: None,
) -> AsyncIterator[Camp]:
    """A camp against the coordinator at an address, or of the descriptor in a file.

    `anywhere` is the caller's word that it may attack a coordinator of another machine: one of its own.
    """
    if source.startswith(("http://", "https://")):
        _check_place(parse_place(source), anywhere)  # before anything is sent there
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, url = await find_run(source, folder, RoleWaits("worker", note=note))
    place = parse_place(url)
    _check_place(place, anywhere)
    async with AsyncExitStack() as stack:
        camp = Camp(place, descriptor, folder, budget or Budget(), stack, note)
        await camp._open()
        yield camp


async def run_script(camp: Camp, name: str) -> None:
    """Run a scripted attack for as long as it may; what ends it early is noted."""
    try:
        async with asyncio.timeout(camp.left_s) as limit:
            await load_attack(name).attack(camp)
    except TimeoutError:
        if not limit.expired():
            raise
        camp.note("the time that it may take is over")
    except BudgetError as error:
        camp.note(str(error))


def _check_place(place: Place, anywhere: bool) -> None:
    if not anywhere and not is_loopback(place.url.host):
        raise ConfigError(
            f"{place}: not this machine. Attacks are for runs of your own; if this is one, say so explicitly"
        )
