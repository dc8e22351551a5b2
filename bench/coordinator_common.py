"""Shared by both sides of the coordinator's benchmark: keys derived from names, so that they need not be sent."""

import hashlib
import os

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from shoal.identity.keys import Key

RUN = "bench"
SERVER_CORE, LOAD_CORE = 0, 1
BODY = b'{"version":0,"leases":[],"tokens_per_s":900}'


def derive_key(name: str) -> Key:
    """The key for a name."""
    return Key(Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest()))


def pin_core(core: int) -> None:
    """Pin this process to one core, if there are several."""
    if hasattr(os, "sched_setaffinity") and (os.cpu_count() or 1) > core:
        os.sched_setaffinity(0, {core})
