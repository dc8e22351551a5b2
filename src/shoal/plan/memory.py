"""Memory of one rank of the trainer at its peak, item by item.

Symbols (sizes of the model in `shapes.py`): n ranks, b bytes of a value in products, m of a master weight, P' the
trained parameters (all, or those of the adapters), N tokens of the largest pack, T of them completion tokens that need
logits, A the sum of queries x keys over the pack's segments of at most 512 keys, J their keys.

    weights        m P / n (with adapters b P / n)      gradients  m P' / n      optimizer  s P' / n, s = 8, 4 or 2
    gradients      4 P' if a rank has several packs per update and exchanges gradients only with the last
    reference      m P / n, if there is a KL term and all weights are trained
    gathered       b (root + 2 layers), their gradients, and 4 x layer for the sum over ranks; n > 1
    weight copies  b (qkv + gate_up), concatenated, of every layer; with checkpointing of one. One process that casts
                   keeps b x layer of each instead, and b V W
    activations    per layer N (16 W + b (H D + 3 F)) + attention; with checkpointing b N W, and one layer in full
    attention      segments of at most 512 keys: b (H D queries + 2 K D J) + (4 or 6) A H
                   longer ones: b (H D queries + 2 K D of copied keys), and b N (2 H + 3 K) D, of which they are views
                   flex: b N (2 H + 2 K) D + 4 N H
    masks          (4 + b H) A of every pack of a step
    logits         5 x 4 T V, or if 4 T V is more than a chunk: 3 chunks and the gradient of the head

The peak is the largest of four moments of a step: the logits, the backward pass of the last layer, the end of the
backward pass and the optimizer's step. Gradients of earlier packs are there during the first two only if a rank has
more than one pack per update. `bench/plan.py` compares the sum with real steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.learner.logprobs import CHUNK_BYTES
from shoal.plan.settings import ITEMSIZE, PlanSettings, TrainerOptions
from shoal.plan.shapes import ModelShape
from shoal.policy.attention import STRIP
from shoal.policy.packing import pack_samples

SHORT_KEYS = 512
"""most keys with which a segment is part of a rectangle, whose scores are stored (policy/attention.py)"""
_ROUND = 8
_LOGIT_COPIES = 5
"""logits, their log-softmax for the backward pass, and three in the entropy"""
_CHUNK_COPIES = 3
_SAMPLED = 2048
"""samples of which packs are formed; more only repeat"""


@dataclass(frozen=True, slots=True)
class PackShape:
    """The largest pack, and how many a rank computes."""

    tokens: int
    rows: int
    """completion tokens"""
    queries: int
    """of segments of at most `SHORT_KEYS` keys, including padding"""
    keys: int
    """that are gathered for them"""
    pairs: int
    """A"""
    long_queries: int
    """of longer segments"""
    long_keys: int
    """that are copied for them: all but those of the first after a prompt, which are next to it"""
    longest: int
    """keys of the longest segment"""
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
    items, host = {**kept, **moments[moment]}, 0.0
    if options.offload:
        host = sum(items.pop(name, 0.0) for name in ("weights", "optimizer", "gradients"))
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
    most = settings.micro_tokens
    if ranks > 1:  # the learner forms at least one pack per rank
        total = -(-rollouts // settings.group_size) * prompt + rollouts * completion
        most = min(most, -(-total // ranks))
    bins = pack_samples([completion] * number, [prompt] * number, groups, most)
    members = max(bins, key=len)
    counts = [sum(groups[index] == group for index in members) for group in sorted({groups[i] for i in members})]
    rows = len(members) * completion
    if prompt + settings.max_tokens > len(counts) * prompt + rows:
        counts, completion, rows = [1], settings.max_tokens, settings.max_tokens
    per_update = -(-round(len(bins) * rollouts / number) // ranks)
    return _measure_pack(counts, prompt, completion, (rows, per_update, per_update * settings.updates))


def _measure_pack(counts: Sequence[int], prompt: int, completion: int, known: tuple[int, int, int]) -> PackShape:
    """A pack of groups of which it holds so many samples each; `known` are rows and numbers of packs."""
    rows, per_update, per_step = known
    segments = [(prompt, 0, len(counts)), (completion - 1, prompt, sum(counts))]  # length, prefix, number
    sizes = [(_round_up(own), _round_up(own) + _round_up(prefix), number) for own, prefix, number in segments if own]
    short = [size for size in sizes if size[1] <= SHORT_KEYS]
    is_long = _round_up(completion - 1) + _round_up(prompt) > SHORT_KEYS
    copied = (sum(counts) - len(counts)) * (prompt + completion - 1) if is_long else 0
    return PackShape(
        tokens=sum(length * number for length, _, number in segments),
        rows=rows,
        queries=sum(queries * number for queries, _, number in short),
        keys=sum(keys * number for _, keys, number in short),
        pairs=sum(queries * keys * number for queries, keys, number in short),
        long_queries=sum(queries * number for queries, keys, number in sizes if keys > SHORT_KEYS),
        long_keys=copied,
        longest=prompt + completion - 1,
        per_update=per_update,
        per_step=per_step,
    )


def _round_up(length: int) -> int:
    return -(-length // _ROUND) * _ROUND


def _list_kept(shape: ModelShape, settings: PlanSettings, ranks: int, pack: PackShape) -> dict[str, float]:
    """What is there at every moment."""
    options, item = settings.trainer, ITEMSIZE[settings.trainer.compute]
    master, trained = ITEMSIZE[options.master], count_trained(shape, options)
    adapters = 0 if options.lora is None else 4 * trained
    has_reference = settings.has_reference and options.lora is None  # else the base without its adapters
    masks = 0 if options.flex_attention else pack.per_step * pack.pairs * (4 + item * shape.heads)
    return {
        "weights": (master * shape.parameters + adapters) / ranks,
        "optimizer": 2 * options.trained_bytes * trained / ranks,
        "reference": master * shape.parameters / ranks if has_reference else 0.0,
        "masks": float(masks),
        "gathered layers": _count_gathered(shape, options, ranks),
        "rotation tables": 2.0 * 4 * shape.head_dim * (shape.context + pack.tokens),
    }


def _list_moments(
    shape: ModelShape, options: TrainerOptions, ranks: int, pack: PackShape, *, is_cpu: bool
) -> dict[str, dict[str, float]]:
    """What is there in addition, at each moment at which memory may be largest."""
    item, trained, frozen = ITEMSIZE[options.compute], count_trained(shape, options), options.lora is not None
    gradients = options.trained_bytes * trained / ranks
    earlier = gradients if pack.per_update > 1 else 0.0
    inputs = item * pack.tokens * shape.width * shape.layers
    own, copies = _count_layer(shape, options, pack), _count_copies(shape, options, ranks)
    recomputes = options.checkpointing
    forward = {"activations": inputs if recomputes else shape.layers * own}
    forward["weight copies"] = copies.other + (0.0 if recomputes else shape.layers * copies.layer)
    backward = {"activations": inputs + own, "weight copies": copies.other + copies.layer} if recomputes else forward
    head = 0.0 if frozen or ranks > 1 else ITEMSIZE[options.master] * shape.head_parameters
    temporary = 8.0 * shape.largest_parameter if is_cpu else 4.0 * trained
    return {
        "logits": {**forward, "gradients": earlier, "logits": _count_logits(shape, options, pack)},
        "backward pass of a layer": {
            **backward,
            "gradients": max(earlier, min(gradients, head)),
            "gradients of a layer": _count_backward(shape, item, pack, flex=options.flex_attention),
        },
        "end of the backward pass": {
            "gradients": max(gradients, earlier),
            "gradients of a layer": 0.0 if frozen else float(item * shape.fused_parameters),
        },
        "optimizer": {"gradients": gradients, "temporaries": min(temporary, 8.0 * trained) / ranks},
    }


@dataclass(frozen=True, slots=True)
class _Copies:
    layer: float
    other: float


def _count_copies(shape: ModelShape, options: TrainerOptions, ranks: int) -> _Copies:
    """Copies of weights in the type of products that the backward pass needs."""
    item = ITEMSIZE[options.compute]
    if ranks == 1 and options.compute != options.master:
        return _Copies(float(item * shape.layer_parameters), float(item * shape.head_parameters))
    return _Copies(float(item * shape.fused_parameters), 0.0)


def _count_layer(shape: ModelShape, options: TrainerOptions, pack: PackShape) -> float:
    """Bytes that one layer keeps for its backward pass."""
    item = ITEMSIZE[options.compute]
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    # Two norms keep the normalised values in float32 and their product with the weight (or, in bfloat16, the input in
    # float32 and both in bfloat16), so a token takes 8 bytes per norm and channel whatever the type.
    rest = pack.tokens * (16 * shape.width + item * (heads + 3 * shape.feed_forward))
    if shape.has_qk_norm:
        rest += pack.tokens * (heads + kv_heads) * (4 if item == 4 else 6)
    if options.lora is not None:
        rest += pack.tokens * item * options.lora.rank * len(shape.find_targets(options.lora.targets))
    return float(rest + _count_attention(shape, item, pack, flex=options.flex_attention))


def _count_attention(shape: ModelShape, item: int, pack: PackShape, *, flex: bool) -> float:
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if flex:
        return pack.tokens * (item * (2 * heads + 2 * kv_heads) + 4 * shape.heads)
    gathered = item * ((pack.queries + pack.long_queries) * heads + 2 * (pack.keys + pack.long_keys) * kv_heads)
    # Keys next to their prompt are views, which keep the projected and the rotated tensor of the whole pack.
    viewed = item * pack.tokens * (2 * heads + 3 * kv_heads) if pack.long_queries else 0
    return gathered + viewed + pack.pairs * shape.heads * (4 if item == 4 else 6)


def _count_logits(shape: ModelShape, options: TrainerOptions, pack: PackShape) -> float:
    """Logits and their copies, and the hidden states that lead to them."""
    item, logits = ITEMSIZE[options.compute], 4.0 * shape.vocabulary * pack.rows
    hidden = shape.width * (pack.tokens * (4 if item == 4 else 6) + pack.rows * item)
    if logits <= CHUNK_BYTES:
        return _LOGIT_COPIES * logits + hidden
    head = 0 if options.lora else shape.head_parameters * (4 if item == 4 else 4 + item)
    return _CHUNK_COPIES * CHUNK_BYTES + hidden + pack.rows * shape.width * item + head


def _count_backward(shape: ModelShape, item: int, pack: PackShape, *, flex: bool) -> float:
    """Gradients of the activations of one layer: of its feed-forward part, or of its attention."""
    mlp = pack.tokens * item * (3 * shape.feed_forward + 2 * shape.width)
    freed = pack.tokens * (item * 3 * shape.feed_forward + 8 * shape.width)
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = 3 * item * pack.tokens * heads
    if not flex:
        strips = pack.longest * (3 * 4 * STRIP * shape.heads + 2 * 4 * kv_heads) if pack.long_queries else 0
        attention += 2 * 4 * pack.pairs * shape.heads + strips
    return float(max(mlp, attention - freed))


def _count_gathered(shape: ModelShape, options: TrainerOptions, ranks: int) -> float:
    """What FSDP2 gathers: the parameters outside the layers, this layer and the next."""
    if ranks == 1:
        return 0.0
    item = ITEMSIZE[options.compute]
    units = shape.root_parameters + 2 * shape.layer_parameters
    if options.lora is not None:
        return float(item * units)
    # Gradients of the same units before they are summed over ranks, and one layer's in float32 for the sum.
    return float(2 * item * units + 4 * shape.layer_parameters)
