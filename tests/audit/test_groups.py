"""The audit where decisions are committed in one group, and on the other database."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from shoal.ledger.event import EventKind
from shoal.protocol.messages import Action, Command, SignedCommand, sign_message
from shoal.protocol.params import RunParams, dump_params


def test_what_is_decided_in_one_commit_follows_the_parameters_that_were_changed_in_it(world: Any) -> None:
    """The ledger has no commits: a reader applies each decision with the parameters before it."""
    coordinator, gate = world.coordinator, threading.Event()
    params = RunParams(**{**coordinator.params.model_dump(), "price": 77})
    command = Command(nonce="a" * 32, action=Action.PARAMS, params=dump_params(params))
    signed = SignedCommand(command=command, signature=sign_message(world.operator, "demo", command))

    async def ask_both() -> Any:
        held = coordinator.ledger.submit(lambda draft: gate.wait(10))
        both = [coordinator.command(signed), coordinator.grant_lease(world.id("w1"), "b" * 32, 0)]
        tasks = [asyncio.create_task(work) for work in both]
        await asyncio.sleep(0)  # both wait for the writer now
        gate.set()
        await asyncio.wrap_future(held)
        return (await asyncio.gather(*tasks))[1]

    assert world.run(ask_both()).lease.price == 77


@pytest.mark.parametrize("url", ["postgresql"], indirect=True)
def test_a_ledger_on_postgresql_is_audited_in_the_same_way(url: str, make_world: Callable[..., Any], play: Any) -> None:
    world = play(type(make_world()), url)
    assert world.verify().findings == []
    ann = world.owner_id("ann")
    ban = {"reason": "we do not like you", "target": ann}
    seq = world.coordinator.ledger.submit(lambda draft: draft.append(EventKind.BAN, subject=ann, body=ban)).result().seq
    findings = world.verify().findings
    world.close()
    assert [(finding.check, finding.text) for finding in findings] == [
        ("rules", f"event {seq}: ban of {ann}: missing signature")
    ]
