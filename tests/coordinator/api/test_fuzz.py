"""Requests generated from the OpenAPI document, against a whole coordinator: no answer is a 5xx.

Half of them violate the schema and half follow it. A third is unsigned. The others are signed by a worker or by a node
that is validator and trainer, with the statements in their bodies signed as well (by the operator, the owner, the
node), and with every other id replaced by an existing one: so they pass authentication and reach the decisions.
"""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from shoal.coordinator.api.context import ApiLimits
from shoal.coordinator.service import TABLES, CoordinatorService, ServiceConfig, open_service
from shoal.identity.authenticator import AuthLimits
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.identity.routes import JSON, build_openapi
from shoal.identity.signer import RequestSigner
from shoal.ledger.event import EventError
from shoal.protocol.messages import (
    AppealStatement,
    Command,
    Heartbeat,
    Manifest,
    RedeemStatement,
    RolloutEntry,
    SignedManifest,
    SignedVersion,
    UnbondStatement,
    VerdictStatement,
    VersionStatement,
    sign_message,
)
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
requests = pytest.importorskip("requests")

MANY = 1e5
EXAMPLES = 20
"""tries of each operation in each way"""
LEASE, SUBMISSION, KEY = re.compile(r"l[0-9]{1,18}"), re.compile(r"s[0-9]{1,18}"), re.compile(r"[0-9a-f]{64}")
WAIT = re.compile(rb'("wait_s": ?)[0-9]+')
STATEMENTS: dict[str, tuple[str, Any, str]] = {
    "/v1/submissions": ("manifest", Manifest, "node"),
    "/v1/verdicts": ("verdict", VerdictStatement, "node"),
    "/v1/versions": ("version", VersionStatement, "node"),
    "/v1/appeals": ("appeal", AppealStatement, "owner"),
    "/v1/redeems": ("redeem", RedeemStatement, "owner"),
    "/v1/unbonds": ("unbond", UnbondStatement, "owner"),
    "/v1/commands": ("command", Command, "operator"),
}
"""by path: the field that is signed, its kind, and the signer"""


class Target:
    """A coordinator that serves from its own thread, with two nodes, a lease and a submission."""

    def __init__(self, folder: Path) -> None:
        self.keys = {name: Key.generate() for name in ("operator", "owner", "worker", "judge")}
        self.session = requests.Session()
        self.lease = self.submission = ""
        self._folder = folder
        self._ready: Future[CoordinatorService] = Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self.service = self._ready.result(30)
        self.url = self.service.url

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()
        self.session.close()

    async def _serve(self) -> None:
        owner = self.keys["owner"].public
        limits = {"read_rate": MANY, "stranger_rate": MANY}
        config = ServiceConfig(
            run="demo",
            operator=self.keys["operator"].public,
            port=0,
            join_work=16,
            params=RunParams(steps=5, group_size=2, validators=(owner,), trainers=(owner,), max_tokens=100),
            api=ApiLimits(**limits),
            auth=AuthLimits(address_rate=MANY, node_rate=MANY, owner_rate=MANY, fresh_rate=MANY),
        )
        try:
            async with open_service(config, self._folder) as service:
                await self._prepare(service)
                self._ready.set_result(service)
                chores = asyncio.create_task(service.run())
                await self._stop.wait()
                chores.cancel()
                await asyncio.gather(chores, return_exceptions=True)
        except BaseException as error:
            if not self._ready.done():
                self._ready.set_exception(error)
            raise

    async def _prepare(self, service: CoordinatorService) -> None:
        """v0 is published, the worker has committed a submission for one lease and holds another."""
        core, worker, judge = service.coordinator, self.keys["worker"], self.keys["judge"]
        now_ms = read_clock()
        for key, scopes in ((worker, {Scope.WORK}), (judge, {Scope.WORK, Scope.VALIDATE, Scope.TRAIN})):
            grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**9, frozenset(scopes), 64)
            await core.join(key.public, sign_delegation(self.keys["owner"], grant))
        version = VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch="")
        signed = SignedVersion(version=version, signature=sign_message(judge, "demo", version))
        await core.publish_version(judge.public, signed)
        lease = (await core.grant_lease(worker.public, "1" * 32, 0)).lease
        assert lease is not None
        entry = RolloutEntry(hash="1" * 64, tokens=5)
        manifest = Manifest(
            lease=lease.lease, fence=lease.fence, blob="2" * 64, size=5, version=0, rollouts=(entry,) * 2
        )
        statement = SignedManifest(manifest=manifest, signature=sign_message(worker, "demo", manifest))
        self.submission = (await core.commit_submission(worker.public, statement)).submission
        core.heartbeat(worker.public, Heartbeat())
        other = (await core.grant_lease(judge.public, "2" * 32, 0)).lease
        assert other is not None
        self.lease = other.lease
        await core.ledger.sign_head()

    def send(self, case: Any, signer: str | None) -> Any:
        """The answer to a generated request, signed by a node or unsigned."""
        plain = requests.Request(**case.as_transport_kwargs(base_url=self.url)).prepare()
        body = plain.body or b""
        if signer is None:
            return self.session.send(plain, timeout=10, allow_redirects=False)
        node = self.keys[signer]
        body = body.encode() if isinstance(body, str) else bytes(body)
        body = WAIT.sub(rb"\g<1>0", body)  # otherwise long polls would take half a minute each
        target = self.place_ids(plain.path_url)
        body = self.sign_statement(case.operation.path, self.place_ids(body.decode("latin-1")).encode("latin-1"), node)
        headers = dict(
            RequestSigner(node, "demo", self.service.coordinator.public).sign_request(case.method, target, body)
        )
        headers["Content-Type"] = "application/json"
        return self.session.request(
            case.method, self.url + target, data=body, headers=headers, timeout=10, allow_redirects=False
        )

    def place_ids(self, text: str) -> str:
        """The same with every other lease and submission id replaced by an existing one."""
        for pattern, found in ((LEASE, self.lease), (SUBMISSION, self.submission)):
            bounded = re.compile(rf'(?<=["/]){pattern.pattern}(?=["/]|$)')
            text = bounded.sub(lambda match, found=found: found if int(match[0][1:]) % 2 else match[0], text)
        return text

    def sign_statement(self, path: str, body: bytes, node: Key) -> bytes:
        """The same with the right signature for its statement, if it is a statement at all."""
        field, kind, who = STATEMENTS.get(path, ("", None, ""))
        try:
            content = json.loads(body)
            message = kind.model_validate_json(json.dumps(content[field]))
        except (ValueError, ValidationError, KeyError, TypeError, AttributeError, RecursionError):
            return body
        key = node if who == "node" else self.keys[who]
        try:
            content["signature"] = sign_message(key, "demo", message)
        except EventError:
            return body  # floats, which cannot be signed
        if who == "owner":
            content["owner"] = key.public
        return json.dumps(content).encode()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.close()


def list_operations() -> list[Any]:
    """All operations of the document; it is built from the routes alone, so no context is needed."""
    routes = [route for table in TABLES for route in table.routes]
    document = build_openapi(routes, title="coordinator", version="1", media_type=JSON)
    found = [one.ok() for one in schemathesis.openapi.from_dict(document).get_all_operations()]
    # A node that has left cannot do anything else.
    return sorted(found, key=lambda operation: operation.path == "/v1/leave")


OPERATIONS = list_operations()
MODES = schemathesis.GenerationMode


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_made_up_request_is_answered_with_a_bug(target: Target, operation: Any) -> None:
    cases = st.one_of(*(operation.as_strategy(generation_mode=mode) for mode in (MODES.POSITIVE, MODES.NEGATIVE)))

    @settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases, signer=st.sampled_from([None, "worker", "judge"]))
    def check(case: Any, signer: str | None) -> None:
        answer = target.send(case, signer)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert {"code", "text"} <= answer.json().keys()

    check()


def test_made_up_requests_get_behind_authentication(target: Target) -> None:
    seen = target.service.context.refusals.values
    for code in ("unsigned", "invalid", "statement", "unknown_submission"):
        assert seen.get(code, 0) > 0, seen
    assert target.service.server.metrics.requests.values.get("200", 0) > 0
