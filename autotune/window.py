"""Windows: joining them, and the questions asked of one, each with its number.

The verdict and the tuner ask the same questions. A question has one function and one
number, so a cause that `explain()` names is one that the tuner acts on, if it may. A
number that one module alone needs stands there. Where a value was chosen among several,
71 simulated pipelines were run with each (`tests/support/workloads.py`, 2026-11-28).

A pipeline that starves its trainer may take a second for one step, so steps alone say
too little too late. While the trainer waits, the rows that the segments finish give the
same rate, one row at a time. Otherwise the trainer's own seconds count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import ceil, inf
from operator import attrgetter

from ..engine.observe.observation import (
    MIN_WAIT,
    ConnectorObservation,
    Observation,
    PartObservation,
    SegmentObservation,
    ratio,
)
from ..system.resources import Budget

# Seconds for which the result of a trial is trusted, at first: that other workers, or
# more of them, brought nothing.
TRUSTED_S = 120.0
# Share of a step. A shorter wait is `not input-bound`, and not worth a change, which
# must gain as much: windows differ by about 2 % anyway (`PRIOR_SD` in trial.py). The
# tuner once acted from 0.02 on: no pipeline ended differently.
WORTH = MIN_WAIT
# Share of a step. A trainer that waits for longer is `input-bound`. It makes few steps
# then, so the rows that the segments finish say more about its speed.
STARVED = 0.10
# Share of the time with no batch ready. Below it, a wait is for the hand-over. With
# 0.002 before something is released, no pipeline ended differently.
NEVER_EMPTY = 0.02
# Share of the workers' time that is work. Workers are enough if they are busy for less
# than that: the rest is for work that comes unevenly. With 0.8, five pipelines ended 1
# to 4 % slower, and three 1 to 2.5 % faster.
BUSY = 0.85
# Share of the workers' time that they may not work further ahead, above which their
# queue may be too short. With 0.1, no pipeline ended differently.
HELD_BACK = 0.2
# Share of a time above which something takes most of it.
MOSTLY = 0.5
# Steps of the trainer that a long task of a worker process takes at least.
MANY_STEPS = 2.0
# Share of an operation's time on a CPU above which it computes (MindSpore's number for
# a high CPU use).
COMPUTES = 0.75
# Share of their run time that workers wait for a core, above which more of them would
# only wait, too. On a crowded machine the tests see 0.45 or more.
QUEUED = 0.25
# Looks at a worker from which on the share in line is known: at eight, two.
LOOKS = 12
# Seconds per sample: a wait for the GIL or for a hand-over may be shorter.
LONG_WAIT_S = 0.001
# Share of the cores in use above which none is to spare. With 0.75, no pipeline ended
# differently; a search for the best number of workers goes on until 0.95
# (`bottleneck_law.py`), or four of them ended slower.
CPU_USED = 0.85
# Share of moments with the GIL held above which threads take turns. The probe is
# accurate to 0.14, so it is surely held nearly half of the time. With 0.45 for a trial
# of processes and 0.8 for the end of growth, pipelines that need the GIL for 0.3 to 0.9
# of their work ended as fast or slower, but for one (1.5 %).
GIL_HELD = 0.6
# With this many rows, the count is accurate to one in eight; most have more.
ENOUGH_STEPS, ENOUGH_ROWS = 2, 8
# Longest time in which each process is to report something, in seconds.
MAX_REPORT_S = 3.0
# Seconds of a loop, with the break before it, below which a window has a whole one.
SHORT_LOOP_S = 3.0
# Workers from which a need only says that the trainer does next to nothing, and from
# which it does if its own part of a step is shorter than these seconds.
COUNTLESS, HIGH, SHORT_STEP_S = 1000, 100, 0.001
# Stands for anything larger, such as for a trainer that does nothing.
MAX_HEADSPACE = 1000.0
# Seconds after which one finished row is enough: decisions must not take forever.
PATIENCE_S = 2.0


def outbox(observation: Observation) -> ConnectorObservation:
    """Return the connector before the trainer: the last segment's output."""
    return observation.segments[-1].output


def own_s(observation: Observation) -> float:
    """Return the seconds of the trainer's own part of a step."""
    return ratio(observation.trainer.gap_s, observation.trainer.steps)


def wait_share(observation: Observation) -> float:
    """Return the exposed wait as a share of the step, 0 to 1.

    If the trainer's clock shows nothing of the window yet, because it lies within one
    long step, return the share of the window with nothing to hand over.
    """
    clock_s = observation.trainer.wait_s + observation.trainer.gap_s
    return observation.trainer.wait_share if clock_s > 0 else outbox(observation).empty


def lost_share(observation: Observation) -> float:
    """Return the share of the step, 0 to 1, that loading costs.

    This is the exposed wait, and by how much loading lengthens the trainer's own part.
    """
    return 1.0 - (1.0 - wait_share(observation)) / observation.slowdown


def slowed_share(observation: Observation) -> float:
    """Return the share of the step by which loading lengthens the trainer's own part.

    It is 0 if that is not certain, or less than `MIN_GROWTH` in observation.py.
    """
    return lost_share(observation) - wait_share(observation)


def starving(observation: Observation) -> bool:
    """Whether the trainer waits so long that steps are few."""
    return wait_share(observation) > STARVED


def always_ready(observation: Observation) -> bool:
    """Whether a batch is there all the time: a wait is for the hand-over then."""
    return outbox(observation).empty < NEVER_EMPTY


def busy(segment: SegmentObservation) -> float:
    """Return the share of their time that a segment's workers work."""
    return ratio(segment.run_s, segment.worker_s)


def held_back(observation: Observation, segment: SegmentObservation) -> float:
    """Return the share of their time that workers may not work further ahead.

    The time that they wait for memory is not part of it: a longer queue needs more. Nor
    is the time before a loop's first batch: other workers may not have begun yet. What
    processes have finished may wait until the trainer comes for it.
    """
    begins_s = observation.trainer.first_s * segment.num_parallel_workers
    held_s = idle_s(observation, segment) - segment.wait_memory_s - begins_s
    return max(0.0, ratio(held_s, segment.worker_s))


def idle_s(observation: Observation, segment: SegmentObservation) -> float:
    """Return the worker-seconds that workers may not work further ahead."""
    # Between short tasks, processes are idle because handing over takes long.
    if segment.executor == "process" and (
        segment.lease_s >= MANY_STEPS * own_s(observation)
    ):
        return segment.worker_s - segment.run_s - segment.wait_input_s
    return segment.wait_credit_s


def computes(cpu_s: float, run_s: float) -> bool:
    """Whether work that takes `run_s` is mostly on a CPU."""
    return ratio(cpu_s, run_s) >= COMPUTES


def queued(segments: Sequence[SegmentObservation]) -> float:
    """Return the share of their run time that workers wait for a core."""
    return ratio(sum(s.queued_s for s in segments), sum(s.run_s for s in segments))


def in_line(segment: SegmentObservation) -> float:
    """Return the share of their time that threads wait for one and the same lock.

    Of three that do nothing but take turns at it, two do. Of short samples, and after
    few looks, it is 0: workers meet at locks of the engine, too.
    """
    few = segment.looked < LOOKS
    short = segment.executor != "thread" or segment.run_s_per_row < LONG_WAIT_S
    return 0.0 if few or short else ratio(segment.lined, segment.looked)


def take_turns(observation: Observation, segment: SegmentObservation) -> bool:
    """Whether a segment's threads take turns at the GIL."""
    return segment.executor == "thread" and (observation.gil_held or 0.0) >= GIL_HELD


def busy_cores(observation: Observation) -> float:
    """Return the cores that loading keeps busy, hand-overs included.

    What the trainer's process does besides its workers may be the trainer's own work,
    except while the trainer waits.
    """
    waits = wait_share(observation) >= MOSTLY
    return max(observation.cpu_cores, observation.used_cores if waits else 0.0)


def cores_used(
    observation: Observation, budget: Budget, share: float = CPU_USED
) -> bool:
    """Whether loading keeps this share of the cores busy: by default, all of them."""
    return busy_cores(observation) >= share * budget.cpu_cores


def no_core_free(observation: Observation, budget: Budget) -> bool:
    """Whether loading and training together keep all cores busy."""
    return observation.used_cores >= CPU_USED * budget.cpu_cores


def waits_elsewhere(observation: Observation, segment: SegmentObservation) -> bool:
    """Whether workers mostly wait, and for nothing that they hold themselves."""
    waits = segment.cpu_s + segment.queued_s < MOSTLY * segment.run_s
    alone = in_line(segment) < MOSTLY and not take_turns(observation, segment)
    return waits and alone and segment.run_s_per_row >= LONG_WAIT_S


def outlasts(observation: Observation, segment: SegmentObservation) -> bool:
    """Whether a lease takes longer than the steps of all batches ahead.

    More workers do not help then, though a sample may take less than a step. Of worker
    processes, each makes a batch of its own.
    """
    step_s, shared = own_s(observation), segment.executor not in ("process", "inline")
    long = segment.lease_s >= segment.prefetch_size * step_s
    return shared and long and segment.run_s_per_row < step_s


def rows_in(observation: Observation, budget: Budget) -> int:
    """Return the rows of all batches that the memory budget has room for; 0: unknown.

    Workers beyond that find no row to make.
    """
    fits = (
        budget.memory_bytes // observation.batch_bytes if observation.batch_bytes else 0
    )
    return int(fits * ratio(observation.trainer.rows, observation.trainer.steps))


def collate_s(observation: Observation, segment: SegmentObservation) -> float:
    """Return the seconds of a step that the trainer collates, if most of its wait.

    Only worker processes can do that for it.
    """
    trainer = observation.trainer
    spent_s = trainer.collate_s
    if segment.executor == "inline" and len(segment.parts) > 1:
        spent_s = segment.parts[-1].run_s_per_row * trainer.rows
    most = spent_s >= MOSTLY * trainer.wait_s > 0.0
    return ratio(spent_s, trainer.steps) if most else 0.0


# The speed of training, and what it needs


def worked_rows(segment: SegmentObservation) -> float:
    """Return the rows that a segment's workers were busy for.

    A process reports a whole batch, and several that began together report together.
    So their reports say how long a row takes, and not how many rows a window had.
    """
    reports = segment.executor == "process" and segment.rows > 0
    return ratio(segment.run_s, segment.run_s_per_row) if reports else segment.rows


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
    per_child = max(1.0, ratio(segment.num_parallel_workers, segment.children))
    return segment.run_s_per_row * batch_rows(segment) / per_child


def batch_rows(segment: SegmentObservation) -> float:
    """Return the rows of a batch, as a segment's output has room for some batches."""
    return ratio(segment.output.capacity, segment.prefetch_size)


def enough(observation: Observation) -> bool:
    """Whether the window is evidence; if not, it is extended."""
    trainer, window_s = observation.trainer, observation.window_s
    # Workers start with a loop, and its first batches are not made before. More workers
    # make the rest faster and the start slower, so only a whole short loop tells.
    short = 0.0 < trainer.loop_s < SHORT_LOOP_S
    cuts_a_loop = short and trainer.loops < 2 and window_s < 3.0 * trainer.loop_s
    if lacking_s(observation) > 0 or cuts_a_loop:
        return False
    if not starving(observation):
        return trainer.steps >= ENOUGH_STEPS
    rows = sustained_rows(observation)
    patient = trainer.steps >= ENOUGH_STEPS or window_s >= PATIENCE_S
    return rows >= ENOUGH_ROWS or (patient and rows > 0)


def lacking_s(observation: Observation) -> float:
    """Return how much longer a window must be for each process to report something."""
    longest_s = max(map(report_s, observation.segments))
    return min(longest_s, MAX_REPORT_S) - observation.window_s


def cost_s(observation: Observation) -> float:
    """Return the seconds of training per sample, the objective: less is better.

    This is `(wait + own time) / samples` of the trainer. While it starves, it is the
    time between two rows that pass all segments; infinite if nothing is finished.
    """
    rows, spent_s = sustained_rows(observation), observation.window_s
    if not starving(observation):
        trainer = observation.trainer
        rows, spent_s = trainer.rows, trainer.wait_s + trainer.gap_s
    return spent_s / rows if rows > 0 else inf


def demand_rows_per_s(observation: Observation) -> float:
    """Return the samples per second of a trainer that never waits; 0 if unknown."""
    return ratio(observation.trainer.rows, observation.trainer.gap_s)


def headspace_of(share: float) -> float:
    """Return how many times faster training could be if loading costs this share."""
    return min(MAX_HEADSPACE, ratio(1.0, 1.0 - share) or MAX_HEADSPACE)


def needed_workers(observation: Observation, segment: SegmentObservation) -> float:
    """Return the workers that keep up with the trainer: demand times seconds a row.

    It is infinite for a loop that does next to nothing with its batches: no number says
    anything of it.
    """
    workers = demand_rows_per_s(observation) * segment.run_s_per_row
    short = ratio(observation.trainer.gap_s, observation.trainer.steps) < SHORT_STEP_S
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


def needed_prefetch(observation: Observation, segment: SegmentObservation) -> int:
    """Return the batches ahead while whose steps the longest samples are made.

    It is at least twice the present number, and at most eight times that.
    """
    present = segment.prefetch_size
    bridging = ceil(min(ratio(segment.lease_s, own_s(observation)), 8 * present)) + 1
    return min(max(2 * present, bridging), 8 * present)


def fitting(observation: Observation, budget: Budget, present: int, target: int) -> int:
    """Return as many of the wanted batches ahead as the memory budget has room for.

    Of what does not fit, half is left out, and half again; at last, the present number
    is left.
    """
    room = budget.memory_bytes - observation.held_bytes
    while target > present and (target - present) * observation.batch_bytes > room:
        target -= (target - present + 1) // 2
    return max(present, target)


def whole(windows: tuple[Observation, ...]) -> Observation:
    """Join consecutive windows, at least one, into one."""
    return reduce(joined, windows)


def latest(windows: tuple[Observation, ...], steps: int, seconds: float) -> Observation:
    """Join the last windows, at least one, until they have these steps and seconds."""
    span, *before = reversed(windows)
    for window in before:
        if span.trainer.steps >= steps and span.window_s >= seconds:
            break
        span = joined(window, span)
    return span


def joined(first: Observation, second: Observation) -> Observation:
    """Join two consecutive windows into one.

    The second window stands alone if the two are not comparable: the pipeline was
    rebuilt with other segments, a segment has workers of another kind, or the plan has
    entered another regime.
    """
    same_workers = staff(first) == staff(second) and first.host == second.host
    alike = same_workers and first.regime == second.regime
    return first + second if alike else second


def staff(observation: Observation) -> tuple[tuple[str, str], ...]:
    """Return the kind of workers of each segment, by its name."""
    return tuple((segment.name, segment.executor) for segment in observation.segments)
