"""Room for files: how many bytes of the store each owner may occupy, so that no owner can keep others from delivering.

A lease reserves room for the largest file that it can have (`file_bytes`), before anyone computes anything. The room is

    held        by leases, and by files that are not accepted, until they are deleted: each counts as its reservation
    kept        by accepted files: each counts its size

Everyone has room of its own in proportion to its work; what exceeds it comes from a common pool:

    earned      sum of the reservations of all accepted submissions of the owner
    over        max(0, held - earned)

A lease is granted if afterwards, with S = `store_bytes`,

    over of the owner   <= min(MOST_FILES files, pool / OWNER_PARTS), at least LEAST_FILES files
    over of all owners  <= pool = S / POOL_PART
    held by the owner   <= S / OWNER_PART
    held and kept       <= S

So owners without accepted work occupy at most a pool together, however many they are. Whoever wants to occupy more must
first have as much work accepted. Reservations count, not sizes: many tiny files are as expensive as few large ones.

Rejected files are kept while they can be appealed. Files of owners without accepted work that were not accepted are
kept for `form_keep_s` only while more than half of the pool is used, or of the owner's part: so room comes back to
newcomers within that time, whatever others do.
"""

from functools import cache
from typing import NamedTuple

from shoal.protocol.messages import SubmissionState
from shoal.protocol.params import RunParams
from shoal.submission.columns import limit_file
from shoal.submission.limits import SubmissionLimits

POOL_PART = 8
"""the pool is this part of the store"""
OWNER_PART = 8
"""what is not accepted of one owner is at most this part of the store"""
LEAST_FILES, MOST_FILES, OWNER_PARTS = 4, 16, 64
"""one owner's part of the pool"""
MIN_FILES = 128
"""files of a full lease for which a store must have room: the pool then has room for 16"""


class Room(NamedTuple):
    """Bytes of an owner, or of all owners."""

    held: int = 0
    earned: int = 0

    @property
    def over(self) -> int:
        """Bytes that come from the pool."""
        return max(0, self.held - self.earned)


def limit_lease_file(params: RunParams, groups: int) -> int:
    """Bytes of the largest file of a lease of so many groups."""
    most = _limit_rollouts(groups * params.group_size, params.max_tokens, params.max_prompt_tokens)
    return min(params.blob_max_bytes, most)


@cache
def _limit_rollouts(rollouts: int, max_tokens: int, max_prompt_tokens: int) -> int:
    # No token id is longer than another, and the form of groups changes no size.
    return limit_file(
        SubmissionLimits(
            max_rollouts=rollouts,
            group_size=1,
            max_tokens=max_tokens,
            vocab_size=1,
            max_prompt_tokens=max_prompt_tokens,
        )
    )


def find_shortage(params: RunParams, own: Room, file_bytes: int, *, all_over: int, all_bytes: int) -> str:
    """Why there is no room for one more file of an owner, in one sentence; empty if there is.

    `all_over` is what all owners have from the pool, `all_bytes` what is held and kept in total."""
    after, pool = Room(own.held + file_bytes, own.earned), params.store_bytes // POOL_PART
    if all_bytes + file_bytes > params.store_bytes:
        return "the store has no room for another file; leases are granted when files are deleted"
    if after.held > max(file_bytes, params.store_bytes // OWNER_PART):
        return "files of this owner that are not accepted occupy as much of the store as one owner may"
    if after.over <= own.over:
        return ""
    if after.over > limit_owner(params, file_bytes):
        return "this owner has as many files without a verdict or rejected as its accepted work allows"
    if all_over - own.over + after.over > pool:
        return "the room for owners without accepted work is used up; it becomes free when their files are deleted"
    return ""


def limit_owner(params: RunParams, file_bytes: int) -> int:
    """Bytes of the pool that one owner may have, if its files have this size."""
    part = params.store_bytes // POOL_PART // OWNER_PARTS
    return max(LEAST_FILES * file_bytes, min(MOST_FILES * file_bytes, part))


def find_patience(params: RunParams, all_over: int) -> int:
    """Bytes above which an owner without accepted work has its files that were not accepted deleted early."""
    if 2 * POOL_PART * all_over > params.store_bytes:
        return 0
    # Leases of such owners have one group, if the run does not fix their size.
    return limit_owner(params, limit_lease_file(params, params.groups_per_lease or 1)) // 2


def appeal_time(params: RunParams, state: SubmissionState) -> int:
    """Seconds in which a rejection can be appealed; its file is kept as long."""
    return min(params.form_keep_s, params.appeal_s) if state is SubmissionState.FORM else params.appeal_s
