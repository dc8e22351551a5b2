"""Every route, called as a node calls it: requests reach the coordinator, and answers come back unchanged."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.identity.delegation import sign_revocation
from shoal.identity.documents import Tag, open_document
from shoal.identity.keys import Key
from shoal.ledger.event import EventKind
from shoal.ledger.head import InclusionProof
from shoal.net.retry import RefusedError
from shoal.protocol.messages import (
    Action,
    AppealAnswer,
    AppealStatement,
    Command,
    CommandAnswer,
    Done,
    Explanation,
    Heartbeat,
    LeaseProgress,
    Manifest,
    RevokeRequest,
    RolloutEntry,
    SignedAppeal,
    SignedCommand,
    SignedUnbond,
    SubmissionState,
    UnbondAnswer,
    UnbondStatement,
    Verdict,
    VerdictStatement,
    VersionStatement,
    sign_message,
)

DATA = b"rollouts" * 100_000


def make_manifest(data: bytes = DATA) -> Manifest:
    blob = hashlib.sha256(data).hexdigest()
    entry = RolloutEntry(hash="1" * 64, tokens=5)
    return Manifest(lease="l1", fence=1, blob=blob, size=len(data), version=0, rollouts=(entry, entry))


def test_a_node_goes_through_the_whole_cycle(open_stand: Any, tmp_path: Path) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            client = stand.client(key)
            info = await client.join(b"{}", "shoal 1")
            assert info.node == key.public
            beat = Heartbeat(version=0, leases=(LeaseProgress(lease="l1", done=1),), tokens_per_s=2)
            assert (await client.send_heartbeat(beat)).next_s == 10
            lease = (await client.ask_lease(version=0)).lease
            assert lease is not None and lease.node == key.public
            path = tmp_path / "file"
            path.write_bytes(DATA)
            receipt = await client.submit(make_manifest(), path)
            assert receipt.receipt.blob == make_manifest().blob
            assert (await client.ask_receipt("s1", make_manifest())).receipt == receipt.receipt
            job = (await client.claim_jobs()).job
            assert job is not None and job.manifest == make_manifest()
            await client.fetch_blob(job.submission, job.manifest.blob, job.manifest.size, tmp_path / "copy")
            assert (tmp_path / "copy").read_bytes() == DATA
            await client.send_verdict(VerdictStatement(submission="s1", round=1, verdict=Verdict.ACCEPTED))
            assert (await client.cut_batch(3)).batch is not None
            assert (await client.read_batch(3)).reason == "not yet"
            version = VersionStatement(version=1, root="0" * 64, manifest="0" * 64, batch="")
            assert (await client.publish_version(version)).open_steps == (1,)
            assert (await client.return_lease("l1")).state == "returned"
            await client.leave()
            client.close()
            folder = stand.folder / "nodes" / key.public[:8]
            for name, tag in [
                ("signed_leases/l1", Tag.LEASE),
                ("receipts/s1", Tag.RECEIPT),
                ("verdicts/s1-1", Tag.VERDICT),
            ]:
                open_document(stand.key.public, tag, (folder / f"{name}.json").read_bytes())
            assert stand.server.metrics.accepted.total <= 3  # connections are reused

    asyncio.run(check())


def test_everybody_may_look(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            client = stand.client(Key.generate())
            assert (await client.read_status()).run == "demo"
            assert (await client.read_leaders()).leaders[0].tokens == 5
            assert (await client.read_account("0" * 64)).avail == 500_000
            with pytest.raises(RefusedError, match="no node of this owner has joined this run"):
                await client.read_account("1" * 64)
            assert await client.explain("s5") == Explanation(
                text="all about s5", findings=("every value of s5",), state=SubmissionState.RECEIVED
            )
            await stand.ledger.transact(lambda draft: draft.append(EventKind.ADMIN, body={}))
            assert await client.read_head() is None
            await stand.ledger.sign_head()
            head = await client.read_head()
            assert head is not None and head.head.size == 2
            bundle = InclusionProof.from_bytes(await client.read_event(1))
            bundle.check_proof("demo", stand.key.public)
            assert await client.read_proof(2, 2) == ()
            status, body = await stand.send(["GET /healthz HTTP/1.1"])
            assert status == 200 and json.loads(body)["coordinator"] == stand.key.public
            status, body = await stand.send(["GET /metrics HTTP/1.1"])
            assert status == 200 and b"shoal_ledger_events 2.0\n" in body
            assert b"shoal_canaries_caught 2.0\n" in body and b"shoal_canaries_missed 1.0\n" in body
            assert b"shoal_workers_tokens_per_second 30.0\n" in body
            assert b"shoal_validators_tokens_per_second 7.0\n" in body
            assert b'shoal_request_seconds_count{route="/healthz",status="2xx"} 1.0\n' in body
            client.close()

    asyncio.run(check())


def test_statements_that_carry_their_signature_may_come_from_anybody(open_stand: Any) -> None:
    async def check() -> None:
        key = Key.generate()
        async with open_stand() as stand:
            client = stand.client(key)
            stand.coordinator.admit(key.public)
            appeal = AppealStatement(submission="s1")
            signed = SignedAppeal(appeal=appeal, owner=key.public, signature=sign_message(key, "demo", appeal))
            assert (await client.bring("/v1/appeals", signed, AppealAnswer)).state == "open"
            command = Command(nonce="0" * 32, action=Action.STOP)
            ordered = SignedCommand(command=command, signature=sign_message(key, "demo", command))
            assert (await client.bring("/v1/commands", ordered, CommandAnswer)).seq == 3
            revocation = RevokeRequest(revocation=sign_revocation(key, Key.generate().public, "demo").decode())
            assert (await client.bring("/v1/revocations", revocation, Done)).ok
            with pytest.raises(RefusedError, match="invalid revocation"):
                await client.bring("/v1/revocations", RevokeRequest(revocation="{}"), Done)
            unbond = UnbondStatement(request="0" * 32)
            asked = SignedUnbond(unbond=unbond, owner=key.public, signature=sign_message(key, "demo", unbond))
            assert (await client.bring("/v1/unbonds", asked, UnbondAnswer)).free_ms == 7
            assert stand.coordinator.calls == ["appeal", "command", "revoke", "unbond"]
            client.close()

    asyncio.run(check())


def test_the_status_is_computed_once_for_concurrent_requests(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            await asyncio.gather(*(stand.send(["GET /v1/status HTTP/1.1"]) for _ in range(30)))
            assert stand.coordinator.calls.count("status") <= 2

    asyncio.run(check())


def test_the_openapi_document_names_every_route_and_its_messages(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            status, body = await stand.send(["GET /v1/openapi.json HTTP/1.1"])
            paths = json.loads(body)["paths"]
            assert status == 200
            assert len(paths) == 37
            schema = paths["/v1/heartbeat"]["post"]["requestBody"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": "#/components/schemas/Heartbeat"}
            for path, methods in paths.items():
                for operation in methods.values():
                    assert set(operation["responses"]) >= {"200", "4XX"}, path
                    for parameter in operation.get("parameters", ()):
                        assert parameter["in"] == "path", f"{path} has no query parameters"

    asyncio.run(check())


def test_chores_go_on_and_sign_a_head(open_stand: Any) -> None:
    async def check() -> None:
        async with open_stand() as stand:
            chores = asyncio.create_task(stand.context.run_chores())
            while stand.ledger.head is None:
                await asyncio.sleep(0.01)
            assert stand.coordinator.num_ticks == 1
            chores.cancel()
            with pytest.raises(asyncio.CancelledError):
                await chores

    asyncio.run(check())
