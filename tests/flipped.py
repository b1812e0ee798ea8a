"""A loss that trains in the wrong direction, to see that the check of learning can fail."""

from __future__ import annotations

from ajgrpo.config import AsyncGRPOConfig
from ajgrpo.losses import score_centering
from ajgrpo.losses.api import Array, LossExtras, LossMetrics

_right = score_centering.make(AsyncGRPOConfig())


def loss(logps: Array, old_logps: Array, advantages: Array, extras: LossExtras) -> tuple[Array, LossMetrics]:
    """Score centering with the sign of the advantages flipped."""
    return _right(logps, old_logps, -advantages, extras)
