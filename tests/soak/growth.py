"""When a figure that should be flat has grown: the soak's rule.

The first quarter of the readings is warm-up and left out. Of the rest, the median of the last third is held
against that of the first third: more than 5 % above it, and above that by more than a small slack of the
figure's kind, is growth. Medians make a single outlier harmless; the slack keeps one file of twenty, or one
page of a small process, from counting.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WARM_UP_SHARE = 0.25
TOLERANCE = 0.05
# Nine are left after the warm-up: three in each third, so that one outlier does not decide.
LEAST_READINGS = 12
_MIB = 1024.0**2
# By kind of figure, which is the first word of a series' name.
SLACK: Mapping[str, float] = {"rss": 4 * _MIB, "shm": 1 * _MIB, "files": 2, "threads": 2}


@dataclass(frozen=True)
class Growth:
    """Medians of a series' first and last third after the warm-up, and whether that is growth."""

    first: float
    last: float
    grew: bool

    @property
    def percent(self) -> float:
        """Change in percent of the first median; infinite from nothing."""
        if self.first:
            return 100.0 * (self.last - self.first) / self.first
        return math.inf if self.last > 0 else 0.0


def growth(readings: Sequence[float], *, slack: float) -> Growth:
    """Judge one series.

    Args:
        slack: growth of at most so much, in the series' unit, is none.

    Raises:
        ValueError: too few readings to tell.
    """
    if len(readings) < LEAST_READINGS:
        raise ValueError(f"{len(readings)} readings, at least {LEAST_READINGS} needed: soak longer")
    warm = readings[math.ceil(WARM_UP_SHARE * len(readings)) :]
    third = max(1, len(warm) // 3)
    first, last = statistics.median(warm[:third]), statistics.median(warm[-third:])
    return Growth(first, last, last - first > max(TOLERANCE * first, slack))


def judge(series: Mapping[str, Sequence[float]]) -> dict[str, Growth]:
    """Judge every series by the slack of its kind; KeyError for a kind without one."""
    return {name: growth(readings, slack=SLACK[name.split()[0]]) for name, readings in series.items()}
