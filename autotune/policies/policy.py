"""What a policy is."""

from __future__ import annotations

from typing import Protocol, TypeVar

from ..situation import Decision, Situation

M = TypeVar("M")


class Policy(Protocol[M]):
    """Decides from a situation and its own memory, and does nothing else.

    `M` is an immutable value. The same situations from the same start give the same
    decisions, live, simulated or replayed from a log, so a policy reads no clock, draws
    no random numbers and keeps nothing in itself.
    """

    @property
    def name(self) -> str:
        """As the log shows it."""

    def start(self) -> M:
        """Return the memory to begin with."""

    def decide(self, situation: Situation, memory: M) -> tuple[tuple[Decision, ...], M]:
        """Return what to change now, verified together, and what to remember.

        No decision means that all is well, or that nothing within the budget helps.
        """
