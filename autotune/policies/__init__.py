"""Policies: pure functions from what was seen to what should be changed."""

from .bottleneck_law import BottleneckLaw
from .connector_rules import ConnectorRules
from .policy import Policy

__all__ = ["BottleneckLaw", "ConnectorRules", "Policy"]
