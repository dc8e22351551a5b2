"""What a comparison with rivals takes: one layer of altered weights at a time, not a copy of the model."""

import json
import os
import subprocess
import sys
import textwrap

WORK = """
    import json
    from pathlib import Path

    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from shoal.policy.altered import map_linears
    from shoal.rollout import Finish, Rollout, VersionRange
    from shoal.toploc import replay as module
    from shoal.toploc.replay import replay_rollouts
    from shoal.toploc.rivals import make_rivals, measure_change

    def peak(work):
        Path("/proc/self/clear_refs").write_text("5")
        before = read("VmRSS")
        work()
        return read("VmHWM") - before

    def read(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))

    def replay(weights):
        replay_rollouts(weights.model, [rollout], eos_id=1, change=weights.change)

    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 16, "vocab_size": 512}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=8, num_key_value_heads=4)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    module.HELD_BYTES = 0  # as if the model were large
    ids = np.arange(2, 10, dtype=np.int32)
    rollout = Rollout(
        id="r",
        prompt_ids=ids,
        token_ids=ids,
        logprobs=np.zeros(8, dtype=np.float32),
        finish=Finish.LENGTH,
        versions=(VersionRange(0, 0, 8),),
        temperature=1.0,
        seed=0,
    )
    first, second, last = make_rivals(model, model).values()
    replay(first)  # buffers that are allocated once
    found = {name: peak(lambda: replay(own)) for name, own in (("int8", first), ("groups", second), ("previous", last))}
    found["change"] = peak(lambda: measure_change(model, model))
    found["control"] = peak(lambda: map_linears(model, first.change))
    print(json.dumps(found | {"model": sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20}))
"""


def test_rivals_take_no_memory_for_a_copy_of_the_model() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WORK)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    found = json.loads(done.stdout.splitlines()[-1])
    model = found.pop("model")
    assert found.pop("control") > 0.9 * model, "the control that makes a copy must show it"
    assert all(size < 0.4 * model for size in found.values()), f"MB, of a model of {model:.0f}: {found}"
