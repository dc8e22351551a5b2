"""What is asked many times a second, in memory: who a node is, which leases are out, the newest version.

Invariants:
- it holds what is on disk: events reach it after their commit, each once, in their order, whichever thread brings them;
- it grows with joined nodes and leases that are out, and with nothing that a stranger sends.

Decisions do not rely on it, but for parameters and for how long leases took.
"""

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from shoal.swarm.delegation import Scope
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import Heartbeat, HeartbeatAnswer, NodeWait, Standing, SubmissionState
from shoal.swarm.params import parse_params
from shoal.swarm.rows import count_events
from shoal.swarm.rules.age import oldest_version, open_steps
from shoal.swarm.server_auth import Member
from shoal.swarm.state.leases import list_active, list_times
from shoal.swarm.state.nodes import list_bans, list_nodes, list_owners
from shoal.swarm.state.run import RunRow
from shoal.swarm.state.steps import newest_version
from shoal.swarm.waits import Wait

MAX_TOLD = 16
"""waits of nodes that are told"""
MAX_SILENCE_MS = 3_600_000
"""after which a node that fell silent is gone, and no longer waited for"""
MAX_TIMES = 64
"""leases whose durations are remembered"""


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that is out."""

    node: str
    granted_ms: int
    count: int


@dataclass(slots=True)
class Seen:
    """A node's last sign of life."""

    time_ms: int
    version: int = -1
    role: str = ""
    wait: NodeWait | None = None


class Mirror:
    """The run in memory."""

    def __init__(self, connection: Connection, state: RunRow) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Event] = {}
        self._next_seq = count_events(connection)
        self.params, self.stopped = state.params, state.stopped
        self.newest_version = newest_version(connection)
        self.standings = {row.owner: Standing(row.standing) for row in list_owners(connection)}
        self._bans = {row.target for row in list_bans(connection)}
        self._members: dict[str, Member] = {}
        for row in list_nodes(connection):
            scopes, term = row.scopes.split(","), (row.not_before_ms, row.not_after_ms)
            self._members[row.node] = _make_member(row.owner, scopes, *term, revoked=row.gone == "revoked")
        self.leases = {row.lease: HeldLease(row.node, row.granted_ms, row.count) for row in list_active(connection)}
        self.group_ms = deque(reversed(list_times(connection, MAX_TIMES)), maxlen=MAX_TIMES)
        self.seen: dict[str, Seen] = {}
        self.started_ms = 0
        self._reasons: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        return self.newest_version >= self.params.steps

    def find_member(self, node: str) -> Member | None:
        """What is known of a node; bans included, also those of keys that never joined."""
        member = self._members.get(node)
        if member is None:
            return None
        return replace(member, is_banned=True) if self._bans & {node, member.owner} else member

    def is_banned(self, key: str) -> bool:
        return key in self._bans

    def take_events(self, events: Iterable[Event]) -> None:
        """Follow events that are on disk."""
        with self._lock:
            self._waiting |= {event.seq: event for event in events}
            while (event := self._waiting.pop(self._next_seq, None)) is not None:
                self._next_seq += 1
                self._follow_event(event)

    def answer_heartbeat(self, node: str, beat: Heartbeat, now_ms: int, head: str | None) -> HeartbeatAnswer:
        """Note a node's sign of life, and tell it what it must know."""
        member = self._members[node]
        self.seen[node] = Seen(now_ms, beat.version, beat.role, beat.wait)
        gone = tuple(item.lease for item in beat.leases if not self._holds_lease(node, item.lease))
        params = self.params
        steps = open_steps(self.newest_version, params.async_level, params.steps)
        return HeartbeatAnswer(
            cancelled=gone,
            newest_version=self.newest_version,
            oldest_version=oldest_version(steps[0], params.async_level) if steps else self.newest_version,
            head=head,
            server_time_ms=now_ms,
            next_s=params.heartbeat_s,
            standing=self.standings[member.owner],
            finished=self.finished,
            reasons=self._list_reasons(node),
        )

    def last_seen(self, node: str) -> int:
        """When a node last gave a sign of life; after a restart all count as seen then."""
        seen = self.seen.get(node)
        return self.started_ms if seen is None else seen.time_ms

    def count_alive(self, now_ms: int) -> tuple[int, int, int]:
        """Nodes that are live, stale and gone."""
        ages = [now_ms - self.last_seen(node) for node in list(self._members)]
        live = sum(age <= 1000 * self.params.stale_s for age in ages)
        gone = sum(age > 1000 * self.params.gone_s for age in ages)
        return live, len(ages) - live - gone, gone

    def list_waits(self, now_ms: int) -> list[Wait]:
        """What nodes say they wait for, and those that have fallen silent; the longest first, and not too many."""
        found = []
        for node, seen in list(self.seen.items()):
            if not seen.role or self.finished:
                continue
            name = f"{seen.role} {node[:8]}"
            age_ms = now_ms - seen.time_ms
            if 1000 * self.params.stale_s < age_ms <= MAX_SILENCE_MS:
                found.append(Wait("silence", name, "a sign of life", seen.time_ms))
            elif seen.wait is not None and age_ms <= 1000 * self.params.stale_s:
                wait = seen.wait
                found.append(Wait("node", name, f"{wait.for_whom}: {wait.name}", wait.since_ms, wait.deadline_ms))
        return sorted(found, key=lambda wait: wait.since_ms)[:MAX_TOLD]

    def _holds_lease(self, node: str, lease: str) -> bool:
        held = self.leases.get(lease)
        return held is not None and held.node == node

    def _list_reasons(self, node: str) -> tuple[str, ...]:
        reasons = [self._reasons[node]] if node in self._reasons else []
        if self.finished:
            reasons.append("the run is finished")
        elif self.stopped:
            reasons.append("the operator stopped the run")
        elif self.newest_version < 0:
            reasons.append("the run waits for its trainer to publish v0")
        return tuple(reasons)

    def _follow_event(self, event: Event) -> None:
        content = event.content
        match event.kind:
            case Kind.NODE_JOIN | Kind.NODE_DELEGATE:
                self._follow_join(event.subject, content, event.time_ms)
            case Kind.NODE_REVOKE:
                self._members[event.subject] = replace(self._members[event.subject], is_revoked=True)
            case Kind.NODE_LEAVE:
                self.seen[event.subject] = Seen(event.time_ms)  # what it waited for, it waits for no more
            case Kind.NODE_STANDING:
                self.standings[event.subject] = Standing(content["standing"])
            case Kind.BAN | Kind.UNBAN:
                self._follow_ban(event.kind, content["target"])
            case Kind.PARAMS:
                self.params = parse_params(content["params"])
            case Kind.ADMIN:
                self.stopped = content["action"] == "stop"
            case Kind.VERSION_PUBLISH:
                self.newest_version = content["version"]
            case Kind.SUB_OUTCOME:
                self._follow_outcome(event.subject, content)
            case _:
                self._follow_lease(event)

    def _follow_join(self, node: str, content: dict[str, Any], time_ms: int) -> None:
        term = content["not_before_ms"], content["not_after_ms"]
        self._members[node] = _make_member(content["owner"], content["scopes"], *term)
        self.standings.setdefault(content["owner"], Standing.PROBATION)
        self.seen[node] = Seen(time_ms)

    def _follow_ban(self, kind: str, target: str) -> None:
        if kind == Kind.BAN:
            self._bans.add(target)
        else:
            self._bans.discard(target)
        if target in self.standings:
            self.standings[target] = Standing.BANNED if kind == Kind.BAN else Standing.PROBATION

    def _follow_lease(self, event: Event) -> None:
        content = event.content
        match event.kind:
            case Kind.LEASE_GRANT:
                self.leases[event.subject] = HeldLease(content["node"], event.time_ms, content["count"])
            case Kind.LEASE_END:
                self.leases.pop(event.subject, None)
                if content["state"] in ("expired", "unsent"):
                    self._reasons[content["node"]] = f"lease {event.subject}: {content['because']}"
            case Kind.SUB_COMMIT:
                held = self.leases.pop(content["lease"], None)
                if held is not None:
                    self.group_ms.append((event.time_ms - held.granted_ms) // held.count)

    def _follow_outcome(self, submission: str, content: dict[str, Any]) -> None:
        if content["state"] == SubmissionState.ACCEPTED:
            self._reasons.pop(content["node"], None)
        elif content["node"] in self._members:
            self._reasons[content["node"]] = f"submission {submission}: {content['state']}, {content['because']}"


def _make_member(
    owner: str, scopes: Iterable[str], not_before_ms: int, not_after_ms: int, *, revoked: bool = False
) -> Member:
    return Member(owner, frozenset(map(Scope, scopes)), not_before_ms, not_after_ms, is_revoked=revoked)
