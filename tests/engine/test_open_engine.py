"""Engines are opened in one place."""

import re
from pathlib import Path

import shoal
from shoal.config.run import EngineConfig
from shoal.engine import open_engine
from shoal.policy.model import Policy
from shoal.rollout import Request


def test_nobody_but_open_engine_constructs_an_engine() -> None:
    root = Path(shoal.__file__).parent
    found = {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if re.search(r"\bTorchEngine\(", path.read_text())
    }
    assert found == {"engine/__init__.py"}


def test_the_engine_that_is_opened_generates(qwen: Policy) -> None:
    engine = open_engine(EngineConfig(slots=2), qwen.model, eos_id=qwen.eos_id, version=3)
    requests = [Request(id=name, prompt_ids=(5, 6), seed=7, max_tokens=4) for name in "abc"]
    assert engine.version == 3 and not engine.busy
    assert {rollout.id for rollout in engine.generate(requests)} == {"a", "b", "c"}
