"""How the rates of `bench/diloco.py` were chosen: every setting tried, on a seed that is not evaluated.

    python bench/diloco_sweep.py            all of them, best first within each kind
    python bench/diloco_sweep.py ddp:lr=6e-3 diloco:lr=6e-3,mu=0.8,fade=8

A setting is a kind and its differences from the defaults of `Arm`. Runs are kept in bench/out/diloco, as in the
benchmark.
"""

import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from common import OUT
from diloco_arms import Arm, Size, train_arm

SEED = 11
TRIED = [
    "ddp:lr=6e-3",
    "ddp:lr=1e-2",
    "ddp:lr=1.5e-2",
    "diloco:codec=int4,lr=6e-3,eta=1.0,mu=0.8,fade=8",
    "diloco:codec=int4,lr=6e-3,mu=0.8,fade=8,beta2=0.99",
]


def main() -> None:
    torch.set_num_threads(1)
    runs = [(text, train_arm(parse_arm(text), Size(), SEED, OUT / "diloco")) for text in sys.argv[1:] or TRIED]
    for text, run in sorted(runs, key=lambda pair: (pair[0].split(":")[0], pair[1]["loss"])):
        print(f"{run['loss']:.4f}  {run['cpu_s']:4.0f} s  {text}", flush=True)


def parse_arm(text: str) -> Arm:
    """An arm from "kind:field=value,field=value"."""
    kind, _, fields = text.partition(":")
    options: dict[str, float | int | str | bool] = {}
    for pair in filter(None, fields.split(",")):
        name, _, value = pair.partition("=")
        default = Arm("", kind).__dict__[name]
        options[name] = value == "True" if isinstance(default, bool) else type(default)(value)
    return Arm(f"sweep {text.replace(':', ' ')}", kind, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
