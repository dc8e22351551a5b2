"""What `VllmEngine` calls in vLLM's worker processes; vLLM mixes this class into its own worker.

Only the process that samples records anything: of several pipeline stages the last, of several tensor-parallel ranks
the first.
"""

import os
import pkgutil
import select
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from functools import wraps
from threading import Thread
from typing import Any

from torch import Tensor

from shoal.engine.vllm.recorder import RECORDER


class Extension:
    """Methods of a worker, called by name."""

    model_runner: Any
    model_config: Any

    def shoal_open(self, version: int, sink: str, client: int, home: str) -> None:
        """State the version of the weights, the class of the sink for hidden states (module:name; empty: none), and the
        process that started vLLM, with the folder that it writes weights to."""
        RECORDER.version = version
        if hasattr(os, "pidfd_open"):
            Thread(target=_outlive, args=(os.pidfd_open(client), os.getppid(), home), daemon=True).start()
        if not sink:
            return
        RECORDER.sink = pkgutil.resolve_name(sink)()
        model = self.model_runner.get_model()
        if not hasattr(model, "shoal_compute_logits"):
            model.shoal_compute_logits = compute = model.compute_logits

            @wraps(compute)
            def compute_logits(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
                RECORDER.hidden = hidden_states
                return compute(hidden_states, *args, **kwargs)

            model.compute_logits = compute_logits

    def shoal_take(self, lengths: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Finished rollouts, which are then forgotten."""
        return RECORDER.take(lengths)

    def shoal_drop(self, ids: Sequence[str]) -> None:
        """Forget cancelled rollouts."""
        RECORDER.drop(ids)

    def shoal_load(self, folder: str, version: int) -> float:
        """Replace the weights by those of a folder; returns the seconds. The engine is paused meanwhile."""
        begun = time.perf_counter()
        self.model_runner.reload_weights(weights_path=folder)
        model = self.model_runner.get_model()
        if self.model_config.hf_config.tie_word_embeddings:
            # On CPUs a tied head keeps the product that it packed from the earlier weights.
            model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
        RECORDER.version = version
        return time.perf_counter() - begun

    def shoal_count(self) -> dict[str, int]:
        """Rows reported and reported again, and rollouts that are kept."""
        return {"rows": RECORDER.num_rows, "repeated": RECORDER.num_repeated, "open": RECORDER.count_open()}


def _outlive(client: int, core: int, home: str) -> None:
    """Wait until the process behind a descriptor has ended, and end vLLM's core, which would stay if it was killed.

    Without its core this process ends too.
    """
    waiting = select.poll()
    waiting.register(client, select.POLLIN)
    waiting.poll()
    shutil.rmtree(home, ignore_errors=True)
    os.kill(core, signal.SIGKILL)
