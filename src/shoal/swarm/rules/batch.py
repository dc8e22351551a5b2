"""Which groups a step still needs, and the one order and name of its batch.

New indices are given out only for groups that are missing: groups with a signal, plus groups on their way, never exceed
a batch. So when the last one is accepted the batch is the first `groups_per_batch` groups with a signal, in order of
index, whoever was fast; and no accepted group with a signal is thrown away.
"""

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise

from shoal.canonical import encode_canonical
from shoal.swarm.messages import BatchEntry


def count_missing(groups_per_batch: int, with_signal: int, on_their_way: int) -> int:
    """Groups for which new indices are to be given out."""
    return max(0, groups_per_batch - with_signal - on_their_way)


def hash_batch(entries: Sequence[BatchEntry]) -> str:
    """The name of a batch."""
    assert all(left.index < right.index for left, right in pairwise(entries)), "in order"
    return sha256(encode_canonical([entry.model_dump(mode="json") for entry in entries])).hexdigest()
