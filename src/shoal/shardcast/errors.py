"""What can go wrong with what others send, by what it was.

None of these is a reason to stop: whoever talks to a peer catches them, counts them against it and goes on. A disk that
refuses stays an `OSError` and passes up to the command.
"""


class ManifestError(ValueError):
    """A line that is not the next one of this log, signed by its publisher; the log is as it was."""


class ShardError(Exception):
    """Bytes that are not the shard they were sent as, or a shard that is not to be had here any more."""


class StaleError(Exception):
    """A version that is older than what is kept, or was replaced; nobody's fault."""


class DeltaError(ValueError):
    """A delta that is damaged, or does not fit the parent it is applied to; the text says which."""
