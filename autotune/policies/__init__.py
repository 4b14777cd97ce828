"""Policies: pure functions from what was seen to what should be changed."""

from .connector_rules import ConnectorRules
from .policy import Policy

__all__ = ["ConnectorRules", "Policy"]
