"""One learner in several processes: torch's FSDP2, one process per device, started by torchrun or `--nproc`.

Every rank holds its rows of every tensor, gathers one decoder layer at a time, and runs its own micro-batches.

Invariants:
- a rank computes with the denominators of the whole update, so gradients are summed over ranks, never averaged;
- every rank runs the same number of micro-batches: one with fewer repeats one with weight 0, because the collectives of
  all ranks must match. Gradients are exchanged with every micro-batch: until then a rank would hold those of the
  whole model;
- what decides (gradient norm, skipping, metrics) is computed from reduced numbers that every rank has, so all decide
  the same. Squares of gradients are summed in float64: the norm, and so the clip, does not depend on the sharding;
- what goes from rank to rank is tensors and bytes; nothing is pickled, except by torch's own checkpoint planner.

Collectives of tensors on a device use its backend (nccl), those of host tensors gloo.
"""

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from shoal.config.run import LearnerConfig
from shoal.errors import ConfigError
from shoal.learner.logprobs import TokenScores, score_tokens
from shoal.policy.model import choose_device
from shoal.policy.packing import Pack

COLLECTIVE_S = 600.0
"""after which a collective with a rank that does not answer fails"""
IDLE_S = 7 * 86_400.0
"""how long a rank waits for the next call of rank 0, which itself waits for batches"""
SMALL = 2**20
"""parameters up to which a plain process takes the gradient norm in float32, as the recorded learning curves did; it is
then within 1e-6 of the float64 norm, and with a hundred times as many it is not"""
_SCORE = "score_pack"
_MEETING = "SHOAL_RANKS"
"""file through which the ranks of `--nproc` meet (launch/ranks.py)"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The processes of one learner, seen from one of them."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    mesh: DeviceMesh | None = None
    """None: a plain process, whose model is not sharded"""
    control: Any = None
    """group of host tensors without a short timeout: ranks wait in it for the calls of rank 0"""
    saving: Any = None
    """group of host tensors for checkpoints that are written while training continues"""
    local: int = 0
    """number on this machine"""
    num_local: int = 1
    """ranks on this machine"""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def kind(self) -> str:
        """What decides the bits of a step: the same number of the same devices computes the same."""
        return f"{self.device.type} x {self.size}"

    def divide_threads(self, threads: int) -> int:
        """Torch threads of this rank, if all ranks of the machine have `threads`; 0 stays 0, all cores."""
        return threads if self.mesh is None or not threads else max(1, threads // self.num_local)

    def decide(self, value: bool) -> bool:
        """The value of rank 0, on every rank."""
        return self.broadcast(b"1" if value else b"0") == b"1"

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place and equal on all."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.mesh is not None:
            self.sum(torch.zeros(1, device=self.device)).cpu()

    def broadcast(self, data: bytes = b"") -> bytes:
        """The bytes of rank 0, on every rank."""
        if self.mesh is None:
            return data
        size = torch.tensor([len(data)])
        dist.broadcast(size, 0, group=self.control)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.is_first and data else None
        if buffer is None:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        if len(buffer):
            dist.broadcast(buffer, 0, group=self.control)
        return buffer.numpy().tobytes()

    def announce(self, name: str, *, payload: bytes = b"", **values: str | float) -> None:
        """On rank 0: tell the other ranks which call comes next. On the others and in a plain process: nothing."""
        if self.mesh is not None and self.is_first:
            self.broadcast(json.dumps({"name": name, "values": values}).encode() + b"\n" + payload)

    def hear(self) -> tuple[str, dict[str, Any], bytes]:
        """On the other ranks: the next call of rank 0, with its values and payload; ends the process if it is gone."""
        try:
            head, _, payload = self.broadcast().partition(b"\n")
        except RuntimeError:  # rank 0 has ended, and said why
            raise SystemExit(1) from None
        call = json.loads(head)
        return call["name"], call["values"], payload

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, by rank; only on rank 0, elsewhere nothing."""
        if self.mesh is None:
            return [data]
        sizes = torch.zeros(self.size, dtype=torch.long)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self.control)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else padded[:0]
        found = [torch.empty_like(padded) for _ in range(self.size)] if self.is_first else None
        dist.gather(padded, found, 0, group=self.control)
        return [part[:size].numpy().tobytes() for part, size in zip(found or (), sizes.tolist(), strict=False)]


ONE = Ranks()
"""a plain process"""


def join_ranks(device: str) -> Ranks:
    """Meet the other ranks that torchrun or `--nproc` started; a plain process is alone."""
    if "RANK" not in os.environ:
        return ONE
    place = _choose_place(device)
    backend = "gloo" if place.type == "cpu" else f"cpu:gloo,{place.type}:{dist.get_default_backend_for_device(place)}"
    if place.type != "cpu":
        torch.accelerator.set_device_index(place)
    meeting = os.environ.get(_MEETING)
    dist.init_process_group(
        backend,
        init_method=f"file://{meeting}" if meeting else "env://",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=COLLECTIVE_S),
    )
    mesh = init_device_mesh(place.type, (dist.get_world_size(),))
    return Ranks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=place,
        mesh=mesh,
        control=dist.new_group(backend="gloo", timeout=timedelta(seconds=IDLE_S)),
        saving=dist.new_group(backend="gloo", timeout=timedelta(seconds=COLLECTIVE_S)),
        local=int(os.environ.get("LOCAL_RANK", "0")),
        num_local=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )


def leave_ranks(ranks: Ranks) -> None:
    """Close the connections to the other ranks; every rank does this at its end."""
    if ranks.mesh is not None:
        dist.destroy_process_group()


def _choose_place(device: str) -> torch.device:
    """The device of this rank: the one of its number on this machine."""
    chosen = choose_device(device)
    if chosen.type == "cpu":
        return chosen
    if chosen.index is not None:
        raise ConfigError(f"policy.device: {device!r} names one device; with several ranks use {chosen.type!r}")
    local, count = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
    if local >= count:
        raise ConfigError(
            f"--nproc: this machine has {count} devices of type {chosen.type}, and rank {local} needs one"
        )
    return torch.device(chosen.type, local)


def shard_model(model: PreTrainedModel, ranks: Ranks, config: LearnerConfig) -> None:
    """Shard a model in place, also one on the meta device; nothing in a plain process.

    Each decoder layer is a unit that is gathered and released; embedding, norm and head are another.
    """
    if ranks.mesh is None:
        return
    offload: OffloadPolicy = OffloadPolicy()
    if config.offload:
        offload = CPUOffloadPolicy(pin_memory=ranks.device.type != "cpu")
    options: dict[str, Any] = {"mesh": ranks.mesh, "mp_policy": _choose_precision(config), "offload_policy": offload}
    body: Any = model.base_model
    for layer in body.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    setattr(model, _SCORE, MethodType(_score_pack, model))
    register_fsdp_forward_method(model, _SCORE)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor


def _choose_precision(config: LearnerConfig) -> MixedPrecisionPolicy:
    if config.precision == "float32":
        return MixedPrecisionPolicy()
    # Inputs are not cast: hidden states have the type of the gathered embedding already.
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)


def _score_pack(model: PreTrainedModel, pack: Pack, entropy_grad: bool) -> tuple[Tensor, Tensor]:
    """The learner's forward as one method of the root, around which FSDP2 gathers embedding, norm and head."""
    scores = score_tokens(model, pack, entropy_grad=entropy_grad)
    return scores.logprobs, scores.entropy


def score_model(
    model: PreTrainedModel, pack: Pack, *, entropy_grad: bool = False, dtype: torch.dtype | None = None
) -> TokenScores:
    """`score_tokens` of a model that may be sharded; `dtype` is that of the computation in a plain process."""
    if not isinstance(model, FSDPModule):
        return score_tokens(model, pack, entropy_grad=entropy_grad, dtype=dtype)
    scores = TokenScores(*getattr(model, _SCORE)(pack, entropy_grad))
    if not torch.is_grad_enabled():
        model.reshard()  # the root's own parameters, which otherwise stay gathered until a backward pass
    return scores


@dataclass(frozen=True, slots=True)
class Share:
    """A micro-batch that a rank runs."""

    index: int
    """in the list of all"""
    counts: bool = True
    """False: a repetition that has weight 0"""


def deal_packs(sizes: Sequence[int], ranks: Ranks) -> list[Share]:
    """The micro-batches of this rank. Those of similar size run at the same time, because ranks wait for each other."""
    if ranks.size == 1:
        return [Share(index) for index in range(len(sizes))]
    order = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    own = [Share(index) for index in order[ranks.rank :: ranks.size]]
    rounds = -(-len(order) // ranks.size)
    return own + [Share(order[-1], counts=False)] * (rounds - len(own))


def measure_norm(parameters: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """L2 norm of the gradients of all ranks in float32; infinite if the sum of squares overflows there."""
    grads = [own_rows(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if ranks.mesh is None and sum(parameter.numel() for parameter in parameters) <= SMALL:
        return torch.nn.utils.get_total_norm(grads)
    squares = [torch.linalg.vector_norm(grad, dtype=torch.float64).square() for grad in grads]
    return ranks.sum(torch.stack(squares)).sum().float().sqrt()


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, most: float) -> None:
    """Scale all gradients so that their norm is at most `most`; without waiting for the device."""
    scale = (most / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            own_rows(parameter.grad).mul_(scale.to(parameter.grad.device))


def own_rows(tensor: Tensor) -> Tensor:
    """The rows of a tensor that this rank holds; of a plain tensor all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: Tensor) -> int:
    """The number of the first row that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0])


def whole_tensor(tensor: Tensor) -> Tensor:
    """All rows, on every rank; ranks call this for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
