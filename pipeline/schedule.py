"""Values that change during training: batch and image size, momentum, learning rate.

    ps.schedule.policy("20:128-224,38:224-224,40:288-128")
    ps.schedule.of(
        batch_size=ps.schedule.steps({0: 64, 30: 128, 60: 256}),       # of one rank
        image_size=ps.schedule.linear(128, 224, end=38, multiple_of=32),
        coupling="linear",
    )

Each value takes effect at an exact batch, on every rank, however much is prefetched.
A curve is the course of one value, a pure function of the samples consumed so far. It
never looks at a clock, so it is the same on every rank and after any resume.

Functions get image size and strength from `ctx`. The stamp of the batch holds the other
values; `ps.optim.follow` sets them in an optimiser.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from types import CodeType
from typing import Any, Literal, Protocol, get_args

from ..cache.fingerprint import digest
from ..engine.plan import Change, Place, Setting, Timeline
from ..errors import NOTE, SpecError, add_note, check
from ..system.printing import Printed, name_of

__all__ = [
    "Curve",
    "Scheduled",
    "constant",
    "cosine",
    "function",
    "linear",
    "of",
    "policy",
    "stages",
    "steps",
]


# The course of one value.

Unit = Literal["samples", "steps", "epochs"]
# The most changes of a function: a plan stores each change of the batch size.
MAX_CHANGES = 100_000


def plain(value: float) -> str:
    """Return a number as people write it: 20, not 20.0."""
    whole = isinstance(value, float) and value.is_integer()
    return repr(int(value) if whole else value)


def called(method: str, *arguments: str, unit: Unit = "epochs") -> str:
    """Return the code that makes a curve."""
    keywords = () if unit == "epochs" else (f"unit={unit!r}",)
    return f"schedule.{method}({', '.join((*arguments, *keywords))})"


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
        number = sum(threshold(s, self.unit, place) <= now for s in self.starts)
        return self.values[number - 1]

    def next_change(self, place: Place) -> Change | None:
        now = count(place, self.unit)
        marks = (threshold(start, self.unit, place) for start in self.starts)
        return next((change(self.unit, mark) for mark in marks if mark > now), None)

    def describe(self) -> Mapping[str, object]:
        table = [list(row) for row in zip(self.starts, self.values, strict=True)]
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
        value = self._value(now, place)
        counts = range(now + 1, threshold(self.end, self.unit, place) + 1)
        if not counts or self._value(counts[-1], place) == value:
            return None
        first = bisect_left(counts, 1, key=lambda at: self._value(at, place) != value)
        return change(self.unit, counts[first])

    def describe(self) -> Mapping[str, object]:
        return {
            "kind": self.shape,
            "unit": self.unit,
            "from": [self.begin, self.first],
            "to": [self.end, self.last],
            "multiple_of": self.multiple_of,
        }

    def __repr__(self) -> str:
        arguments = [plain(self.first), plain(self.last), f"end={plain(self.end)}"]
        arguments += [f"begin={plain(self.begin)}"] if self.begin else []
        if self.multiple_of is not None:
            arguments.append(f"multiple_of={self.multiple_of}")
        return called(self.shape, *arguments, unit=self.unit)

    def _value(self, now: int, place: Place) -> float:
        begin = threshold(self.begin, self.unit, place)
        end = threshold(self.end, self.unit, place)
        part = min(max((now - begin) / (end - begin), 0.0), 1.0) if end > begin else 1.0
        if self.shape == "cosine":
            part = (1.0 - math.cos(math.pi * part)) / 2.0
        value = self.first + (self.last - self.first) * part
        if self.multiple_of is None:
            return value
        multiple = math.floor(value / self.multiple_of + 1e-9) * self.multiple_of
        return max(multiple, self.multiple_of)


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
        value = self._call(now)
        for argument in range(now + 1, self.until + 1):
            if self._call(argument) != value:
                return change(self.unit, threshold(argument, self.unit, place))
        return None

    def describe(self) -> Mapping[str, object]:
        function = self.function
        code = getattr(function, "__code__", None)
        # Sets of words, and code within code, print in another way in each process.
        constants = tuple(
            digest(part, "schedule")
            if isinstance(part, CodeType)
            or (isinstance(part, frozenset) and {*map(type, part)} - {int, float})
            else part
            for part in getattr(code, "co_consts", ())
        )
        parts = (code.co_code, constants, code.co_names) if code else ()
        return {
            "kind": "function",
            "unit": self.unit,
            "name": getattr(function, "__qualname__", type(function).__name__),
            "code": hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest(),
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
    match value:
        case Constant() | Stages() | Ramp() | Function():
            return value
        case int() | float() if not isinstance(value, bool):
            return Constant(value)
        case _ if callable(value):
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


# All values.

Coupling = Literal["none", "linear", "sqrt"] | float
EXPONENTS: Mapping[str, float] = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
CURVES = ("image_size", "momentum", "lr_mult", "strength")
# Settings that may be left out.
OPTIONAL = (*CURVES, "base_batch", "end_epoch")
# The first row of a preview: after two columns, the fields of a `Setting`.
HEAD = ("epoch", "step", "batch", "image", "lr x", "momentum", "strength")
MAX_LINES = 61


@dataclass(frozen=True, slots=True, repr=False)
class Scheduled(Printed):
    """The values at each point of training; pass it to a pipeline as `schedule=`.

    `ps.schedule.of` and `ps.schedule.policy` make it.
    """

    batch_size: Curve
    per_rank: bool
    """Whether `batch_size` counts one data-parallel rank rather than all ranks."""
    image_size: Curve | None = None
    momentum: Curve | None = None
    lr_mult: Curve | None = None
    strength: Curve | None = None
    coupling: Coupling = "none"
    base_batch: int | None = None
    """The batch size that the learning rate was chosen for; None: the first."""
    end_epoch: float | None = None
    """The end of the last stage, if given: `preview` goes up to it."""
    ranks: int = 1
    """The ranks of a global batch, if sizes count one of them: see `resolve`."""

    def __post_init__(self) -> None:
        check(
            0 <= self.exponent <= 1,
            "`coupling` must be 'none', 'linear', 'sqrt' or a power from 0 to 1,"
            f" got {self.coupling!r}"
            "; 'linear' scales the learning rate with the batch size",
        )

    @property
    def exponent(self) -> float:
        """lr_mult is (B / B0) to this power, times its own curve; -1: unknown.

        0.5 to 1 are in use: linear, P. Goyal et al., arXiv:1706.02677; a power, S.
        McCandlish et al., arXiv:1812.06162.
        """
        known = EXPONENTS.get(str(self.coupling), self.coupling)
        return -1.0 if isinstance(known, str) else float(known)

    def resolve(self, world: int) -> Scheduled:
        """Return the schedule of global batches on `world` data-parallel ranks."""
        return replace(self, ranks=world if self.per_rank else 1)

    def at(self, place: Place) -> Setting:
        size = self._size(place)
        base = self.base_batch and self.base_batch * self.ranks
        base = base or self._size(Place(0, 0, 0, place.epoch_length))
        own = 1.0 if self.lr_mult is None else self.lr_mult.at(place)
        image = None if self.image_size is None else self.image_size.at(place)
        return Setting(
            global_size=size,
            image_size=None if image is None else whole("image_size", image),
            lr_mult=own * (size / base) ** self.exponent,
            momentum=None if self.momentum is None else self.momentum.at(place),
            strength=None if self.strength is None else self.strength.at(place),
        )

    def next_change(self, place: Place) -> Change | None:
        return self.batch_size.next_change(place)

    def describe(self) -> Mapping[str, object]:
        descriptions = {
            name: curve.describe()
            for name in CURVES
            if (curve := getattr(self, name)) is not None
        }
        descriptions["batch_size"] = multiplied(self.batch_size, self.ranks)
        base = self.base_batch and self.base_batch * self.ranks
        coupling = {"exponent": self.exponent, "base_batch": base}
        return {
            "kind": "scheduled",
            **descriptions,
            **(coupling if self.exponent else {}),
        }

    def _size(self, place: Place) -> int:
        return whole("batch_size", self.batch_size.at(place)) * self.ranks

    def preview(
        self, samples: int, *, world: int = 1, epochs: int | None = None
    ) -> str:
        """Return a table of the values and when they take effect; print it.

        Args:
            samples: number of samples in an epoch.
            world: number of data-parallel ranks.
            epochs: number of epochs in the table; None: up to the end of the schedule,
                or to the epoch after its last change.
        """
        schedule = self.resolve(world)
        timeline = Timeline(schedule, samples, drop_last=False)
        curves = filter(None, (getattr(self, name) for name in CURVES))
        # The first steps of each run, of each further value, and of each epoch.
        steps = {run.step for run in timeline.runs}
        steps.update(*(changes(curve, timeline) for curve in curves))
        last = timeline.find(max(steps))[0].place.epoch
        end = int(epochs or self.end_epoch or last + 1)
        steps.update(timeline.place(epoch, 0).step for epoch in range(end))
        total = timeline.place(end, 0).step
        lines: list[tuple[str, ...]] = [HEAD]
        for step in sorted(step for step in steps if step < total):
            place = timeline.find(step)[0].place
            cells = tuple(
                "-" if value is None else f"{value:.6g}"
                for value in astuple(schedule.at(place))
            )
            if cells != lines[-1][2:]:
                lines.append((f"{place.samples / samples:g}", f"{place.step}", *cells))
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 : -1] = [("...",) * len(HEAD)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        rows = ("  ".join(map(str.rjust, row, widths)).rstrip() for row in lines)
        return "\n".join([*rows, f"{total} steps in {end} epochs of {samples} samples"])

    def __repr__(self) -> str:
        """Return the code that makes it, a line a setting."""
        size = "batch_size" if self.per_rank else "global_batch_size"
        arguments = [f"{size}={self.batch_size!r}"]
        values = {name: getattr(self, name) for name in OPTIONAL}
        arguments += [f"{name}={v!r}" for name, v in values.items() if v is not None]
        arguments += [] if self.coupling == "none" else [f"coupling={self.coupling!r}"]
        if len(arguments) == 1:
            return f"schedule.of({arguments[0]})"
        return "\n".join(["schedule.of(", *(f"    {line}," for line in arguments), ")"])


def changes(curve: Curve, timeline: Timeline) -> Iterator[int]:
    """Yield the first steps of a curve's further values; of a smooth ramp, its end."""
    length = timeline.epoch_length
    place = Place(0, 0, 0, length)
    if isinstance(curve, Function) and (curve.until is None or curve.unit != "epochs"):
        return  # each step of a function may be a change
    if isinstance(curve, Ramp) and curve.multiple_of is None:
        curve = Stages((0, curve.end), (curve.first, curve.last), curve.unit)
    while (known := curve.next_change(place)) is not None:
        place = Place(*divmod(known.value, length), known.value, length)
        epoch, position = divmod(known.value - 1, length)
        batch_before = timeline.place(epoch, timeline.batch_of(epoch, position))
        yield known.value if known.unit == "steps" else batch_before.step + 1


def multiplied(curve: Curve, factor: int) -> Mapping[str, object]:
    """Describe a curve times a factor, as a curve of the same kind if possible."""
    match curve:
        case Constant(value):
            curve = Constant(value * factor)
        case Stages(starts, values, unit):
            curve = Stages(starts, tuple(value * factor for value in values), unit)
        case Ramp(first, last, multiple_of=step) if step is not None:
            curve = replace(
                curve,
                first=first * factor,
                last=last * factor,
                multiple_of=step * factor,
            )
        case _ if factor != 1:
            return {**curve.describe(), "times": factor}
    return curve.describe()


def whole(name: str, value: float) -> int:
    """Return a size as an int, or raise `SpecError`."""
    check(
        value == int(value) and value >= 1,
        f"`{name}` must be a whole number >= 1 everywhere, got {value!r};"
        " give a ramp `multiple_of=`",
    )
    return int(value)


# What makes curves and schedules.


def constant(value: float) -> Curve:
    """Return the curve that is `value` throughout."""
    return Constant(value)


def steps(table: Mapping[float, float], unit: Unit = "epochs") -> Curve:
    """Return the curve that takes another value from each start on.

    Args:
        table: `{start: value}`; the first start is 0.
        unit: the unit of the starts: "samples", "steps" or "epochs".
    """
    starts = sorted(table)
    return Stages(tuple(starts), tuple(table[start] for start in starts), unit)


def linear(
    first: float,
    last: float,
    *,
    end: float,
    begin: float = 0,
    unit: Unit = "epochs",
    multiple_of: int | None = None,
) -> Curve:
    """Return the curve that goes straight from one value to another.

    Args:
        first: the value up to `begin`.
        last: the value from `end` on.
        end: in `unit`.
        begin: in `unit`.
        unit: "samples", "steps" or "epochs"; fractions of an epoch are allowed.
        multiple_of: round down to a multiple of this; sizes need it.
    """
    return Ramp(first, last, begin, end, unit=unit, multiple_of=multiple_of)


def cosine(
    first: float,
    last: float,
    *,
    end: float,
    begin: float = 0,
    unit: Unit = "epochs",
    multiple_of: int | None = None,
) -> Curve:
    """Return the curve that goes from one value to another along half a cosine.

    Its arguments are those of `linear`. I. Loshchilov, F. Hutter, arXiv:1608.03983.
    """
    return Ramp(
        first, last, begin, end, unit=unit, multiple_of=multiple_of, shape="cosine"
    )


def function(
    f: Callable[[int], float], unit: Unit = "epochs", *, until: int | None = None
) -> Curve:
    """Return the curve `f(n)`, after n samples, steps or epochs.

    Args:
        f: a pure function: it returns the same on every rank and at every call.
        unit: the unit of n.
        until: the count after which the value stays; required for a batch size.
    """
    return Function(f, unit, until)


def stages(
    *rows: Mapping[str, Any], unit: Unit = "epochs", **settings: Any
) -> Scheduled:
    """Return the schedule of a table of stages.

    Args:
        *rows: one row per stage: `{"until": 20, "batch_size": 224, "image_size": 128,
            ...}`; a value that a row leaves out stays what it was in the row before.
            The last row holds forever.
        unit: the unit of `until`.
        **settings: as `of` takes them.
    """
    starts = [0.0, *(float(row["until"]) for row in rows[:-1])]
    names = {name for row in rows for name in row} - {"until"}
    curves: dict[str, Any] = {}
    for name in sorted(names):
        check(
            rows and name in rows[0],
            f"the first stage must set `{name}`, because a later stage does; got"
            f" {rows[:1]!r}",
        )
        table, value = {}, None
        for start, row in zip(starts, rows, strict=True):
            value = row.get(name, value)
            table[start] = value
        curves[name] = steps(table, unit)
    return of(**curves, **settings)


def of(
    batch_size: float | Curve | None = None,
    *,
    global_batch_size: float | Curve | None = None,
    image_size: float | Curve | None = None,
    momentum: float | Curve | None = None,
    lr_mult: float | Curve | None = None,
    strength: float | Curve | None = None,
    coupling: Coupling = "none",
    base_batch: int | None = None,
    end_epoch: float | None = None,
) -> Scheduled:
    """Return a schedule.

    Args:
        batch_size: samples in a batch of one data-parallel rank.
        global_batch_size: samples in a batch of all ranks; use it instead of
            `batch_size`.
        image_size: side in pixels: `ctx.image_size`.
        momentum: momentum of the optimiser, 0 to 1.
        lr_mult: factor on the learning rate.
        strength: strength of augmentation: `ctx.strength`.
        coupling: factor on the learning rate for a batch B instead of the base batch
            B0: "linear" B / B0, "sqrt" (B / B0) ** 0.5, a power a (B / B0) ** a.
        base_batch: B0, in the same terms as the batch size; None: the first batch size.
        end_epoch: where training ends; `preview` shows what happens up to there.

    Raises:
        SpecError: there is no batch size or there are two, or a value is neither a
            number nor a curve.
    """
    size = batch_size if global_batch_size is None else global_batch_size
    check(
        (batch_size is None) != (global_batch_size is None),
        "a schedule needs `batch_size`, of one rank, or `global_batch_size`, of"
        f" all; got {batch_size!r} and {global_batch_size!r}",
    )
    values = zip(CURVES, (image_size, momentum, lr_mult, strength), strict=True)
    curves: dict[str, Any] = {n: as_curve(n, v) for n, v in values if v is not None}
    return Scheduled(
        as_curve("batch_size", size),
        global_batch_size is None,
        **curves,
        coupling=coupling,
        base_batch=base_batch,
        end_epoch=end_epoch,
    )


def policy(
    text: str,
    *,
    coupling: Coupling = "none",
    momentum: float | Curve | None = None,
    lr_mult: float | Curve | None = None,
) -> Scheduled:
    """Return the schedule of a policy string: `"20:128-224,38:224-224,40:288-128"`.

    This is the format of ModelArts MoXing. Up to epoch 20, the example has images of
    128 px in batches of 224, up to 38 of 224 px in batches of 224, and up to 40 of 288
    px in batches of 128.

    Args:
        text: stages divided by commas, each `end epoch : image size - batch size of one
            rank`. The last stage also holds after its end.
        coupling: coupling of the learning rate to the batch size, as in `of`.
        momentum: momentum of the optimiser.
        lr_mult: factor on the learning rate, times that of the coupling.

    Raises:
        SpecError: `text` is not a policy string, or its epochs do not increase.
    """
    rows: list[dict[str, int]] = []
    for part in str(text).split(","):
        match = STAGE.fullmatch(part)
        if match is None:
            raise SpecError(f"{part!r} is no stage of a policy; {EXAMPLE}")
        end, image, batch = map(int, match.groups())
        check(
            end > (rows[-1]["until"] if rows else 0) and min(image, batch) >= 1,
            f"the stages of a policy must end one after the other, with sizes of 1"
            f" or more, got {part.strip()!r} in {text!r}; {EXAMPLE}",
        )
        rows.append({"until": end, "batch_size": batch, "image_size": image})
    return stages(
        *rows,
        coupling=coupling,
        momentum=momentum,
        lr_mult=lr_mult,
        end_epoch=rows[-1]["until"],
    )


STAGE = re.compile(r"\s*(\d+)\s*:\s*(\d+)\s*-\s*(\d+)\s*")
EXAMPLE = 'write "END_EPOCH:IMAGE-BATCH,...", as in "20:128-224,38:224-224"'
