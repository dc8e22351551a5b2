"""Requests that somebody else signed, or for something else, or nobody: to act in another's name, or beyond one's own.

What is tried is to take a lease, join, commit or command: if any of it were taken, the ledger would have it.
"""

import json
import os
from typing import Any

from shoal.keys import Key
from shoal.redteam.camp import Camp, Recruit
from shoal.swarm.clock import read_clock
from shoal.swarm.delegation import sign_revocation
from shoal.swarm.messages import Action, Command, Manifest, RolloutEntry, SignedCommand, SignedManifest, sign_message

TARGET = "/v1/leases"
FORGED, MALFORMED = ("signature",), ("malformed",)


async def attack(camp: Camp) -> None:
    """Forged requests, forged statements, and words of owners that do not hold."""
    victim, thief = await camp.join(), await camp.join()
    await forge_requests(camp, victim, thief)
    await alter_headers(camp, victim)
    await forge_statements(camp, victim, thief)
    await bend_delegations(camp, victim)
    await use_revoked(camp, thief)


def ask_body() -> bytes:
    """A request for a lease."""
    return json.dumps({"request_key": os.urandom(16).hex()}).encode()


async def forge_requests(camp: Camp, victim: Recruit, thief: Recruit) -> None:
    """In the name of another, of nobody, for another coordinator or run."""
    body, stranger = ask_body(), camp.make_recruit()

    async def sign_and_try(what: str, wanted: tuple[str, ...], signer: Recruit, **options: Any) -> None:
        await camp.try_raw(what, wanted, camp.sign(signer, "POST", TARGET, body, **options), body)

    stolen = [line.replace(thief.key.public, victim.key.public) for line in camp.sign(thief, "POST", TARGET, body)]
    await camp.try_raw("another node's name, signed by the own key", FORGED, stolen, body)
    await sign_and_try("a node that never joined", ("unknown_node",), stranger)
    await sign_and_try("for another coordinator", ("other_audience",), victim, audience=Key.generate().public)
    await sign_and_try("for another run", ("other_run",), victim, run="another-run")
    plain = [f"POST {TARGET} HTTP/1.1", f"Content-Length: {len(body)}"]
    await camp.try_raw("no signature at all", ("unsigned",), plain, body)


async def alter_headers(camp: Camp, victim: Recruit) -> None:
    """A victim's request, changed on its way."""
    body = ask_body()
    lines = camp.sign(victim, "POST", TARGET, body)
    swap = '"@method" "@path"', '"@path" "@method"'
    changes = {
        "another tag": (MALFORMED, 'tag="shoal-request-1"', 'tag="shoal-lease-1"'),
        "another algorithm": (MALFORMED, 'alg="ed25519"', 'alg="hmac-sha256"'),
        "fewer parts covered": (MALFORMED, ' "content-digest"', ""),
        "parts in another order": (FORGED, *swap),
        "another run in the header": (("other_run",), f"Shoal-Run: {camp.run}", "Shoal-Run: another-run"),
        "another length": (FORGED, f"Content-Length: {len(body)}", f"Content-Length: {len(body) - 1}"),
        "another signature": (FORGED, "Signature: shoal=:", f"Signature: shoal=:{'A' * 85}Q==:\r\nX-Old: shoal=:"),
    }
    for what, (wanted, old, new) in changes.items():
        await camp.try_raw(what, wanted, [line.replace(old, new) for line in lines], body)
    await camp.try_raw("another path", FORGED, ["POST /v1/claims HTTP/1.1", *lines[1:]], body)
    await camp.try_raw("another verb", ("method", "signature"), [f"PUT {TARGET} HTTP/1.1", *lines[1:]], body)
    await camp.try_raw("a query", FORGED, [f"POST {TARGET}?a=b HTTP/1.1", *lines[1:]], body)
    await camp.try_raw("a header twice", MALFORMED, [*lines, f"Shoal-Run: {camp.run}"], body)
    await camp.try_raw("a body in chunks", ("http", "length_required"), [*lines, "Transfer-Encoding: chunked"], body)
    # The last of them: the head is right, so its nonce is spent.
    await camp.try_raw("another body", ("body",), lines, ask_body())
    await camp.try_raw("the right body after it", ("replay",), lines, body)


async def forge_statements(camp: Camp, victim: Recruit, thief: Recruit) -> None:
    """Statements within requests that are good: a manifest, a command, what the owner did not allow."""
    entry = RolloutEntry(hash=os.urandom(32).hex(), tokens=1)
    size = camp.params.group_size * camp.params.groups_per_lease
    lease = (await camp.ask_lease(victim)).lease
    name, fence = ("l1", 1) if lease is None else (lease.lease, lease.fence)
    manifest = Manifest(lease=name, fence=fence, blob=os.urandom(32).hex(), size=1, version=0, rollouts=(entry,) * size)
    signed = SignedManifest(manifest=manifest, signature=sign_message(thief.key, camp.run, manifest))
    body = signed.model_dump_json().encode()
    lines = camp.sign(victim, "POST", "/v1/submissions", body)
    await camp.try_raw("a manifest that another key signed", ("statement", "unknown_lease"), lines, body)
    lines = camp.sign(thief, "POST", "/v1/submissions", body)
    await camp.try_raw("a manifest for another node's lease", ("unknown_lease",), lines, body)
    for target, message in (("/v1/claims", b"{}"), ("/v1/batches/1", b"{}")):
        lines = camp.sign(thief, "POST", target, message)
        await camp.try_raw(f"{target} by a worker", ("scope",), lines, message)
    command = Command(action=Action.BAN, nonce=os.urandom(16).hex(), target=victim.owner.public)
    order = SignedCommand(command=command, signature=sign_message(thief.owner, camp.run, command))
    body = order.model_dump_json().encode()
    lines = ["POST /v1/commands HTTP/1.1", f"Content-Length: {len(body)}"]
    await camp.try_raw("a ban that the operator did not sign", ("statement",), lines, body)
    if lease is not None:
        await victim.client.return_lease(lease.lease)


async def bend_delegations(camp: Camp, victim: Recruit) -> None:
    """Joining with an owner's word that does not hold for this node, this run, now."""
    now_ms, node = read_clock(), camp.make_recruit()
    day_ms = 86_400_000
    words: dict[str, dict[str, Any]] = {
        "a delegation that has ended": {"not_after_ms": now_ms - 1000},
        "one that has not begun": {"not_before_ms": now_ms + day_ms // 2},
        "one for another node": {"node": victim.key.public},
        "one for another run": {"run": "another-run"},
    }
    for what, terms in words.items():
        with camp.refused("delegation", what=what):
            await node.client.join(camp.sign_delegation(node.owner, node.key.public, **terms))
    with camp.refused("delegation", what="one that was changed after it was signed"):
        text = camp.sign_delegation(node.owner, node.key.public).replace(b'"max_leases":64', b'"max_leases":65')
        await node.client.join(text)
    with camp.refused("other_owner", what="a node of another owner"):
        await victim.client.join(camp.sign_delegation(node.owner, victim.key.public))


async def use_revoked(camp: Camp, node: Recruit) -> None:
    """A stolen node key, after its owner took its word back."""
    document = sign_revocation(node.owner, node.key.public, camp.run)
    body = json.dumps({"revocation": document.decode()}).encode()
    head = ["POST /v1/revocations HTTP/1.1", f"Content-Length: {len(body)}"]
    answer = await camp.send(head, body, source=camp.find_source(1))
    camp.evidence.count("revoked" if answer.status == 200 else "not_revoked")
    body = ask_body()
    await camp.try_raw("a revoked node", ("revoked",), camp.sign(node, "POST", TARGET, body), body)
    with camp.refused("revoked", what="a revoked node that joins again"):
        await node.client.join(camp.sign_delegation(node.owner, node.key.public))
