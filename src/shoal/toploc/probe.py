"""Whether a dtype can be computed with on this machine, tried where it does no harm."""

import os
import signal
import subprocess
import sys

_PROBE_S = 120.0
_PROBE = """
import torch
import torch.nn.functional as F
dtype = getattr(torch, {dtype!r})
for rows in (1, 16, 256):
    F.linear(torch.ones(rows, 256, dtype=dtype), torch.ones(256, 256, dtype=dtype))
"""


def probe_dtype(dtype: str) -> str:
    """Why products in `dtype` cannot be computed here, or nothing. Tried in a child, for some machines kill it.

    Virtual machines may announce matrix instructions that their host does not let them use.
    """
    if dtype == "float32":
        return ""
    command = [sys.executable, "-c", _PROBE.format(dtype=dtype)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{dtype} products took more than {_PROBE_S:.0f} s"
    if done.returncode == 0:
        return ""
    if done.returncode > 0:
        return f"{dtype} products fail here: {done.stderr.strip().splitlines()[-1]}"
    name = signal.Signals(-done.returncode).name
    hint = "" if "ONEDNN_MAX_CPU_ISA" in os.environ else "; ONEDNN_MAX_CPU_ISA=AVX512_CORE in the environment may help"
    return f"{dtype} products end the process here ({name}){hint}"
