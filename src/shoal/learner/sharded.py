"""The weights of a sharded model: loaded, written, compared and gathered by rows.

A sharded tensor is cut by its first dimension, so the rows of a rank are one range of bytes of a safetensors file.

Invariants:
- no rank ever holds the whole model: it is built without values (meta device), sharded, and then each rank reads its
  own rows. The exception is `gather_weights`, for an engine in the process of rank 0;
- a folder that all ranks write has the bytes that one process writes (`policy/weights.py`);
- every function is called by all ranks at the same point. A plain process may call them too.

Ranks that do not see the folder of rank 0 (several machines without a shared file system) send their rows tensor by
tensor instead. To read, every machine needs the folder.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shoal.config.run import SHARD_BYTES, LearnerConfig, PolicyConfig
from shoal.errors import ConfigError
from shoal.learner.parallel import Ranks, first_row, own_rows, shard_model, whole_tensor
from shoal.policy.compatibility import check_kind
from shoal.policy.model import (
    Policy,
    find_policy,
    load_policy,
    name_tensors,
    open_tokenizer,
    reopen_policy,
    save_settings,
    saved_tensors,
)
from shoal.policy.weights import (
    RowRange,
    WeightsFile,
    WeightsReader,
    WeightsWriter,
    create_files,
    describe_tensors,
    finish_file,
    plan_layout,
)
from shoal.util.files import atomic_dir

Weights = dict[str, Tensor]


def open_shards(path: str | Path, policy: PolicyConfig, learner: LearnerConfig, ranks: Ranks) -> Policy:
    """Open a saved policy, each rank its own rows; in a plain process the whole."""
    if ranks.mesh is None:
        return reopen_policy(path, policy)
    folder = _find_folder(path, ranks)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, policy.dtype))
    tokenizer = open_tokenizer(folder, model)
    check_kind(model)
    shard_model(model, ranks, learner)
    model.to_empty(device="cpu" if learner.offload else ranks.device)
    _restore_buffers(model, ranks.device)
    read_rows(model, folder)
    return Policy(model=model, tokenizer=tokenizer)


def load_shards(policy: PolicyConfig, learner: LearnerConfig, ranks: Ranks, *, alphabet: str, seed: int) -> Policy:
    """The policy that the settings name, sharded; a tiny one is built whole on every rank, from the same seed."""
    if policy.path:
        return open_shards(policy.path, policy, learner, ranks)
    built = load_policy(
        policy if ranks.mesh is None else policy.model_copy(update={"device": ranks.device.type}),
        alphabet=alphabet,
        seed=seed,
    )
    shard_model(built.model, ranks, learner)
    return built


def read_rows(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a folder into a model, in place."""
    with WeightsReader(folder) as reader:
        tensors = name_tensors(model, reader.tensors)
        if odd := sorted(name for name in tensors if name not in reader.tensors):
            raise ConfigError(f"{folder}: {len(odd)} weights are missing, first {odd[0]!r}")
        for name, tensor in tensors.items():
            if tuple(tensor.shape) != reader.specs[name].shape:
                raise ConfigError(f"{folder}: {name!r} has the shape {reader.specs[name].shape}")
            own, first = own_rows(tensor), first_row(tensor)
            if own.numel():
                own.copy_(reader.read_rows(name, first, first + len(own)) if own.dim() else reader.read_rows(name))


def write_rows(
    policy: Policy,
    folder: Path,
    ranks: Ranks,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    planned: Callable[[Mapping[str, int]], None] = lambda _sizes: None,
) -> None:
    """Write the Hugging Face folder of a policy, each rank its own rows.

    As by `save_policy`: `planned` is called, on rank 0, with the sizes of all files before the weights are written; the
    folder as a whole is not atomic.
    """
    tensors = saved_tensors(policy.model)
    layout = plan_layout(describe_tensors(tensors, dtype), shard_bytes)
    if ranks.is_first:
        save_settings(policy, folder, dtype)
        planned({path.name: path.stat().st_size for path in folder.iterdir()} | layout.sizes)
        create_files(folder, layout)
    ranks.barrier()
    is_shared = _count_ranks(folder.is_dir(), ranks) == ranks.size
    with WeightsWriter(folder, layout) as writer:
        for file in layout.files:
            _write_file(writer, file, tensors, ranks, is_shared=is_shared)
            written: list[RowRange] = writer.close_file(file.name)
            rows = [tuple(row) for part in ranks.gather(json.dumps(written).encode()) for row in json.loads(part)]
            if ranks.is_first:
                finish_file(folder, file, rows)
    ranks.barrier()


def _write_file(
    writer: WeightsWriter, file: WeightsFile, tensors: Mapping[str, Tensor], ranks: Ranks, *, is_shared: bool
) -> None:
    for place in file.tensors:
        name, tensor = place.spec.name, tensors[place.spec.name]
        rows, first = (own_rows(tensor), first_row(tensor)) if is_shared else (whole_tensor(tensor), 0)
        has_rows = ranks.is_first if not (is_shared and isinstance(tensor, DTensor)) else len(rows) > 0
        if has_rows:
            writer.write_rows(name, first, rows)


def is_equal(policy: Policy, folder: Path, ranks: Ranks, dtype: torch.dtype | None = None) -> bool:
    """Whether a folder has the weights of a policy, rounded to `dtype`; every rank compares its own rows."""
    tensors = saved_tensors(policy.model)
    with WeightsReader(folder) as reader:
        same = reader.specs == {spec.name: spec for spec in describe_tensors(tensors, dtype)}
        same = same and all(_has_rows(reader, name, tensor) for name, tensor in tensors.items())
    return _count_ranks(same, ranks) == ranks.size


def _has_rows(reader: WeightsReader, name: str, tensor: Tensor) -> bool:
    own, first = own_rows(tensor), first_row(tensor)
    if not own.numel():
        return True
    stored = reader.read_rows(name, first, first + len(own)) if own.dim() else reader.read_rows(name)
    return torch.equal(own.detach().to(device="cpu", dtype=stored.dtype), stored)


def gather_weights(model: PreTrainedModel, ranks: Ranks) -> Weights:
    """Copies of all tensors by all of their names, tensor by tensor; only rank 0 keeps them, in the host's memory."""
    found: Weights = {}
    known: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in known:
            whole = whole_tensor(tensor.detach())
            known[id(tensor)] = whole if ranks.is_first else whole[:0]
        found[name] = known[id(tensor)].clone()
    return found if ranks.is_first else {}


def build_whole(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    """A model that is not sharded, with gathered weights."""
    with torch.random.fork_rng(devices=[]):
        whole = AutoModelForCausalLM.from_config(model.config, dtype=next(iter(weights.values())).dtype)
    whole.load_state_dict(weights)
    return whole.to(model.device).eval()  # type: ignore[no-any-return]


@contextmanager
def shared_dir(path: Path, ranks: Ranks) -> Iterator[Path]:
    """`atomic_dir` for all ranks: the folder appears when every rank has left the block."""
    with atomic_dir(path) if ranks.is_first else nullcontext() as target:
        yield Path(ranks.broadcast(str(target or "").encode()).decode())
        ranks.barrier()
    ranks.barrier()


def _count_ranks(is_so: bool, ranks: Ranks) -> int:
    return int(ranks.sum(torch.tensor([int(is_so)], device=ranks.device)))


def _find_folder(path: str | Path, ranks: Ranks) -> Path:
    """The local folder of a policy; a hub id is downloaded once per machine."""
    found = find_policy(path)
    if Path(found).is_dir():
        return Path(found)
    for is_turn in (ranks.local == 0, ranks.local != 0):
        if is_turn:
            folder = snapshot_download(found, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"])
        ranks.barrier()
    return Path(folder)


def _restore_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Compute buffers again that no file holds, such as the frequencies of the rotation, from the model's config."""
    for module in model.modules():
        names = [name for name, _ in module.named_buffers(recurse=False)]
        if not names:
            continue
        try:
            fresh = type(module)(model.config)
        except TypeError:
            kind = model.config.model_type
            raise ConfigError(f"policy.path: {kind} cannot be loaded by rows ({type(module).__name__})") from None
        for name in names:
            setattr(module, name, getattr(fresh, name).to(device))
