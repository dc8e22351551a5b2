"""Steps, versions and the bound between them, in one place.

Step n trains version n - 1 on batch n and makes version n. With t steps trained the newest version is t, and steps
t + 1 .. t + 1 + k are open. A rollout of step n may be of version v if (n - 1) - v <= k and v <= t.

The bound never makes work late: it depends on n and v alone, and n <= t + 1 + k gives n - 1 - k <= t, so the newest
version may be used for every open step, and what may be used when a lease is granted may still be used when it ends.
Invariant: n - 1 - k <= v <= n - 1 for every group of batch n, the right side because step n is cut before v = n exists.
"""


def open_steps(trained: int, async_level: int, steps: int) -> range:
    """The steps that are open once `trained` steps are trained and version `trained` is out."""
    return range(trained + 1, min(trained + 1 + async_level, steps) + 1)


def oldest_version(step: int, async_level: int) -> int:
    """The oldest version whose rollouts a step may train on."""
    return max(0, step - 1 - async_level)


def is_allowed(step: int, version: int, async_level: int) -> bool:
    """Whether a step may train on rollouts of a version."""
    return oldest_version(step, async_level) <= version <= step - 1
