"""The course of one value during training, a pure function of consumed samples.

A curve is counted in samples, steps or epochs, from the beginning of training. It never
looks at a clock, so it is the same on every rank and after any resume.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol, get_args

from ...engine.plan import Change, Place
from ...errors import NOTE, SpecError, add_note, check
from ...system.printing import name_of

Unit = Literal["samples", "steps", "epochs"]
MAX_CHANGES = 100_000
"""The most changes of a function: a plan stores each change of the batch size."""


def plain(value: float) -> str:
    """Return a number as people write it: 20, not 20.0."""
    whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if whole else value)


def called(method: str, *given: str, unit: Unit = "epochs") -> str:
    """Return the code that makes a curve."""
    said = () if unit == "epochs" else (f"unit={unit!r}",)
    return f"schedule.{method}({', '.join((*given, *said))})"


class Curve(Protocol):
    """One value, as a function of the place where a batch starts."""

    def at(self, place: Place) -> float:
        """Return the value for the batch that starts at `place`."""

    def next_change(self, place: Place) -> Change | None:
        """Return the next change after `place`; None if the value stays."""

    def describe(self) -> Mapping[str, object]:
        """Return a description that identifies the curve: small, JSON."""


@dataclass(frozen=True, slots=True, repr=False)
class Constant:
    """The same value forever."""

    value: float

    def at(self, place: Place) -> float:  # noqa: ARG002 the same everywhere
        return self.value

    def next_change(self, place: Place) -> Change | None:  # noqa: ARG002 there is none
        return None

    def describe(self) -> Mapping[str, object]:
        return {"kind": "constant", "value": self.value}

    def __repr__(self) -> str:
        return plain(self.value)


@dataclass(frozen=True, slots=True, repr=False)
class Stages:
    """A table with a new value from each start on."""

    starts: tuple[float, ...]
    """Ascending; the first start is 0."""
    values: tuple[float, ...]
    unit: Unit

    def __post_init__(self) -> None:
        check_unit(self.unit)
        ascending = all(a < b for a, b in pairwise(self.starts))
        check(
            self.starts and self.starts[0] == 0 and ascending,
            "a table of stages must begin at 0 and go up, got starts"
            f" {list(self.starts)}; write {{0: first, 30: second, ...}}",
        )

    def at(self, place: Place) -> float:
        now = count(place, self.unit)
        passed = sum(threshold(s, self.unit, place) <= now for s in self.starts)
        return self.values[passed - 1]

    def next_change(self, place: Place) -> Change | None:
        now = count(place, self.unit)
        marks = (threshold(start, self.unit, place) for start in self.starts)
        ahead = next((mark for mark in marks if mark > now), None)
        return None if ahead is None else change(self.unit, ahead)

    def describe(self) -> Mapping[str, object]:
        table = [list(each) for each in zip(self.starts, self.values, strict=True)]
        return {"kind": "stages", "unit": self.unit, "table": table}

    def __repr__(self) -> str:
        rows = zip(self.starts, self.values, strict=True)
        table = ", ".join(f"{plain(start)}: {plain(value)}" for start, value in rows)
        return called("steps", f"{{{table}}}", unit=self.unit)


@dataclass(frozen=True, slots=True, repr=False)
class Ramp:
    """A ramp from one value to another, straight or along half a cosine.

    value(p) = first + (last - first) * w(p), p from 0 to 1 between `begin` and `end`,
    with w(p) = p, or w(p) = (1 - cos(pi * p)) / 2; then rounded down to a multiple.
    """

    first: float
    last: float
    begin: float
    end: float
    unit: Unit
    multiple_of: int | None = None
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        check_unit(self.unit)
        check(
            0 <= self.begin < self.end,
            f"a ramp must end after it begins, got begin={self.begin} and"
            f" end={self.end} {self.unit}; begin is 0 or more",
        )
        check(
            self.multiple_of is None or self.multiple_of >= 1,
            f"`multiple_of` must be >= 1, got {self.multiple_of}; 32 is usual",
        )

    def at(self, place: Place) -> float:
        return self._value(count(place, self.unit), place)

    def next_change(self, place: Place) -> Change | None:
        """Find the next change by bisection: a ramp is monotonic."""
        now = count(place, self.unit)
        held = self._value(now, place)
        ahead = range(now + 1, threshold(self.end, self.unit, place) + 1)
        if not ahead or self._value(ahead[-1], place) == held:
            return None
        first = bisect_left(ahead, 1, key=lambda at: self._value(at, place) != held)
        return change(self.unit, ahead[first])

    def describe(self) -> Mapping[str, object]:
        return {
            "kind": self.shape,
            "unit": self.unit,
            "from": [self.begin, self.first],
            "to": [self.end, self.last],
            "multiple_of": self.multiple_of,
        }

    def __repr__(self) -> str:
        given = [plain(self.first), plain(self.last), f"end={plain(self.end)}"]
        given += [f"begin={plain(self.begin)}"] if self.begin else []
        if self.multiple_of is not None:
            given.append(f"multiple_of={self.multiple_of}")
        return called(self.shape, *given, unit=self.unit)

    def _value(self, now: int, place: Place) -> float:
        begin = threshold(self.begin, self.unit, place)
        end = threshold(self.end, self.unit, place)
        part = min(max((now - begin) / (end - begin), 0.0), 1.0) if end > begin else 1.0
        if self.shape == "cosine":
            part = (1.0 - math.cos(math.pi * part)) / 2.0
        value = self.first + (self.last - self.first) * part
        if self.multiple_of is None:
            return value
        rounded = math.floor(value / self.multiple_of + 1e-9) * self.multiple_of
        return max(rounded, self.multiple_of)


@dataclass(frozen=True, slots=True, repr=False)
class Function:
    """A function of the whole number of samples, steps or epochs before a batch."""

    function: Callable[[int], float]
    unit: Unit
    until: int | None = None
    """The count from which the function is no longer called and its value stays."""

    def __post_init__(self) -> None:
        check_unit(self.unit)
        check(
            self.until is None or 0 <= self.until <= MAX_CHANGES,
            f"`until` must be 0 to {MAX_CHANGES} {self.unit}, got {self.until};"
            " count in epochs, or use a ramp",
        )

    def at(self, place: Place) -> float:
        return self._call(self._argument(place))

    def next_change(self, place: Place) -> Change | None:
        if self.until is None:
            raise SpecError(
                "a batch size given by a function needs `until=`, got None; pass the"
                f" place, in {self.unit}, after which the size no longer changes"
            )
        now = self._argument(place)
        held = self._call(now)
        for later in range(now + 1, self.until + 1):
            if self._call(later) != held:
                return change(self.unit, threshold(later, self.unit, place))
        return None

    def describe(self) -> Mapping[str, object]:
        code = getattr(self.function, "__code__", None)
        parts = (code.co_code, code.co_consts, code.co_names) if code else ()
        named = getattr(self.function, "__qualname__", type(self.function).__name__)
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()
        return {
            "kind": "function",
            "unit": self.unit,
            "name": named,
            "code": digest,
            "until": self.until,
        }

    def __repr__(self) -> str:
        until = [] if self.until is None else [f"until={self.until}"]
        return called("function", name_of(self.function), *until, unit=self.unit)

    def _call(self, argument: int) -> float:
        try:
            return self.function(argument)
        except Exception as error:
            add_note(error, f"{NOTE}the schedule: {self!r} at {argument} {self.unit}")
            raise

    def _argument(self, place: Place) -> int:
        now = place.epoch if self.unit == "epochs" else count(place, self.unit)
        return now if self.until is None else min(now, self.until)


def as_curve(name: str, value: object) -> Curve:
    """Return the user's value as a curve.

    Raises:
        SpecError: the value is neither a number nor a curve.
    """
    if isinstance(value, (Constant, Stages, Ramp, Function)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Constant(value)
    if callable(value):
        return Function(value, "epochs")
    raise SpecError(
        f"`{name}` must be a number, a function of the epoch, or one of ps.schedule's"
        f" constant, steps, linear, cosine or function, got {value!r}"
    )


def count(place: Place, unit: Unit) -> int:
    """Return the count of a place; epochs are also counted by their samples."""
    return place.step if unit == "steps" else place.samples


def threshold(value: float, unit: Unit, place: Place) -> int:
    """Return the first count not before `value`; for epochs, in samples."""
    if unit != "epochs":
        return math.ceil(value)
    whole = math.floor(value)
    rest = math.ceil((value - whole) * place.epoch_length - 1e-9)
    return whole * place.epoch_length + rest


def change(unit: Unit, value: int) -> Change:
    """Return the change at a count that `count` returned."""
    return Change("steps" if unit == "steps" else "samples", value)


def check_unit(unit: str) -> None:
    """Raise `SpecError` unless this is a unit."""
    check(
        unit in get_args(Unit), f"`unit` must be one of {get_args(Unit)}, got {unit!r}"
    )
