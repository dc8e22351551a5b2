"""The engine on torchft, where it is installed: two peers of one process with a lighthouse on loopback."""

import threading

import numpy as np
import pytest

from shoal.diloco.codecs import find_codec
from shoal.diloco.outer import DilocoPlan, Rules
from shoal.diloco.reduce import apply_outcome
from shoal.diloco.round import RoundOutcome, StaleRoundError, Update
from shoal.diloco.state import start_state
from shoal.diloco.torchft import TorchftAverager, explain_lack
from shoal.errors import ConfigError

SIZE = 300
PLAN = DilocoPlan("test", (SIZE,), Rules(codec="int8", dynamic=False))
START = start_state((np.linspace(-1.0, 1.0, SIZE, dtype=np.float32),))


def make_update(averager: TorchftAverager, factor: float) -> Update:
    values = np.linspace(0.0, factor, SIZE, dtype=np.float32)
    key = PLAN.name_round(averager.fetch_state(1.0), 0)
    return Update(key, averager.peer, 10, 5, find_codec("int8").encode(values), "int8")


def run_round(members: list[TorchftAverager]) -> list[RoundOutcome | None]:
    updates = [make_update(averager, 1.0 + number) for number, averager in enumerate(members)]
    for averager, update in zip(members, updates, strict=True):
        averager.submit(update)
    return [averager.collect(update.key, 60.0) for averager, update in zip(members, updates, strict=True)]


@pytest.mark.skipif(bool(explain_lack()), reason=explain_lack())
def test_peers_agree_on_every_round_and_a_newcomer_is_healed() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=200, heartbeat_timeout_ms=2000)
    address = lighthouse.address()
    made: dict[str, TorchftAverager] = {}

    def make(name: str) -> None:
        made[name] = TorchftAverager(PLAN, name, START, lighthouse=address, min_peers=2, timeout_s=40.0)

    threads = [threading.Thread(target=make, args=(name,)) for name in ("peer-1", "peer-2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    members = [made["peer-1"], made["peer-2"]]
    state = START
    for _ in range(2):
        outcomes = run_round(members)
        assert outcomes[0] == outcomes[1] and outcomes[0] is not None
        assert outcomes[0].peers == ("peer-1", "peer-2")
        state = apply_outcome(PLAN, state, outcomes[0])
    assert {averager.fetch_state(1.0).hash for averager in members} == {state.hash}
    make("peer-3")
    late = make_update(made["peer-3"], 1.0)
    made["peer-3"].submit(late)

    def run_until_healed() -> None:
        for _ in range(10):  # it may miss the first quorum
            run_round(members)
            made["peer-3"].collect(late.key, 2.0)

    try:
        with pytest.raises(StaleRoundError):
            run_until_healed()
    finally:
        for averager in made.values():
            averager.close()
        lighthouse.shutdown()
    assert len({averager.fetch_state(1.0).hash for averager in made.values()}) == 1


def test_without_torchft_the_reason_is_reported(monkeypatch) -> None:
    monkeypatch.setattr("shoal.diloco.torchft.explain_lack", lambda: "torchft is not installed")
    with pytest.raises(ConfigError, match="not installed"):
        TorchftAverager(PLAN, "a", START, lighthouse="http://127.0.0.1:1")
