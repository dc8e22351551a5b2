"""What a manifest says of each rollout: the hash of its completion, and its length."""

import hashlib

import numpy as np

from shoal.rollout import Rollout
from shoal.swarm.messages import RolloutEntry

_TAG = b"shoal-tokens-1\x00"


def hash_tokens(token_ids: np.ndarray) -> str:
    """SHA-256 over the token ids as little-endian int32, in hex: equal for equal completions, whatever the prompt.

    Changing breaks: the search for copies across submissions.
    """
    return hashlib.sha256(_TAG + np.asarray(token_ids).astype("<i4", copy=False).tobytes()).hexdigest()


def make_entry(rollout: Rollout) -> RolloutEntry:
    """The entry of a rollout."""
    return RolloutEntry(hash=hash_tokens(rollout.token_ids), tokens=rollout.num_tokens)
