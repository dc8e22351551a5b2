"""Errors in what other machines send, by kind.

None of these is fatal: the code that talks to a peer catches them, counts them against the peer and continues. Errors
of our own disk remain `OSError` and reach the command.
"""


class ManifestError(ValueError):
    """The line is not the next one of this log, signed by its publisher; the log is unchanged."""


class ShardError(Exception):
    """The bytes do not match the shard, or the shard is no longer available here."""


class StaleError(Exception):
    """The version is older than those kept, or was replaced; nobody's fault."""


class DeltaError(ValueError):
    """The delta is damaged, or does not fit the parent it is applied to; the text states which."""
