"""Threads or processes? What is measured, and what follows from it. Pure.

Threads cost less: one copy of the data, rows written in place. ProcessPool have a GIL
each. So a segment on threads is tried on processes where three things are measured
together: the trainer waits for data, cores stand idle, and the GIL is held nearly
always, or workers that compute are blocked part of the time. A segment on processes is
tried on threads where nothing is known of them. A trial is judged by the samples the
trainer gets a second, before and after, and what came of it is remembered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import sqrt
from statistics import median
from typing import Literal

__all__ = [
    "MIN_WAIT",
    "Advice",
    "Contender",
    "Evidence",
    "Past",
    "Proposal",
    "Trial",
    "Verdict",
    "other",
    "propose",
]

Contender = Literal["thread", "process"]
"""The kinds of workers between which a segment is moved while it runs."""

NAMES = {"thread": "threads", "process": "processes"}

MIN_WAIT = 0.05
"""Share of its time that the trainer waits, from which faster loading would be felt."""
MIN_CPU_SHARE = 0.2
"""Share of all segments' CPU from which a segment can be what holds the GIL."""
BUSY_SHARE = 0.85
"""Share of the cores allowed in use, from which none is to spare."""
HELD_SHARE = 0.45
"""Share of moments with the GIL held, from which threads stand in each other's way."""
JOSTLED = (0.12, 0.6)
"""Share of the time blocked that may come of short calls, each of which lets go of the
GIL and has to get it back: the probe, which seldom meets it held, does not see that.
Where it is more, they wait for something else."""
GAIN = 0.05
"""What processes must gain, in samples a second, for what they cost in memory."""
LOSS = 0.03
"""What threads may lose against processes, for what they save."""
MIN_AFTER = 2
"""Windows that a trial lasts at least: one may be a hiccup."""
MAX_AFTER = 6
STANDARD_ERRORS = 2.0
PRIOR_SD = 0.03
"""Noise of one window, relative, before there are windows to tell: counts as
`PRIOR_WINDOWS` of them."""
PRIOR_WINDOWS = 2
RETRY_S = 120.0
"""A trial is repeated after so long; each time after twice as long."""


@dataclass(frozen=True, slots=True)
class Past:
    """What came of the last trial of the other kind."""

    change: float
    """In samples a second, relative, as if it had been from this kind to the other."""
    trials: int
    """That there were."""
    time_s: float
    """When it was over."""

    @property
    def due_s(self) -> float:
        """When it may be tried again."""
        return self.time_s + RETRY_S * 2.0 ** (self.trials - 1)

    def reversed(self) -> Past:
        """The same, seen from the other kind."""
        return replace(self, change=1.0 / (1.0 + self.change) - 1.0)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was measured of one segment, over some windows under the same workers."""

    kind: Contender
    time_s: float
    wait_share: float
    """Exposed wait as a share of the trainer's step, 0 to 1."""
    cpu_share: float
    """This segment's share of the CPU time of all segments, 0 to 1."""
    used_cores: float
    """Cores that this process and its workers keep busy."""
    allowed_cores: float
    gil_held: float | None = None
    """Share of moments with the GIL held; None where it was not looked at."""
    past: Past | None = None
    blocked: float = 0.0
    """Share of its workers' time in the functions, 0 to 1, that was spent on no CPU,
    though cores were free."""


class Advice(Enum):
    """What to do about a segment."""

    STAY = "stay"
    PROBE = "probe"
    """Look at the GIL, then ask again."""
    TRY = "try"
    """Try the other kind."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What to do, and why, with figures."""

    advice: Advice
    reason: str


def other(kind: Contender) -> Contender:
    """Return the kind that is not `kind`."""
    return "process" if kind == "thread" else "thread"


def propose(seen: Evidence) -> Proposal:
    """Say what follows from the evidence: stay, look at the GIL, or try the other."""
    reason = _against(seen)
    if reason:
        return Proposal(Advice.STAY, reason)
    return _of_threads(seen) if seen.kind == "thread" else _of_processes(seen)


def _against(seen: Evidence) -> str:
    """Why there is nothing to win by any move; empty where there may be."""
    if seen.wait_share < MIN_WAIT:
        return f"the trainer waits only {seen.wait_share:.1%} of its step for data"
    if seen.cpu_share < MIN_CPU_SHARE:
        return f"it takes only {seen.cpu_share:.0%} of the CPU time of loading"
    past = seen.past
    if past is not None and seen.time_s < past.due_s:
        return f"{NAMES[other(seen.kind)]} were tried: {past.change:+.0%} samples/s"
    return ""


def _of_threads(seen: Evidence) -> Proposal:
    cores = f"{seen.used_cores:.2f} of {seen.allowed_cores:g} cores are used"
    if seen.used_cores >= BUSY_SHARE * seen.allowed_cores:
        return Proposal(Advice.STAY, f"{cores}: none is left for processes to use")
    if seen.gil_held is None:
        return Proposal(Advice.PROBE, f"{cores}: is it the GIL?")
    held = f"the GIL is held {seen.gil_held:.0%} of the time"
    low, high = JOSTLED
    if seen.gil_held < HELD_SHARE and low <= seen.blocked <= high:
        blocked = f"workers that compute are blocked {seen.blocked:.0%} of the time"
        text = f"{cores}, and {blocked}: threads may be in one another's way"
        return Proposal(Advice.TRY, text)
    if seen.gil_held < HELD_SHARE:
        return Proposal(Advice.STAY, f"{held}: threads do not wait for it")
    text = f"{held} while {cores}: processes may use the rest"
    return Proposal(Advice.TRY, text)


def _of_processes(seen: Evidence) -> Proposal:
    if seen.past is None:
        text = "threads would take less memory, and how fast they are is not known"
    else:
        text = (
            f"threads are measured again: {seen.past.change:+.0%} samples/s "
            f"{seen.time_s - seen.past.time_s:.0f} s ago"
        )
    return Proposal(Advice.TRY, text)


class Verdict(Enum):
    """What a trial has come to."""

    MORE = "more"
    """Not yet to be told from noise."""
    KEEP = "keep"
    BACK = "back"


@dataclass(frozen=True, slots=True)
class Trial:
    """A move on trial: samples a second, by window, before it and since."""

    new: Contender
    before: tuple[float, ...]
    """At least one."""
    after: tuple[float, ...] = ()

    def seen(self, rows_per_s: float) -> Trial:
        """The trial with one more window."""
        return replace(self, after=(*self.after, rows_per_s))

    @property
    def rates(self) -> tuple[float, float]:
        """Samples a second before and after: medians, as a window may hold a pause."""
        return median(self.before), median(self.after)

    @property
    def change(self) -> float:
        """In samples a second, relative."""
        before, after = self.rates
        return after / before - 1.0

    @property
    def error(self) -> float:
        """The standard error of `change`."""
        shares = []
        for rates in (self.before, self.after):
            middle = median(rates)
            scatter = sum((rate / middle - 1.0) ** 2 for rate in rates)
            variance = (PRIOR_WINDOWS * PRIOR_SD**2 + scatter) / (
                PRIOR_WINDOWS + len(rates) - 1
            )
            shares.append(variance / len(rates))
        return (1.0 + self.change) * sqrt(sum(shares))

    def verdict(self) -> Verdict:
        """Judge by the windows seen so far."""
        if len(self.after) < MIN_AFTER:
            return Verdict.MORE
        margin = self.change - (GAIN if self.new == "process" else -LOSS)
        noisy = abs(margin) < STANDARD_ERRORS * self.error
        if noisy and len(self.after) < MAX_AFTER:
            return Verdict.MORE
        return Verdict.KEEP if margin >= 0 else Verdict.BACK
