"""What is asked many times a second, in memory: who a node is, which leases are out, the newest version.

Invariants:
- it holds what is on disk: events reach it after their commit, each once, in their order, whichever thread brings them;
- it grows with joined nodes and leases that are out, and with nothing that a stranger sends.

Decisions do not rely on it, but for parameters and for how long leases took.
"""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from shoal.swarm.delegation import Scope, refuse_left
from shoal.swarm.event import Event, Kind
from shoal.swarm.messages import Heartbeat, HeartbeatAnswer, NodeWait, Standing, SubmissionState
from shoal.swarm.params import parse_params
from shoal.swarm.rows import count_events
from shoal.swarm.rules.age import oldest_version, open_steps
from shoal.swarm.server_auth import Member
from shoal.swarm.state.canaries import CANARY_STATES, count_graded
from shoal.swarm.state.history import count_watched, list_watched
from shoal.swarm.state.leases import list_active, list_times
from shoal.swarm.state.nodes import list_bans, list_nodes, list_owners
from shoal.swarm.state.run import RunRow
from shoal.swarm.state.steps import newest_version
from shoal.swarm.waits import Wait

MAX_TOLD = 16
"""waits of nodes that are told"""
MAX_SILENCE_MS = 3_600_000
"""after which a node that fell silent is gone, and no longer waited for"""
MAX_TIMES, MAX_OWN_TIMES = 64, 8
"""leases whose durations are remembered, of all and of one owner"""


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
        owners = list_owners(connection)
        self.standings = {row.owner: Standing(row.standing) for row in owners}
        self._tallies = {row.owner: (row.accepted, row.earned) for row in owners}
        self._bans = {row.target for row in list_bans(connection)}
        self._members: dict[str, Member] = {}
        self._left: set[str] = set()
        for row in list_nodes(connection):
            if row.gone == "left":
                self._left.add(row.node)
            scopes, term = row.scopes.split(","), (row.not_before_ms, row.not_after_ms)
            self._members[row.node] = _make_member(row.owner, scopes, *term, revoked=row.gone == "revoked")
        self.leases = {row.lease: HeldLease(row.node, row.granted_ms, row.count) for row in list_active(connection)}
        self._times: deque[tuple[str, int]] = deque(maxlen=MAX_TIMES)
        for owner, time_ms in list_times(connection, MAX_TIMES, MAX_OWN_TIMES):
            self._note_time(owner, time_ms)
        self.canaries = {state: count_graded(connection, state) for state in CANARY_STATES}
        watched = list_watched(connection, count_watched(connection))
        self._watched = {row.owner: row.because for row in watched}
        self.seen: dict[str, Seen] = {}
        self.started_ms = 0
        self.full_ms = 0
        """since when files are refused for want of room; 0 if they are not"""
        self._reasons: dict[str, str] = {}

    @property
    def group_ms(self) -> list[int]:
        """What a group took, of the newest accepted leases: what is handed in and refused measures nothing."""
        return [time_ms for _, time_ms in list(self._times)]

    @property
    def finished(self) -> bool:
        return self.newest_version >= self.params.steps

    def find_member(self, node: str) -> Member | None:
        """What is known of a node; bans included, also those of keys that never joined."""
        member = self._members.get(node)
        if member is None:
            return None
        return replace(member, is_banned=True) if self._bans & {node, member.owner} else member

    def find_owner(self, key: str) -> str | None:
        """The owner that a key speaks for: its own or its node's, banned or not; none for a node that was revoked."""
        member = self._members.get(key)
        if member is not None:
            return None if member.is_revoked else member.owner
        return key if key in self.standings else None

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
        if node in self._left:
            raise refuse_left()
        member = self._members[node]
        self.seen[node] = Seen(now_ms, beat.version, beat.role, beat.wait)
        gone = tuple(item.lease for item in beat.leases if not self._holds_lease(node, item.lease))
        params = self.params
        steps = open_steps(self.newest_version, params.async_level, params.steps)
        accepted, earned = self._tallies.get(member.owner, (0, 0))
        return HeartbeatAnswer(
            cancelled=gone,
            newest_version=self.newest_version,
            oldest_version=oldest_version(steps[0], params.async_level) if steps else self.newest_version,
            head=head,
            server_time_ms=now_ms,
            next_s=params.heartbeat_s,
            standing=self.standings[member.owner],
            accepted=accepted,
            earned=earned,
            finished=self.finished,
            reasons=self._list_reasons(node, member.owner),
        )

    def last_seen(self, node: str) -> int:
        """When a node last gave a sign of life; after a restart all count as seen then."""
        seen = self.seen.get(node)
        return self.started_ms if seen is None else seen.time_ms

    def count_alive(self, now_ms: int) -> tuple[int, int, int]:
        """Nodes that are live, stale and gone, of those that belong to the run: who left or was shut out does not."""
        belong = [node for node, member in list(self._members.items()) if self._is_in(node, member)]
        ages = [now_ms - self.last_seen(node) for node in belong]
        live = sum(age <= 1000 * self.params.stale_s for age in ages)
        gone = sum(age > 1000 * self.params.gone_s for age in ages)
        return live, len(ages) - live - gone, gone

    def list_waits(self, now_ms: int) -> list[Wait]:
        """What nodes say they wait for, and those that have fallen silent; the longest first, and not too many.

        Those of the run's own come first, and only theirs can be overdue: what a stranger says of itself crowds out
        nobody and raises no alarm."""
        if self.finished:
            return []
        own: list[Wait] = list(self._find_lacks(now_ms))
        others: list[Wait] = []
        for node, seen in list(self.seen.items()):
            member = self.find_member(node)
            if not seen.role or member is None or member.is_banned:
                continue
            role = self._find_role(node, member.owner)
            wait = self._find_wait(node, seen, role or "worker", now_ms, is_own=bool(role))
            if wait is not None:
                (own if role else others).append(wait)
        told = sorted(own, key=_begin)[:MAX_TOLD]
        return sorted([*told, *sorted(others, key=_begin)[: MAX_TOLD - min(len(told), MAX_TOLD // 2)]], key=_begin)

    def _is_in(self, node: str, member: Member) -> bool:
        return not (member.is_revoked or node in self._left or node in self._bans or member.owner in self._bans)

    def _find_role(self, node: str, owner: str) -> str:
        """What a node is to the run, whatever it calls itself; empty for all who only work."""
        roles = {"trainer": self.params.trainers, "validator": self.params.validators}
        return next((role for role, keys in roles.items() if {node, owner} & set(keys)), "")

    def _find_wait(self, node: str, seen: Seen, role: str, now_ms: int, *, is_own: bool) -> Wait | None:
        name, age_ms = f"{role} {node[:8]}", now_ms - seen.time_ms
        if 1000 * self.params.stale_s < age_ms <= MAX_SILENCE_MS:
            return Wait("silence", name, "a sign of life", seen.time_ms)
        if seen.wait is None or age_ms > 1000 * self.params.stale_s:
            return None
        since_ms = min(max(seen.wait.since_ms, now_ms - MAX_SILENCE_MS), now_ms)
        whom = f"{seen.wait.for_whom}: {seen.wait.name}"
        return Wait("node", name, whom, since_ms, seen.wait.deadline_ms if is_own else 0, seen.wait.reason)

    def _find_lacks(self, now_ms: int) -> Iterator[Wait]:
        """What the run cannot do without, and does not have now."""
        if self.full_ms:
            yield Wait("disk", "the run", "room for files on the coordinator's disk", self.full_ms)
        for role, keys in (("validator", self.params.validators), ("trainer", self.params.trainers)):
            seen_ms = max(map(self.last_seen, self._list_nodes(keys)), default=self.started_ms)
            if keys and now_ms - seen_ms > 1000 * self.params.stale_s:
                yield Wait("silence", "the run", f"a sign of life of any {role}", seen_ms)

    def _note_time(self, owner: str, time_ms: int) -> None:
        """Remember how long a group took; of one owner only the newest few, or it would set everybody's deadlines."""
        own = [entry for entry in self._times if entry[0] == owner]
        if len(own) >= MAX_OWN_TIMES:
            self._times.remove(own[0])
        self._times.append((owner, time_ms))

    def _list_nodes(self, keys: Iterable[str]) -> list[str]:
        """Nodes that are named, by their own key or their owner's."""
        named = set(keys)
        return [node for node, member in list(self._members.items()) if {node, member.owner} & named]

    def _holds_lease(self, node: str, lease: str) -> bool:
        held = self.leases.get(lease)
        return held is not None and held.node == node

    def _list_reasons(self, node: str, owner: str) -> tuple[str, ...]:
        reasons = [self._reasons[node]] if node in self._reasons else []
        if owner in self._watched:
            reasons.append(f"no blame, but this owner's work is checked in full for a while: {self._watched[owner]}")
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
                self._left.add(event.subject)
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
                self._follow_work(event)

    def _follow_join(self, node: str, content: dict[str, Any], time_ms: int) -> None:
        term = content["not_before_ms"], content["not_after_ms"]
        self._members[node] = _make_member(content["owner"], content["scopes"], *term)
        self._left.discard(node)
        self.standings.setdefault(content["owner"], Standing.PROBATION)
        self.seen[node] = Seen(time_ms)

    def _follow_watch(self, owner: str, content: dict[str, Any]) -> None:
        if content["state"] == "over":
            self._watched.pop(owner, None)
        else:
            self._watched[owner] = content["because"]

    def _follow_ban(self, kind: str, target: str) -> None:
        if kind == Kind.BAN:
            self._bans.add(target)
        else:
            self._bans.discard(target)
        if target in self.standings:
            self.standings[target] = Standing.BANNED if kind == Kind.BAN else Standing.PROBATION

    def _follow_work(self, event: Event) -> None:
        """Leases, what is handed in for them, and how that is looked at."""
        content = event.content
        match event.kind:
            case Kind.LEASE_GRANT:
                self.leases[event.subject] = HeldLease(content["node"], event.time_ms, content["count"])
            case Kind.LEASE_END:
                self.leases.pop(event.subject, None)
                if content["state"] in ("expired", "unsent"):
                    self._reasons[content["node"]] = f"lease {event.subject}: {content['because']}"
            case Kind.SUB_COMMIT:
                self.leases.pop(content["lease"], None)
            case Kind.NODE_WATCH:
                self._follow_watch(event.subject, content)
            case Kind.CANARY_GRADE:
                self.canaries[content["state"]] += 1

    def _follow_outcome(self, submission: str, content: dict[str, Any]) -> None:
        accepted, earned = self._tallies.get(content["owner"], (0, 0))
        if content["state"] == SubmissionState.ACCEPTED:
            self._tallies[content["owner"]] = accepted + 1, earned + content["paid"]
            self._reasons.pop(content["node"], None)
            if not content["appeal"]:
                self._note_time(content["owner"], content["group_ms"])
        else:
            self._reasons[content["node"]] = f"submission {submission}: {content['state']}, {content['because']}"


def _begin(wait: Wait) -> int:
    return wait.since_ms


def _make_member(
    owner: str, scopes: Iterable[str], not_before_ms: int, not_after_ms: int, *, revoked: bool = False
) -> Member:
    return Member(owner, frozenset(map(Scope, scopes)), not_before_ms, not_after_ms, is_revoked=revoked)
