"""What a worker has on disk, through kills."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from shoal.recipe import Recipe
from shoal.rollout import Group
from shoal.submission.write import Proofs, Written
from shoal.swarm.messages import Lease, RolloutEntry
from shoal.worker.author import Work
from shoal.worker.intake import WorkLimits, take_order
from shoal.worker.outbox import Outbox


class KillError(Exception):
    """Stands for kill -9."""


def write_word(path: Path, groups: Sequence[Group], proofs: Proofs) -> Written:
    path.write_bytes(b"work")
    return Written(path=path, sha256="ab" * 32, size=4, entries=(RolloutEntry(hash="cd" * 32, tokens=1),))


@pytest.mark.parametrize("survived", range(4))
def test_a_kill_while_a_lease_is_forgotten_never_has_it_written_again(
    tmp_path: Path, recipe: Recipe, make_lease: Callable[[], Lease], monkeypatch: Any, survived: int
) -> None:
    lease, outbox = make_lease(), Outbox(tmp_path, write_word)
    outbox.add_lease(lease)
    order = take_order(lease, recipe, WorkLimits())
    parcel = outbox.pack(Work(order=order, version=0, groups=(), proofs={}, seconds=0.0), lease.fence)
    unlink, left = Path.unlink, list(range(survived))

    def unlink_or_die(path: Path, missing_ok: bool = False) -> None:
        if not left:
            raise KillError
        left.pop()
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_or_die)
        try:
            outbox.forget(lease.lease)
        except KillError:
            assert survived < 3
    again = Outbox(tmp_path)
    assert again.list_leases() == [], "or a second manifest would be signed for it"
    assert [found.manifest for found in again.list_parcels()] in ([], [parcel.manifest])
