"""The rate for each number of workers tried, and which number to try next. Pure."""

from __future__ import annotations

from math import inf, sqrt

from ...engine.observe.observation import KnobName, ratio
from ..situation import DecisionOutcome
from ..thresholds import WORTH

WORKERS: KnobName = "num_parallel_workers"
DRIFT = 1.2
"""A rate this many times higher or lower than measured for the same number is of
another load, or the measured one lived on stock."""
LINEAR = 0.8
"""Share of the expected gain from more workers above which none hinders another."""
FREE = 0.9
"""The same above which workers are sure not to hinder each other: if still more then
bring nothing, they wait in line for something, and no number between brings more.
Workers that hinder one another enough for that show it earlier (N. Gunther's law)."""
NOTHING = 0.1
"""Share of the expected gain from more workers below which they brought nothing."""
FINE = 1.25
"""Numbers closer than this factor cannot be told apart by measurement."""

Curve = tuple[tuple[int, float], ...]
"""(workers, rows per second) as measured, by workers."""


def remembered(
    curves: dict[str, Curve], outcomes: tuple[DecisionOutcome, ...]
) -> dict[str, Curve]:
    """Add the results of changed worker counts; a gain elsewhere drops a curve."""
    moved = {o.decision.operator for o in outcomes if o.decision.knob == WORKERS}
    if any(o.kept and faster(o) for o in outcomes):
        curves = {name: curve for name, curve in curves.items() if name in moved}
    for outcome in outcomes:
        if outcome.decision.knob != WORKERS:
            continue
        name = outcome.decision.operator
        points = dict(curves.get(name, ()))
        points[int(outcome.decision.old)] = outcome.before.rows_per_s
        points[int(outcome.decision.new)] = outcome.after.rows_per_s
        curves[name] = tuple(sorted(points.items()))
    return curves


def faster(outcome: DecisionOutcome) -> bool:
    """Whether the rate grew by enough to be worth a change."""
    return outcome.after.rows_per_s > (1.0 + WORTH) * outcome.before.rows_per_s


def is_steady(curve: Curve, workers: int, rate: float) -> bool:
    """Whether the remembered rate of this many workers agrees with the present one."""
    then = dict(curve).get(workers, rate)
    return rate <= 0 or then <= 0 or 1 / DRIFT <= rate / then <= DRIFT


def efficiency(curve: Curve, workers: int) -> float:
    """Gain in rate over gain in workers, from the next fewer tried; 1 if unknown."""
    rates = dict(curve)
    fewer = [count for count in rates if count < workers]
    if workers not in rates or not fewer:
        return 1.0
    least = max(fewer)
    gained = rates[workers] / rates[least] - 1.0 if rates[least] > 0 else inf
    return gained / (workers / least - 1.0)


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
    found = [count for count in between if count not in rates]
    return found[0] if found else None
