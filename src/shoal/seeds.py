"""All randomness of a run: named seeds, and one counter-based uniform per token.

- `derive_seed` hashes a tuple, so (a, bc) and (ab, c), or (1, 2) and (2, 1), never collide by construction.
- `token_uniforms(seed, t)` depends only on the rollout's seed and the token's index: not on the batch, the slot, the
  neighbours or the number of threads. With the seed, anyone can compute which token an honest sampler had to choose.

Changing breaks: every recorded rollout, golden curve and seeded-sampling check.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_ROUNDS = 10


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from a tuple of names and numbers."""
    framed = [b"shoal-seed-v1"]
    for part in parts:
        kind, raw = (b"i", b"%d" % part) if isinstance(part, int) else (b"s", part.encode())
        framed.append(b"%b%d:%b" % (kind, len(raw), raw))
    return int.from_bytes(hashlib.sha256(b"".join(framed)).digest()[:8], "big")


@dataclass(frozen=True, slots=True)
class GroupSeeds:
    """The seeds that determine a group."""

    task: int
    rollouts: tuple[int, ...]


def derive_group_seeds(beacon: int, index: int, group_size: int) -> GroupSeeds:
    """Seeds of the task and the rollouts of group `index` of the step with this beacon."""
    seeds = tuple(derive_seed("rollout", beacon, index, sample) for sample in range(group_size))
    return GroupSeeds(derive_seed("task", beacon, index), seeds)


def token_uniforms(seed: int, start: int, count: int) -> np.ndarray:
    """u_t in [0, 1) as float64 for t = start .. start + count - 1 of one rollout."""
    return uniform_rows(np.array([seed], dtype=np.uint64), np.array([start]), count)[0]


def uniform_rows(seeds: np.ndarray, starts: np.ndarray, count: int) -> np.ndarray:
    """`token_uniforms` of many rollouts at once, (rows, count): Philox4x32-10 with key = seed, counter = t."""
    counter: np.ndarray = starts.astype(np.uint64)[:, None] + np.arange(count, dtype=np.uint64)
    keys = seeds.astype(np.uint64)[:, None]
    k0, k1 = keys & _LOW, keys >> _HALF
    c0, c1 = counter & _LOW, counter >> _HALF
    c2, c3 = np.zeros_like(counter), np.zeros_like(counter)
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    bits = (c0 << _HALF) | c1
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
