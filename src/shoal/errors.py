"""Errors by the boundary they crossed.

`ConfigError` is a user mistake: one sentence that names the key or file and states what is allowed. The command line
prints it and exits with code 2. `DiskError` is a disk that is full, missing or not writable, `UnavailableError` a
service that does not answer now: one sentence, exit code 1. `UnreachableError` is a request without a usable answer
after all retries; long-running roles wait and ask again. Bugs are left to crash.
"""

EXIT_MISTAKE = 2
"""exit code of a command whose flags, settings or files are invalid"""
EXIT_UNWANTED = 3
"""exit code of a role that its run rejects: restarting does not help"""


class ConfigError(ValueError):
    """An invalid setting, flag or file of the user; the text states what is allowed."""


class DiskError(Exception):
    """A folder that can no longer be written to; complete files in it stay intact."""

    def __init__(self, text: str, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_full = is_full
        """whether space ran out: the condition may clear by itself"""


class UnavailableError(Exception):
    """A required service that does not answer now; the same command may succeed later."""


class TrainerError(Exception):
    """A contradiction between what a trainer computed and what is recorded: training cannot continue, and restarting
    unchanged does not help; the text says what to check."""


class UnreachableError(Exception):
    """No usable answer from another machine after all retries; the text describes the last attempt."""

    def __init__(self, text: str, *, is_busy: bool = False) -> None:
        super().__init__(text)
        self.is_busy = is_busy
        """whether it answered that there are too many requests"""
