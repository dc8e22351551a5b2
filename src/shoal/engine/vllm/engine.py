"""`VllmEngine`: vLLM behind the interface of every engine, its core and workers in processes of their own.

- Requests are sampled by their seeds (choice_v1.py), proofs are built where the states are (recorder.py), and fetched
  when a rollout is finished.
- New weights are read from a folder. The engine is paused for it: active rollouts keep their tokens, their keys and
  values are dropped and computed again with the new weights, and each token counts as sampled by the weights that
  sampled it.
- vLLM decides by itself what it computes together; no result depends on it beyond rounding.
"""

import atexit
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from shoal.config.run import SHARD_BYTES, EngineConfig
from shoal.engine.vllm.recorder import ProofSink, describe_row
from shoal.errors import ConfigError
from shoal.policy.model import save_model_settings, saved_tensors
from shoal.policy.weights import describe_tensors, plan_layout, write_weights
from shoal.rollout import Finish, Request, Rollout, VersionRange
from shoal.util.files import remove_dir

logger = logging.getLogger(__name__)

_CHOICE = "shoal.engine.vllm.choice_v{runner}:SeededChoiceV{runner}"
_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_EXTENSION = "shoal.engine.vllm.extension.Extension"
_OWN_OPTIONS = {"model", "dtype", "max_num_seqs", "generation_config", "skip_tokenizer_init", "seed"}
_OWN_OPTIONS |= {"logits_processors", "worker_extension_cls"}
_CPU_CACHE_BYTES = 1 << 30
"""for keys and values, where vLLM has no device whose memory it could measure"""


class VllmEngine:
    """Generates rollouts with vLLM."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: EngineConfig,
        *,
        eos_id: int,
        version: int = 0,
        sink: ProofSink | None = None,
    ) -> None:
        """A sink of the same class is created in vLLM's worker; this one is given its proofs of finished rollouts."""
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault(_RUNNER, "0")
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ConfigError(f'engine.name: "vllm" is not installed here ({error}); see docs/vllm.md') from None
        if clash := sorted(config.options.keys() & _OWN_OPTIONS):
            raise ConfigError(f"engine.options.{clash[0]}: is set by shoal, from its own settings")
        logger.info("starting vLLM, which takes about a minute")
        self._eos_id, self._sink = eos_id, sink
        self._requests: dict[str, Request] = {}
        self._home = tempfile.TemporaryDirectory(prefix="shoal-vllm-")
        tensors = saved_tensors(model)
        self._names = tuple(tensors)
        folder = self._write(tensors)
        save_model_settings(model, folder)
        on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_CACHE_BYTES} if current_platform.is_cpu() else {}
        settings: dict[str, Any] = {"disable_log_stats": True, "use_tqdm_on_load": False, **on_cpu, **config.options}
        self._llm = LLM(
            str(folder),
            **settings,
            dtype=str(model.dtype).removeprefix("torch."),
            max_num_seqs=config.slots,
            generation_config="vllm",
            skip_tokenizer_init=True,
            seed=0,
            logits_processors=[_CHOICE.format(runner=2 if os.environ[_RUNNER] == "1" else 1)],
            worker_extension_cls=_EXTENSION,
        )
        self._core = self._llm.llm_engine
        atexit.register(self.close)
        place = "" if sink is None else f"{type(sink).__module__}:{type(sink).__qualname__}"
        self._call("shoal_open", version, place, os.getpid(), self._home.name)
        self.version = version

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. vLLM computes what equal prompts share once, if it caches prefixes."""
        from vllm import SamplingParams

        for request in requests:
            assert request.id not in self._requests, "ids of active requests are unique"
            params = SamplingParams(
                temperature=0.0,
                max_tokens=request.max_tokens,
                detokenize=False,
                ignore_eos=True,
                stop_token_ids=[self._eos_id] if self._eos_id >= 0 else None,
                extra_args=describe_row(request),
            )
            self._core.add_request(request.id, {"prompt_token_ids": list(request.prompt_ids)}, params)
            self._requests[request.id] = request

    def step(self) -> list[Rollout]:
        """Wait for the next outputs of vLLM, and return the rollouts that finished."""
        done = [output for output in self._core.step() if output.finished]
        if not done:
            return []
        taken = self._call("shoal_take", {output.request_id: len(output.outputs[0].token_ids) for output in done})
        return [self._finish(output.request_id, output.outputs[0].token_ids, taken) for output in done]

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit and step until all are done; yields rollouts in order of finishing."""
        assert not self.busy, "generate needs an idle engine"
        self.submit(requests)
        while self.busy:
            yield from self.step()

    def cancel(self, ids: Iterable[str]) -> None:
        """Drop these requests, queued or active; ids of finished requests are ignored."""
        active = [name for name in ids if self._requests.pop(name, None) is not None]
        if active:
            self._core.abort_request(active)
            self._call("shoal_drop", active)

    def swap_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights in place; active rollouts continue with them."""
        folder = self._write({name: weights[name] for name in self._names})
        # The core steps by itself: without the pause it would compute new states over old keys.
        self._core.engine_core.call_utility("pause_scheduler", "keep", False)
        try:
            self._call("shoal_load", str(folder), version)
            self._core.reset_prefix_cache(reset_running_requests=True)
        finally:
            self._core.engine_core.call_utility("resume_scheduler")
        self.version = version
        remove_dir(folder)

    def count_rows(self) -> dict[str, int]:
        """Rows that the workers reported, and how many again."""
        return dict(self._call("shoal_count"))

    def close(self) -> None:
        """End vLLM's processes, and remove the weights that they read."""
        atexit.unregister(self.close)
        self._core.engine_core.shutdown()
        self._home.cleanup()

    def _write(self, tensors: Mapping[str, Tensor]) -> Path:
        """A new folder with these weights, from which vLLM's workers read."""
        folder = Path(tempfile.mkdtemp(dir=self._home.name))
        write_weights(folder, plan_layout(describe_tensors(tensors), SHARD_BYTES), tensors)
        return folder

    def _call(self, method: str, *args: Any) -> Any:
        """Call the worker extension; the result of the process that samples."""
        found = self._llm.collective_rpc(method, args=args)
        return next((result for result in found if result), found[0])

    def _finish(self, name: str, token_ids: Iterable[int], taken: Mapping[str, Mapping[str, Any]]) -> Rollout:
        request, own = self._requests.pop(name), taken[name]
        tokens = np.frombuffer(own["tokens"], dtype=np.int32).copy()
        assert np.array_equal(tokens, np.fromiter(token_ids, dtype=np.int32)), f"{name}: vLLM returned other tokens"
        if self._sink is not None:
            self._sink.add_proofs(name, list(own["proofs"]))
        return Rollout(
            id=name,
            prompt_ids=np.array(request.prompt_ids, dtype=np.int32),
            token_ids=tokens,
            logprobs=np.frombuffer(own["logprobs"], dtype=np.float32).copy(),
            finish=Finish.STOP if tokens[-1] == self._eos_id else Finish.LENGTH,
            versions=tuple(VersionRange(*span) for span in own["versions"]),
            temperature=request.temperature,
            seed=request.seed,
        )
