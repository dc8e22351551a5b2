"""The law where decisions are made side by side, and on the other database."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.swarm.event import Kind
from shoal.swarm.messages import Action, Command, SignedCommand, sign_message
from shoal.swarm.params import RunParams, dump_params


def test_what_is_decided_in_one_commit_follows_the_parameters_that_were_changed_in_it(world: Any) -> None:
    """The ledger knows no commits: who reads it takes each decision by the parameters before it."""
    coordinator, gate = world.coordinator, threading.Event()
    params = RunParams(**{**coordinator.params.model_dump(), "price": 77})
    command = Command(nonce="a" * 32, action=Action.PARAMS, params=dump_params(params))
    signed = SignedCommand(command=command, signature=sign_message(world.operator, "demo", command))

    async def ask_both() -> Any:
        held = coordinator.ledger.submit(lambda draft: gate.wait(10))
        both = [coordinator.command(signed), coordinator.grant_lease(world.id("w1"), "b" * 32)]
        tasks = [asyncio.create_task(work) for work in both]
        await asyncio.sleep(0)  # both wait for the writer now
        gate.set()
        await asyncio.wrap_future(held)
        return (await asyncio.gather(*tasks))[1]

    assert world.run(ask_both()).lease.price == 77


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_ledger_on_postgresql_has_the_same_law(url: str, make_world: Callable[..., Any], tell: Any) -> None:
    world = tell(type(make_world()), url)
    assert world.verify().findings == []
    ann = world.owner_id("ann")
    ban = {"reason": "we do not like you", "target": ann}
    seq = world.coordinator.ledger.submit(lambda draft: draft.append(Kind.BAN, subject=ann, body=ban)).result().seq
    findings = world.verify().findings
    world.close()
    assert [(finding.check, finding.text) for finding in findings] == [
        ("law", f"event {seq}: ban of {ann}: nobody signed it")
    ]
