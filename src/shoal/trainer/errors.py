"""Errors that end a trainer: a contradiction between what it computed and what is recorded."""


class TrainerError(Exception):
    """Training cannot continue, and restarting unchanged does not help; the text says what to check."""
