"""`host="auto"`: moves the engine out of the trainer's process when it is in its way.

Works in the trainer's thread, within `next()`. In cycles of four steps the engine is
held still over the last two: the third sees it come to rest, the fourth belongs to the
trainer alone. Batches that are ready carry the trainer over it. What to do follows from
contention.py.
"""

from __future__ import annotations

import io
import logging
import os
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from ..core.byte_budget import ByteBudget
from ..observe.monitor import TrainerMeter
from ..recipe import Recipe, SegmentRecipe
from ..segment import Kind, Segment
from .contention import Contention, Trial
from .handover import Pickler
from .local import Host, TrainerHost
from .process import ProcessHost

__all__ = [
    "Relocation",
    "may_move",
]

LOGGER = logging.getLogger("penstock.autotune")

WARM_STEPS = 20
"""Before the first cycle."""
CYCLE = 4
HELD_FROM = 2
"""The step of a cycle from which the engine is held."""
MAX_BEFORE = 200
"""Steps remembered."""
REST_S = 60.0
"""After a finding or a verdict; each time twice as long."""


def may_move(recipe: Recipe) -> bool:
    """Whether this pipeline's engine may live in either process.

    Every segment's workers may then be anywhere, as with `executor="auto"`: functions
    and dataset hold nothing that only the trainer's process has.
    """
    anywhere = all(s.movable or s.executor == "process" for s in recipe.segments)
    able = hasattr(os, "fork") and hasattr(os, "memfd_create")
    return recipe.options.host == "auto" and anywhere and able


class Relocation:
    """Chooses where the engine of one run lives.

    Args:
        recipe: what runs.
        purse: the bytes it may hold.
        trainer: its time.
    """

    def __init__(
        self, recipe: Recipe, byte_budget: ByteBudget, trainer: TrainerMeter
    ) -> None:
        self._recipe = recipe
        self._byte_budget = byte_budget
        self._trainer = trainer
        self._contention = Contention()
        self._trial: Trial | None = None
        self._steps: list[float] = []
        self._gaps: list[float] = []
        """Of the cycle under way."""
        self._asked_s = 0.0
        self._held: TrainerHost | None = None
        self._left = WARM_STEPS
        """Steps until the next cycle may begin."""
        self._rests = 0
        self._due_s = 0.0

    def asked(self) -> None:
        """The trainer asks for a batch."""
        self._asked_s = time.perf_counter()
        gap_s = self._trainer.gap_s
        if gap_s == 0:
            self.reset()
        elif self._held is not None:
            self._gaps.append(gap_s)
            if len(self._gaps) < CYCLE:
                self._check_rest(self._held)
            else:
                self._end_cycle()
        elif self._left == 0:
            self._gaps.append(gap_s)

    def given(self, host: Host, data: Any) -> Host:
        """The trainer is given `data` by `host`; return where it gets the next one."""
        step_s = self._trainer.gap_s + time.perf_counter() - self._asked_s
        self._steps.append(step_s)
        del self._steps[:-MAX_BEFORE]
        if self._trial is not None:
            return self._judge(host, self._trial.seen(step_s))
        if not isinstance(host, TrainerHost) or time.monotonic() < self._due_s:
            return host
        if self._left:
            self._left -= 1
        elif len(self._gaps) == HELD_FROM and self._held is None:
            self._pause(host)
        if self._contention.whole:
            return self._decide(host, data)
        return host

    def reset(self) -> None:
        """The trainer begins elsewhere, or is through: what was begun is dropped."""
        self._let_go()
        self._gaps.clear()

    # One cycle

    def _pause(self, host: TrainerHost) -> None:
        """Hold the engine still, if there is a batch ready to bridge it."""
        engine = host.engine
        threads = any(segment.executor == "thread" for segment in engine.segments)
        if threads and engine.steady:
            self._held = host
            engine.pause(still=True)
        else:
            self._gaps.clear()

    def _check_rest(self, host: TrainerHost) -> None:
        """The step to be left in peace begins: is the engine at rest?"""
        if not host.engine.resting:
            self.reset()

    def _end_cycle(self) -> None:
        self._let_go()
        self._contention = self._contention.seen(self._gaps)
        self._gaps.clear()

    def _let_go(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.engine.pause(still=False)

    # What follows

    def _decide(self, host: TrainerHost, data: Any) -> Host:
        found, self._contention = self._contention, Contention()
        at_work, in_peace = found.gaps
        reason = (
            f"the trainer's own part of a step takes {at_work * 1e3:.3g} ms while "
            f"batches are loaded beside it, {in_peace * 1e3:.3g} ms while none are "
            f"({found.growth:+.0%})"
        )
        unfit = _why_not(data) if found.costly else ""
        if not found.costly or unfit:
            self._rest()
            LOGGER.info("Pipeline: host trainer stays: %s%s.", reason, unfit)
            return host
        return self._move(host, reason)

    def _move(self, host: TrainerHost, reason: str) -> Host:
        engine, before = host.engine, tuple(self._steps)
        recipe = replace(self._recipe, segments=_as_now(engine.segments))
        try:
            with engine.still():  # a fork copies the locks that its threads hold
                new = ProcessHost(recipe, self._byte_budget, host.cursor, self._trainer)
        except Exception as error:  # noqa: BLE001 whatever the user's functions raise
            self._due_s = float("inf")
            LOGGER.info("Pipeline: host trainer -> process failed: %s.", error)
            return host
        self._recipe, self._trial = recipe, Trial(before)
        LOGGER.info("Pipeline: host trainer -> process on trial: %s.", reason)
        return _exchanged(host, new)

    def _judge(self, host: Host, trial: Trial) -> Host:
        self._trial = trial
        if not trial.whole:
            return host
        self._trial = None
        self._steps.clear()
        before, after = trial.steps
        told = f"a step takes {before * 1e3:.3g} -> {after * 1e3:.3g} ms"
        if trial.kept:
            LOGGER.info("Pipeline: host trainer -> process kept: %s.", told)
            return host
        LOGGER.info("Pipeline: host trainer -> process taken back: %s.", told)
        self._rest()
        new = TrainerHost(self._recipe, self._byte_budget, host.cursor, self._trainer)
        return _exchanged(host, new)

    def _rest(self) -> None:
        self._due_s = time.monotonic() + REST_S * 2.0**self._rests
        self._rests += 1
        self._left = WARM_STEPS

    def __repr__(self) -> str:
        doing = f"trying {self._trial}" if self._trial else "watching"
        return f"<Relocation {doing}>"


def _exchanged(host: Host, new: Host) -> Host:
    """Close `host` and return `new`; close that, too, if Ctrl-C comes in between."""
    with ExitStack() as undo:
        undo.callback(new.close)
        host.close()
        undo.pop_all()
    return new


def _as_now(segments: list[Segment]) -> tuple[SegmentRecipe, ...]:
    """Return recipes that begin where these segments are now."""
    return tuple(
        replace(
            segment.recipe,
            executor=cast("Kind", segment.executor),
            num_parallel_workers=segment.num_parallel_workers,
            prefetch_size=segment.prefetch_size,
        )
        for segment in segments
    )


def _why_not(data: Any) -> str:
    """Why a batch cannot be handed over from another process; empty if it can."""
    try:
        Pickler(io.BytesIO()).dump(data)
    except Exception as error:  # noqa: BLE001 whatever pickling the user's raises
        return f", but batches cannot be handed over ({type(error).__name__}: {error})"
    return ""
