"""How often something happened, and how sure that is."""

import math
from dataclasses import dataclass

Z95 = 1.96


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of trials, with the interval in which it lies with 95 % confidence (Wilson's)."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.trials:
            return 0.0, 1.0
        n, p, zz = self.trials, self.value, Z95 * Z95
        middle, half = p + zz / (2 * n), Z95 * math.sqrt(p * (1 - p) / n + zz / (4 * n * n))
        return max(0.0, (middle - half) / (1 + zz / n)), min(1.0, (middle + half) / (1 + zz / n))
