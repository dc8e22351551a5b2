"""Which groups a step still needs, and the one order and name of its batch.

New indices are given out only for groups that are missing: groups with a signal, plus groups on their way, never exceed
a batch. So when the last one is accepted the batch is the first `groups_per_batch` groups with a signal, in order of
index, whoever was fast; and no accepted group with a signal is thrown away. A step whose groups are all given out
trains on those that have a signal, be it none.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

from shoal.canonical import encode_canonical
from shoal.swarm.messages import BatchEntry
from shoal.swarm.params import RunParams


def count_missing(params: RunParams, with_signal: int, on_their_way: int, given_out: int) -> int:
    """Groups for which new indices are to be given out."""
    missing = max(0, params.groups_per_batch - with_signal - on_their_way)
    return min(missing, max(0, params.max_groups - given_out)) if params.max_groups else missing


def is_exhausted(params: RunParams, on_their_way: int, given_out: int) -> bool:
    """Whether all groups that a step may have are settled: then it trains on what there is."""
    return 0 < params.max_groups <= given_out and on_their_way == 0


def hash_batch(entries: Sequence[BatchEntry]) -> str:
    """The name of a batch."""
    assert all(left.index < right.index for left, right in pairwise(entries)), "in order"
    return sha256(encode_canonical([entry.model_dump(mode="json") for entry in entries])).hexdigest()
