"""Losses on trained tokens: the interface, the built-in ones, and the builder that picks one from the configuration."""

from ajgrpo.losses.api import LossExtras, LossFn, LossMetrics, checked
from ajgrpo.losses.builder import BUILT_IN, build_loss

__all__ = ["BUILT_IN", "LossExtras", "LossFn", "LossMetrics", "build_loss", "checked"]
