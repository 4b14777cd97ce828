"""Policies: pure functions from observations to changes."""

from .bottleneck_law import BottleneckLaw
from .per_regime import PerRegime
from .policy import Policy

__all__ = ["BottleneckLaw", "PerRegime", "Policy"]
