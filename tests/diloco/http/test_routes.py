"""The reducer's routes as its OpenAPI document describes them."""

import asyncio
import json
from pathlib import Path

import numpy as np

from shoal.diloco.http.service import open_reducer
from shoal.diloco.http.settings import ReducerConfig
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.state import start_state
from shoal.net.client import HttpClient, HttpResponse, parse_endpoint

PLAN = DilocoPlan("test", (8,), Rules(interval=5, codec="fp32"))


def ask_reducer(folder: Path, *requests: tuple[str, str]) -> list[HttpResponse]:
    async def run() -> list[HttpResponse]:
        initial = start_state((np.zeros(8, dtype=np.float32),))
        config = ReducerConfig(port=0, peers=("ab" * 32,))
        async with asyncio.timeout(20), open_reducer(config, folder, PLAN, initial=initial) as service:
            client = HttpClient(parse_endpoint(service.url))
            try:
                return [await client.ask(method, path, [], b"", 1 << 20) for method, path in requests]
            finally:
                client.close()

    return asyncio.run(run())


def test_the_openapi_document_names_every_route_with_its_messages(tmp_path: Path) -> None:
    (answer,) = ask_reducer(tmp_path, ("GET", "/openapi.json"))
    document = json.loads(answer.body)
    paths = document["paths"]
    assert answer.status == 200 and len(paths) == 14
    held = paths["/v1/diloco/holdings"]["post"]
    assert held["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/HeldState"}
    outcome = paths["/v1/diloco/outcomes/{fragment}/{number}/{base}/{index}"]["get"]
    assert [part["in"] for part in outcome["parameters"]] == 4 * ["path"] + ["query"]
    assert {method["x-access"] for path in paths.values() for method in path.values()} == {"public", "join", "member"}


def test_a_path_has_one_spelling_and_a_wait_has_a_bound(tmp_path: Path) -> None:
    digest = "a" * 64
    requests = {
        ("GET", "/v1/diloco/statuses"): 404,
        ("GET", "/v1/diloco/%73tatus"): 404,
        ("GET", f"/v1/diloco/states/{digest}/01"): 404,
        ("GET", "/v1/diloco/join"): 405,
        ("GET", "/v1/diloco/state?wait=21"): 400,
        ("GET", "/v1/diloco/state?x=1"): 400,
        ("GET", f"/v1/diloco/states/{digest}/1"): 401,
        ("GET", "/v1/diloco/status"): 200,
        ("GET", "/metrics"): 200,
    }
    answers = ask_reducer(tmp_path, *requests)
    assert [answer.status for answer in answers] == list(requests.values())
    metrics = answers[-1].body.decode()
    assert 'shoal_request_seconds_count{route="",status="4xx"} 4.0\n' in metrics, "a path of the caller is no label"
    assert 'shoal_diloco_refused_total{code="malformed"} 2.0\n' in metrics
