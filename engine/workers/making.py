"""Making the worker pools of one engine, all in this process."""

from __future__ import annotations

from collections.abc import Mapping

from ..core.connector import Connector
from ..recipe import Recipe, SegmentRecipe
from ..witness.hazards import Finding
from .coroutines import Coroutines
from .inline import Inline
from .pool import Kind, Watches, WorkerPool, no_watch
from .threads import Threads


class PoolMaker:
    """Makes pools. Others may have workers elsewhere, too, and own what these share.

    Args:
        recipe: the engine's recipe.
        begun_at: the first batch wanted.
        watch: makes what observes the samples of a worker; it may return None.
    """

    def __init__(
        self, recipe: Recipe, begun_at: int, watch: Watches = no_watch
    ) -> None:
        self._recipe = recipe
        self._begun_at = begun_at
        self._watch = watch

    @staticmethod
    def opened_late(recipe: Recipe, step: int) -> Mapping[int, Finding]:  # noqa: ARG004 others look
        """Return what threads must not share once samples are made, by segment."""
        return {}

    def begin(self) -> None:
        """Start what the pools share, before the engine has threads.

        The caller must `close`, also after an error.

        Raises:
            SpecError: workers elsewhere cannot be started.
        """

    def make(
        self, connector: Connector, recipe: SegmentRecipe, kind: Kind
    ) -> WorkerPool:
        """Create a pool of one kind, without workers yet.

        Args:
            connector: where they take their leases.
            recipe: the segment's recipe.
            kind: kind of the workers.

        Raises:
            SpecError: this system has no such workers, or the program cannot be sent
                to them.
        """
        program, seed, name = recipe.program, self._recipe.seed, recipe.name
        match kind:
            case "inline":
                return Inline(connector, program, seed, self._watch)
            case "thread":
                return Threads(connector, program, seed, name, self._watch)
            case "async":
                return Coroutines(connector, program, seed, name, recipe.timeout_s)
        raise AssertionError(kind)

    @property
    def forked(self) -> bool:
        """Whether there is a fork server."""
        return False

    def fork(self) -> None:
        """Start the fork server, while nobody works: a fork copies locks as they are.

        Raises:
            SpecError: a segment cannot be sent to another process, or this system has
                no fork.
        """

    def expire(self) -> None:
        """Let worker processes end; none start until `renew`."""

    def renew(self) -> None:
        """Replace all workers in other processes: the dataset may have changed.

        Raises:
            SpecError: something in the programs can no longer be sent.
        """

    def close(self) -> None:
        """End what the pools share."""
