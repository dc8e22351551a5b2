"""TOPLOC: proofs of inference. What generated tokens leave behind in 258 bytes per 32 tokens, and how it is checked.

    proofs = build_proofs(hidden)
    results = verify_proofs(recomputed, proofs)

Names are imported when first used: numpy and torch are not loaded for a look at the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.toploc.build import build_batch, build_proofs
    from shoal.toploc.calibration import Calibration, load_calibration
    from shoal.toploc.check import Report, check_rollouts, weigh_reports
    from shoal.toploc.finding import Check, Finding
    from shoal.toploc.proof import CHUNK_SIZE, TOPK, Fault, decode_proofs, encode_proofs
    from shoal.toploc.sequence import Evidence
    from shoal.toploc.stream import ProofBuilder
    from shoal.toploc.verify import ChunkResult, verify_batch, verify_proofs

__all__ = [
    "CHUNK_SIZE",
    "TOPK",
    "Calibration",
    "Check",
    "ChunkResult",
    "Evidence",
    "Fault",
    "Finding",
    "ProofBuilder",
    "Report",
    "build_batch",
    "build_proofs",
    "check_rollouts",
    "decode_proofs",
    "encode_proofs",
    "load_calibration",
    "verify_batch",
    "verify_proofs",
    "weigh_reports",
]

_HOMES = {
    "build": ("build_batch", "build_proofs"),
    "calibration": ("Calibration", "load_calibration"),
    "check": ("Report", "check_rollouts", "weigh_reports"),
    "finding": ("Check", "Finding"),
    "proof": ("CHUNK_SIZE", "TOPK", "Fault", "decode_proofs", "encode_proofs"),
    "sequence": ("Evidence",),
    "stream": ("ProofBuilder",),
    "verify": ("ChunkResult", "verify_batch", "verify_proofs"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"shoal.toploc.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
