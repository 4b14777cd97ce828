"""The autotuner: observe, decide, apply, verify.

It sees a pipeline only through observations and changes it only through knobs; see
README.md.
"""

from .budget import Budget, effective_cpus, effective_memory_bytes, parse_bytes
from .decision import Decision, Measure, Outcome
from .explain import Explanation, explain
from .log import AutotuneLog, show_by_default
from .policies import ConnectorRules, Policy
from .situation import KnobView, Situation
from .tuner import Plant, Tuner, TunerThread

__all__ = [
    "AutotuneLog",
    "Budget",
    "ConnectorRules",
    "Decision",
    "Explanation",
    "KnobView",
    "Measure",
    "Outcome",
    "Plant",
    "Policy",
    "Situation",
    "Tuner",
    "TunerThread",
    "effective_cpus",
    "effective_memory_bytes",
    "explain",
    "parse_bytes",
    "show_by_default",
]
