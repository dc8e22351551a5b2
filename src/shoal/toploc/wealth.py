"""Bets whose fair value is 1: the one piece of arithmetic that all tests by betting share."""

import numpy as np


def average_wealth(logs: np.ndarray) -> np.ndarray:
    """Log of the mean wealth over the last axis, from logs."""
    mean: np.ndarray = np.logaddexp.reduce(logs, axis=-1) - np.log(logs.shape[-1])
    return mean
