"""vLLM as a rollout engine: `VllmEngine` in the worker's process, the rest inside vLLM's processes.

    engine.py       VllmEngine, which starts vLLM and speaks to it (the only module that the rest of shoal imports)
    choice_v1.py    the seeded choice of tokens, for vLLM's model runner V1 (CPUs)
    choice_v2.py    the same for model runner V2 (GPUs)
    recorder.py     the choice of a batch's tokens, and what is kept of the rollouts under way
    extension.py    what the engine calls in vLLM's worker processes

What runs inside vLLM imports numpy and torch, and of shoal the seeds, engine.sampling and the class of the sink.
"""
