"""Policies: pure functions from observations to changes."""

from .bottleneck_law import BottleneckLaw
from .policy import PerRegime, Policy, Values

__all__ = ["BottleneckLaw", "PerRegime", "Policy", "Values"]
