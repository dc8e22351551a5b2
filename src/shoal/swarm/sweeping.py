"""Files that nobody needs any more are removed from the store.

A file is needed while its submission is awaited or judged, while its rejection can be appealed, and until the step of
its batch is trained; and for the challenge window after that.

Invariants:
- a file is removed, then that is recorded: a kill in between leaves a file that is removed again, never one that the
  tables forgot;
- while a file is removed no upload of the same file begins, and while one is uploaded it is not removed. Both are
  decided on the coordinator's loop.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.swarm.event import Kind
from shoal.swarm.state.run import count_away
from shoal.swarm.state.submissions import is_free_blob, list_free_blobs
from shoal.swarm.submitting import refuse_busy
from shoal.swarm.turn import Turn

MAX_AT_ONCE = 64
EVERY_S = 60
SLACK_S = 120
"""after the end of the time to appeal: a restart may move that end, by as much as was not written down, a minute"""


class BlobGate:
    """Who works on which file: uploads side by side, or a removal alone. For one loop."""

    def __init__(self) -> None:
        self._uploads: Counter[str] = Counter()
        self._removals: set[str] = set()

    @contextmanager
    def upload(self, blob: str) -> Iterator[None]:
        """Keep a file from being removed; `AuthError` if it is."""
        if blob in self._removals:
            raise refuse_busy()
        self._uploads[blob] += 1
        try:
            yield
        finally:
            self._uploads[blob] -= 1
            if not self._uploads[blob]:
                del self._uploads[blob]

    @contextmanager
    def removal(self, blobs: list[str]) -> Iterator[list[str]]:
        """Keep files from being uploaded; those that are uploaded now are left out."""
        taken = [blob for blob in blobs if blob not in self._uploads and blob not in self._removals]
        self._removals.update(taken)
        try:
            yield taken
        finally:
            self._removals.difference_update(taken)


def find_unneeded(turn: Turn) -> list[str]:
    """Files to remove."""
    kept_ms, appealed_ms = _find_times(turn)
    return list_free_blobs(turn.connection, kept_ms, appealed_ms, MAX_AT_ONCE)


def confirm_unneeded(turn: Turn, *, blobs: list[str]) -> list[str]:
    """Of some files those that are still to be removed: the others were committed again meanwhile."""
    kept_ms, appealed_ms = _find_times(turn)
    return [blob for blob in blobs if is_free_blob(turn.connection, blob, kept_ms, appealed_ms)]


def record_drop(turn: Turn, *, blobs: list[str]) -> None:
    """The files are gone."""
    turn.append(Kind.BLOB_DROP, "", {"blobs": blobs})


def _find_times(turn: Turn) -> tuple[int, int]:
    params, now_ms = turn.params, turn.now_ms
    kept_ms = now_ms - 1000 * params.challenge_s
    return kept_ms, min(kept_ms, now_ms - 1000 * (params.appeal_s + SLACK_S) - count_away(turn.connection, 0))
