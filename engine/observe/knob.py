"""Knobs: the only way in which anything outside changes a running pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "Knob",
    "KnobName",
]

KnobName = Literal["num_parallel_workers", "prefetch_size"]


@dataclass(frozen=True, slots=True)
class Knob:
    """One number of one operator that may be changed while the pipeline runs.

    Reading `value` and calling `turn` are safe from any thread and never wait for work
    in progress.
    """

    operator: str
    """As the log shows it: `Map(ID:2) decode`."""
    name: KnobName
    lower: int
    """Least value the user allows, >= 1."""
    upper: int
    """Most the user allows."""
    tunable: bool
    """False where the user pinned the stage with `tune=False`."""
    read: Callable[[], int] = field(repr=False)
    write: Callable[[int], None] = field(repr=False)

    @property
    def value(self) -> int:
        """The value now asked for (workers may still be starting or finishing)."""
        return self.read()

    def set(self, value: int) -> int:
        """Ask for `value`, kept within the bounds; return what was asked for."""
        asked = min(max(value, self.lower), self.upper)
        if asked != self.read():
            self.write(asked)
        return asked
