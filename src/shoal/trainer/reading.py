"""Strangers' files for the trainer: read in the jail, like a validator's, and nowhere else."""

from collections.abc import Sequence
from pathlib import Path

from shoal.rollout import Group
from shoal.submission.bounds import Bounds, FormError
from shoal.submission.jail import Jail, JailError
from shoal.submission.read import read_submission
from shoal.swarm.asking import UnreachableError
from shoal.swarm.messages.base import MAX_ROLLOUTS
from shoal.swarm.params import RunParams
from shoal.trainer.pick import Expected, UnreadableError

MAX_FILE_BYTES = 1 << 29
"""of a file that the coordinator took in; a limit of this machine's, not of the run's"""


class JailReader:
    """A `ReadGroups` that reads in a jail."""

    def __init__(self, jail: Jail, bounds: Bounds) -> None:
        self._jail, self._bounds = jail, bounds

    async def __call__(self, path: Path) -> Sequence[Group]:
        """The groups of a file."""
        try:
            return (await read_submission(self._jail, path, self._bounds)).groups
        except FormError as error:
            raise UnreadableError(str(error)) from None
        except JailError as error:
            raise UnreachableError(str(error)) from None


def make_bounds(params: RunParams, expected: Expected) -> Bounds:
    """What one file of a run may hold, at any time of it.

    Nothing here follows from a parameter that the operator may change: files of before and after the change are trained
    on, and a step that is repeated must find the same of them readable.
    """
    return Bounds(
        max_rollouts=MAX_ROLLOUTS,
        group_size=params.group_size,
        max_tokens=params.max_tokens,
        vocab_size=expected.vocab_size,
        max_prompt_tokens=expected.context,
        file_bytes=MAX_FILE_BYTES,
    )
