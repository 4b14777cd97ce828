"""The mover: watches an engine's `auto` segments and moves them live.

Works in the trainer's thread, within `next()`: a look costs one reading of the clock
until a window is over, so a trainer that does not ask for batches changes nothing. What
to do is decided by choice.py; the engine carries it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

from .choice import (
    MIN_WAIT,
    Advice,
    Contender,
    Evidence,
    Past,
    Proposal,
    Trial,
    Verdict,
    other,
    propose,
)
from .observe.gil import GilProbe
from .observe.monitor import Monitor, Reading, TrainerMeter, difference
from .observe.observation import Move, MoveOutcome, Observation, ratio
from .segment import Kind, Segment

__all__ = [
    "Mover",
]

LOGGER = logging.getLogger("penstock.autotune")

WINDOW_NS = 500_000_000
LOOK_NS = 50_000_000
"""Between two looks at whether a window has had its steps."""
STEPS = 3
"""Steps in a window, at least."""
MIN_BEFORE = 3
"""Windows that a decision needs: their median is not that of the one, be it the first,
in which the trainer was elsewhere for seconds."""
MAX_BEFORE = 4
WORTH_A_THREAD_NS = 500_000
"""Work in a batch from which handing it to a thread pays (a hand-over costs some 50 us
and as much again of the GIL)."""
WORTH_A_PROCESS_NS = 2_000_000
"""The same to a process, of which some 300 us of CPU are spent on each lease."""
SOON_NS = 300_000_000
"""A batch that is done inline within this is done so: no worker would be there much
sooner, and the first batch of all is waited for."""
SURE_NS = 10_000_000
"""Work from which a segment need not finish a whole batch to be judged."""
PROBE_AGAIN_S = 60.0
"""What the GIL probe has seen is believed for so long."""
REST_S = 10.0
"""After a trial that others disturbed: they are at work."""
OTHER_WORK = 2.0
"""Factor in the worker-seconds of a sample from which it is other work."""
NEVER = 1 << 62

Change = Callable[[Segment, Kind, int | None], None]
"""Gives a segment workers of this kind, and so many of them."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A segment on trial with workers of another kind."""

    segment: Segment
    trial: Trial
    workers_before: int


class Mover:
    """Chooses the kind of workers of one engine's segments while it runs.

    Args:
        segments: of the engine.
        monitor: reads them.
        trainer: its time.
        probe: looks at the GIL where that is in question; closed with the mover.
        cores: that the workers may keep busy.
        change: moves a segment; it may raise, and then nothing has moved.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        monitor: Monitor,
        trainer: TrainerMeter,
        probe: GilProbe,
        cores: float,
        change: Change,
    ) -> None:
        self._segments = segments
        self._monitor = monitor
        self._trainer = trainer
        self._cores = cores
        self._change = change
        self._probe = probe
        self._pasts: dict[Segment, Past] = {}
        self._stuck: set[Segment] = set()
        """Cannot be moved: it was tried, and failed."""
        self._told: set[tuple[Segment, str]] = set()
        self._windows: tuple[Observation, ...] = ()
        """Under the workers there are now, the latest."""
        self._cores_used: tuple[float, ...] = ()
        self._attempt: Attempt | None = None
        self._settling = True
        self._counts: tuple[int, ...] = ()
        self._before: Reading | None = None
        self._cpu_s = self._probed_s = self._rested_s = 0.0
        self._cost_s: float | None = None
        """Worker-seconds of a sample, as they first were under these workers."""
        self.due_ns = NEVER
        """When to look, on the clock of `time.perf_counter_ns`."""
        self._watch()

    def weigh(self, segment: Segment) -> None:
        """Called between two leases of an inline segment: is it time to move it?"""
        batch_ns = _batch_ns(segment)
        if batch_ns is None or 0 < _left_ns(segment, batch_ns) < SOON_NS:
            return
        segment.undecided = False
        kind: Kind = "thread" if segment.recipe.thread_safe else "process"
        cost = f"a batch takes {batch_ns / 1e6:.3g} ms"
        worth_ns = WORTH_A_THREAD_NS if kind == "thread" else WORTH_A_PROCESS_NS
        line = f"{worth_ns / 1e6:g} ms from which handing it over pays"
        if batch_ns <= worth_ns:
            self._say(segment, "inline", "stays", f"{cost}, less than the {line}")
        elif self._carry_out(segment, kind):
            self._say(segment, kind, "moved", f"{cost}, more than the {line}", "inline")
            self._watch()

    def look(self) -> None:
        """Look at the window that is over, if one is, and do what follows from it."""
        before = self._before
        if before is not None and self._trainer.steps - before.trainer.steps < STEPS:
            self.due_ns = time.perf_counter_ns() + LOOK_NS
            return
        self.due_ns = time.perf_counter_ns() + WINDOW_NS
        now, cpu_s = self._monitor.read(), time.process_time()
        self._before, spent_s, self._cpu_s = now, cpu_s - self._cpu_s, cpu_s
        counts = tuple(segment.num_parallel_workers for segment in self._segments)
        same, self._counts = counts == self._counts, counts
        window = None if before is None else difference(before, now)
        if window is not None:
            self._look_at_gil(window)
        if window is None or not same:
            self._disturbed()
        else:
            self._on_window(window, spent_s)

    @property
    def trying(self) -> bool:
        """Whether a segment is on trial with workers of another kind."""
        return self._attempt is not None

    def close(self) -> None:
        """End what it has begun. Idempotent."""
        self.due_ns = NEVER
        self._probe.close()

    def _watch(self) -> None:
        """Begin to look, if the GIL may be what binds, or a segment may be moved."""
        if any(_contends(s) or s.executor == "thread" for s in self._segments):
            self._settle()
            self._before = None
            self.due_ns = 0

    def _disturbed(self) -> None:
        """Somebody changed how many workers there are: what was seen is of no use."""
        self._settle()
        attempt = self._attempt
        if attempt is not None:
            self._rested_s = time.perf_counter_ns() / 1e9 + REST_S
            self._take_back(attempt, "the number of workers was changed meanwhile")

    def _settle(self) -> None:
        self._settling = True
        self._windows = ()
        self._cores_used = ()
        self._cost_s = None
        self._probe.clear()

    def _on_window(self, window: Observation, spent_s: float) -> None:
        """One window: let it settle, or judge, or decide."""
        if self._settling:
            left = [segment.settled() for segment in self._segments]
            self._settling = not (all(left) and all(s.rows for s in window.segments))
            return
        if self._attempt is not None:
            self._judge(self._attempt, _rate(window))
            return
        self._windows = (*self._windows, window)[-MAX_BEFORE:]
        used = (spent_s + _children_s(window)) / window.window_s
        self._cores_used = (*self._cores_used, used)[-MAX_BEFORE:]
        if self._is_other_work():
            return
        if window.time_s - self._probed_s > PROBE_AGAIN_S:
            self._probe.clear()
        if len(self._windows) >= MIN_BEFORE and window.time_s > self._rested_s:
            self._decide()

    def _is_other_work(self) -> bool:
        """Whether a sample costs what it did not; then nothing that was found holds.

        A cache is warm, or a schedule makes larger images.
        """
        if len(self._windows) < MIN_BEFORE:
            return False
        cost_s = median(sum(s.run_s_per_row for s in w.segments) for w in self._windows)
        before_s, self._cost_s = self._cost_s, cost_s
        if before_s is None or 1 / OTHER_WORK < cost_s / before_s < OTHER_WORK:
            self._cost_s = before_s or cost_s
            return False
        self._settle()
        self._pasts.clear()
        self._told.clear()
        self._probed_s = 0.0
        return True

    def _decide(self) -> None:
        """Ask of each segment what to do; the one with the most CPU first."""
        spent = {
            segment: sum(window.segments[at].cpu_s for window in self._windows)
            for at, segment in enumerate(self._segments)
        }
        for segment in sorted(spent, key=spent.__getitem__, reverse=True):
            if not _contends(segment) or segment in self._stuck:
                continue
            share = ratio(spent[segment], sum(spent.values()))
            proposal = propose(self._evidence(segment, share))
            if proposal.advice is Advice.TRY:
                self._try(segment, proposal)
                return
            if proposal.advice is Advice.PROBE:
                self._probed_s = self._windows[-1].time_s
                self._probe.burst()
                return
            segment.weighed_at = segment.num_parallel_workers
            self._say_once(segment, proposal.reason)

    def _look_at_gil(self, window: Observation) -> None:
        """Look, if threads are short of it, perhaps: it is part of what is observed."""
        threads = any(segment.executor == "thread" for segment in self._segments)
        waits = window.trainer.wait_share >= MIN_WAIT
        known = window.gil_held is not None
        if known and window.time_s - self._probed_s < PROBE_AGAIN_S:
            return
        if threads and waits:
            self._probed_s = window.time_s
            self._probe.burst()

    def _evidence(self, segment: Segment, cpu_share: float) -> Evidence:
        wait_s = sum(window.trainer.wait_s for window in self._windows)
        gap_s = sum(window.trainer.gap_s for window in self._windows)
        return Evidence(
            _kind(segment),
            self._windows[-1].time_s,
            ratio(wait_s, wait_s + gap_s),
            cpu_share,
            ratio(sum(self._cores_used), len(self._cores_used)),
            self._cores,
            self._probe.held_share,
            self._pasts.get(segment),
            self._blocked(segment),
        )

    def _blocked(self, segment: Segment) -> float:
        at = self._segments.index(segment)
        seen = [window.segments[at] for window in self._windows]
        idle_s = sum(each.run_s - each.cpu_s - each.queued_s for each in seen)
        return max(0.0, ratio(idle_s, sum(each.run_s for each in seen)))

    def _try(self, segment: Segment, proposal: Proposal) -> None:
        new = other(_kind(segment))
        trial = Trial(new, tuple(map(_rate, self._windows)))
        workers = segment.num_parallel_workers
        # A tuner may have found that one thread is as good as many: not so processes.
        enough = min(segment.recipe.num_parallel_workers, round(self._cores))
        wanted = max(workers, enough) if new == "process" else workers
        if not self._carry_out(segment, new, wanted):
            return
        self._attempt = Attempt(segment, trial, workers)
        self._say(segment, new, "on trial", proposal.reason, other(new))

    def _judge(self, attempt: Attempt, rows_per_s: float) -> None:
        segment, trial = attempt.segment, attempt.trial.seen(rows_per_s)
        self._attempt, verdict = replace(attempt, trial=trial), trial.verdict()
        if verdict is Verdict.MORE:
            return
        kept = verdict is Verdict.KEEP
        workers = segment.num_parallel_workers if kept else attempt.workers_before
        segment.weighed_at = workers
        reason = "{:.0f} -> {:.0f} samples/s".format(*trial.rates)
        past = self._pasts.get(segment)
        known = Past(
            trial.change,
            1 if past is None else past.trials + 1,
            self._monitor.read().time_s,
        )
        if verdict is Verdict.BACK:
            self._pasts[segment] = known
            self._take_back(attempt, reason)
            return
        self._pasts[segment] = known.reversed()
        self._attempt = None
        self._settle()
        self._say(segment, trial.new, "kept", reason, other(trial.new))

    def _take_back(self, attempt: Attempt, reason: str) -> None:
        self._attempt = None
        segment, new = attempt.segment, attempt.trial.new
        if self._carry_out(segment, other(new), attempt.workers_before):
            self._say(segment, new, "taken back", reason, other(new))

    def _carry_out(
        self, segment: Segment, kind: Kind, workers: int | None = None
    ) -> bool:
        """Move a segment; where that cannot be done, say so and leave it for good."""
        try:
            self._change(segment, kind, workers)
        except Exception as error:  # noqa: BLE001 what pickling the user's raises
            self._stuck.add(segment)
            self._say(segment, kind, "failed", str(error), segment.executor)
            return False
        self._counts = tuple(each.num_parallel_workers for each in self._segments)
        self._settle()
        return True

    def _say_once(self, segment: Segment, reason: str) -> None:
        """Say why a segment stays, once for each kind of workers it has."""
        about = segment, segment.executor
        if about not in self._told:
            self._told.add(about)
            self._say(segment, segment.executor, "stays", reason)

    def _say(
        self,
        segment: Segment,
        new: str,
        outcome: MoveOutcome,
        reason: str,
        old: str | None = None,
    ) -> None:
        now_s = time.perf_counter_ns() / 1e9
        move = Move(now_s, segment.recipe.name, old or new, new, outcome, reason)
        segment.moves.append(move)
        LOGGER.info(move.line)

    def __repr__(self) -> str:
        doing = f"trying {self._attempt}" if self._attempt else "watching"
        return f"<Mover {doing}, {self._probe!r}>"


def _batch_ns(segment: Segment) -> float | None:
    """What a batch costs inline; None while too little was done to tell."""
    inline = segment.inline
    rows, run_ns = inline.tally if inline is not None else (0, 0)
    batch_rows = segment.connector.engine_lock.core.batch_rows
    if rows == 0 or (rows < batch_rows and run_ns < SURE_NS):
        return None
    return run_ns / rows * batch_rows


def _left_ns(segment: Segment, batch_ns: float) -> float:
    """What is left to do inline of the batch that was begun."""
    inline, rows = segment.inline, segment.connector.engine_lock.core.batch_rows
    done = inline.done % rows if inline is not None else 0
    return (rows - done) / rows * batch_ns if done else 0.0


def _contends(segment: Segment) -> bool:
    return segment.movable and segment.executor in ("thread", "process")


def _kind(segment: Segment) -> Contender:
    return cast("Contender", segment.executor)


def _rate(window: Observation) -> float:
    """Samples a second that the trainer got, in the time of whole steps."""
    trainer = window.trainer
    return ratio(trainer.rows, trainer.wait_s + trainer.gap_s)


def _children_s(window: Observation) -> float:
    """CPU-seconds of work in other processes."""
    return sum(s.cpu_s for s in window.segments if s.executor == "process")
