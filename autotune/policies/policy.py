"""The interface of a policy."""

from __future__ import annotations

from typing import Protocol, TypeVar

from ..situation import Decision, Situation

M = TypeVar("M")


class Policy(Protocol[M]):
    """Decides from a situation and its own memory, and does nothing else.

    `M` is an immutable value. From the same start, the same situations give the same
    decisions, whether live, simulated or replayed from a log. So a policy reads no
    clock, draws no random numbers and keeps no state in itself.
    """

    @property
    def name(self) -> str:
        """Its name in the log."""

    def start(self) -> M:
        """Return the memory to start with."""

    def decide(self, situation: Situation, memory: M) -> tuple[tuple[Decision, ...], M]:
        """Return the changes to make now, verified together, and the new memory.

        No decision means that all is well, or that nothing within the budget helps.
        """
