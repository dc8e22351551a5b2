"""Read a submission: the one way from a stranger's file to records, for validators and trainers alike."""

from pathlib import Path

from shoal.submission.bounds import Bounds
from shoal.submission.claims import Contents, read_claims
from shoal.submission.jail import Jail


async def read_submission(jail: Jail, path: Path, bounds: Bounds) -> Contents:
    """What a file claims.

    `FormError`: it is no submission within the bounds, or ends its readers. `JailError`: reading does not work here at
    the moment, which says nothing about the file.
    """
    return read_claims(await jail.read(path, bounds), bounds)
