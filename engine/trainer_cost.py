"""What loading costs the trainer: its waits, and its own part of a step beside loading.

`TrainerMeter` measures how long `next()` makes it wait. `ContentionMeter` compares the
trainer's own part of a step beside loading and alone.

Workers compete with the trainer for the GIL, the cores and the caches, so what it does
between two batches takes longer than it would alone. How busy each is does not show how
much longer, so it is measured. While the trainer makes its batches itself, its steps
are alone anyway. Later, loading rests now and then for two steps, once their batches
are there: a look. The second step counts: after a wait, the first one finds cold
caches. Looks take at most `SHARE` of a run, without the wait for the second batch:
workers go on meanwhile. A trainer that never waits loses only the time until loading
rests: the batches that are ready last for longer.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

from ..system.run_queue import RunQueue
from .core.connector import EngineLock
from .observe.observation import (
    MIN_GROWTH,
    MIN_WAIT,
    ContentionObservation,
    TrainerObservation,
)
from .plan import BatchPlan, Shard
from .segment import Segment

AWAY_NS = 1_000_000_000
# A gap this many times the usual one, and at least `AWAY_NS`, means it was away.
AWAY = 20
# Kinds of workers that take something from a trainer on this machine.
BESIDE = frozenset(("thread", "async", "process"))
# Largest part of a run that may be spent on looks, on all ranks together: ranks that
# step together wait for one another's looks.
SHARE = 0.005
# The first look may take as much of a run as if it had lasted this long, in seconds.
# Without it, the verdict of a short run would know only the wait.
LOAN_S = 30.0
# The first steps of a run are slow by nature: they do not count.
WARM_STEPS = 5
# Steps beside loading that are compared: the latest.
KEPT = 64
# Steps beside loading that are enough; as many are between two looks.
MIN_BESIDE = 10
# Looks after which the next ones are rare.
KNOWN = 8
# Pause between looks then, in seconds.
RARE_S = 60.0
# How long the trainer waits until loading rests, at first and at most, in seconds:
# twice as long after each look that failed.
REST_S, MAX_REST_S = 0.005, 0.05
# How long the trainer waits at most for the batch of the second step, in seconds.
HOLD_S = 1.0
# Longest time that children rest, in seconds, should nobody wake them.
MAX_PAUSE_S = 5.0
POLL_S = 0.0002
# A step that takes this many times the usual one does something else, too.
ODD = 3.0
# If steps beside loading have become this many times longer or shorter though nothing
# else changed, the trainer has other work, and former looks say nothing.
OTHER = 1.25
# Share of all pairs of a step beside loading and one alone in which the first must be
# the longer one, to be certain (the statistic of Mann and Whitney, 1947, which a single
# odd step hardly changes).
SURE = 0.85
# How many times shorter steps alone must be if there are so few.
MARGINS = {1: 1.3, 2: 1.15}
# Where loading lengthens only some of the steps, such as those that find the GIL held,
# this is the largest probability that all steps alone are short by chance.
CHANCE = 0.01
# Quantile of the steps beside loading that other work of the trainer's changes, and the
# turns of a GIL do not.
LOWEST = 0.1
# Probability that a step begins a look once one is due: the number of steps between two
# looks must not keep the rhythm of the trainer's own, as of gradients that are
# accumulated over some batches.
CHOSEN = 0.25


class TrainerMeter:
    """Measures how long `next()` made the trainer wait.

    A step's times are counted when its batch is handed over, together with the batch,
    so a window never holds half a step. Only the trainer's thread writes; any thread
    may read at any time.
    """

    def __init__(self) -> None:
        self._began_s = time.perf_counter_ns() / 1e9
        self._began_cpu_s = time.process_time()
        self.epoch = self.step = 0
        # Steps, rows, and nanoseconds: waits, gaps, the part of the waits for copying
        # to the device, time away, and waits for first batches. Replaced as a whole, so
        # readers need no lock.
        self._totals: tuple[int, ...] = (0, 0, 0, 0, 0, 0, 0)
        # Time spent in the user's `collate_fn`, in nanoseconds.
        self.collate_ns = 0
        # How long the start of the loop took, in nanoseconds: the trainer waited.
        self.begin_ns = 0
        # Loops begun; when the last one began, and how long the one before took.
        self._loops, self._loop_ns = 0, (0, 0)
        self._left_ns: int | None = None
        self._asked_ns = self._gap_ns = self._thread = 0
        self._first = False
        self._run_queue = RunQueue(lambda: [f"/proc/self/task/{self._thread}"])

    @property
    def training(self) -> bool:
        """Whether the trainer is in its loop."""
        return self._left_ns is not None

    @property
    def gap_s(self) -> float:
        """Seconds between the last batch and this request; 0 at the start of a loop."""
        return self._gap_ns / 1e9

    def ask(self, now_ns: int) -> None:
        """Note that the trainer calls `next()`."""
        self._first = self._left_ns is None
        if self._first:
            self._thread = threading.get_native_id()
        self._gap_ns = 0 if self._left_ns is None else now_ns - self._left_ns
        self._asked_ns, self._left_ns = now_ns - self.begin_ns, now_ns
        self.begin_ns = 0

    def get(self, now_ns: int, plan: BatchPlan, copy_ns: int = 0) -> None:
        """Note a batch; `copy_ns` of its wait went into copying it to the device."""
        self.count(now_ns, plan.n_rows, copy_ns)
        self.epoch, self.step = plan.epoch, plan.step

    def count(self, now_ns: int, n_rows: int, copy_ns: int = 0) -> None:
        """Note a batch that has no plan."""
        steps, rows, wait_ns, gap_ns, copied_ns, away_ns, first_ns = self._totals
        gap, wait = self._gap_ns, now_ns - self._asked_ns
        if self._first:
            first_ns += wait
            begun_ns, _ = self._loop_ns
            self._loop_ns = self._asked_ns, self._asked_ns - begun_ns
            self._loops += 1
        if gap > AWAY_NS and gap * steps > AWAY * (gap_ns + away_ns) > 0:
            gap, away_ns = 0, away_ns + gap
        self._totals = (
            steps + 1,
            rows + n_rows,
            wait_ns + wait,
            gap_ns + gap,
            copied_ns + copy_ns,
            away_ns,
            first_ns,
        )
        self._left_ns = now_ns

    @contextlib.contextmanager
    def collating(self) -> Iterator[None]:
        """Measure the user's `collate_fn` in the trainer's thread."""
        begun_ns = time.perf_counter_ns()
        yield
        self.collate_ns += time.perf_counter_ns() - begun_ns

    def stop(self) -> None:
        """Note that it left the loop: the last step ends here, and no gap begins."""
        steps, rows, wait_ns, gap_ns, *others = self._totals
        self._totals = steps, rows, wait_ns, gap_ns + self._gap_ns, *others
        self._left_ns = None

    def read(self) -> TrainerObservation:
        """Return the totals over whole steps."""
        steps, rows, *spent_ns = self._totals
        spent_ns.insert(3, self.collate_ns)
        spent_ns.append(self._run_queue.look().waited_ns)
        spent_s = (ns / 1e9 for ns in spent_ns)
        loops, (begun_ns, last_ns) = self._loops, self._loop_ns
        # A long loop may follow a short one.
        age_ns = (self._left_ns or begun_ns) - begun_ns
        loop_s = max(last_ns, age_ns) / 1e9 if loops > 1 else 0.0
        return TrainerObservation(steps, rows, *spent_s, loops=loops, loop_s=loop_s)

    @property
    def process_cpu_s(self) -> float:
        """CPU-seconds of this process since the run began."""
        return time.process_time() - self._began_cpu_s

    def window_s(self, now_ns: int, trainer: TrainerObservation) -> float:
        """Return the seconds since the run began, without those that it was away."""
        return now_ns / 1e9 - self._began_s - trainer.away_s


class Rest:
    """Lets the workers of an engine rest. For the trainer's thread.

    Args:
        engine_lock: hands out their work.
        segments: whose workers they are.
    """

    def __init__(self, engine_lock: EngineLock, segments: Sequence[Segment]) -> None:
        self._engine_lock, self._segments = engine_lock, segments
        # Ends a rest that lasts too long; None: they do not rest.
        self._alarm: threading.Timer | None = None

    @property
    def beside(self) -> bool | None:
        """Whether others load beside the trainer; None while that is changing."""
        kinds = [
            None if segment.moving else segment.executor for segment in self._segments
        ]
        return None if None in kinds else not BESIDE.isdisjoint(kinds)

    @property
    def ready(self) -> bool:
        """Whether the next batch is there."""
        return self._engine_lock.peek() is not None

    @property
    def fed(self) -> bool:
        """Whether the trainer does a part of the work itself."""
        return any(segment.inline is not None for segment in self._segments)

    @property
    def resting(self) -> bool:
        """Whether they rest, and nobody takes anything from the trainer."""
        with self._engine_lock.lock:
            # Actors take nothing from the trainer.
            pools = (s.pool for s in self._segments if s.executor != "ray")
            return self._alarm is not None and not any(p.at_work() for p in pools)

    def pause(self, until_ns: int) -> None:
        """Hand out no more work. Batches that are ready may still be taken.

        Args:
            until_ns: when they go on by themselves, by the monotonic clock: the
                trainer may do something else, or wait for what a sample does.
        """
        alarm = threading.Timer(
            max(0.0, (until_ns - time.monotonic_ns()) / 1e9), self._wake
        )
        alarm.name, alarm.daemon = "penstock rest", True
        with self._engine_lock.lock:
            self._alarm = alarm  # first: Ctrl-C may come between the two
            self._engine_lock.core.pause()
        for segment in self._segments:
            segment.pool.rest(until_ns)  # within leases, where these are long
        try:
            alarm.start()
        except RuntimeError:  # the system has no more threads
            self.resume()

    def resume(self) -> None:
        """Hand out work again."""
        for segment in self._segments:
            segment.pool.rest(0)
        if (alarm := self._wake()) is not None:
            alarm.cancel()

    def _wake(self) -> threading.Timer | None:
        """End the rest, if it goes on: a fork may have paused the engine since."""
        with self._engine_lock.lock:
            alarm, self._alarm = self._alarm, None
            if alarm is not None:
                self._engine_lock.core.unpause()
                self._engine_lock.wake()
        return alarm


class Look(NamedTuple):
    """One step alone."""

    step_s: float
    """The trainer's own part, in seconds."""
    beside_s: float
    """The same of the steps beside loading before it: the median."""
    lowest_s: float
    """Their lowest decile."""
    setting: int
    """The number of the setting in which those were made."""


def compare(
    beside: Sequence[float], alone: Sequence[float], *, uneven: bool = False
) -> ContentionObservation | None:
    """Compare the trainer's own part of steps beside loading and of steps alone.

    Args:
        beside: the latest steps beside loading, in seconds.
        alone: the latest steps alone, in seconds.
        uneven: whether the trainer's own steps differ, and those alone that took
            exceptionally long are left out; so are those beside loading then.

    Returns:
        None if there are too few.
    """
    if uneven:
        beside = [step_s for step_s in beside if step_s < ODD * lowest(beside)]
    if len(beside) < MIN_BESIDE or not alone:
        return None
    steps, margin = sorted(beside), MARGINS.get(len(alone), 1.0)
    bounds = [margin * step_s for step_s in alone]
    ranks_of = (bisect_left(steps, b) + bisect_right(steps, b) for b in bounds)
    longer = len(beside) * len(alone) - sum(ranks_of) / 2  # ties count half
    if longer >= SURE * len(beside) * len(alone):
        mean_s = median(beside)
        if lowest(beside) >= (1.0 + MIN_GROWTH) * median(alone):  # all are longer
            mean_s = fmean(step_s for step_s in beside if step_s <= ODD * mean_s)
        return ContentionObservation(mean_s, median(alone), certain=True)
    short = bisect_right(steps, max(bounds)) / len(beside)
    if not uneven and short ** len(alone) <= CHANCE:
        return ContentionObservation(fmean(beside), fmean(alone), certain=True)
    return ContentionObservation(median(beside), median(alone), certain=False)


def lowest(steps: Sequence[float]) -> float:
    """Return the lowest decile of some steps; 0 of none."""
    return sorted(steps)[int(LOWEST * len(steps))] if steps else 0.0


def waits_for_others() -> bool:
    """Whether a step may wait for what goes on while `next()` waits, too.

    An accelerator works on, and other ranks arrive. The longer `next()` takes, the less
    remains to wait for, and the shorter is the trainer's own part.
    """
    return torch.cuda.is_initialized() or Shard.found().size > 1  # type: ignore[no-untyped-call]


class ContentionMeter:
    """Measures one trainer, in its own thread.

    The tuner's thread writes `armed`. Any thread may read `comparison`, and call
    `renew` or `forget`.

    Args:
        one_by_one: whether `next()` takes a single batch of the engine's, which may be
            there while loading rests. If not, a look is a single step.
    """

    def __init__(self, *, one_by_one: bool = True) -> None:
        self._one_by_one = one_by_one
        # Whether a look may be taken: no trial is being judged.
        self.armed = True
        # The trainer's own part of steps, in seconds. `_free` ones were alone anyway.
        self._beside: deque[float] = deque(maxlen=KEPT)
        self._free: deque[float] = deque(maxlen=KEPT)
        # The whole of the steps beside loading, in seconds.
        self._steps: deque[float] = deque(maxlen=KEPT)
        self._looks: deque[Look] = deque(maxlen=2 * KNOWN)
        # Counts changes of what loads beside the trainer.
        self._setting = 0
        # Where the present step belongs; None: nowhere.
        self._now: deque[float] | None = None
        # Whether others load beside the trainer, as far as is known.
        self._loads = False
        self._size: tuple[int, int | None] = 0, None
        self._steps_left = WARM_STEPS
        self._paused: Rest | None = None
        # The look that goes on, without its step.
        self._look = Look(0.0, 0.0, 0.0, 0)
        # Whether the first of its two steps goes on, or the second.
        self._first = self._second = False
        # How long loading took to rest for it, and the first of two steps took.
        self._waited_s = 0.0
        # Whether the trainer waits for loading, so that it loses all of a look.
        self._costs = True
        self._trained_s = self._spent_s = self._given_s = self._due_s = 0.0
        # Steps beside loading since the last look, looks that failed in a row, and
        # those whose step took exceptionally long.
        self._since = self._failed = self._odd = 0
        self._dice = random.Random(0)

    @property
    def comparison(self) -> ContentionObservation | None:
        """What is known of loading as it is now; None if too little, or none loads."""
        if not self._loads:
            return None
        beside, setting = list(self._beside), self._setting
        now_s = lowest(beside)
        alone = [
            look.step_s
            for look in list(self._looks)
            if look.setting != setting or 1 / OTHER < now_s / look.lowest_s < OTHER
        ]
        return compare(beside, alone or list(self._free), uneven=self._odd > 0)

    def asked(self, gap_s: float) -> None:
        """Note that the trainer asks for a batch, `gap_s` after it got the last."""
        if gap_s == 0:
            self.reset()
        elif self._paused is not None:
            if self._first and self._paused.ready:
                self._first, self._second = False, True
                self._waited_s += gap_s * self._costs
            else:
                self._end_look(self._paused, gap_s)
        elif self._steps_left:
            self._steps_left -= 1
        elif (now := self._now) is not None:
            now.append(gap_s)
            self._since += now is self._beside

    def given(self, rest: Rest | None, plan: BatchPlan) -> None:
        """Note that it gets a batch.

        Args:
            rest: lets what loads rest; None if the trainer made the batch itself.
            plan: of the batch. A step of another size than the last does not count.
        """
        if self._paused is not None:
            return
        loads = rest is not None and rest.beside
        size = plan.n_rows, plan.image_size
        alike, self._size = size == self._size, size
        self._now = None
        if loads is not None:
            self._loads = loads
        if loads is None or not alike:
            return
        if rest is None or not loads:
            self._now = None if waits_for_others() else self._free
            return
        self._now = self._beside
        now_s = time.monotonic()
        step_s, self._given_s = now_s - self._given_s, now_s
        self._trained_s += min(step_s, 1.0)
        self._steps.append(step_s)
        enough = self._since >= MIN_BESIDE and not plan.last
        due = self.armed and enough and now_s >= self._due_s
        if due and self._dice.random() < CHOSEN:
            self._may_look(rest, now_s)

    def reset(self) -> None:
        """End a look without a result: the trainer leaves its loop."""
        rest, self._paused = self._paused, None
        if rest is not None:
            rest.resume()

    def forget(self) -> None:
        """Drop the steps beside loading: what loads has changed."""
        self._now, self._loads = None, False
        self._beside.clear()
        self._steps.clear()
        self._setting += 1
        self._odd = self._failed = 0
        self._due_s = 0.0

    def renew(self) -> None:
        """Drop all that was measured: the trainer's steps have become other ones."""
        self.forget()
        self._free.clear()
        self._looks.clear()

    def _may_look(self, rest: Rest, now_s: float) -> None:
        """Take a look if the run is long enough for what it may cost."""
        beside = list(self._beside)
        if len(beside) < MIN_BESIDE:
            return  # another thread has just dropped them
        step_s, rest_s = median(beside), min(MAX_REST_S, REST_S * 2.0**self._failed)
        steps_s = [  # of a copy: another thread may drop them
            look.step_s for look in list(self._looks) if look.setting == self._setting
        ]
        looked_s = min([step_s, *steps_s[-1:]]) * (1 + self._one_by_one)
        whole_s = median(list(self._steps) or [now_s])
        self._costs = whole_s - step_s >= MIN_WAIT * whole_s
        wanted_s = rest_s + looked_s * self._costs
        first = not self._looks and not self._free
        known_s = max(LOAN_S * first, self._trained_s)
        left_s = SHARE / Shard.found().size * known_s - self._spent_s
        if left_s < wanted_s:
            self._due_s = now_s + (wanted_s - left_s) * Shard.found().size / SHARE
            return
        self._look = Look(0.0, step_s, lowest(beside), self._setting)
        self._since = 0
        # Workers that the trainer feeds would make nothing while it waits.
        self._first = self._one_by_one and (rest.ready or not rest.fed)
        self._second, self._failed = False, self._failed + 1  # until it has succeeded
        while self._first and not rest.ready:
            if time.monotonic() > now_s + HOLD_S:
                self._due_s = now_s + HOLD_S * 2.0**self._failed
                return
            time.sleep(POLL_S)
        now_s, self._paused = time.monotonic(), rest
        pause_s = min(rest_s + ODD * (rest_s + looked_s), MAX_PAUSE_S)
        rest.pause(int(1e9 * (now_s + pause_s)))
        while not rest.resting:
            if time.monotonic() > now_s + rest_s:
                self._end(rest_s)
                return
            time.sleep(POLL_S)
        self._waited_s = time.monotonic() - now_s

    def _end_look(self, rest: Rest, gap_s: float) -> None:
        """Note the step that the trainer has just made while loading rested."""
        look, usual = self._look, gap_s < ODD * self._look.lowest_s
        usual = usual and not self._first
        if usual and look.setting == self._setting and rest.resting:
            absorbed = not self._second and waits_for_others()
            step_s = gap_s + self._waited_s * absorbed
            self._looks.append(look._replace(step_s=step_s))
            self._failed = 0
        self._odd += not self._first and not usual
        spent_s = min(gap_s, ODD * look.beside_s) * self._costs
        self._end(self._waited_s + spent_s)

    def _end(self, cost_s: float) -> None:
        """Go on loading, and see when the next look is due."""
        self.reset()
        self._spent_s += cost_s
        again_s = cost_s * 2.0**self._failed * Shard.found().size / SHARE
        rare_s = RARE_S if len(self._looks) >= KNOWN else 0.0
        self._due_s = time.monotonic() + max(again_s, rare_s)
