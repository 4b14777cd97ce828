"""Which crew works for a segment: one for each kind of workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ..connector import Connector
from ..recipe import SegmentRecipe
from .coroutines import Coroutines
from .crew import Crew
from .inline import Inline
from .threads import Threads

__all__ = ["Kind", "hire"]

Kind = Literal["inline", "thread", "process", "async"]


def hire(
    connector: Connector,
    recipe: SegmentRecipe,
    seed: int,
    children: Callable[[], Crew],
    kind: Kind,
) -> Crew:
    """Make the crew of one kind; it has no workers yet.

    Args:
        connector: where they take their leases.
        recipe: of the segment.
        seed: of the samples' random streams.
        children: makes a crew of processes, which share what the engine owns.
        kind: of the workers.
    """
    program = recipe.program
    match kind:
        case "inline":
            return Inline(connector, program, seed)
        case "thread":
            return Threads(connector, program, seed, recipe.name)
        case "async":
            return Coroutines(connector, program, seed, recipe.name, recipe.timeout_s)
        case "process":
            return children()
