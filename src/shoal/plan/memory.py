"""Memory of one rank of the trainer at its peak, item by item.

Symbols (sizes of the model in `shapes.py`): n ranks, b bytes of a value in products, m bytes of a master weight, P' the
trained parameters (all, or those of the adapters), N tokens of the largest pack, T of them completion tokens that need
logits, A = sum over the pack's segments of queries x visible keys.

    weights      m P / n                  gradients  m P' / n            optimizer  s P' / n, s = 8, 4 or 2
    reference    b P / n  with a KL term
    gathered     b (root + 2 layers) and their gradients, if the parameters are sharded or of another type
    fused        b (qkv + gate_up) of every layer, of one with checkpointing
    activations  per layer  N (16 W + b (H D + 3 F)) + attention; with checkpointing b N W, and one layer in full
    attention    rectangles: b (N H D + 2 keys K D) + (4 or 6) A H of those with at most 512 keys, else b N H D
                 flex: b N (2 H D + 2 K D) + 4 N H
    masks        (4 + b H) A of every pack of a step (rectangles only)
    logits       5 x 4 V rows, rows = T or the rows of a chunk

The peak is the largest of four moments of a step: the logits, the backward pass of the last layer, the end of the
backward pass and the optimizer's step. Gradients of earlier packs are there during the first two only if a rank has
more than one pack per update. `bench/plan.py` compares the sum with real steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.plan.settings import ITEMSIZE, STATE_BYTES, PlanSettings, TrainerOptions
from shoal.plan.shapes import ModelShape
from shoal.policy.packing import pack_samples

LOGIT_COPIES = 5
"""logits, their log-softmax for the backward pass, and three in the entropy"""
FUSED_KEYS = 512
"""most keys for which rectangles store their scores (policy/attention.py)"""
_ROUND = 8
_SAMPLED = 2048
"""samples of which packs are formed; more only repeat"""


@dataclass(frozen=True, slots=True)
class PackShape:
    """The largest pack, and how many a rank computes."""

    tokens: int
    rows: int
    """completion tokens"""
    queries: int
    """tokens including padding"""
    keys: int
    """keys and values that are gathered for them"""
    pairs: int
    """A"""
    stored_pairs: int
    """the part whose scores are stored"""
    per_update: int
    """packs of one rank in an update"""
    per_step: int


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """Bytes of one kind at the peak."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank; `moment` is when it is largest."""

    moment: str
    items: tuple[MemoryItem, ...]
    host_bytes: float
    """what is in host memory instead, per rank"""

    @property
    def bytes(self) -> float:
        return sum(item.bytes for item in self.items)


def plan_memory(shape: ModelShape, settings: PlanSettings, ranks: int, *, is_cpu: bool = False) -> MemoryPlan:
    """Memory of one of `ranks` ranks at the largest moment of a step."""
    options, pack = settings.trainer, shape_packs(settings, ranks)
    kept = _list_kept(shape, settings, ranks, pack)
    moments = _list_moments(shape, options, ranks, pack, is_cpu=is_cpu)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    host = sum(kept.pop(name) for name in ("weights", "optimizer")) if options.offload else 0.0
    items = {**kept, **moments[moment]}
    if options.offload:
        host += items.pop("gradients", 0.0)
    return MemoryPlan(moment, tuple(MemoryItem(name, size) for name, size in items.items() if size), host)


def count_trained(shape: ModelShape, options: TrainerOptions) -> int:
    """P': parameters that the optimizer updates."""
    return shape.parameters if options.lora is None else shape.count_adapter(options.lora.rank, options.lora.targets)


def shape_packs(settings: PlanSettings, ranks: int) -> PackShape:
    """The largest pack of an update, by the learner's own packing; a longest completion may be a pack of its own."""
    rollouts = max(1, settings.trained_rollouts // settings.updates)
    number = min(rollouts, _SAMPLED)
    groups = [index // settings.group_size for index in range(number)]
    prompt, completion = settings.prompt_tokens, settings.completion_tokens
    bins = pack_samples([completion] * number, [prompt] * number, groups, settings.micro_tokens)
    members = max(bins, key=len)
    segments = [(prompt, 0)] * len({groups[index] for index in members}) + [(completion - 1, prompt)] * len(members)
    rows = len(members) * completion
    if prompt + settings.max_tokens > sum(length for length, _ in segments):
        segments, rows = [(prompt, 0), (settings.max_tokens - 1, prompt)], settings.max_tokens
    per_update = -(-round(len(bins) * rollouts / number) // ranks)
    return _measure_pack(segments, rows, per_update, per_update * settings.updates)


def _measure_pack(segments: Sequence[tuple[int, int]], rows: int, per_update: int, per_step: int) -> PackShape:
    padded = [(_round_up(length), _round_up(length) + _round_up(prefix)) for length, prefix in segments if length]
    return PackShape(
        tokens=sum(length for length, _ in segments),
        rows=rows,
        queries=sum(queries for queries, _ in padded),
        keys=sum(keys for _, keys in padded),
        pairs=sum(queries * keys for queries, keys in padded),
        stored_pairs=sum(queries * keys for queries, keys in padded if keys <= FUSED_KEYS),
        per_update=per_update,
        per_step=per_step,
    )


def _round_up(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _list_kept(shape: ModelShape, settings: PlanSettings, ranks: int, pack: PackShape) -> dict[str, float]:
    """What is there at every moment."""
    options, item = settings.trainer, ITEMSIZE[settings.trainer.compute]
    master, trained = ITEMSIZE[options.master], count_trained(shape, options)
    weights = master * shape.parameters if options.lora is None else item * shape.parameters + master * trained
    masks = 0 if options.flex_attention else pack.per_step * pack.pairs * (4 + item * shape.heads)
    return {
        "weights": weights / ranks,
        "optimizer": STATE_BYTES[options.optimizer_state] * trained / ranks,
        "reference": item * shape.parameters / ranks if settings.has_reference and options.lora is None else 0.0,
        "masks": float(masks),
        "gathered layers": _count_gathered(shape, options, ranks),
        "rotation tables": 2.0 * 4 * shape.head_dim * (shape.context + pack.tokens),
    }


def _list_moments(
    shape: ModelShape, options: TrainerOptions, ranks: int, pack: PackShape, *, is_cpu: bool
) -> dict[str, dict[str, float]]:
    """What is there in addition, at each moment at which memory may be largest."""
    item, master = ITEMSIZE[options.compute], ITEMSIZE[options.master]
    gradients = master * count_trained(shape, options) / ranks
    earlier = gradients if pack.per_update > 1 else 0.0
    own, whole = _count_layer(shape, options, pack), options.checkpointing
    layers = shape.layers * (item * pack.tokens * shape.width if whole else own)
    forward = {"activations": layers, "fused weights": 0.0 if whole else item * shape.fused_parameters * shape.layers}
    last = {"activations": layers + (own if whole else 0.0), "fused weights": item * shape.fused_parameters * 1.0}
    if not whole:
        last["fused weights"] = forward["fused weights"]
    head = master * shape.head_parameters if options.lora is None and ranks == 1 else 0.0
    temporary = 4.0 * shape.largest_parameter * 2 if is_cpu else 4.0 * count_trained(shape, options)
    return {
        "logits": {**forward, "gradients": earlier, "logits": _count_logits(shape, options, pack)},
        "backward pass of a layer": {
            **last,
            "gradients": max(earlier, min(gradients, head)),
            "gradients of a layer": _count_backward(shape, item, pack),
        },
        "end of the backward pass": {"gradients": gradients, "gradients of a layer": item * shape.fused_parameters},
        "optimizer": {"gradients": gradients, "temporaries": temporary / ranks},
    }


def _count_layer(shape: ModelShape, options: TrainerOptions, pack: PackShape) -> float:
    """Bytes that one layer keeps for its backward pass."""
    item = ITEMSIZE[options.compute]
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms keep the normalised values in float32 (or, in bfloat16, the input in float32 and the values in both
    # places where weights multiply them), so a token takes 8 bytes per norm and channel whatever the type.
    rest = pack.tokens * (16 * shape.width + item * (heads + 3 * shape.feed_forward))
    if shape.has_qk_norm:
        rest += pack.tokens * (heads + kv_heads) * (4 if item == 4 else 6)
    if options.lora is not None:
        names = [name for name, _, _ in shape.linears if name in options.lora.targets]
        rest += pack.tokens * item * options.lora.rank * len(names)
    return float(rest + _count_attention(shape, item, pack, flex=options.flex_attention))


def _count_attention(shape: ModelShape, item: int, pack: PackShape, *, flex: bool) -> float:
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if flex:
        return pack.tokens * (item * (2 * heads + 2 * kv_heads) + 4 * shape.heads)
    gathered = item * (pack.queries * heads + 2 * pack.keys * kv_heads)
    scores = pack.stored_pairs * shape.heads * (4 if item == 4 else 6)
    mixed = pack.queries * (item * heads + 4 * shape.heads) if pack.stored_pairs < pack.pairs else 0
    return gathered + scores + mixed


def _count_logits(shape: ModelShape, options: TrainerOptions, pack: PackShape) -> float:
    """Logits and their copies, and the hidden states that lead to them."""
    item = ITEMSIZE[options.compute]
    rows = min(options.logit_rows or pack.rows, pack.rows)
    hidden = shape.width * (pack.tokens * (4 + item) + pack.rows * item)
    return LOGIT_COPIES * 4.0 * shape.vocabulary * rows + hidden


def _count_backward(shape: ModelShape, item: int, pack: PackShape) -> float:
    """Gradients of the activations of one layer: of its feed-forward part, or of its scores."""
    mlp = pack.tokens * item * (3 * shape.feed_forward + 2 * shape.width)
    freed = pack.tokens * (item * 3 * shape.feed_forward + 8 * shape.width)
    attention = 2 * 4 * pack.stored_pairs * shape.heads + 3 * item * pack.queries * shape.heads * shape.head_dim
    return float(max(mlp, attention - freed))


def _count_gathered(shape: ModelShape, options: TrainerOptions, ranks: int) -> float:
    """Copies of parameters that FSDP2 gathers or casts: those outside the layers, this layer and the next."""
    if ranks == 1 and options.compute == options.master:
        return 0.0
    item = ITEMSIZE[options.compute]
    units = shape.root_parameters + 2 * shape.layer_parameters
    if options.lora is not None:
        return float(item * units)
    # Gradients of the same units before they are summed over ranks, and one layer's in float32 for the sum.
    return float(2 * item * units + 4 * shape.layer_parameters)
