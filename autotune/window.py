"""Windows: joining observations, and measuring the speed of training in them.

A pipeline that starves its trainer may take a second for one step, so steps alone say
too little too late. While the trainer waits, the rows that the segments finish give the
same rate, one row at a time. Otherwise the trainer's own seconds count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from math import ceil, inf
from operator import attrgetter

from ..engine.observe.observation import (
    Observation,
    PartObservation,
    SegmentObservation,
    ratio,
)
from ..system.resources import Budget
from .situation import Decision, Measure
from .thresholds import MOSTLY, has_room, starving, take_turns, wait_share

ENOUGH_STEPS = 2
ENOUGH_ROWS = 8
"""With this many rows, the count is accurate to one in eight; most have more."""
MAX_REPORT_S = 3.0
"""Longest time in which each process is to report something, in seconds."""
SHORT_LOOP_S = 3.0
"""Seconds of a loop, with the break before it, below which a window has a whole one."""
COUNTLESS, HIGH, SHORT_STEP_S = 1000, 100, 0.001
"""Workers from which a need only says that the trainer does next to nothing, and from
which it does if its own part of a step is shorter than these seconds."""
MAX_HEADSPACE = 1000.0
"""Stands for anything larger, such as for a trainer that does nothing."""
PATIENCE_S = 2.0
"""Seconds after which one finished row is enough: decisions must not take forever."""


def worked_rows(segment: SegmentObservation) -> float:
    """Return the rows that a segment's workers were busy for.

    A process reports a whole batch, and several that began together report together.
    So their reports say how long a row takes, and not how many rows a window had.
    """
    if segment.executor != "process" or segment.rows == 0:
        return segment.rows
    return ratio(segment.run_s, segment.run_s_per_row)


def sustained_rows(observation: Observation) -> float:
    """Return the rows that passed the whole pipeline: the fewest a segment finished.

    While a connector runs empty, its reader is faster than the segment that fills it;
    while it fills up, slower. The slower of the two sets the rate that will last. A
    segment that is mostly held back could have finished more, so it is no limit.
    """
    *before, last = observation.segments
    free = [s for s in before if ratio(s.wait_credit_s, s.worker_s) < MOSTLY]
    return min(worked_rows(segment) for segment in (*free, last))


def report_s(segment: SegmentObservation) -> float:
    """Return the time after which a process reports a batch; 0 for other workers.

    All workers of a process make its batch.
    """
    if segment.executor != "process":
        return 0.0
    each = max(1.0, ratio(segment.num_parallel_workers, segment.children))
    return segment.run_s_per_row * batch_rows(segment) / each


def batch_rows(segment: SegmentObservation) -> float:
    """Return the rows of a batch, as a segment's output has room for some batches."""
    return ratio(segment.output.capacity, segment.prefetch_size)


def enough(observation: Observation) -> bool:
    """Whether the window is evidence; if not, it is extended."""
    steps, rows = observation.trainer.steps, sustained_rows(observation)
    if lacking_s(observation) > 0 or cuts_a_loop(observation):
        return False
    if not starving(observation):
        return steps >= ENOUGH_STEPS
    patient = steps >= ENOUGH_STEPS or observation.window_s >= PATIENCE_S
    return rows >= ENOUGH_ROWS or (patient and rows > 0)


def cuts_a_loop(observation: Observation) -> bool:
    """Whether loops are short, and the window lies within one.

    Workers start with a loop, and its first batches are not made before. More workers
    make the rest faster and the start slower, so only a whole loop tells.
    """
    trainer = observation.trainer
    short = 0.0 < trainer.loop_s < SHORT_LOOP_S
    return short and trainer.loops < 2 and observation.window_s < 3.0 * trainer.loop_s


def lacking_s(observation: Observation) -> float:
    """Return how much longer a window must be for each process to report something."""
    longest_s = max(map(report_s, observation.segments))
    return min(longest_s, MAX_REPORT_S) - observation.window_s


def cost_s(observation: Observation) -> float:
    """Return the seconds of training per sample, the objective: less is better.

    This is `(wait + own time) / samples` of the trainer. While it starves, it is the
    time between two rows that pass all segments; infinite if nothing is finished.
    """
    trainer = observation.trainer
    if starving(observation):
        rows, spent_s = sustained_rows(observation), observation.window_s
    else:
        rows, spent_s = trainer.rows, trainer.wait_s + trainer.gap_s
    return spent_s / rows if rows > 0 else float("inf")


def demand_rows_per_s(observation: Observation) -> float:
    """Return the samples per second of a trainer that never waits; 0 if unknown."""
    trainer = observation.trainer
    return trainer.rows / trainer.gap_s if trainer.gap_s > 0 else 0.0


def headspace_of(share: float) -> float:
    """Return how many times faster training could be if loading costs this share."""
    return min(MAX_HEADSPACE, ratio(1.0, 1.0 - share) or MAX_HEADSPACE)


def needed_workers(seen: Observation, segment: SegmentObservation) -> float:
    """Return the workers that keep up with the trainer: demand times seconds a row.

    It is infinite for a loop that does next to nothing with its batches: no number says
    anything of it.
    """
    workers = demand_rows_per_s(seen) * segment.run_s_per_row
    short = ratio(seen.trainer.gap_s, seen.trainer.steps) < SHORT_STEP_S
    return workers if workers < (HIGH if short else COUNTLESS) else inf


def seconds_of(
    observation: Observation, segment: SegmentObservation
) -> Callable[[PartObservation], float]:
    """Return a function that tells how long an operation takes per sample.

    An operation that gets the GIL back from computing threads waits for milliseconds,
    however little it does. In that case its time on a CPU is used.
    """
    turns = segment.num_parallel_workers > 1 and take_turns(observation, segment)
    return attrgetter("cpu_s_per_row" if turns else "run_s_per_row")


def busiest(observation: Observation) -> SegmentObservation:
    """Return the segment whose workers are busiest.

    The trainer waits for all of the work it does itself, however long it is away.
    """

    def burden(segment: SegmentObservation) -> tuple[float, float]:
        alive_s, edge = segment.worker_s, segment.output.utilization
        if segment.executor == "inline" and observation.trainer.wait_s > 0:
            alive_s = max(segment.run_s, observation.trainer.wait_s)
        share = round(ratio(segment.run_s, alive_s), 2)
        return share, segment.input_utilization - edge

    return max(observation.segments, key=burden)


def needed_prefetch(seen: Observation, segment: SegmentObservation) -> int:
    """Return the batches ahead while whose steps the longest samples are made.

    It is at least twice the present number, and at most eight times that.
    """
    own_s = ratio(seen.trainer.gap_s, seen.trainer.steps)
    present = segment.prefetch_size
    bridging = ceil(min(ratio(segment.lease_s, own_s), 8 * present)) + 1
    return min(max(2 * present, bridging), 8 * present)


def fitting(seen: Observation, budget: Budget, present: int, wanted: int) -> int:
    """Return as many of the wanted batches ahead as the memory budget has room for.

    Of what does not fit, half is left out, and half again; at last, the present number
    is left.
    """
    while wanted > present and not has_room(seen, budget, wanted - present):
        wanted -= (wanted - present + 1) // 2
    return max(present, wanted)


def measured(windows: tuple[Observation, ...]) -> Measure:
    """Return the speed of training over these windows, at least one."""
    seen = whole(windows)
    spent_s = cost_s(seen)
    rate = 1.0 / spent_s if spent_s > 0 else 0.0
    return Measure(rate, wait_share(seen), seen.trainer.step_s)


def whole(windows: tuple[Observation, ...]) -> Observation:
    """Join consecutive windows, at least one, into one."""
    return reduce(joined, windows)


def latest(windows: tuple[Observation, ...], steps: int, seconds: float) -> Observation:
    """Join the last windows, at least one, until they have these steps and seconds."""
    found, *before = reversed(windows)
    for window in before:
        if found.trainer.steps >= steps and found.window_s >= seconds:
            break
        found = joined(window, found)
    return found


def joined(first: Observation, second: Observation) -> Observation:
    """Join two consecutive windows into one.

    The second window stands alone if the two are not comparable: the pipeline was
    rebuilt with other segments, a segment has workers of another kind, or the plan has
    entered another regime.
    """
    alike = staff(first) == staff(second) and first.host == second.host
    if not alike or first.regime != second.regime:
        return second
    return first + second


def staff(observation: Observation) -> tuple[tuple[str, str], ...]:
    """Return the kind of workers of each segment, by its name."""
    return tuple((each.name, each.executor) for each in observation.segments)


def arrived(observation: Observation, decisions: Iterable[Decision]) -> bool:
    """Whether the decided kinds of workers are in force, and the old ones have left."""
    wanted = {d.key: d.new for d in decisions if isinstance(d.new, str)}
    for segment in observation.segments:
        kind = wanted.get((segment.name, "executor"))
        there = kind is None or (kind == segment.executor and segment.rows > 0)
        if segment.moving or not there:
            return False
    hosts = [new for (_, name), new in wanted.items() if name == "host"]
    return all(new == observation.host for new in hosts)


def beginning(observation: Observation) -> bool:
    """Whether workers are still starting, so that the rate is not yet theirs."""
    return any(segment.beginning for segment in observation.segments)
