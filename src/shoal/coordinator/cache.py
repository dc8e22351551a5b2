"""In-memory data for frequent requests: members, current leases, the newest version.

Invariants:
- it reflects what is on disk: events reach it after their commit, each once, in order, from whichever thread;
- its size depends on joined nodes and current leases, and on nothing that a stranger sends.

Decisions do not rely on it, except for parameters and the progress of leases that nodes report.
"""

import heapq
import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from shoal.coordinator.rules.standing import has_record
from shoal.coordinator.state.canaries import CANARY_STATES, count_graded
from shoal.coordinator.state.drift import count_watched, list_watched
from shoal.coordinator.state.leases import list_active
from shoal.coordinator.state.members import list_bans, list_nodes, list_owners
from shoal.coordinator.state.run import RunRow, newest_version
from shoal.identity.authenticator import BanNotice, Member, refuse_left
from shoal.identity.delegation import Scope
from shoal.ledger.event import Event, EventKind
from shoal.ledger.reader import count_events
from shoal.protocol import events, messages
from shoal.protocol.events import parse_event, read_ban, read_body, stops_run
from shoal.protocol.params import oldest_version, open_steps, parse_params
from shoal.util.waits import Wait

logger = logging.getLogger(__name__)

MAX_REPORTED = 16
"""waits of nodes that are reported"""
MAX_LISTED = 64
"""nodes that the status lists"""
MAX_SILENCE_MS = 3_600_000
"""time after which a silent node counts as gone and is no longer waited for"""
MAX_NOTICES = 8
"""rejections of a node, reported in answers to its heartbeats"""


@dataclass(slots=True)
class LastSeen:
    """A node's last heartbeat."""

    time_ms: int
    version: int = -1
    role: str = ""
    wait: messages.NodeWait | None = None
    tokens_per_s: int = 0
    """as reported; only shown"""


class RunCache:
    """The run in memory."""

    def __init__(self, connection: Connection, state: RunRow) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Event] = {}
        self._next_seq = count_events(connection)
        self.params, self.stopped = state.params, state.stopped
        self.newest_version = newest_version(connection)
        owners = list_owners(connection)
        self.standings = {row.owner: messages.Standing(row.standing) for row in owners}
        self._tallies = {row.owner: (row.accepted, row.earned) for row in owners}
        self._strikes = {row.owner: row.strikes for row in owners}
        self._bans = {row.target: BanNotice(row.seq, row.reason) for row in list_bans(connection)}
        self._members: dict[str, Member] = {}
        self._left: set[str] = set()
        for row in list_nodes(connection):
            if row.gone == "left":
                self._left.add(row.node)
            scopes, term = row.scopes.split(","), (row.not_before_ms, row.not_after_ms)
            self._members[row.node] = _make_member(row.owner, scopes, *term, revoked=row.gone == "revoked")
        self.leases = {row.lease: row.node for row in list_active(connection)}
        """current leases, with the node that holds each"""
        self._progress: dict[str, int] = {}
        """finished rollouts of current leases, as their nodes report them"""
        self.canaries = {state: count_graded(connection, state) for state in CANARY_STATES}
        watched = list_watched(connection, count_watched(connection))
        self._watched = {row.owner: row.because for row in watched}
        self.seen: dict[str, LastSeen] = {}
        self.started_ms = 0
        self.full_ms = 0
        """since when files are refused because the disk is full; 0 if they are not"""
        self._reasons: dict[str, str] = {}
        self._rejected: dict[str, tuple[messages.RejectionNotice, ...]] = {}
        """the last ones by node, since the coordinator started"""

    def find_progress(self, lease: str) -> int:
        """Finished rollouts of a current lease, as its node reports them."""
        return self._progress.get(lease, 0)

    @property
    def finished(self) -> bool:
        return self.newest_version >= self.params.steps

    def find_member(self, node: str) -> Member | None:
        """A node's membership, with the ban of the node or of its owner."""
        member = self._members.get(node)
        if member is None:
            return None
        ban = self._bans.get(node) or self._bans.get(member.owner)
        return member if ban is None else replace(member, ban=ban)

    def find_owner(self, key: str) -> str | None:
        """The owner that a key belongs to: itself or its node's owner, banned or not; None for a revoked node."""
        member = self._members.get(key)
        if member is not None:
            return None if member.is_revoked else member.owner
        return key if key in self.standings else None

    def has_record(self, owner: str) -> bool:
        """Whether an owner is of record, see `rules.standing`."""
        return has_record(self._tallies.get(owner, (0, 0))[0], self._strikes.get(owner, 0))

    def take_events(self, recorded: Iterable[Event]) -> None:
        """Apply events that are on disk."""
        with self._lock:
            self._waiting |= {event.seq: event for event in recorded}
            while (event := self._waiting.pop(self._next_seq, None)) is not None:
                self._next_seq += 1
                self._follow_event(event)

    def answer_heartbeat(
        self, node: str, beat: messages.Heartbeat, now_ms: int, head: str | None
    ) -> messages.HeartbeatAnswer:
        """Record a node's heartbeat, and answer with what it must know."""
        if node in self._left:
            raise refuse_left()
        member = self._members[node]
        self.seen[node] = LastSeen(now_ms, beat.version, beat.role, beat.wait, beat.tokens_per_s)
        gone = tuple(item.lease for item in beat.leases if self.leases.get(item.lease) != node)
        self._progress |= {item.lease: item.done for item in beat.leases if self.leases.get(item.lease) == node}
        params = self.params
        steps = open_steps(self.newest_version, params.async_level, params.steps)
        accepted, earned = self._tallies.get(member.owner, (0, 0))
        return messages.HeartbeatAnswer(
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
            rejected=self._rejected.get(node, ()),
            reasons=self._list_reasons(node, member.owner),
        )

    def last_seen(self, node: str) -> int:
        """Time of a node's last heartbeat; after a restart all count as seen at that time."""
        seen = self.seen.get(node)
        return self.started_ms if seen is None else seen.time_ms

    def count_alive(self, now_ms: int) -> tuple[int, int, int]:
        """Numbers of live, stale and gone nodes of the run, without those that left or were banned."""
        members = [(node, own) for node, own in list(self._members.items()) if not own.is_revoked]
        belong = [node for node, own in members if node not in self._left and not {node, own.owner} & self._bans.keys()]
        ages = [now_ms - self.last_seen(node) for node in belong]
        live = sum(age <= 1000 * self.params.stale_s for age in ages)
        gone = sum(age > 1000 * self.params.gone_s for age in ages)
        return live, len(ages) - live - gone, gone

    def list_live(self, now_ms: int) -> list[messages.NodeInfo]:
        """Live nodes with what they report, at most `MAX_LISTED`.

        The order follows from the run's parameters and the ledger, so no report displaces another node."""
        live = [self._describe_node(node, member, seen) for node, member, seen in self._find_live(now_ms)]
        return [info for _, info in heapq.nsmallest(MAX_LISTED, live, key=lambda entry: entry[0])]

    def sum_rates(self, role: str, now_ms: int) -> int:
        """Tokens per second that the live nodes of a role report, in total."""
        found = self._find_live(now_ms)
        return sum(seen.tokens_per_s for node, own, seen in found if self._find_role(node, own.owner) == role)

    def _find_live(self, now_ms: int) -> Iterator[tuple[str, Member, LastSeen]]:
        """Nodes with a recent heartbeat that belong to the run."""
        for node, seen in list(self.seen.items()):
            member = self.find_member(node)
            if member is None or member.is_revoked or member.ban is not None or node in self._left or not seen.role:
                continue
            if now_ms - seen.time_ms <= 1000 * self.params.stale_s:
                yield node, member, seen

    def _describe_node(
        self, node: str, member: Member, seen: LastSeen
    ) -> tuple[tuple[bool, int, str], messages.NodeInfo]:
        """A node and its place in the list."""
        role = self._find_role(node, member.owner)
        accepted, _ = self._tallies.get(member.owner, (0, 0))
        info = messages.NodeInfo(
            node=node, role=role, version=seen.version, tokens_per_s=seen.tokens_per_s, heard_ms=seen.time_ms
        )
        return (role == "worker", -accepted, node), info

    def list_waits(self, now_ms: int) -> list[Wait]:
        """What nodes report waiting for, and nodes that have fallen silent; longest first, limited in number.

        Trainers and validators of the run come first, and only theirs can be overdue: the report of an untrusted node
        displaces no other and raises no alarm."""
        if self.finished:
            return []
        own: list[Wait] = list(self._find_lacks(now_ms))
        others: list[Wait] = []
        for node, seen in list(self.seen.items()):
            member = self.find_member(node)
            if not seen.role or member is None or member.ban is not None:
                continue
            role = self._find_role(node, member.owner)
            is_own = role != "worker"
            wait = self._find_wait(node, seen, role, now_ms, is_own=is_own)
            if wait is not None:
                (own if is_own else others).append(wait)
        reported = sorted(own, key=_begin)[:MAX_REPORTED]
        return sorted(
            [*reported, *sorted(others, key=_begin)[: MAX_REPORTED - min(len(reported), MAX_REPORTED // 2)]], key=_begin
        )

    def _find_role(self, node: str, owner: str) -> messages.NodeRole:
        """A node's role in the run, whatever it calls itself."""
        if {node, owner} & set(self.params.trainers):
            return "trainer"
        return "validator" if {node, owner} & set(self.params.validators) else "worker"

    def _find_wait(self, node: str, seen: LastSeen, role: str, now_ms: int, *, is_own: bool) -> Wait | None:
        name, age_ms = f"{role} {node[:8]}", now_ms - seen.time_ms
        if 1000 * self.params.stale_s < age_ms <= MAX_SILENCE_MS:
            return Wait("silence", name, "a heartbeat", seen.time_ms)
        if seen.wait is None or age_ms > 1000 * self.params.stale_s:
            return None
        since_ms = min(max(seen.wait.since_ms, now_ms - MAX_SILENCE_MS), now_ms)
        whom = f"{seen.wait.for_whom}: {seen.wait.name}"
        deadline_ms = seen.wait.deadline_ms if is_own and not self.stopped else 0
        return Wait("node", name, whom, since_ms, deadline_ms, seen.wait.reason)

    def _find_lacks(self, now_ms: int) -> Iterator[Wait]:
        """What the run requires and does not have now."""
        if self.full_ms:
            yield Wait("disk", "the run", "free space for files on the coordinator's disk", self.full_ms)
        for role, keys in (("validator", self.params.validators), ("trainer", self.params.trainers)):
            seen_ms = max(map(self.last_seen, self._list_nodes(keys)), default=self.started_ms)
            if keys and now_ms - seen_ms > 1000 * self.params.stale_s:
                yield Wait("silence", "the run", f"a heartbeat from any {role}", seen_ms)

    def _list_nodes(self, keys: Iterable[str]) -> list[str]:
        """The given nodes, listed by their own key or their owner's."""
        named = set(keys)
        return [node for node, member in list(self._members.items()) if {node, member.owner} & named]

    def _list_reasons(self, node: str, owner: str) -> tuple[str, ...]:
        reasons = [self._reasons[node]] if node in self._reasons else []
        if owner in self._watched:
            reasons.append(f"this owner's work is checked in full for a while, without penalty: {self._watched[owner]}")
        if self.finished:
            reasons.append("the run is finished")
        elif self.stopped:
            reasons.append("the operator stopped the run")
        elif self.newest_version < 0:
            reasons.append("the run is waiting for its trainer to publish v0")
        return tuple(reasons)

    def _follow_event(self, event: Event) -> None:
        match event.kind:
            case EventKind.NODE_JOIN | EventKind.NODE_DELEGATE:
                self._follow_join(event.subject, read_body(event, events.NodeJoin), event.time_ms)
            case EventKind.NODE_REVOKE:
                self._members[event.subject] = replace(self._members[event.subject], is_revoked=True)
            case EventKind.NODE_LEAVE:
                self._left.add(event.subject)
                self.seen[event.subject] = LastSeen(event.time_ms)  # discard its earlier wait
            case EventKind.NODE_STANDING:
                self.standings[event.subject] = read_body(event, events.NodeStanding).standing
            case EventKind.BAN | EventKind.UNBAN:
                self._follow_ban(event, read_ban(event))
            case EventKind.PARAMS:
                self.params = parse_params(read_body(event, messages.Command).params)
            case EventKind.ADMIN:
                self.stopped = stops_run(event)
            case EventKind.VERSION_PUBLISH:
                self.newest_version = read_body(event, messages.VersionStatement).version
            case EventKind.SUB_OUTCOME:
                self._follow_outcome(event.subject, read_body(event, events.SubmissionOutcome))
            case _:
                self._follow_work(event)

    def _follow_join(self, node: str, body: events.NodeJoin, time_ms: int) -> None:
        self._members[node] = _make_member(body.owner, body.scopes, body.not_before_ms, body.not_after_ms)
        self._left.discard(node)
        self.standings.setdefault(body.owner, messages.Standing.PROBATION)
        self.seen[node] = LastSeen(time_ms)

    def _follow_ban(self, event: Event, body: events.Ban) -> None:
        target = body.target
        who = f"{'owner' if target in self.standings else 'node'} {target}"
        logger.warning(f"{who}: {event.kind} by event {event.seq}: {body.reason or 'no reason given'}")
        if event.kind == EventKind.BAN:
            self._bans[target] = BanNotice(event.seq, body.reason)
            if target in self.standings:
                self.standings[target] = messages.Standing.BANNED
            return
        if self._bans.pop(target, None) is not None:
            self._strikes.pop(target, None)
        if self.standings.get(target) is messages.Standing.BANNED:  # as in the tables: an owner that was not stays
            self.standings[target] = messages.Standing.PROBATION

    def _follow_work(self, event: Event) -> None:
        """Apply events about leases, submissions and validation."""
        match parse_event(event):
            case events.LeaseGrant() as body:
                self.leases[event.subject] = body.node
            case events.LeaseEnd() as body:
                self._drop_lease(event.subject)
                self._strikes[body.owner] = body.strikes
                if body.state in ("expired", "unsent"):
                    self._reasons[body.node] = f"lease {event.subject}: {body.because}"
            case messages.Manifest() as body:
                self._drop_lease(body.lease)
            case events.WatchStart() as body:
                self._watched[event.subject] = body.because
            case events.WatchEnd():
                self._watched.pop(event.subject, None)
            case events.CanaryGraded() as body:
                self.canaries[body.state] += 1

    def _drop_lease(self, lease: str) -> None:
        self.leases.pop(lease, None)
        self._progress.pop(lease, None)

    def _follow_outcome(self, submission: str, body: events.SubmissionOutcome) -> None:
        accepted, earned = self._tallies.get(body.owner, (0, 0))
        self._strikes[body.owner] = body.strikes
        if body.state is messages.SubmissionState.ACCEPTED:
            self._tallies[body.owner] = accepted + 1, earned + body.earned  # `paid` also returns what was burned
            self._reasons.pop(body.node, None)
            notices = self._rejected.get(body.node, ())  # it is one of them if an appeal reversed its rejection
            self._rejected[body.node] = tuple(notice for notice in notices if notice.submission != submission)
        else:
            self._reasons[body.node] = f"submission {submission}: {body.state}, {body.reason}"
        if body.state in messages.REJECTED and not body.appeal:
            notice = messages.RejectionNotice(submission=submission, state=body.state, because=body.reason)
            self._rejected[body.node] = (*self._rejected.get(body.node, ()), notice)[-MAX_NOTICES:]


def _begin(wait: Wait) -> int:
    return wait.since_ms


def _make_member(
    owner: str, scopes: Iterable[str], not_before_ms: int, not_after_ms: int, *, revoked: bool = False
) -> Member:
    return Member(owner, frozenset(map(Scope, scopes)), not_before_ms, not_after_ms, is_revoked=revoked)
