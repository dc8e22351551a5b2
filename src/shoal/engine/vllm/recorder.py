"""The seeded choice of a batch's tokens, and what a worker process of vLLM keeps of every rollout under way: tokens,
log-probs, versions, and what a sink makes of its hidden states.

Each step, the choice of tokens reports one row per rollout. Row t may be reported again: vLLM also samples rows of a
prompt that is read in parts, of a request that was preempted, or of a step whose output the scheduler dropped, and then
discards them. The last report of a row is the one whose token was returned.

Invariants:
- a row is final once 32 further rows follow; then its chunk of hidden states goes to the sink. So at most 64 rows of a
  rollout are kept, whatever its length;
- on an accelerator the recorder does not wait for the step under way: values are copied to pinned memory, and read when
  the next step reports. The choice itself does wait: it checks that the logits are finite.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.engine.base import CHUNK, HiddenSink
from shoal.engine.sampling import choose_tokens
from shoal.rollout import Request
from shoal.seeds import uniform_rows

_MAX_ID = 256


@dataclass(frozen=True, slots=True)
class SeededRow:
    """What a request states."""

    name: str
    seed: int
    temperature: float


def describe_row(request: Request) -> dict[str, Any]:
    """The `extra_args` of a request. The seed is text: JSON readers lose the last bits of large numbers."""
    return {"shoal_id": request.id, "shoal_seed": str(request.seed), "shoal_temperature": request.temperature}


def read_row(extra: Mapping[str, Any] | None) -> SeededRow | None:
    """The opposite of `describe_row`; None for a request without a seed, ValueError for an invalid one."""
    if not extra or "shoal_seed" not in extra:
        return None
    name, seed, temperature = (extra.get(f"shoal_{key}") for key in ("id", "seed", "temperature"))
    if not isinstance(name, str) or not 0 < len(name) <= _MAX_ID:
        raise ValueError(f"shoal_id must be a text of 1 to {_MAX_ID} characters")
    if not isinstance(seed, str) or not (seed.isascii() and seed.isdigit()) or int(seed) >= 2**64:
        raise ValueError("shoal_seed must be a whole number below 2^64, as text")
    if not isinstance(temperature, float | int) or not 0 <= temperature <= 1000:
        raise ValueError("shoal_temperature must be a number from 0 to 1000")
    return SeededRow(name, int(seed), float(temperature))


@runtime_checkable
class ProofSink(HiddenSink, Protocol):
    """A sink that makes proofs of hidden states, and gives them to one of its class in the engine's process."""

    def take_many(self, rollout_ids: Sequence[str]) -> list[list[bytes]]:
        """The proofs of finished rollouts, which are then forgotten."""

    def add_proofs(self, rollout_id: str, proofs: list[bytes]) -> None:
        """Keep the proofs of a finished rollout, until they are taken."""

    def drop(self, rollout_id: str) -> None:
        """Forget a cancelled rollout."""


@dataclass(slots=True)
class _OpenRollout:
    """The rows of a rollout so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    """bfloat16 rows from `first` on"""
    first: int = 0
    """rows before it were given to the sink"""

    def put(self, t: int, token: int, logprob: float, version: int, hidden: Tensor | None) -> None:
        """Set row t, and forget the rows after it."""
        if not self.first <= t <= len(self.tokens):
            raise AssertionError(f"row {t} was reported after {len(self.tokens)} rows, of which {self.first} are final")
        del self.tokens[t:], self.logprobs[t:], self.versions[t:], self.hidden[t - self.first :]
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if hidden is not None:
            self.hidden.append(hidden)


@dataclass(frozen=True, slots=True)
class _Report:
    """One step's rows, on the host once `ready`."""

    ids: Sequence[str]
    counts: Sequence[int]
    version: int
    tokens: Tensor
    logprobs: Tensor
    hidden: Tensor | None
    ready: torch.Event | None


class Recorder:
    """The rollouts of one process."""

    def __init__(self) -> None:
        self.version = 0
        self.sink: ProofSink | None = None
        self.hidden: Tensor | None = None
        """(rows, width), if there is a sink: the states from which the step under way computes its logits"""
        self.num_rows = self.num_repeated = 0
        self._rollouts: dict[str, _OpenRollout] = {}
        self._reports: deque[_Report] = deque()

    def record(self, ids: Sequence[str], counts: Sequence[int], tokens: Tensor, logprobs: Tensor, rows: Tensor) -> None:
        """Take the step's choice: rollout `ids[i]` has `counts[i]` tokens, and gets `tokens[i]`."""
        hidden = None if self.hidden is None else self.hidden.index_select(0, rows).to(torch.bfloat16)
        columns = [None if column is None else _copy_to_host(column) for column in (tokens, logprobs, hidden)]
        ready = None
        if tokens.device.type != "cpu":
            ready = torch.Event(tokens.device)
            ready.record()
        assert columns[0] is not None and columns[1] is not None
        self._reports.append(_Report(ids, counts, self.version, columns[0], columns[1], columns[2], ready))
        self._read_reports(leave=0 if ready is None else 1)

    def take(self, lengths: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Finished rollouts by id, which are then forgotten: their first tokens as plain data."""
        self._read_reports(leave=0)
        known = {name: length for name, length in lengths.items() if name in self._rollouts}
        rollouts = {name: self._rollouts.pop(name) for name in known}
        for name, length in known.items():
            rollout = rollouts[name]
            assert rollout.first <= length <= len(rollout.tokens), f"{name}: {length} of {len(rollout.tokens)} rows"
            if self.sink is not None and rollout.hidden:
                self.sink(name, rollout.first, torch.stack(rollout.hidden[: length - rollout.first]))
        proofs = [[] for _ in known] if self.sink is None else self.sink.take_many(list(known))
        return {
            name: {
                "tokens": np.array(rollouts[name].tokens[:length], dtype=np.int32).tobytes(),
                "logprobs": np.array(rollouts[name].logprobs[:length], dtype=np.float32).tobytes(),
                "versions": _list_ranges(rollouts[name].versions[:length]),
                "proofs": own,
            }
            for (name, length), own in zip(known.items(), proofs, strict=True)
        }

    def drop(self, ids: Sequence[str]) -> None:
        """Forget cancelled rollouts."""
        self._read_reports(leave=0)
        for name in ids:
            self._rollouts.pop(name, None)
            if self.sink is not None:
                self.sink.drop(name)

    def count_open(self) -> int:
        """Rollouts that were neither taken nor dropped."""
        return len(self._rollouts)

    def _read_reports(self, leave: int) -> None:
        while len(self._reports) > leave:
            report = self._reports.popleft()
            if report.ready is not None:
                report.ready.synchronize()
            self._store(report)

    def _store(self, report: _Report) -> None:
        hidden = [None] * len(report.ids) if report.hidden is None else report.hidden.unbind(0)
        columns = report.ids, report.counts, report.tokens.tolist(), report.logprobs.tolist(), hidden
        for name, t, token, logprob, row in zip(*columns, strict=True):
            rollout = self._rollouts.setdefault(name, _OpenRollout())
            self.num_rows += 1
            self.num_repeated += t < len(rollout.tokens)
            rollout.put(t, token, logprob, report.version, row)
            if self.sink is not None and len(rollout.hidden) == 2 * CHUNK:
                self.sink(name, rollout.first, torch.stack(rollout.hidden[:CHUNK]))
                del rollout.hidden[:CHUNK]
                rollout.first += CHUNK


def _copy_to_host(column: Tensor) -> Tensor:
    """A copy that is complete once the device has reached this point."""
    if column.device.type == "cpu":
        return column.clone()
    host = torch.empty(column.shape, dtype=column.dtype, pin_memory=True)
    return host.copy_(column, non_blocking=True)


def _list_ranges(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Version, first token and end of each range of tokens of one version."""
    starts = [t for t, version in enumerate(versions) if t == 0 or version != versions[t - 1]]
    return [(versions[start], start, end) for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)]


RECORDER = Recorder()
"""of this process: the choice of tokens and the worker extension are created by vLLM, which does not connect them"""


def choose_rows(logits: Tensor, places: Sequence[int], rows: Sequence[SeededRow], counts: Sequence[int]) -> None:
    """Choose token `counts[i]` of `rows[i]` from `logits[places[i]]`, and make those logits one-hot."""
    seeds = np.array([row.seed for row in rows], dtype=np.uint64)
    uniforms = uniform_rows(seeds, np.array(counts), 1)[:, 0]
    where = torch.tensor(places, device=logits.device)
    temperatures = torch.tensor([row.temperature for row in rows], device=logits.device)
    tokens, logprobs = choose_tokens(
        logits.index_select(0, where).float(), temperatures, torch.from_numpy(uniforms).to(logits.device)
    )
    logits.index_fill_(0, where, float("-inf"))
    logits[where, tokens] = 0.0
    RECORDER.record([row.name for row in rows], counts, tokens, logprobs, where)
