"""`bottleneck_law`: what is possible, which segments lack workers for it, and how many.

Operational analysis (P. Denning and J. Buzen, 1978) answers this in closed form. A row
takes `S` worker-seconds in a segment, `C` of them on a CPU. With `n` workers, a segment
therefore produces at most `n / S` rows per second, all segments together at most
`cores / sum(C)`, and the trainer takes at most `rows / gap`. Nothing is gained beyond
the smallest of these. A rate `X` keeps `X S` workers busy (Little's law), so each
segment gets that many and some to spare: usually right after one or two seconds.

The law does not know about nonlinear effects: a lock, a disk or the GIL makes `S` grow
with `n`, and fewer workers may then be faster. Each change is verified (trial.py), and
the rate for each number is remembered. If workers brought much less than they should,
the best number is searched for between those tried, as for any curve with one peak.

In order: correct anything over budget. If the trainer waits, try another kind of
workers if measurements favour it (kinds.py), or else add workers by the law, with rows
ahead for workers that mostly wait, or else search for the peak, or widen queues that
hold workers back. Finally release what does nothing, by Little's law, even while the
trainer waits for something else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, inf, sqrt

from ...engine.observe.observation import (
    KnobName,
    Observation,
    SegmentObservation,
    ratio,
)
from .. import phrases
from ..trial import RELIEF, Decision, DecisionOutcome
from ..window import (
    BUSY,
    CPU_USED,
    HELD_BACK,
    MOSTLY,
    QUEUED,
    WORTH,
    always_ready,
    batch_rows,
    busy,
    busy_cores,
    collate_s,
    cores_used,
    cost_s,
    demand_rows_per_s,
    fitting,
    held_back,
    in_line,
    needed_prefetch,
    outlasts,
    queued,
    slowed_share,
    staff,
    starving,
    take_turns,
    wait_share,
)
from .kinds import ALONE_NOW, NO_KINDS, Kinds
from .policy import NO_BACKOFFS, Backoffs, Case, KnobKey, Situation, drifted, faster

# Most by which workers are multiplied at once while little is known of a segment.
# Processes may be one for each core: they share no lock as threads may.
JUMP = 4.0
# Most processes that are added at once beyond one for each core: they cost memory.
MORE_PROCESSES = 16
# Gain that a jump must promise if little CPU is left, which may not be available.
WORTH_MUCH = 0.06
# Share of the expected rate below which growth has met a limit.
EFFICIENT = 0.3
# Share of the cores in use above which no number of workers could get more out of them:
# at `CPU_USED`, workers that hinder one another may still be the reason.
CPU_SPENT = 0.95
# Workers per core above which they may hinder each other.
CROWD = 2.0
# Windows at ease before something is released, and windows to wait for the GIL probe
# before more threads are tried.
EASE_WINDOWS, PATIENCE_WINDOWS = 2, 3
# How much less CPU a row may take, at most, if fewer workers crowd caches and cores
# less. A number that needs more cores even then is not tried.
CHEAPER = 1.5
MAX_PREFETCH = 16
# Rows ahead for each worker if rows mostly wait.
ROWS_EACH = 4
# Part of its workers that a segment keeps if they slow the trainer down.
RELIEF_KEEPS = 0.75
WORKERS: KnobName = "num_parallel_workers"
# A rate this many times higher or lower than measured for the same number is of another
# load, or the measured one lived on stock.
STEADY = 1.2
# Share of the expected gain from more workers above which none hinders another.
LINEAR = 0.8
# The same above which workers are sure not to hinder each other: if still more then
# bring nothing, they wait in line for something, and no number between brings more.
# Workers that hinder one another enough for that show it earlier (N. Gunther's law).
FREE = 0.9
# Share of the expected gain from more workers below which they brought nothing.
NOTHING = 0.1
# Numbers closer than this factor cannot be told apart by measurement.
FINE = 1.25

# (workers, rows per second) as measured, by workers.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class LawMemory:
    """What the policy remembers from one window to the next."""

    at_ease: int = 0
    """Successive windows in which the trainer did not wait."""
    hungry: int = 0
    """Successive windows in which it did."""
    backoffs: Backoffs = NO_BACKOFFS
    curves: Mapping[str, Curve] = field(default_factory=dict)
    """Measured rates by number of workers, for each operator."""
    staff: tuple[tuple[str, str], ...] = ()
    """Kinds of workers, by operator: results of one say nothing about another."""
    kinds: Kinds = NO_KINDS
    """Results of other kinds of workers, and of another host."""
    waited: int = 0
    """Successive windows in which the GIL had yet to be probed."""


class BottleneckLaw:
    """Jumps to what the law says, then searches for what it does not know."""

    def start(self) -> LawMemory:
        return LawMemory()

    def decide(
        self, situation: Situation, memory: LawMemory
    ) -> tuple[tuple[Decision, ...], LawMemory]:
        """Correct anything over budget, or add, or search, or release."""
        window, outcomes = situation.observation, situation.outcomes
        kinds, workers = memory.kinds.learned(outcomes, window), staff(window)
        new = {name for name, _ in set(workers) - set(memory.staff)}
        # If a kind was given up together with a number, that number says nothing.
        lost = any(isinstance(o.decision.new, str) and not o.kept for o in outcomes)
        numbers = tuple(
            o for o in outcomes if o.decision.rule != "executor" and not lost
        )
        backoffs = memory.backoffs.learned(numbers, window, new)
        curves = {name: at for name, at in memory.curves.items() if name not in new}
        curves = current(remembered(curves, numbers), window)
        new_memory = replace(
            memory, backoffs=backoffs, curves=curves, staff=workers, kinds=kinds
        )
        case = _Law(situation, backoffs, curves)
        moves = case.staffed(tuple(kinds.off_threads(situation)))
        if urgent := tuple(case.within_budget()) or moves:
            return urgent, replace(new_memory, hungry=0, at_ease=0)
        if case.starved():
            return _fed(case, replace(new_memory, hungry=memory.hungry + 1, at_ease=0))
        new_memory = replace(new_memory, hungry=0, waited=0)
        collates = any(collate_s(window, segment) for segment in window.segments)
        moves = tuple(kinds.other_executor(situation)) if collates else ()
        moves = moves or tuple(kinds.other_host(situation))
        if moves:
            return case.staffed(moves), new_memory
        at_ease = memory.at_ease + 1 if case.at_ease() else 0
        releases = tuple(case.relieved())
        if at_ease >= EASE_WINDOWS:
            releases = releases or case.spared() or tuple(case.idle_queues())
        return releases, replace(new_memory, at_ease=at_ease)


def _fed(case: _Law, memory: LawMemory) -> tuple[tuple[Decision, ...], LawMemory]:
    """Feed a trainer that waits: with another kind of workers, or with more of them."""
    situation = case.situation
    if memory.hungry < 2 and not starving(situation.observation):
        return (), replace(memory, waited=0)
    if memory.waited < PATIENCE_WINDOWS and memory.kinds.unprobed(situation):
        return (), replace(memory, waited=memory.waited + 1)
    decisions = (
        tuple(memory.kinds.alone(situation, ALONE_NOW))
        or case.staffed(tuple(memory.kinds.other_executor(situation)))
        or case.thinned()
        or case.jump()
        or tuple(case.search())
        or tuple(case.wider_queues())
        or case.spared()
        or tuple(memory.kinds.alone(situation, 1.0 + WORTH))
        or case.staffed(tuple(memory.kinds.other_host(situation)))
        or tuple(case.relieved())
    )
    return decisions, replace(memory, waited=0)


@dataclass(frozen=True, slots=True)
class _Law(Case):
    """One situation, and what the law says about it."""

    curves: Mapping[str, Curve]

    def starved(self) -> bool:
        """Whether the trainer waits for loading, not for the hand-over of batches."""
        return wait_share(self.window) >= WORTH and not always_ready(self.window)

    def staffed(self, decisions: tuple[Decision, ...]) -> tuple[Decision, ...]:
        """Return a move, with as many processes as the law says if they are short."""
        if self.starved() and any(decision.new == "process" for decision in decisions):
            return (*decisions, *self.jump(moves=True))
        return decisions

    # What is possible

    @property
    def rate(self) -> float:
        """Present rows per second."""
        return ratio(1.0, cost_s(self.window))

    def possible(self, *, moves: bool = False) -> float:
        """Rows per second that CPU, GIL, trainer and bounded segments allow.

        If workers wait for a core, more of them bring nothing, whoever uses the rest.
        Threads that take turns at the GIL may use the rest of it; processes (if
        everything `moves` there) have their own.
        """
        window, rate = self.window, self.rate
        demand = demand_rows_per_s(window) or inf
        cpu_s_per_row = ratio(busy_cores(window), rate)
        cpu = self.cores / cpu_s_per_row if cpu_s_per_row > 0 else inf
        bounds = [
            self._most(segment) / segment.run_s_per_row
            for segment in window.segments
            if segment.run_s_per_row > 0
        ]
        queue = rate if queued(window.segments) >= QUEUED else inf
        gil = rate / (window.gil_held or 1.0) if self._turns() and not moves else inf
        return min(demand, cpu, queue, gil, *bounds)

    def _most(self, segment: SegmentObservation) -> int:
        """Largest number of workers that a segment may have."""
        knob = self.knob(segment.name, WORKERS)
        if knob is None:
            return segment.num_parallel_workers
        return max(knob.value, self.backoffs.most((segment.name, WORKERS), knob.upper))

    def _cpu_bound(self, share: float = CPU_USED) -> bool:
        """Whether no core is free, or loading uses this share of what it may."""
        return self._spent() or cores_used(self.window, self.situation.budget, share)

    def _spent(self) -> bool:
        """Whether workers with work to do wait for a core, or take turns at the GIL."""
        return self._turns() or queued(self.window.segments) >= QUEUED

    def _turns(self) -> bool:
        """Whether threads take turns at the GIL."""
        return any(take_turns(self.window, segment) for segment in self.window.segments)

    def _cores_of(self, segment: SegmentObservation) -> float:
        """Return the cores that a segment's workers can use at once."""
        return 1.0 if take_turns(self.window, segment) else self.cores

    # What to add

    def thinned(self) -> tuple[Decision, ...]:
        """Reduce workers if many more compute than there are cores."""
        segment = self._bottleneck()
        if segment is None or len(self.curves.get(segment.name, ())) > 1:
            return ()
        crowd = segment.num_parallel_workers > CROWD * self._cores_of(segment)
        return tuple(self._crowded()) if crowd else ()

    def jump(self, *, moves: bool = False) -> tuple[Decision, ...]:
        """Give every segment the workers that the possible rate keeps busy.

        Args:
            moves: whether all of them will become processes.
        """
        if self.rate <= 0:
            return ()
        segments, most = self.window.segments, JUMP * self.rate
        if moves or all(segment.executor == "process" for segment in segments):
            slowest_s = max(segment.run_s_per_row for segment in segments)
            most = max(most, ratio(BUSY * self.cores, slowest_s))  # one for each core
        target = min(self.possible(moves=moves), most)
        worth = WORTH_MUCH if self._cpu_bound() else WORTH
        if target < (1.0 + worth) * self.rate or (self._inefficient() and not moves):
            return ()
        return tuple(self._grown(target, moves=moves))

    def _grown(self, target: float, *, moves: bool) -> Iterator[Decision]:
        for segment, key, knob in self.tunable(WORKERS):
            row_s, more = segment.run_s_per_row, MORE_PROCESSES
            if moves:
                alone_s = segment.alone_s_per_row  # there, none waits for the GIL
                row_s = min(row_s, alone_s or row_s)
                more *= alone_s > 0 and segment.cpu_s_per_row < MOSTLY * row_s
            busy_workers = target * row_s
            workers = min(ceil(busy_workers / BUSY - 0.01), self._most(segment))
            if moves or segment.executor == "process":
                workers = min(workers, max(ceil(self.cores), knob.value + more))
            if workers <= knob.value:
                continue
            yield from self._rows_each(segment, workers)
            yield Decision(
                *key,
                old=knob.value,
                new=workers,
                rule="law",
                reason=phrases.law(
                    segment.name, row_s, busy_workers, rate=target, workers=knob.value
                ),
                expected=min(target / self.rate, workers / knob.value),
                evidence=self._evidence(segment, target),
            )

    def _rows_each(
        self, segment: SegmentObservation, workers: int
    ) -> Iterator[Decision]:
        """Raise the rows ahead so that each worker has several, if rows mostly wait.

        Fewer hand-overs then carry as many rows (`lease_rows` in core.py). Where leases
        outlast the batches ahead, more workers alone would bring nothing.
        """
        queue = segment.queue_name
        if outlasts(self.window, segment):
            batches = needed_prefetch(self.window, segment)
            reason = phrases.outlasted(queue)
        elif mostly_waits(segment):
            batches = ceil(ratio(ROWS_EACH * workers, batch_rows(segment)))
            reason = phrases.few_ahead(queue, segment.prefetch_size, workers)
        else:
            return
        yield from self._further_ahead(segment, batches, "ahead", reason)

    def _further_ahead(
        self,
        segment: SegmentObservation,
        batches: int,
        rule: str,
        reason: str,
        expected: float = 1.0,
    ) -> Iterator[Decision]:
        """Raise the batches ahead, as far as bounds and the memory budget allow."""
        key: KnobKey = (segment.queue_name, "prefetch_size")
        if (knob := self.knob(*key)) is not None:
            new = min(batches, knob.upper, MAX_PREFETCH)
            new = fitting(self.window, self.situation.budget, knob.value, new)
            evidence = {"predicted_bytes": (new - knob.value) * self.window.batch_bytes}
            yield from self.change(
                key, new, rule, reason, evidence=evidence, expected=expected
            )

    def _evidence(self, segment: SegmentObservation, target: float) -> dict[str, float]:
        return {
            "run_s_per_row": segment.run_s_per_row,
            "cpu_s_per_row": segment.cpu_s_per_row,
            "rows_per_s": self.rate,
            "target_rows_per_s": target,
        }

    # Where the law does not hold

    def _inefficient(self) -> bool:
        """Whether more workers of the busiest segment are known to bring too little."""
        segment = self._bottleneck()
        if segment is None:
            return False
        if in_line(segment) >= MOSTLY:
            return True
        curve, workers = self.curves.get(segment.name, ()), segment.num_parallel_workers
        here = dict(curve).get(workers, self.rate)
        return efficiency(curve, workers) < EFFICIENT or any(
            more > workers and rate < (1.0 + WORTH) * here for more, rate in curve
        )

    def _bottleneck(self) -> SegmentObservation | None:
        """The segment whose workers are always busy, or would be on another machine."""
        busiest = max(self.window.segments, key=busy)
        return busiest if busy(busiest) >= BUSY or self._spent() else None

    def search(self) -> Iterator[Decision]:
        """Try the number of workers that reveals most about where the peak is."""
        segment = self._bottleneck()
        knob = self.knob(segment.name, WORKERS) if segment else None
        if segment is None or knob is None or self._cpu_bound(CPU_SPENT):
            return
        rates = dict(self.curves.get(segment.name, ()))
        key: KnobKey = (segment.name, WORKERS)
        cores = ratio(segment.cpu_s, self.window.window_s)
        lower = min(knob.value, max(knob.lower, ceil(cores / CHEAPER)))
        only = len(self.window.segments) == 1
        if only and segment.alone_s_per_row:  # the trainer was one worker
            rates.setdefault(1, 1.0 / segment.alone_s_per_row)
        new = probe(
            tuple(sorted(rates.items())),
            knob.value,
            lower,
            knob.upper,
            waits=mostly_waits(segment),
            only=only,
        )
        if new is None or self.backoffs.refutes(key, new):
            return
        yield Decision(
            *key,
            old=knob.value,
            new=new,
            rule="peak",
            reason=phrases.peak(segment.name, segment.run_s_per_row, knob.value, new),
            expected=1.1,
            evidence=self._evidence(segment, self.rate),
        )

    def wider_queues(self) -> Iterator[Decision]:
        """Prefetch more batches if workers are held back and none is busy."""
        for segment in () if self._bottleneck() else self.window.segments:
            share = held_back(self.window, segment)
            if share >= HELD_BACK:
                batches = min(needed_prefetch(self.window, segment), MAX_PREFETCH)
                yield from self._further_ahead(
                    segment,
                    batches,
                    "held_back",
                    reason=phrases.held_back(segment.queue_name, share),
                    expected=self.expected(batches / segment.prefetch_size),
                )

    # What to release

    def spared(self) -> tuple[Decision, ...]:
        """Release workers that the present rate does not keep busy."""
        return tuple(self.idle_workers()) or tuple(self._crowded())

    def relieved(self) -> Iterator[Decision]:
        """Reduce workers that cost the trainer more of its own part than they spare."""
        window = self.window
        if slowed_share(window) < max(WORTH, wait_share(window)):
            return
        knobs = [entry for entry in self.tunable(WORKERS) if entry[0].is_here]
        for segment, key, knob in sorted(knobs, key=lambda s: s[0].run_s, reverse=True):
            fewer = max(knob.lower, int(RELIEF_KEEPS * knob.value))
            reason = phrases.relief(segment.name, window.slowdown, knob.value)
            evidence = {"slowdown": window.slowdown}
            change = tuple(self.change(key, fewer, RELIEF, reason, evidence=evidence))
            yield from change
            if change:
                return

    def _crowded(self) -> Iterator[Decision]:
        """Reduce workers that crowd the CPU and mostly wait for a core."""
        segment = self._bottleneck()
        knob = self.knob(segment.name, WORKERS) if segment else None
        if segment is None or knob is None or not self._cpu_bound():
            return
        cores, key = self._cores_of(segment), (segment.name, WORKERS)
        many = self._spent() and knob.value >= CROWD**3 * cores
        fewer = max(knob.lower, ceil(cores), knob.value // (4 if many else 2))
        if many and take_turns(self.window, segment):
            fewer = min(fewer, max(knob.lower, int(CROWD)))  # one has it, one waits
        while fewer < knob.value and not self.backoffs.allows(key, fewer):
            fewer = ceil((fewer + knob.value + 1) / 2)
        yield from self.change(
            key,
            min(fewer, knob.value),
            "crowded",
            reason=phrases.crowded(segment.name, knob.value, cores),
            evidence=self._evidence(segment, self.rate),
        )


def mostly_waits(segment: SegmentObservation) -> bool:
    """Whether a row keeps its worker waiting for longer than computing."""
    return segment.cpu_s < MOSTLY * segment.run_s


# The rate for each number of workers tried, and which number to try next


def remembered(
    curves: dict[str, Curve], outcomes: tuple[DecisionOutcome, ...]
) -> dict[str, Curve]:
    """Add the results of changed worker counts; a gain elsewhere drops a curve."""
    numbers = [o for o in outcomes if o.decision.knob == WORKERS]
    if any(o.kept and faster(o) for o in outcomes):
        operators = {o.decision.operator for o in numbers}
        curves = {name: curve for name, curve in curves.items() if name in operators}
    for outcome in numbers:
        name = outcome.decision.operator
        points = dict(curves.get(name, ()))
        points[int(outcome.decision.old)] = outcome.before.rows_per_s
        points[int(outcome.decision.new)] = outcome.after.rows_per_s
        curves[name] = tuple(sorted(points.items()))
    return curves


def current(curves: dict[str, Curve], window: Observation) -> dict[str, Curve]:
    """Return the curves whose rate for the present number is still the rate."""
    rate = ratio(1.0, cost_s(window))
    counts = {segment.name: segment.num_parallel_workers for segment in window.segments}
    return {
        name: curve
        for name, curve in curves.items()
        if not drifted(dict(curve).get(counts.get(name, 0), rate), rate, STEADY)
    }


def efficiency(curve: Curve, workers: int) -> float:
    """Gain in rate over gain in workers, from the next fewer tried; 1 if unknown."""
    rates = dict(curve)
    fewer = [count for count in rates if count < workers]
    if workers not in rates or not fewer:
        return 1.0
    least = max(fewer)
    gain = rates[workers] / rates[least] - 1.0 if rates[least] > 0 else inf
    return gain / (workers / least - 1.0)


def linear(
    rates: dict[int, float], fewer: int, more: int, share: float = LINEAR
) -> bool:
    """Whether more workers brought what they should: no number between is better."""
    if fewer not in rates or fewer == more:
        return False
    return rates[more] >= share * rates[fewer] * more / fewer


def full(rates: dict[int, float], fewer: int, more: int) -> bool:
    """Whether this many workers use all of something: more bring nothing.

    If more bring less, they hinder one another, and a number between may bring more.
    """
    if not linear(rates, min(rates), fewer, FREE):
        return False
    gain = ratio(rates[more], rates[fewer]) - 1.0
    return -NOTHING <= gain < NOTHING * (more / fewer - 1.0)


def probe(
    curve: Curve,
    workers: int,
    lower: int,
    upper: int,
    *,
    waits: bool = False,
    only: bool = False,
) -> int | None:
    """Return the number to try next: within the wider gap beside the best one.

    If a curve has one peak, it lies between the points on both sides of the best one.
    If nothing is known yet, a quarter is tried: a run that starts with too many may be
    far beyond the peak. If a segment mostly `waits`, and each worker brought its share,
    no fewer are tried. Computing workers may crowd each other even then, while others
    make the rate grow. If it is the `only` segment, the rate is its own.
    """
    if len(curve) < 2:
        fewer = max(lower, workers // 4)
        return fewer if fewer < workers else None
    rates = dict(curve)
    peak = max(rates.values())
    best = min(count for count, rate in curve if rate >= (1.0 - WORTH) * peak)
    if best < workers:
        return best
    if only and best > workers and full(rates, workers, best):
        return None
    if best > workers:  # it was not worth what it took: what about less?
        half_way = round(sqrt(workers * best))
        return half_way if half_way not in rates else best
    below = max((c for c in rates if c < best), default=lower)
    above = min((c for c in rates if c > best), default=best)
    between = [
        round(sqrt(a * b))
        for a, b in ((below, best), (best, above))
        if b - a > 1 and b >= FINE * a and not (waits and linear(rates, a, b))
        if not (only and a == best and full(rates, a, b))
    ]
    most = max(rates)
    if above == best:  # more were never tried
        between.append(min(upper, best + max(1, best // 2)))
    if below == lower and not (waits and linear(rates, min(rates), best)):
        between.append(lower)
    if rates[most] == peak and not (only and full(rates, best, most)):
        # It still grows slowly.
        between.append(min(upper, most + max(1, most // 2)))
    candidates = [count for count in between if count not in rates]
    return candidates[0] if candidates else None
