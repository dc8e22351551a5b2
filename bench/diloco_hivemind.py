"""One peer of hivemind's averager, for `diloco_net.py`, in its own process because hivemind's processes outlive it.

    python bench/diloco_hivemind.py RANK PEERS FLOATS CODEC [ADDRESS ...]

Lines on stdout: its address, "ready" before every sync, and after each the seconds it took and the distance of the
result from the mean of all vectors, relative to its norm. A line on stdin starts each sync. Imports nothing from this
package, so it runs with any interpreter that has hivemind 1.1.12.
"""

import sys
import time

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import Float16Compression, NoCompression

CODECS = {"fp32": NoCompression, "fp16": Float16Compression}
TIMEOUT_S = 120.0


def main() -> None:
    rank, count, size = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    addresses = sys.argv[5:] or None
    dht = hivemind.DHT(initial_peers=addresses, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
    print(*dht.get_visible_maddrs(), flush=True)
    averager = DecentralizedAverager(
        [draw_vector(rank, size)],
        dht,
        prefix="bench",
        start=True,
        target_group_size=count,
        min_group_size=count,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=CODECS[sys.argv[4]](),
    )
    wanted = sum(draw_vector(number, size) for number in range(count)) / count
    print("ready", flush=True)
    for _ in sys.stdin:
        with averager.get_tensors() as (tensor,):
            tensor.copy_(draw_vector(rank, size))
        print("ready", flush=True)
        sys.stdin.readline()
        start = time.perf_counter()
        averager.step(timeout=TIMEOUT_S)
        spent_s = time.perf_counter() - start
        with averager.get_tensors() as (tensor,):
            error = float((tensor - wanted).norm() / wanted.norm())
        print(spent_s, error, flush=True)


def draw_vector(rank: int, size: int) -> torch.Tensor:
    """A peer's vector."""
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


if __name__ == "__main__":
    main()
