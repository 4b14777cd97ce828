"""A simulated machine: the tuner's own loop, on a clock that costs no time."""

from .machine import Machine, Ranks
from .plant import Simulated
from .workload import SimulatedStage, Trainer, Workload

__all__ = ["Machine", "Ranks", "Simulated", "SimulatedStage", "Trainer", "Workload"]
