"""What ends a trainer: a contradiction between what it computed and what is written down."""


class TrainerError(Exception):
    """Training cannot go on, and would not if it were started again as it is; a sentence says what to look at."""
