"""A turn: one decision in the making, with what it needs to decide.

Whatever is appended in a turn reaches the mirror, in order, once it is on disk.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

from shoal.keys import Key
from shoal.swarm.beacon import BeaconChain
from shoal.swarm.event import Event, Kind, Statement
from shoal.swarm.ledger import Draft
from shoal.swarm.messages import Message, open_message
from shoal.swarm.messages.signing import Signable
from shoal.swarm.mirror import Mirror
from shoal.swarm.params import RunParams
from shoal.swarm.postings import Posting
from shoal.swarm.state.run import RunReader, RunRow
from shoal.swarm.tags import Tag, sign_document


@dataclass(frozen=True, slots=True)
class Setting:
    """What stays the same from decision to decision."""

    run: str
    key: Key
    chain: BeaconChain
    mirror: Mirror
    reader: RunReader = field(default_factory=RunReader)


@dataclass(slots=True)
class Turn:
    """One decision."""

    draft: Draft
    setting: Setting
    events: list[Event] = field(default_factory=list)
    _state: RunRow | None = None

    @property
    def connection(self) -> Connection:
        return self.draft.connection

    @property
    def state(self) -> RunRow:
        """The run as it was when the decision began; the mirror may be a group of decisions behind."""
        if self._state is None:
            self._state = self.setting.reader.read(self.connection)
        return self._state

    @property
    def params(self) -> RunParams:
        return self.state.params

    @property
    def run(self) -> str:
        return self.setting.run

    @property
    def now_ms(self) -> int:
        return self.draft.time_ms

    @property
    def next_seq(self) -> int:
        """The number of the next event, from which what it makes has its id."""
        return self.draft.size

    def append(self, kind: Kind, subject: str, body: dict[str, Any], postings: Iterable[Posting] = ()) -> Event:
        """Append an event of the coordinator's own."""
        event = self.draft.append(kind, subject=subject, body=body, postings=postings)
        self.events.append(event)
        return event

    def record(self, statement: Statement, postings: Iterable[Posting] = ()) -> Event:
        """Append what somebody else stated."""
        event = self.draft.record(statement, postings=postings)
        self.events.append(event)
        return event

    def open_message(self, actor: str, message: Signable, signature: str) -> Statement:
        """What somebody stated, to be recorded; `AuthError` if it was not signed so."""
        return open_message(self.run, actor, message, signature)

    def sign(self, tag: Tag, message: Message) -> str:
        """A document to keep."""
        return sign_document(self.setting.key, tag, message.model_dump(mode="json")).decode()
