"""Long vectors in pieces: each fits a core's cache, and several cores take them in turn.

Only for work that is elementwise, or within blocks of `PIECE`'s divisors: then how the pieces are dealt does not show
in the result.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

PIECE = 1 << 16
"""Elements; a multiple of the codecs' blocks. Changing breaks: the last bits of norms, and so of clipped means."""
MANY = 16
"""pieces from which threads are worth their start"""
MAX_THREADS = 16


def run_pieces(count: int, work: Callable[[slice], None]) -> None:
    """Call work(piece) for slices that cover `count` elements; raises what the first of them raised."""
    pieces = [slice(start, min(count, start + PIECE)) for start in range(0, count, PIECE)]
    num_threads = min(os.cpu_count() or 1, MAX_THREADS)
    if len(pieces) < MANY or num_threads == 1:
        for piece in pieces:
            work(piece)
        return
    with ThreadPoolExecutor(num_threads, "diloco-pieces") as pool:
        for _ in pool.map(work, pieces):
            pass
