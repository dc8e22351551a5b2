"""Errors by the boundary they crossed.

`ConfigError` is the user's mistake: one sentence that names the key or file and says what is allowed. The command line
prints it and exits with 2. `DiskError` is a disk that is full, gone or closed to us, `AwayError` somebody who does not
answer now: one sentence, exit code 1. Bugs of our own are left to crash.
"""

EXIT_MISTAKE = 2
"""of a command whose flags, settings or files cannot be used as they are"""
EXIT_UNWANTED = 3
"""of a role that its run does not go on with: starting it again does not help"""


class ConfigError(ValueError):
    """A setting, flag or file of the user's that cannot be used; the text says what would be."""


class DiskError(Exception):
    """A folder that cannot be written any more; what was complete before stays."""

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full
        """for want of room: it may come back by itself"""


class AwayError(Exception):
    """Somebody who is needed and does not answer now; the same command may find them later."""
