"""The proof format: a modulus and the coefficients of one polynomial, as bytes, and when bytes are a valid proof.

A proof of k values is 2 + 2 k bytes: the modulus, then k coefficients by ascending power, each a big-endian uint16. It
states: at (flat index mod modulus) of each committed value, the polynomial over the field of 65497 elements takes the
value's bfloat16 pattern. Every commitment has one encoding; any other bytes are a `Fault`, never an exception.
"""

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from shoal.toploc.field import P

CHUNK_SIZE = 32
"""Tokens per proof. Changing breaks: exchange of proofs with all other implementations."""
TOPK = 128
"""Values per proof. Changing breaks: exchange of proofs with all other implementations."""
MODULUS_SLACK = 1024
"""How far below P a modulus may be if a chunk has more values than P.

For 128 scattered indices a modulus fails with probability 0.12 (8128 pairs, each congruent with chance 1/P), so honest
provers stop after a few steps. The slack is for models whose top values are in runs of neighbouring channels."""
MISSING_DEGREES = 2
"""Leading coefficients that may be zero. In an honest proof the leading one is with chance 1/P, three with 4e-15."""


class Fault(StrEnum):
    """Why a proof is invalid, whatever it evaluates to."""

    MISSING = "missing"
    """no proof for this chunk"""
    SURPLUS = "surplus"
    """proofs beyond the last chunk"""
    UNREADABLE = "unreadable"
    """not bytes, or text that is not base64"""
    NULL = "null"
    """modulus 0: written by the published builder when it fails"""
    LENGTH = "length"
    """not 2 + 2 k bytes"""
    MODULUS = "modulus"
    """a modulus that no honest prover finds"""
    COEFFICIENT = "coefficient"
    """a coefficient of P or more, which is equivalent to a smaller one"""
    DEGREE = "degree"
    """a polynomial of lower degree than 3 below its number of coefficients"""


def pack_proofs(moduli: NDArray[np.int64], coefficients: NDArray[np.uint16]) -> list[bytes]:
    """Proofs of moduli (B) and canonical coefficients (B, k)."""
    words = np.column_stack((moduli, coefficients)).astype(">u2")
    size, raw = words[:1].nbytes, words.tobytes()
    return [raw[start : start + size] for start in range(0, len(raw), size)]


def unpack_proofs(proofs: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """Moduli (B) and coefficients (B, k) of proofs of equal length for which `find_fault` found nothing."""
    words = np.frombuffer(b"".join(proofs), dtype=">u2").reshape(len(proofs), -1)
    return words[:, 0].astype(np.int64), words[:, 1:].astype(np.uint16)


def find_fault(proof: object, *, points: int, values: int) -> Fault | None:
    """What is wrong with the format of a proof of `points` out of `values`; coefficients are checked elsewhere."""
    if not isinstance(proof, bytes):
        return Fault.UNREADABLE
    modulus = int.from_bytes(proof[:2])
    if len(proof) >= 2 and not modulus:
        return Fault.NULL
    if len(proof) != 2 + 2 * points:
        return Fault.LENGTH
    lowest = P if values <= P else P - MODULUS_SLACK
    return None if lowest <= modulus <= P else Fault.MODULUS
