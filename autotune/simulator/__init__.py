"""A simulated machine, on which the tuner's own loop runs in virtual time."""

from .machine import Machine, Ranks
from .plant import Simulated
from .scale import Cluster, ScalePoint, Tier, normal_steps, simulate
from .workload import SimulatedStage, Trainer, Workload

__all__ = [
    "Cluster",
    "Machine",
    "Ranks",
    "ScalePoint",
    "Simulated",
    "SimulatedStage",
    "Tier",
    "Trainer",
    "Workload",
    "normal_steps",
    "simulate",
]
