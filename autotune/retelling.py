"""What was told last: so that the log says things once, or now and then."""

from __future__ import annotations

from ..pipeline.observation import Observation
from .decision import Outcome
from .explain import verdict_of
from .window import wait_share

__all__ = ["Released", "Spoken"]

VERDICT_S = 60.0
"""The verdict is repeated after so long, and earlier where it changes."""
VERDICT_CHANGE_S = 5.0


class Released:
    """What was given back since the last time it was told."""

    def __init__(self) -> None:
        self.workers = 0
        self.held_bytes = 0  # when the giving back began

    def add(self, outcomes: tuple[Outcome, ...], held_bytes: int) -> None:
        """Count kept outcomes; `held_bytes` is what was held before them."""
        workers = sum(
            outcome.decision.old - outcome.decision.new
            for outcome in outcomes
            if outcome.decision.knob == "num_parallel_workers"
        )
        if workers > 0 and self.workers == 0:
            self.held_bytes = held_bytes
        self.workers = max(0, self.workers + workers)


class Spoken:
    """The verdict told last."""

    def __init__(self) -> None:
        self._verdict = ""
        self._time_s = float("-inf")

    def due(self, window: Observation) -> bool:
        """Whether the window's verdict is to be told; if so, it counts as told."""
        if window.trainer.steps == 0:
            return False
        verdict = verdict_of(wait_share(window))
        patience_s = VERDICT_S if verdict == self._verdict else VERDICT_CHANGE_S
        if window.time_s - self._time_s < patience_s:
            return False
        self._verdict, self._time_s = verdict, window.time_s
        return True

    def older_than(self, window: Observation) -> bool:
        """Whether what was told last is not of this window."""
        return window.trainer.steps > 0 and window.time_s > self._time_s
