"""Rollout engines behind one interface, `shoal.engine.base.Engine`; only `open_engine` creates them.

Torch is imported when an engine is opened: commands that only need the name of this package start without it.
"""

from typing import TYPE_CHECKING

from shoal.config.run import EngineConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from shoal.engine.base import Engine, HiddenSink
    from shoal.engine.sampling import Choose


def open_engine(
    config: EngineConfig,
    model: "PreTrainedModel",
    *,
    eos_id: int,
    version: int = 0,
    sink: "HiddenSink | None" = None,
    choose: "Choose | None" = None,
) -> "Engine":
    """The engine that `config` names, with `config.slots` rows; the engine takes ownership of the model.

    `sink` receives the hidden states. `choose` replaces the verifiable choice of tokens: only attacks do that.
    """
    if config.name == "vllm":
        from shoal.engine.vllm.engine import VllmEngine
        from shoal.engine.vllm.recorder import ProofSink

        assert choose is None, "attacks sample with torch"
        assert sink is None or isinstance(sink, ProofSink), "hidden states stay in vLLM's process, only proofs leave it"
        return VllmEngine(model, config, eos_id=eos_id, version=version, sink=sink)
    from shoal.engine.sampling import choose_tokens
    from shoal.engine.torch import TorchEngine

    return TorchEngine(
        model, eos_id=eos_id, slots=config.slots, version=version, sink=sink, choose=choose or choose_tokens
    )
