"""The default engine: continuous batching on torch, with rollouts that depend only on their own request.

- Every row of a step feeds one token: first the prompt's last, then the sampled ones. The rest of the prompt is
  computed once for all requests that share it.
- A finished row is refilled from the queue at once; if the queue is empty the last rows move into the holes, so that
  the work shrinks with the number of active rollouts.
- A rollout is a function of (weights, prompt, seed, temperature, max tokens). Matrix products run on padded row counts
  for which a row's bits do not depend on the others (`measure_rows`), and attention on tiles of fixed size.
- The model, keys, values, hidden states and logits are on the model's device; counters, tokens and draws are on the
  host. A step waits for the device where it reads the chosen tokens.
- After a weight swap active rollouts are recomputed from their tokens: no key or value outlives its weights.

Life of a request: submit -> queue -> row -> rollout; on a swap row -> queue; a cancellation removes it from either.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.engine.base import CHUNK, HiddenSink
from shoal.engine.batch_invariance import measure_rows
from shoal.engine.cache import SlotCache
from shoal.engine.prefix import Tokens, compute_prefixes
from shoal.engine.sampling import Choose, choose_tokens
from shoal.engine.slots import SlotTable
from shoal.errors import ConfigError
from shoal.policy.decoder import attention_shape, compute_logits, fuse_layers, is_lean, run_decoder
from shoal.policy.model import name_tensors
from shoal.rollout import Finish, Request, Rollout, VersionRange


@dataclass(slots=True)
class _PendingRequest:
    """A queued or active request, with the tokens that earlier weights generated."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRange] = field(default_factory=list)

    @property
    def context(self) -> Tokens:
        return self.request.prompt_ids + tuple(self.token_ids)

    @property
    def need(self) -> int:
        return len(self.request.prompt_ids) + self.request.max_tokens


class TorchEngine:
    """Generates rollouts with a transformers model, which the engine owns."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_id: int,
        slots: int = 256,
        version: int = 0,
        sink: HiddenSink | None = None,
        choose: Choose = choose_tokens,
    ) -> None:
        """A `choose` other than the default is for attacks, see shoal.redteam."""
        self._model, self._eos_id, self._slots, self._sink = model.eval(), eos_id, slots, sink
        self._choose = choose
        self.version = version
        self._queue: deque[_PendingRequest] = deque()
        self._rows: list[_PendingRequest] = []
        self._ids: set[str] = set()
        self._prefixes: dict[Tokens, Tensor] = {}
        self._table = SlotTable(slots)
        shape = dict(zip(("layers", "heads", "kv_heads", "dim"), attention_shape(model.config), strict=True))
        self._device = model.device
        self._cache = SlotCache(**shape, slots=slots, dtype=model.dtype, device=self._device)
        width = model.config.hidden_size if sink else 0
        self._hidden = torch.zeros(slots, CHUNK, width, dtype=model.dtype, device=self._device)
        self._fuse_weights()
        self._counts = measure_rows(model, self._layers, slots)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._rows)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Rollouts of equal prompts submitted together share the prompt's computation."""
        requested = [_PendingRequest(request) for request in requests]
        if not requested:
            return
        ids = {pending.request.id for pending in requested}
        assert len(ids) == len(requested) and not ids & self._ids, "ids of active requests are unique"
        for pending in requested:
            self._check_request(pending)
        self._ids |= ids
        self._queue.extend(requested)
        self._cache.reserve(max(pending.need for pending in requested))
        self._table.reserve(max(pending.request.max_tokens for pending in requested))

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit and step until all are done; yields rollouts in order of finishing."""
        assert not self.busy, "generate needs an idle engine"
        self.submit(requests)
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """Advance every active rollout by one token and return those that finished."""
        self._admit_requests()
        rows = len(self._rows)
        if not rows:
            return []
        # On a padded row count.
        token_ids = self._counts.pad_flat(self._table.last[:rows])
        positions = self._counts.pad_flat(self._cache.lengths[:rows])
        inputs = (token_ids.to(self._device), positions.to(self._device), self._cache.begin_step(rows))
        hidden = run_decoder(self._model, *inputs, self._layers)
        uniforms = self._table.next_uniforms(rows).to(self._device)
        logits = compute_logits(self._model, hidden)[:rows]
        chosen = self._choose(logits, self._table.temperatures[:rows].to(self._device), uniforms)
        tokens, logprobs = (values.cpu() for values in chosen)
        self._table.record(rows, tokens, logprobs)
        finished = (tokens == self._eos_id) | (self._table.counts[:rows] >= self._table.limits[:rows])
        if self._sink:
            self._pass_hidden(rows, hidden, finished)
        holes = finished.nonzero()[:, 0].tolist()
        rollouts = [self._build_rollout(row) for row in holes]
        self._close_holes(holes)
        return rollouts

    @torch.inference_mode()
    def cancel(self, ids: Iterable[str]) -> None:
        """Drop these requests, queued or active; ids of finished requests are ignored."""
        gone = self._ids & set(ids)
        if not gone:
            return
        if any(pending.token_ids for pending in self._queue):
            self._admit_requests()  # requests that a swap put back must return to their rows before another leaves
        self._queue = deque(pending for pending in self._queue if pending.request.id not in gone)
        self._close_holes([row for row, pending in enumerate(self._rows) if pending.request.id in gone])
        self._ids -= gone

    @torch.inference_mode()
    def swap_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights in place; every tensor must be given, with its shape."""
        own = name_tensors(self._model, weights)
        if odd := sorted(own.keys() ^ weights.keys()):
            raise ValueError(f"weights of version {version} do not fit: {len(odd)} names differ, first {odd[0]!r}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise ValueError(f"weights of version {version} do not fit: {name!r} has {tuple(tensor.shape)}")
        self._return_rows()
        for name, tensor in weights.items():
            own[name].copy_(tensor)  # nothing to do if the model was loaded again in place
        self._fuse_weights()
        self.version = version

    def _check_request(self, pending: _PendingRequest) -> None:
        request, limit = pending.request, self._model.config.max_position_embeddings
        assert request.max_tokens > 0 and request.temperature >= 0, f"{request.id} has invalid limits"
        if not request.prompt_ids:
            raise ConfigError(f"the prompt of {request.id} is empty; it needs at least one token")
        if pending.need > limit:
            text = f"a prompt of {len(request.prompt_ids)} tokens plus {request.max_tokens} generated tokens"
            raise ConfigError(f"engine.max_tokens: {text} exceeds the model's {limit} positions")

    def _fuse_weights(self) -> None:
        self._layers = None  # freed before the new ones are made
        with torch.inference_mode():
            self._layers = fuse_layers(self._model) if is_lean(self._model) else None

    def _return_rows(self) -> None:
        """Put active requests back to the front of the queue, and forget all keys and values.

        In order, so that each returns to its row, which holds the hidden states of its unfinished chunk.
        """
        for row in reversed(range(len(self._rows))):
            pending = self._rows[row]
            self._close_span(row)
            count = int(self._table.counts[row])
            pending.token_ids = self._table.tokens[row, :count].tolist()
            pending.logprobs = self._table.logprobs[row, :count].tolist()
            self._queue.appendleft(pending)
        self._rows.clear()
        self._prefixes.clear()
        self._cache.clear()

    def _close_span(self, row: int) -> None:
        versions = self._rows[row].versions
        start, end = versions[-1].end if versions else 0, int(self._table.counts[row])
        if end > start:
            versions.append(VersionRange(self.version, start, end))

    def _admit_requests(self) -> None:
        free = min(self._slots - len(self._rows), len(self._queue))
        if not free:
            return
        requested = [self._queue.popleft() for _ in range(free)]
        contexts = [pending.context for pending in requested]
        prefixes = [context[:-1] for context in contexts]
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in self._prefixes]
        self._prefixes |= compute_prefixes(self._model, self._layers, missing, self._counts)
        self._cache.open_rows(len(self._rows), [self._prefixes.get(prefix) for prefix in prefixes])
        start = len(self._rows)
        self._table.open_rows(start, [pending.request for pending in requested], [context[-1] for context in contexts])
        for row, pending in enumerate(requested, start=start):
            if pending.token_ids:
                self._table.restore_row(row, pending.token_ids, pending.logprobs)
        self._rows.extend(requested)
        # Requests that share a prompt are adjacent in the queue, so only the next one can need one of these prefixes.
        following = self._queue[0].context[:-1] if self._queue else None
        self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key == following}

    def _pass_hidden(self, rows: int, hidden: Tensor, finished: Tensor) -> None:
        """Store this step's states, and pass on the chunks that are full or end a rollout."""
        assert self._sink is not None
        counts = self._table.counts[:rows]
        places = ((counts - 1) % CHUNK).to(self._device)
        self._hidden[torch.arange(rows, device=self._device), places] = hidden[:rows]
        for row in ((counts % CHUNK == 0) | finished).nonzero()[:, 0].tolist():
            count = int(counts[row])
            start = (count - 1) // CHUNK * CHUNK
            self._sink(self._rows[row].request.id, start, self._hidden[row, : count - start])

    def _close_holes(self, holes: list[int]) -> None:
        """Move the last rows into the holes, and shrink."""
        keep = len(self._rows) - len(holes)
        targets = [row for row in holes if row < keep]
        gone = set(holes)
        sources = [row for row in range(keep, len(self._rows)) if row not in gone]
        if targets:
            source, target = torch.tensor(sources), torch.tensor(targets)
            self._cache.move_rows(source, target)
            self._table.move_rows(source, target)
            self._hidden[target.to(self._device)] = self._hidden[source.to(self._device)]
            for row_from, row_to in zip(sources, targets, strict=True):
                self._rows[row_to] = self._rows[row_from]
        del self._rows[keep:]

    def _build_rollout(self, row: int) -> Rollout:
        self._close_span(row)
        pending, count = self._rows[row], int(self._table.counts[row])
        self._ids.remove(pending.request.id)
        token_ids = self._table.tokens[row, :count].numpy().copy()
        return Rollout(
            id=pending.request.id,
            prompt_ids=torch.tensor(pending.request.prompt_ids, dtype=torch.int32).numpy(),
            token_ids=token_ids,
            logprobs=self._table.logprobs[row, :count].numpy().copy(),
            finish=Finish.STOP if token_ids[-1] == self._eos_id else Finish.LENGTH,
            versions=tuple(pending.versions),
            temperature=pending.request.temperature,
            seed=pending.request.seed,
        )
