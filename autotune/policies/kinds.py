"""Threads or processes, and where the engine runs: conclusions from measurements.

Threads cost less: one copy of the data, with rows written in place. Processes have
their own GIL. So a segment on threads is tried on processes if three things are
measured together: the trainer waits for data, cores are idle, and threads take turns
at the GIL, or computing workers are blocked part of the time. A segment on processes is
tried on threads if nothing is known about them. A trainer that makes long batches
itself tries threads; if they were no faster, and it computes while cores are idle,
processes. The engine is tried in a process of its own if the trainer's own part of a
step takes longer while it loads.

Pure. What a trial says about the kind that lost is remembered, and so is the load it
met.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ...engine.in_children import MANY_CORES
from ...engine.observe.observation import Observation, SegmentObservation, ratio
from ...engine.recipe import WORTH_WORKERS_NS
from ...system.printing import figures
from .. import phrases
from ..trial import Decision, DecisionOutcome
from ..window import (
    MOSTLY,
    TRUSTED_S,
    WORTH,
    collate_s,
    computes,
    in_line,
    no_core_free,
    own_s,
    slowed_share,
    take_turns,
    wait_share,
    waits_elsewhere,
)
from .policy import KnobKey, Situation, drifted

# Share of all segments' CPU above which a segment may be what holds the GIL.
MIN_CPU_SHARE = 0.2
# Range of the share of blocked time that may come from short calls, each of which
# releases the GIL and must get it back. The probe, which seldom finds it held, does not
# see that. Above the range they wait for something else.
JOSTLED = (0.12, 0.6)
# Largest gain that is expected from idle cores.
MAX_GAIN = 2.0
# Collating in a step above which handing it to workers may pay.
WORTH_COLLATING_S = 0.0005
# How many times faster the trainer must have been alone to take over at once.
ALONE_NOW = 1.3


@dataclass(frozen=True, slots=True)
class Past:
    """What is known of a kind that lost its last trial."""

    change: float
    """Its samples per second beside those of the kind that won: -0.3 is 30 % fewer."""
    trials: int
    """How many it has lost."""
    time_s: float
    """When the last one ended."""
    cpu_s: float = 0.0
    """CPU-seconds of a sample at the time."""

    def speaks(self, now_s: float, cpu_s: float) -> bool:
        """Whether it still counts: it is recent, and the work is the same."""
        due_s = self.time_s + TRUSTED_S * 2.0 ** (self.trials - 1)
        return now_s < due_s and not drifted(self.cpu_s, cpu_s)


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of workers that lost a trial, by knob and kind."""

    pasts: Mapping[tuple[KnobKey, str], Past] = field(default_factory=dict)

    def learned(
        self, outcomes: tuple[DecisionOutcome, ...], window: Observation
    ) -> Kinds:
        """Add the results of changes of kind."""
        pasts = dict(self.pasts)
        for outcome in outcomes:
            decision, kept = outcome.decision, outcome.kept
            if isinstance(decision.new, str):
                key = decision.key, str(decision.old if kept else decision.new)
                old, new = outcome.before.rows_per_s, outcome.after.rows_per_s
                change = (ratio(old, new) if kept else ratio(new, old)) - 1.0
                trials = pasts[key].trials + 1 if key in pasts else 1
                cpu_s = _cpu_s(window, decision.operator)
                pasts[key] = Past(change, trials, window.time_s, cpu_s)
        return Kinds(pasts)

    def other_executor(self, situation: Situation) -> Iterator[Decision]:
        """Try another kind of workers for a segment, the one with most CPU first.

        Several segments on threads are tried on processes together: a process then
        makes whole batches.
        """
        window, knobs = situation.observation, situation.knobs
        idle = ratio(situation.budget.cpu_cores, window.used_cores)
        for segment in sorted(window.segments, key=lambda s: s.cpu_s, reverse=True):
            key: KnobKey = (segment.name, "executor")
            knob = knobs.get(key)
            together = knob is None and any(name == "host" for _, name in knobs)
            if together:
                host, losers = self._host(situation), frozenset[str]()
                new = "process" if host and segment.executor == "thread" else None
                key = host or key
            elif knob is None or not knob.tunable or knob.kind != segment.executor:
                continue
            else:
                losers = self._lost(window, segment)
                new = other_kind(window, segment, knob.choices, losers)
            reason = self._reason(situation, segment, losers) if new else None
            if reason is not None and new is not None:
                yield Decision(
                    *key,
                    old="trainer" if together else segment.executor,
                    new=new,
                    rule="executor",
                    reason=phrases.executor(segment.name, new, reason),
                    expected=min(MAX_GAIN, max(1.0, idle)) if new == "process" else 1.0,
                    evidence={
                        "gil_held": -1.0
                        if window.gil_held is None
                        else window.gil_held,
                        "used_cores": window.used_cores,
                        "blocked": _blocked(segment),
                        "wait_share": wait_share(window),
                    },
                )
            if together or reason:
                return

    def alone(self, situation: Situation, gain: float) -> Iterator[Decision]:
        """Let the trainer make the batches, if it was much faster alone.

        Its time for a sample is known from then, so no trial is needed to find out.
        """
        window, trainer = situation.observation, situation.observation.trainer
        segment, *others = window.segments
        knob = situation.knobs.get((segment.name, "executor"))
        if others or knob is None or not knob.tunable or not segment.alone_s_per_row:
            return
        if waits_elsewhere(window, segment):
            return  # the trainer would wait for as long, one sample after another
        lost = "inline" in self._lost(window, segment)
        rows = ratio(trainer.rows, trainer.steps)
        alone_s = own_s(window) + segment.alone_s_per_row * rows
        faster = ratio(trainer.step_s, alone_s)
        if lost or segment.moving or knob.kind in ("", "inline") or faster < gain:
            return
        yield Decision(
            segment.name,
            "executor",
            old=segment.executor,
            new="inline",
            rule="executor",
            reason=phrases.alone(segment.name, trainer.step_s, alone_s),
            expected=faster,
            evidence={"step_s": trainer.step_s, "alone_s": alone_s},
        )

    def unprobed(self, situation: Situation) -> bool:
        """Whether computing threads may lack the GIL, which has not been probed yet.

        If they do, more threads are no cure.
        """
        window = situation.observation
        return window.gil_held is None and any(
            segment.executor == "thread"
            and segment.cpu_s > MOSTLY * segment.run_s
            and (segment.name, "executor") in situation.knobs
            for segment in window.segments
        )

    def other_host(self, situation: Situation) -> Iterator[Decision]:
        """Try all work in worker processes, if it slows the trainer down."""
        window, contention = situation.observation, situation.observation.contention
        key, share = self._host(situation), slowed_share(window)
        here = any(s.is_here and s.executor != "process" for s in window.segments)
        if key is None or contention is None or share < WORTH or not here:
            return
        yield Decision(
            *key,
            old="trainer",
            new="process",
            rule="contention",
            reason=phrases.contention(contention.beside_s, contention.alone_s),
            expected=1.0 / (1.0 - share),
            evidence={"beside_s": contention.beside_s, "alone_s": contention.alone_s},
        )

    def off_threads(self, situation: Situation) -> Iterator[Decision]:
        """Try all work in worker processes rather than threads, on many cores.

        Nothing is measured before: threads take the GIL from the trainer in any case.
        """
        cores, key = situation.budget.cpu_cores, self._host(situation)
        segments = (s for s in situation.observation.segments if s.executor == "thread")
        if cores >= MANY_CORES and key is not None and any(s.rows for s in segments):
            yield Decision(
                *key,
                old="trainer",
                new="process",
                rule="cores",
                reason=phrases.off_threads(cores),
                expected=1.0,
            )

    def _host(self, situation: Situation) -> KnobKey | None:
        """Return the knob that moves all work to processes; None if that lost."""
        window = situation.observation
        for key, knob in situation.knobs.items():
            if key[1] == "host" and knob.tunable and knob.kind == "trainer":
                past = self.pasts.get((key, "process"))
                lost = past is not None and past.speaks(
                    window.time_s, _cpu_s(window, "")
                )
                return None if lost else key
        return None

    def _lost(self, window: Observation, segment: SegmentObservation) -> frozenset[str]:
        """Return the kinds that lost a trial which still counts."""
        return frozenset(
            kind
            for (about, kind), past in self.pasts.items()
            if about == (segment.name, "executor")
            and past.speaks(window.time_s, segment.cpu_s_per_row)
        )

    def _reason(
        self, situation: Situation, segment: SegmentObservation, losers: frozenset[str]
    ) -> str | None:
        """Return why another kind than those that lost may do better, or None."""
        window, share = situation.observation, in_line(segment)
        all_cpu_s = sum(s.cpu_s for s in window.segments)
        little = ratio(segment.cpu_s, all_cpu_s) < MIN_CPU_SHARE and share < MOSTLY
        if wait_share(window) < WORTH or (little and not collate_s(window, segment)):
            return None
        threads = self.pasts.get(((segment.name, "executor"), "thread"))
        if segment.executor == "inline":
            slow = threads if "thread" in losers else None
            return _of_trainer(situation, segment, slow)
        if segment.executor == "process":
            many = situation.budget.cpu_cores >= MANY_CORES
            return None if many else _of_processes(threads, window.time_s)
        if no_core_free(window, situation.budget):
            return None
        if share >= MOSTLY:
            return (
                f"its threads wait for one lock {share:.0%} of their time, and"
                " processes have one each"
            )
        return _of_threads(situation, segment)


NO_KINDS = Kinds()


def _of_threads(situation: Situation, segment: SegmentObservation) -> str | None:
    window, cpu_cores = situation.observation, situation.budget.cpu_cores
    cores = f"{window.used_cores:.2f} of {figures(cpu_cores)} cores are used"
    step_s = collate_s(window, segment)
    if step_s >= WORTH_COLLATING_S:
        return (
            f"putting samples together takes the trainer {figures(1e3 * step_s)} ms"
            f" a step while {cores}: processes collate in its place"
        )
    if window.gil_held is None:
        return None
    if take_turns(window, segment):
        return (
            f"the GIL is held {window.gil_held:.0%} of the time while {cores}:"
            " processes may use the rest"
        )
    blocked = _blocked(segment)
    if JOSTLED[0] <= blocked <= JOSTLED[1]:
        return (
            f"{cores}, and workers that compute are blocked {blocked:.0%} of the time:"
            " threads may be in one another's way"
        )
    return None


def other_kind(
    window: Observation,
    segment: SegmentObservation,
    choices: tuple[str, ...],
    losers: frozenset[str],
) -> str | None:
    """Return the kind to try instead, or None if no other is available.

    After a trial of processes, nothing says that threads would do better.
    """
    kinds = {"inline": ("thread", "process"), "thread": ("process",)}.get(
        segment.executor, ("thread",)
    )
    if "process" in losers or (losers and segment.executor == "process"):
        return None
    if collate_s(window, segment):
        kinds = kinds[::-1]
    return next(
        (kind for kind in kinds if kind in choices and kind not in losers), None
    )


def _of_trainer(
    situation: Situation, segment: SegmentObservation, threads: Past | None
) -> str | None:
    """Return why workers may make batches faster, or None.

    If threads lost a trial (`threads`), processes may still win: where the work
    computes and cores are idle, the GIL may be why threads lost.
    """
    window = situation.observation
    batch_s = segment.run_s_per_row * ratio(window.trainer.rows, window.trainer.steps)
    if batch_s < WORTH_WORKERS_NS / 1e9:
        return None
    why = f"the trainer makes batches itself, and one takes {figures(batch_s * 1e3)} ms"
    if threads is None:
        return why
    computing = computes(segment.cpu_s, segment.run_s)
    if not computing or no_core_free(window, situation.budget):
        return None
    slower = f"{-threads.change:.0%} slower" if threads.change < 0 else "no faster"
    return f"{why}; threads were {slower}"


def _of_processes(past: Past | None, now_s: float) -> str:
    if past is None:
        return "threads would take less memory, and how fast they are is not known"
    return (
        f"threads are measured again: {past.change:+.0%} samples/s"
        f" {now_s - past.time_s:.0f} s ago"
    )


def _blocked(segment: SegmentObservation) -> float:
    """Share of the run time spent off the CPU although a core was free."""
    idle_s = segment.run_s - segment.cpu_s - segment.queued_s
    return max(0.0, ratio(idle_s, segment.run_s))


def _cpu_s(window: Observation, operator: str) -> float:
    """Return a sample's CPU-seconds in one segment, or in all of them for the host."""
    mine = [s for s in window.segments if s.name == operator] or list(window.segments)
    return sum(segment.cpu_s_per_row for segment in mine)
