"""Means with intervals."""

import random
from collections.abc import Sequence

from scipy.stats import binomtest


def interval(scores: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """A confidence interval for the mean of scores between 0 and 1.

    All-or-nothing scores get Wilson's interval, which stays sensible at 0, 1 and small counts; partial scores get a
    percentile bootstrap with a fixed seed, never narrower than the rounding of its draws allows.

    Args:
        scores: One score per sample.
        level: Confidence.

    Returns:
        Lower and upper bound; (0, 1) without samples.
    """
    if not scores:
        return 0.0, 1.0
    if all(score in (0.0, 1.0) for score in scores):
        bounds = binomtest(round(sum(scores)), len(scores)).proportion_ci(level, method="wilson")
        return float(bounds.low), float(bounds.high)
    rng = random.Random(len(scores))
    draws = 2000
    means = sorted(sum(rng.choices(scores, k=len(scores))) / len(scores) for _ in range(draws))
    tail = (1 - level) / 2
    return means[int(tail * draws)], means[min(int((1 - tail) * draws), draws - 1)]


def summary(scores: Sequence[float]) -> dict[str, float | int | list[float]]:
    """Mean, count and interval, as results hold them."""
    low, high = interval(scores)
    return {"score": sum(scores) / len(scores) if scores else 0.0, "n": len(scores), "interval": [low, high]}
