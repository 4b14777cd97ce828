"""Policies: pure functions from what was seen to what should be changed."""

from .bottleneck_law import BottleneckLaw
from .per_regime import PerRegime
from .policy import Policy

__all__ = ["BottleneckLaw", "PerRegime", "Policy"]
