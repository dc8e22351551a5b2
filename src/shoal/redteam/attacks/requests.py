"""Forged, replayed and excessive requests.

- Requests signed for someone else, for something else, or not at all try to take a lease, join, commit or send a
  command. If any of them were accepted, the ledger would show it.
- A request counts once: its nonce is stored per node, whatever the path, for longer than the request is valid.
- A caller has a rate limit, an owner has few open commitments, and a slow sender is disconnected. The flood comes from
  different addresses than the honest node that measures its effect, as a real one would; `neighbour` shares its
  address.
- Files are no larger than their lease allows, and an owner has room for few that were not accepted.
- A proof of work pays for one join.
"""

import asyncio
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shoal.coordinator.rules.storage import limit_lease_file
from shoal.identity.delegation import sign_revocation
from shoal.identity.keys import Key
from shoal.identity.proof_of_work import make_stamp
from shoal.net.retry import RefusedError, RetryPolicy
from shoal.node.client import MAX_WORK
from shoal.protocol import messages
from shoal.redteam.registry import Expected, attack
from shoal.redteam.scripted import OVERTAKEN, TAKEN, AttackerIdentity, AttackSession
from shoal.util.clock import read_clock

LEASES, HEARTBEAT, SUBMISSIONS = "/v1/leases", "/v1/heartbeat", "/v1/submissions"
BEAT = b'{"version":0}'
FORGED, MALFORMED, REPLAY, CLOCK = ("signature",), ("malformed",), ("replay",), ("clock",)
"""error codes that are correct for a forged request"""
CALM_S, FLOOD_S = 1.0, 5.0
NUM_PER_BURST, NUM_CONNECTIONS = 50, 4
MAX_OFFERED = 4000
NUM_QUESTIONS = 200
MAX_COMMITS = 24
NUM_DRIPPING, DRIP_BYTES, DRIP_S = 4, 64, 0.05
FILE_BYTES = 1 << 17
HUGE = 10**9
NO_LEASE = ("too_many", "busy", "no_need", "resting", "queue_full", "room", "trial", "version", "work")
"""codes of refused leases"""
NUM_FILLERS, MAX_FILES = 4, 64
NUM_CHURNS = 20
NUM_FORGED = 2000


@attack(
    "signatures",
    expect=Expected.REFUSED,
    text="requests with a wrong or missing signature",
)
async def forge_signatures(session: AttackSession) -> None:
    """Forged requests, forged statements, and invalid delegations."""
    victim, thief = await session.join(), await session.join()
    await forge_requests(session, victim, thief)
    await alter_headers(session, victim)
    await forge_statements(session, victim, thief)
    await alter_delegations(session, victim)
    await use_revoked(session, thief)


def ask_body() -> bytes:
    """A request for a lease."""
    return json.dumps({"request_key": os.urandom(16).hex()}).encode()


async def forge_requests(session: AttackSession, victim: AttackerIdentity, thief: AttackerIdentity) -> None:
    """In the name of another node or of a stranger; for a different coordinator or run."""
    body, stranger, other = ask_body(), session.make_identity(), Key.generate().public
    stolen = [line.replace(thief.key.public, victim.key.public) for line in session.sign(thief, "POST", LEASES, body)]
    await session.try_raw("another node's name, signed with the attacker's key", FORGED, stolen, body)
    await session.try_signed("a node that never joined", ("unknown_node",), stranger, LEASES, body)
    await session.try_signed("for a different coordinator", ("other_audience",), victim, LEASES, body, audience=other)
    await session.try_signed("for a different run", ("other_run",), victim, LEASES, body, run="another-run")
    plain = [f"POST {LEASES} HTTP/1.1", f"Content-Length: {len(body)}"]
    await session.try_raw("no signature at all", ("unsigned",), plain, body)


async def alter_headers(session: AttackSession, victim: AttackerIdentity) -> None:
    """A victim's request, modified in transit."""
    body = ask_body()
    lines = session.sign(victim, "POST", LEASES, body)
    swap = '"@method" "@path"', '"@path" "@method"'
    changes = {
        "another tag": (MALFORMED, 'tag="shoal-request-1"', 'tag="shoal-lease-1"'),
        "another algorithm": (MALFORMED, 'alg="ed25519"', 'alg="hmac-sha256"'),
        "fewer signed components": (MALFORMED, ' "content-digest"', ""),
        "signed components in another order": (FORGED, *swap),
        "a different run in the header": (("other_run",), f"Shoal-Run: {session.run}", "Shoal-Run: another-run"),
        "a different length": (FORGED, f"Content-Length: {len(body)}", f"Content-Length: {len(body) - 1}"),
        "a different signature": (FORGED, "Signature: shoal=:", f"Signature: shoal=:{'A' * 85}Q==:\r\nX-Old: shoal=:"),
    }
    for what, (wanted, old, new) in changes.items():
        await session.try_raw(what, wanted, [line.replace(old, new) for line in lines], body)
    await session.try_raw("a different path", FORGED, ["POST /v1/claims HTTP/1.1", *lines[1:]], body)
    await session.try_raw("a different method", ("method", "signature"), [f"PUT {LEASES} HTTP/1.1", *lines[1:]], body)
    await session.try_raw("a query", FORGED, [f"POST {LEASES}?a=b HTTP/1.1", *lines[1:]], body)
    await session.try_raw("a header twice", MALFORMED, [*lines, f"Shoal-Run: {session.run}"], body)
    await session.try_raw("a chunked body", ("http", "length_required"), [*lines, "Transfer-Encoding: chunked"], body)
    # Last, because the head is valid and its nonce is then used up.
    await session.try_raw("another body", ("body",), lines, ask_body())
    await session.try_raw("the right body after it", ("replay",), lines, body)


async def forge_statements(session: AttackSession, victim: AttackerIdentity, thief: AttackerIdentity) -> None:
    """Forged statements inside validly signed requests: a manifest, a command, actions outside the delegated scope."""
    entry = messages.RolloutEntry(hash=os.urandom(32).hex(), tokens=1)
    size = session.params.group_size * session.params.most_per_lease
    lease = (await session.ask_lease(victim)).lease
    name, fence = ("l1", 1) if lease is None else (lease.lease, lease.fence)
    blob, rollouts = os.urandom(32).hex(), (entry,) * size
    manifest = messages.Manifest(lease=name, fence=fence, blob=blob, size=1, version=0, rollouts=rollouts)
    signed = messages.SignedManifest(
        manifest=manifest, signature=messages.sign_message(thief.key, session.run, manifest)
    )
    body, wanted = signed.model_dump_json().encode(), ("statement", "unknown_lease")
    await session.try_signed("a manifest signed by another key", wanted, victim, SUBMISSIONS, body)
    await session.try_signed("a manifest for another node's lease", wanted[1:], thief, SUBMISSIONS, body)
    for target in ("/v1/claims", "/v1/batches/1"):
        await session.try_signed(f"{target} by a worker", ("scope",), thief, target, b"{}")
    command = messages.Command(action=messages.Action.BAN, nonce=os.urandom(16).hex(), target=victim.owner.public)
    order = messages.SignedCommand(command=command, signature=messages.sign_message(thief.owner, session.run, command))
    body = order.model_dump_json().encode()
    lines = ["POST /v1/commands HTTP/1.1", f"Content-Length: {len(body)}"]
    await session.try_raw("a ban not signed by the operator", ("statement",), lines, body)
    if lease is not None:
        await victim.client.return_lease(lease.lease)


async def alter_delegations(session: AttackSession, victim: AttackerIdentity) -> None:
    """Join with a delegation that is not valid for this node, for this run, or now."""
    now_ms, node = read_clock(), session.make_identity()
    day_ms = 86_400_000
    words: dict[str, dict[str, Any]] = {
        "an expired delegation": {"not_after_ms": now_ms - 1000},
        "a delegation that is not valid yet": {"not_before_ms": now_ms + day_ms // 2},
        "a delegation for another node": {"node": victim.key.public},
        "a delegation for another run": {"run": "another-run"},
    }
    for what, terms in words.items():
        with session.refused("delegation", what=what):
            await node.client.join(session.sign_delegation(node.owner, node.key.public, **terms))
    with session.refused("delegation", what="a delegation modified after signing"):
        text = session.sign_delegation(node.owner, node.key.public).replace(b'"max_leases":64', b'"max_leases":65')
        await node.client.join(text)
    with session.refused("other_owner", what="a node of another owner"):
        await victim.client.join(session.sign_delegation(node.owner, victim.key.public))


async def use_revoked(session: AttackSession, node: AttackerIdentity) -> None:
    """A stolen node key, after its owner revoked the delegation."""
    document = sign_revocation(node.owner, node.key.public, session.run)
    body = json.dumps({"revocation": document.decode()}).encode()
    head = ["POST /v1/revocations HTTP/1.1", f"Content-Length: {len(body)}"]
    answer = await session.send(head, body, source=session.find_source(1))
    session.evidence.count("revoked" if answer.status == 200 else "not_revoked")
    await session.try_signed("a revoked node", ("revoked",), node, LEASES, ask_body())
    with session.refused("revoked", what="a revoked node that rejoins"):
        await node.client.join(session.sign_delegation(node.owner, node.key.public))


@attack("flood", expect=Expected.REFUSED, text="ten times as many submissions and requests as allowed")
async def flood_coordinator(session: AttackSession) -> None:
    """All floods at once, while an honest node measures its response times before and during them."""
    flooder, committer = await session.join(), await session.join()
    async with session.watch("calm"):
        await session.sleep(CALM_S)
    async with session.watch("flood"):
        submission = await commit_files(session, committer)
        await asyncio.gather(
            flood_requests(session, flooder), flood_questions(session), drip_uploads(session, committer, submission)
        )
        await send_huge(session, flooder)


async def flood_requests(session: AttackSession, node: AttackerIdentity) -> None:
    """Signed requests as fast as possible, over several connections."""
    begun, most, source = time.monotonic(), min(MAX_OFFERED, session.budget.left_requests // 2), session.find_source(0)
    found, offered = Counter[int](), 0
    while offered < most and time.monotonic() - begun < FLOOD_S:
        size = NUM_CONNECTIONS * NUM_PER_BURST
        beats = [(session.sign(node, "POST", HEARTBEAT, BEAT), BEAT) for _ in range(size)]
        bursts = [beats[start : start + NUM_PER_BURST] for start in range(0, size, NUM_PER_BURST)]
        for answers in await asyncio.gather(*(session.send_many(burst, source=source) for burst in bursts)):
            found.update(answers)
        offered += size
    session.evidence.figures["requests_s"] = round(time.monotonic() - begun, 2)
    note_statuses(session, "requests", found)


async def flood_questions(session: AttackSession) -> None:
    """Public queries and statements from strangers; each costs the coordinator some work."""
    source = session.find_source(1)
    for name, line in (("questions", "GET /v1/status HTTP/1.1"), ("statements", "POST /v1/commands HTTP/1.1")):
        note_statuses(session, name, await session.send_many([([line], b"")] * NUM_QUESTIONS, source=source))


def note_statuses(session: AttackSession, name: str, found: Mapping[int, int]) -> None:
    """Record how many responses had which status; some must be 429."""
    for status, number in found.items():
        session.evidence.count(f"{name}_{status or 'unanswered'}", number)
    session.evidence.record_code(f"more {name} than allowed", ("too_many",), "too_many" if found.get(429) else TAKEN)


async def commit_files(session: AttackSession, node: AttackerIdentity) -> str:
    """Commit to files that are never sent, until leases are refused. Returns the last submission."""
    submission = ""
    for _ in range(MAX_COMMITS):
        answer = await session.ask_lease(node)
        if answer.lease is None:
            break
        if not submission:
            with session.refused("too_large", what="a file larger than the run accepts", moot=OVERTAKEN):
                await node.client.commit(promise_file(session, answer.lease, find_most(session, answer.lease) + 1))
        size = min(FILE_BYTES, find_most(session, answer.lease))
        with suppress(RefusedError):  # the step has ended
            submission = (await node.client.commit(promise_file(session, answer.lease, size))).submission
            session.evidence.count("promised")
    session.evidence.record_code("one more commitment without a file", NO_LEASE, answer.code)
    return submission


def find_most(session: AttackSession, lease: messages.Lease) -> int:
    """Bytes of the largest file that a lease can have."""
    return limit_lease_file(session.params, lease.count)


def promise_file(session: AttackSession, lease: messages.Lease, size: int, blob: str = "") -> messages.Manifest:
    """A manifest for a file that does not exist, unless `blob` is its hash."""
    count = lease.count * session.params.group_size
    entries = [messages.RolloutEntry(hash=os.urandom(32).hex(), tokens=1) for _ in range(count)]
    version, blob = lease.version, blob or os.urandom(32).hex()
    return messages.Manifest(
        lease=lease.lease, fence=lease.fence, blob=blob, size=size, version=version, rollouts=tuple(entries)
    )


async def drip_uploads(session: AttackSession, node: AttackerIdentity, submission: str) -> None:
    """Uploads so slow that they would never complete."""
    if not submission:
        return
    target, body = f"/v1/submissions/{submission}/blob", bytes(FILE_BYTES)

    async def drip() -> None:
        lines, way = session.sign(node, "PUT", target, body), {"pause_s": DRIP_S, "piece_bytes": DRIP_BYTES}
        # One upload of a submission at a time: the others are turned away at once.
        refusals = ("http", "busy")
        await session.try_raw("a very slow upload", refusals, lines, body, source=session.find_source(2), **way)

    await asyncio.gather(*(drip() for _ in range(NUM_DRIPPING)))


async def send_huge(session: AttackSession, node: AttackerIdentity) -> None:
    """Bodies larger than any limit; they are refused from the header alone."""
    source = session.find_source(3)
    for method, target in (("POST", "/v1/leases"), ("PUT", "/v1/submissions/s1/blob")):
        lines = session.sign(node, method, target, length=HUGE)
        await session.try_raw(f"a gigabyte for {target}", ("too_large",), lines, source=source)


@attack("fill_store", expect=Expected.REFUSED, text="files as large and as many as possible, of several owners")
async def fill_store(session: AttackSession) -> None:
    """Random bytes for every lease, until there is none; an honest node measures its response times meanwhile."""
    nodes = [await session.join() for _ in range(NUM_FILLERS)]
    async with session.watch("filling"):
        for node in nodes:
            await fill_leases(session, node)


async def fill_leases(session: AttackSession, node: AttackerIdentity) -> None:
    """Upload the largest file for each lease of one node."""
    path = node.folder / "random"
    for _ in range(MAX_FILES):
        answer = await session.ask_lease(node)
        if answer.lease is None:
            break
        most = find_most(session, answer.lease)
        with session.refused("too_large", what="a file larger than its lease can hold", moot=OVERTAKEN):
            await node.client.commit(promise_file(session, answer.lease, most + 1))
        path.write_bytes(os.urandom(most))
        manifest = promise_file(session, answer.lease, most, hashlib.sha256(path.read_bytes()).hexdigest())
        with suppress(RefusedError):  # the step has ended
            await node.client.submit(manifest, path)
            session.evidence.count("stored_bytes", most)
    session.evidence.record_code("one more file", NO_LEASE, answer.code)


@attack("churn", expect=Expected.REFUSED, text="one proof of work pays for many joins: leave, join, renew")
async def churn_membership(session: AttackSession) -> None:
    """Leave and join again, and renew the delegation, with a stamp that was used."""
    node = session.make_identity()
    stamp = await make_stamp(await node.client.read_challenge(node.key.public), node.key.public, MAX_WORK)
    await join_with(session, node, stamp, node.delegation)
    for number in range(NUM_CHURNS):
        renewed = session.sign_delegation(node.owner, node.key.public, max_leases=1 + number)
        await try_join(session, "a renewal with a used stamp", node, stamp, renewed)
    await node.client.leave()
    for number in range(NUM_CHURNS):
        await try_join(session, "a return with a used stamp", node, stamp, node.delegation)
        await try_join(session, "with another solution of its challenge", node, f"{stamp}{number}", node.delegation)


async def join_with(session: AttackSession, node: AttackerIdentity, stamp: str, delegation: bytes) -> None:
    """Join with a stamp of one's own."""
    answer = await session.send(*write_join(session, node, stamp, delegation))
    session.evidence.count("joins" if answer.status == 200 else "not_joined")


async def try_join(session: AttackSession, what: str, node: AttackerIdentity, stamp: str, delegation: bytes) -> None:
    """Join in a way that must be refused."""
    await session.try_raw(what, ("work",), *write_join(session, node, stamp, delegation))


def write_join(
    session: AttackSession, node: AttackerIdentity, stamp: str, delegation: bytes
) -> tuple[list[str], bytes]:
    """The lines and the body of a join."""
    body = messages.JoinRequest(delegation=delegation.decode()).model_dump_json().encode()
    return [*session.sign(node, "POST", "/v1/join", body), f"Shoal-Work: {stamp}"], body


@attack("neighbour", expect=Expected.REFUSED, text="forged requests from the address of an honest node")
async def forge_from_shared_address(session: AttackSession) -> None:
    """In the attacker's own name, in the neighbour's and in that of others, from the neighbour's address."""
    victim = session.make_identity(retries=RetryPolicy(tries=1))
    await victim.client.join(victim.delegation)
    thief, others = await session.join(), [await session.join() for _ in range(NUM_FILLERS)]
    async with session.watch("neighbour", victim.client):
        await session.sleep(CALM_S)
        for what, names in (("its own", [thief]), ("the neighbour's", [victim]), ("others'", others)):
            await forge_names(session, what, thief, names)
    unanswered = session.evidence.figures["neighbour_unanswered"]
    session.evidence.record_code("silencing a neighbour", ("answered",), "silenced" if unanswered else "answered")


async def forge_names(
    session: AttackSession, what: str, thief: AttackerIdentity, names: list[AttackerIdentity]
) -> None:
    """Requests in these names with an invalid signature; most must be refused unseen."""
    forged = []
    for number in range(min(NUM_FORGED, session.budget.left_requests // 4)):
        # Signed for another path: valid in form, with the name of a member, and invalid.
        lines, name = session.sign(thief, "POST", LEASES, BEAT)[1:], names[number % len(names)]
        named = [line.replace(thief.key.public, name.key.public) for line in lines]
        forged.append(([f"POST {HEARTBEAT} HTTP/1.1", *named], BEAT))
    bursts = [forged[start : start + NUM_PER_BURST] for start in range(0, len(forged), NUM_PER_BURST)]
    found = Counter[int]()
    for start in range(0, len(bursts), NUM_CONNECTIONS):
        for answers in await asyncio.gather(*map(session.send_many, bursts[start : start + NUM_CONNECTIONS])):
            found.update(answers)
    taken = found[200]
    session.evidence.record_code(f"a forged request in {what} name", ("refused",), "taken" if taken else "refused")
    for status, number in found.items():
        session.evidence.count(f"forged_{status or 'unanswered'}", number)


@attack("nonces", expect=Expected.REFUSED, text="requests are replayed: immediately, later, from elsewhere")
async def replay_requests(session: AttackSession) -> None:
    """Replays: immediately, from elsewhere, at other times, on other paths, with other methods."""
    node, nonce = await session.join(), os.urandom(16)
    lines = session.sign(node, "POST", HEARTBEAT, BEAT, draw_bytes=lambda _: nonce)
    await send_good(session, lines, BEAT)
    await session.try_raw("the same request immediately", REPLAY, lines, BEAT)
    await session.try_raw("the same request from another address", REPLAY, lines, BEAT, source=session.find_source(0))
    for method, target, body in (("POST", "/v1/leave", b""), ("GET", "/v1/batches/1", b"")):
        signed = session.sign(node, method, target, body, draw_bytes=lambda _: nonce)
        await session.try_raw(f"its nonce, signed for {method} {target}", REPLAY, signed, body)
    await shift_clock(session, node)
    await alter_request(session, node)


async def send_good(session: AttackSession, lines: list[str], body: bytes) -> None:
    """Send a request that must be accepted; otherwise replaying it would prove nothing."""
    answer = await session.send(lines, body)
    session.evidence.count("good" if answer.status == 200 else "good_but_refused")


async def shift_clock(session: AttackSession, node: AttackerIdentity) -> None:
    """Requests with a wrong time: too old, in the future, and one post-dated to be valid for longer."""
    for skew_s in (-3600, -301, -62, 62, 3600):
        what, at_ms = f"a request signed {skew_s:+d} s from now", read_clock() + 1000 * skew_s
        await session.try_signed(what, CLOCK, node, HEARTBEAT, BEAT, clock_ms=lambda at_ms=at_ms: at_ms)
    ahead = session.sign(node, "POST", HEARTBEAT, BEAT, clock_ms=lambda: read_clock() + 50_000)
    await send_good(session, ahead, BEAT)
    await session.try_raw("a post-dated request, replayed", REPLAY, ahead, BEAT)


async def alter_request(session: AttackSession, node: AttackerIdentity) -> None:
    """An intercepted request that was not used yet, with its time, nonce, path or method changed."""
    lines = session.sign(node, "POST", HEARTBEAT, BEAT)
    created = next(part for part in lines[-2].split(";") if part.startswith("created="))
    later = [line.replace(created, f"created={int(created[8:]) + 30}") for line in lines]
    await session.try_raw("a later timestamp", FORGED, later, BEAT)
    nonce = lines[-2].partition('nonce="')[2][:32]
    fresh = [line.replace(nonce, os.urandom(16).hex()) for line in lines]
    await session.try_raw("a different nonce", FORGED, fresh, BEAT)
    await session.try_raw("a different path", FORGED, ["POST /v1/leases HTTP/1.1", *lines[1:]], BEAT)
    await session.try_raw("a query added", FORGED, [f"POST {HEARTBEAT}?a=1 HTTP/1.1", *lines[1:]], BEAT)
    await session.try_raw("another method", ("method", "signature"), [f"PUT {HEARTBEAT} HTTP/1.1", *lines[1:]], BEAT)
    await send_good(session, lines, BEAT)
    await session.try_raw("the original after its use", REPLAY, lines, BEAT)
