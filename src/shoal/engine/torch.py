"""The default engine: continuous batching on torch, with rollouts that depend on nothing but their own request.

- Every row of a step feeds one token: first the prompt's last, then what was sampled. The prompt before it is computed
  once for all requests that share it.
- A finished row is refilled from the queue at once; where the queue is empty the last rows move into the holes, so that
  work shrinks with the number of rollouts under way.
- A rollout is a function of (weights, prompt, seed, temperature, max tokens). Matrix products run on padded row counts
  for which a row's bits do not depend on the others (`measure_rows`), and attention on tiles of fixed size.
- After a weight swap what is under way is computed anew from its tokens: no key or value outlives its weights.

Life of a request: submit -> queue -> row -> rollout; on a swap row -> queue; on a cancellation it is gone from either.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shoal.engine.base import CHUNK, HiddenSink
from shoal.engine.cache import SlotCache
from shoal.engine.choice import Choose, choose_tokens
from shoal.engine.prefix import Tokens, compute_prefixes
from shoal.engine.rows import measure_rows
from shoal.engine.slots import SlotTable
from shoal.errors import ConfigError
from shoal.policy.decoder import compute_logits, fuse_layers, is_lean, run_decoder
from shoal.rollout import Finish, Request, Rollout, VersionRange


@dataclass(slots=True)
class _Ticket:
    """A request on its way, with what earlier weights wrote of it."""

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
    """Generates rollouts with a transformers model; the model is the engine's own from here on."""

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
        """`choose` other than the default is for those who want to be found out: see shoal.redteam."""
        self._model, self._eos_id, self._slots, self._sink = model.eval(), eos_id, slots, sink
        self._choose = choose
        self.version = version
        self._queue: deque[_Ticket] = deque()
        self._rows: list[_Ticket] = []
        self._ids: set[str] = set()
        self._prefixes: dict[Tokens, Tensor] = {}
        self._table = SlotTable(slots)
        self._cache = SlotCache.for_model(model, slots=slots)
        width = model.config.hidden_size if sink else 0
        self._hidden = torch.zeros(slots, CHUNK, width, dtype=model.dtype)
        self._fuse_weights()
        self._counts = measure_rows(model, self._layers, slots)

    @property
    def busy(self) -> bool:
        return bool(self._queue or self._rows)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue requests. Rollouts of equal prompts submitted together share the prompt's computation."""
        tickets = [_Ticket(request) for request in requests]
        if not tickets:
            return
        ids = {ticket.request.id for ticket in tickets}
        assert len(ids) == len(tickets) and not ids & self._ids, "every request under way has an id of its own"
        for ticket in tickets:
            self._check_ticket(ticket)
        self._ids |= ids
        self._queue.extend(tickets)
        self._cache.reserve(max(ticket.need for ticket in tickets))
        self._table.reserve(max(ticket.request.max_tokens for ticket in tickets))

    def generate(self, requests: Iterable[Request]) -> Iterator[Rollout]:
        """Submit and step until these are done, in order of finishing."""
        assert not self.busy, "generate needs an idle engine"
        self.submit(requests)
        while self.busy:
            yield from self.step()

    @torch.inference_mode()
    def step(self) -> list[Rollout]:
        """Advance every active rollout by one token and return those that finished."""
        self._admit_tickets()
        rows = len(self._rows)
        if not rows:
            return []
        hidden = self._decode_rows(rows)
        uniforms = self._table.next_uniforms(rows)
        logits = compute_logits(self._model, hidden)[:rows]
        tokens, logprobs = self._choose(logits, self._table.temperatures[:rows], uniforms)
        self._table.record(rows, tokens, logprobs)
        finished = (tokens == self._eos_id) | (self._table.counts[:rows] >= self._table.limits[:rows])
        if self._sink:
            self._pass_hidden(rows, hidden, finished)
        return self._take_finished(finished.nonzero()[:, 0].tolist())

    @torch.inference_mode()
    def cancel(self, ids: Iterable[str]) -> None:
        """Forget these requests, wherever they are; those that finished already are no error."""
        gone = self._ids & set(ids)
        if not gone:
            return
        if any(ticket.token_ids for ticket in self._queue):
            self._admit_tickets()  # what a swap put back must come to its own row before another leaves the line
        self._queue = deque(ticket for ticket in self._queue if ticket.request.id not in gone)
        self._close_holes([row for row, ticket in enumerate(self._rows) if ticket.request.id in gone])
        self._ids -= gone

    @torch.inference_mode()
    def swap_weights(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights in place; every tensor must be given, with its shape."""
        own = self._model.state_dict()
        if odd := sorted(_odd_names(own, weights)):
            raise ValueError(f"weights of version {version} do not fit: {len(odd)} names differ, first {odd[0]!r}")
        for name, tensor in weights.items():
            if tensor.shape != own[name].shape:
                raise ValueError(f"weights of version {version} do not fit: {name!r} has {tuple(tensor.shape)}")
        self._return_rows()
        for name, tensor in weights.items():
            own[name].copy_(tensor)
        self._fuse_weights()
        self.version = version

    def _check_ticket(self, ticket: _Ticket) -> None:
        request, limit = ticket.request, self._model.config.max_position_embeddings
        assert request.max_tokens > 0 and request.temperature >= 0, f"{request.id} has odd limits"
        if not request.prompt_ids:
            raise ConfigError(f"a prompt needs one token, {request.id} has none")
        if ticket.need > limit:
            text = f"a prompt of {len(request.prompt_ids)} tokens and {request.max_tokens} more"
            raise ConfigError(f"engine.max_tokens: {text} do not fit, the model has {limit} positions")

    def _fuse_weights(self) -> None:
        with torch.inference_mode():
            self._layers = fuse_layers(self._model) if is_lean(self._model) else None

    def _return_rows(self) -> None:
        """Put what is under way back to the front of the queue, and forget all keys and values.

        In order, so that each comes back to the row it had: there lie the hidden states of its unfinished chunk.
        """
        for row in reversed(range(len(self._rows))):
            ticket = self._rows[row]
            self._close_span(row)
            count = int(self._table.counts[row])
            ticket.token_ids = self._table.tokens[row, :count].tolist()
            ticket.logprobs = self._table.logprobs[row, :count].tolist()
            self._queue.appendleft(ticket)
        self._rows.clear()
        self._prefixes.clear()
        self._cache.clear()

    def _close_span(self, row: int) -> None:
        versions = self._rows[row].versions
        start, end = versions[-1].end if versions else 0, int(self._table.counts[row])
        if end > start:
            versions.append(VersionRange(self.version, start, end))

    def _admit_tickets(self) -> None:
        free = min(self._slots - len(self._rows), len(self._queue))
        if not free:
            return
        tickets = [self._queue.popleft() for _ in range(free)]
        contexts = [ticket.context for ticket in tickets]
        prefixes = [context[:-1] for context in contexts]
        missing = [prefix for prefix in dict.fromkeys(prefixes) if prefix not in self._prefixes]
        self._prefixes |= compute_prefixes(self._model, self._layers, missing, self._counts)
        self._cache.open_rows(len(self._rows), [self._prefixes.get(prefix) for prefix in prefixes])
        self._open_rows(tickets, [context[-1] for context in contexts])
        # requests that share a prompt stand side by side, so only the next in the queue can want a prefix of these
        following = self._queue[0].context[:-1] if self._queue else None
        self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if key == following}

    def _open_rows(self, tickets: list[_Ticket], last: list[int]) -> None:
        start = len(self._rows)
        self._table.open_rows(start, [ticket.request for ticket in tickets], last)
        for row, ticket in enumerate(tickets, start=start):
            if ticket.token_ids:
                self._table.restore_row(row, ticket.token_ids, ticket.logprobs)
        self._rows.extend(tickets)

    def _decode_rows(self, rows: int) -> Tensor:
        """Hidden states from which the next token of each row is chosen, on a padded row count."""
        token_ids = self._counts.pad_flat(self._table.last[:rows])
        positions = self._counts.pad_flat(self._cache.lengths[:rows])
        return run_decoder(self._model, token_ids, positions, self._cache.begin_step(rows), self._layers)

    def _pass_hidden(self, rows: int, hidden: Tensor, finished: Tensor) -> None:
        """Keep this step's states, and hand over the chunks that it filled or that end a rollout."""
        assert self._sink is not None
        counts = self._table.counts[:rows]
        self._hidden[torch.arange(rows), (counts - 1) % CHUNK] = hidden[:rows]
        for row in ((counts % CHUNK == 0) | finished).nonzero()[:, 0].tolist():
            count = int(counts[row])
            start = (count - 1) // CHUNK * CHUNK
            self._sink(self._rows[row].request.id, start, self._hidden[row, : count - start])

    def _take_finished(self, finished: list[int]) -> list[Rollout]:
        if not finished:
            return []
        rollouts = [self._build_rollout(row) for row in finished]
        self._close_holes(finished)
        return rollouts

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
            self._hidden[target] = self._hidden[source]
            for row_from, row_to in zip(sources, targets, strict=True):
                self._rows[row_to] = self._rows[row_from]
        del self._rows[keep:]

    def _build_rollout(self, row: int) -> Rollout:
        self._close_span(row)
        ticket, count = self._rows[row], int(self._table.counts[row])
        self._ids.remove(ticket.request.id)
        token_ids = self._table.tokens[row, :count].numpy().copy()
        return Rollout(
            id=ticket.request.id,
            prompt_ids=torch.tensor(ticket.request.prompt_ids, dtype=torch.int32).numpy(),
            token_ids=token_ids,
            logprobs=self._table.logprobs[row, :count].numpy().copy(),
            finish=Finish.STOP if token_ids[-1] == self._eos_id else Finish.LENGTH,
            versions=tuple(ticket.versions),
            temperature=ticket.request.temperature,
            seed=ticket.request.seed,
        )


def _odd_names(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> set[str]:
    """Names that only one side has. Tied tensors are one tensor: files hold it under one of its names."""
    given = {own[name].data_ptr() for name in own.keys() & weights.keys()}
    return {name for name in own.keys() ^ weights.keys() if name not in own or own[name].data_ptr() not in given}
