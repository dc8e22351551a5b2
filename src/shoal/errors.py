"""Errors by the boundary they crossed.

`ConfigError` is the user's mistake: one sentence that names the key or file and says what is allowed. The command line
prints it and exits with 2. Bugs of our own are left to crash.
"""


class ConfigError(ValueError):
    """A setting, flag or file of the user's that cannot be used; the text says what would be."""
