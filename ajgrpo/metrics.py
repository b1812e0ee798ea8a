"""Metric accumulation: how observations of a logging window become one number each.

The reduction follows from the name's last part (the text after the last ``/``), split at ``_``:

- holds ``count``: summed;
- holds ``max`` or ``min``: the largest or smallest;
- anything else: Σ numerator / Σ denominator, so that a rate is exact whatever the size of its observations.

A value that is not finite means "not applicable" and is left out. Observations are plain tuples, so a worker process
can send them over a queue.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class Observation(NamedTuple):
    """One observation of a metric. Example: ``Observation("tools/failure_frequency", 1.0, 4.0)`` (1 of 4 failed)."""

    name: str
    numerator: float
    denominator: float = 1.0


def reduction(name: str) -> str:
    """``"sum"``, ``"max"``, ``"min"`` or ``"mean"``: how observations of this metric are reduced."""
    words = name.rsplit("/", 1)[-1].split("_")
    if "count" in words:
        return "sum"
    for word in ("max", "min"):
        if word in words:
            return word
    return "mean"


class Metrics:
    """Collects observations and reduces them over a window."""

    def __init__(self) -> None:
        self._observations: list[Observation] = []

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds a value; means are weighted with ``weight``."""
        self.add_rate(name, float(value) * weight, weight)

    def add_rate(self, name: str, numerator: float, denominator: float) -> None:
        """Adds a rate by its two parts."""
        if math.isfinite(numerator) and math.isfinite(denominator):
            self._observations.append(Observation(name, float(numerator), float(denominator)))

    def update(self, values: Mapping[str, float]) -> None:
        """Adds several values."""
        for name, value in values.items():
            self.add(name, value)

    def merge(self, observations: Iterable[Observation]) -> None:
        """Adds what another process collected."""
        self._observations.extend(observations)

    def drain(self) -> list[Observation]:
        """Hands out everything collected, ready for a queue, and forgets it."""
        drained, self._observations = self._observations, []
        return drained

    @contextlib.contextmanager
    def timer(self, name: str) -> Iterator[None]:
        """Adds the wall time of the ``with`` block, in seconds, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def reduce(self) -> dict[str, float]:
        """One value for each metric, sorted by name; a rate whose denominators sum to 0 is left out."""
        grouped: dict[str, list[Observation]] = {}
        for observation in self._observations:
            grouped.setdefault(observation.name, []).append(observation)
        reduced = {}
        for name in sorted(grouped):
            items = grouped[name]
            how = reduction(name)
            denominator = sum(item.denominator for item in items)
            if how == "sum":
                reduced[name] = sum(item.numerator for item in items)
            elif how in ("max", "min"):
                ratios = [item.numerator / item.denominator for item in items if item.denominator]
                if ratios:
                    reduced[name] = max(ratios) if how == "max" else min(ratios)
            elif denominator:
                reduced[name] = sum(item.numerator for item in items) / denominator
        return reduced
