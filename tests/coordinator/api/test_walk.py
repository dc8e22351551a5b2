"""How many of our files one request passes through, from the socket to the answer: a reader must be able to follow."""

import asyncio
import http.client
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import shoal
from shoal.coordinator.service import CoordinatorService, ServiceConfig, open_service
from shoal.identity.delegation import Grant, Scope, sign_delegation
from shoal.identity.keys import Key
from shoal.identity.signer import RequestSigner
from shoal.protocol.messages import LeaseRequest, SignedVersion, VersionStatement, sign_message
from shoal.protocol.params import RunParams
from shoal.util.clock import read_clock

MAX_FILES, MAX_ROUTE_FILES = 35, 17
"""limit for all files, and for those between the socket and the decision: the others decide, or write the ledger"""
DECISION = ("coordinator/decide/", "coordinator/rules/", "coordinator/state/", "ledger/", "protocol/")
SOURCE = Path(shoal.__file__).parent
OWNER, WORKER, TRAINER = Key.generate(), Key.generate(), Key.generate()


class Recorder:
    """Files of this package in which a function is called while recording, in threads that were started meanwhile."""

    def __init__(self) -> None:
        self.is_on = False
        self.files: set[str] = set()

    def record(self, frame: FrameType, event: str, _: Any) -> None:
        if self.is_on and event == "call":
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(SOURCE):
                self.files.add(str(path.relative_to(SOURCE)))


@contextmanager
def serve_in_thread(folder: Path) -> Iterator[CoordinatorService]:
    """A coordinator with a worker and a published version that serves from its own thread."""
    loop, stop, is_ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    made: list[CoordinatorService] = []

    async def serve() -> None:
        params = RunParams(groups_per_lease=1, steps=2, group_size=2, max_tokens=100, trainers=(OWNER.public,))
        config = ServiceConfig(run="demo", port=0, join_work=16, params=params)
        async with open_service(config, folder) as service:
            now_ms = read_clock()
            for key, scope in ((WORKER, Scope.WORK), (TRAINER, Scope.TRAIN)):
                grant = Grant(key.public, "demo", now_ms - 1000, now_ms + 10**8, frozenset({scope}), 16)
                await service.coordinator.join(key.public, sign_delegation(OWNER, grant))
            version = VersionStatement(version=0, root="0" * 64, manifest="0" * 64, batch="")
            signed = SignedVersion(version=version, signature=sign_message(TRAINER, "demo", version))
            await service.coordinator.publish_version(TRAINER.public, signed)
            made.append(service)
            is_ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert is_ready.wait(30)
        yield made[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def test_a_request_for_a_lease_goes_through_few_files(tmp_path: Path) -> None:
    recorder = Recorder()
    threading.setprofile(recorder.record)
    try:
        with serve_in_thread(tmp_path) as service:
            body = LeaseRequest(request_key="1" * 32, version=0).model_dump_json().encode()
            signer = RequestSigner(WORKER, "demo", service.coordinator.public)
            headers = dict(signer.sign_request("POST", "/v1/leases", body))
            connection = http.client.HTTPConnection(*service.server.address, timeout=30)
            assert sys.getprofile() is None, "the client is not recorded"
            recorder.is_on = True
            connection.request("POST", "/v1/leases", body, headers)
            answer = connection.getresponse()
            text = answer.read()
            recorder.is_on = False
            connection.close()
    finally:
        threading.setprofile(None)
    assert answer.status == 200 and b'"lease":"l' in text, text
    assert "coordinator/api/routes.py" in recorder.files and "identity/authenticator.py" in recorder.files
    assert len(recorder.files) <= MAX_FILES, sorted(recorder.files)
    on_the_way = sorted(name for name in recorder.files if not name.startswith(DECISION))
    assert len(on_the_way) <= MAX_ROUTE_FILES, on_the_way
