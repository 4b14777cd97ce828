"""Knobs: the only way to change a running pipeline from outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

KnobName = Literal["num_parallel_workers", "prefetch_size", "executor", "host"]
Value = int | str
"""A number, or one of a few kinds."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting of one operator that may change while the pipeline runs.

    Reading `value` and calling `set` are safe from any thread, and never wait for work
    in progress. A kind changes in the trainer's thread, at its next batch. If that
    fails, a `Move` says so and the knob disappears.
    """

    operator: str
    """Its name in the log: `Map(ID:2) decode`."""
    name: KnobName
    lower: int
    """Smallest number the user allows, >= 1; 0 for a kind."""
    upper: int
    """Largest number the user allows; 0 for a kind."""
    tunable: bool
    """False if the user pinned the stage with `tune=False`."""
    read: Callable[[], Value] = field(repr=False)
    write: Callable[[Any], object] = field(repr=False)
    choices: tuple[str, ...] = ()
    """Possible kinds; empty for a number."""
    held: str = ""
    """What keeps it from being raised, and what would let it; empty if nothing does."""

    @property
    def value(self) -> Value:
        """The requested value (workers may still be starting or finishing)."""
        return self.read()

    def set(self, value: Value) -> Value:
        """Request `value`; a number is clipped to its bounds.

        Returns:
            the requested value.

        Raises:
            ValueError: there is no such kind.
        """
        if isinstance(value, str):
            if value not in self.choices:
                text = f"{self.name} of {self.operator} must be one of {self.choices}"
                raise ValueError(f"{text}, got {value!r}")
        else:
            value = min(max(value, self.lower), self.upper)
        if value != self.read():
            self.write(value)
        return value
