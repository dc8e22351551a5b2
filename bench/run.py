"""All benchmarks, one after the other: `make bench`. Flags are passed on (`--quick`, `--json`).

A benchmark whose peer is not installed says so, and is left out.
"""

import subprocess
import sys
from pathlib import Path

from common import NO_PEER

BENCHES = (
    "engine",
    "trl",
    "learning",
    "clipping",
    "staleness",
    "filter",
    "toploc",
    "forgery",
    "separation",
    "delta",
    "shardcast",
    "ledger",
    "coordinator",
    "overlap",
    "unequal",
    "loop",
)


def main() -> int:
    folder = Path(__file__).parent
    failed = []
    for name in BENCHES:
        print(f"== {name}", flush=True)
        code = subprocess.run([sys.executable, str(folder / f"{name}.py"), *sys.argv[1:]], check=False).returncode
        if code not in (0, NO_PEER):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
