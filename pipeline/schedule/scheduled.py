"""All values that change during training, and their coupling."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Literal

from ...engine.plan import Change, Place, Setting
from ...engine.plan.timeline import Timeline
from ...errors import check
from ...system.printing import Printed
from .curves import Constant, Curve, Ramp, Stages

Coupling = Literal["none", "linear", "sqrt"] | float
EXPONENTS: Mapping[str, float] = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
OPTIONAL = ("image_size", "momentum", "lr_mult", "strength", "base_batch", "end_epoch")
"""Settings that may be left out."""


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
        if isinstance(self.coupling, str):
            return EXPONENTS.get(self.coupling, -1.0)
        return float(self.coupling)

    def resolve(self, world: int) -> ResolvedSchedule:
        """Return the schedule of global batches on `world` data-parallel ranks."""
        return ResolvedSchedule(self, world if self.per_rank else 1)

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
        end = int(epochs or self.end_epoch or timeline.runs[-1].epoch + 1)
        total = timeline.place(end, 0).step
        lines: list[tuple[str, ...]] = []
        before: tuple[str, ...] | None = None
        # The start of each run and each epoch.
        starts = {(run.epoch, run.batch) for run in timeline.runs if run.epoch < end}
        starts |= {(epoch, 0) for epoch in range(end)}
        for epoch, batch in sorted(starts):
            place = timeline.place(epoch, batch)
            values = astuple(schedule.at(place))
            shown = tuple("-" if value is None else f"{value:.6g}" for value in values)
            if shown != before:
                lines.append((f"{place.samples / samples:g}", f"{place.step}", *shown))
            before = shown
        if len(lines) > MAX_LINES:
            lines[MAX_LINES - 1 : -1] = [("...",) * len(HEAD)]
        widths = [max(map(len, column)) for column in zip(HEAD, *lines, strict=True)]
        rows = (
            "  ".join(map(str.rjust, row, widths)).rstrip() for row in (HEAD, *lines)
        )
        return "\n".join([*rows, f"{total} steps in {end} epochs of {samples} samples"])

    def __repr__(self) -> str:
        """Return the code that makes it, a line a setting."""
        size = "batch_size" if self.per_rank else "global_batch_size"
        given = [f"{size}={self.batch_size!r}"]
        for name in OPTIONAL:
            value = getattr(self, name)
            given += [] if value is None else [f"{name}={value!r}"]
        given += [] if self.coupling == "none" else [f"coupling={self.coupling!r}"]
        if len(given) == 1:
            return f"schedule.of({given[0]})"
        return "\n".join(["schedule.of(", *(f"    {each}," for each in given), ")"])


@dataclass(frozen=True, slots=True)
class ResolvedSchedule:
    """A `Schedule` of global sizes, from which a plan is made."""

    scheduled: Scheduled
    factor: int
    """The number of ranks, if sizes count one rank."""

    def at(self, place: Place) -> Setting:
        said = self.scheduled
        size = self._size(place)
        own = 1.0 if said.lr_mult is None else said.lr_mult.at(place)
        image = None if said.image_size is None else said.image_size.at(place)
        return Setting(
            global_size=size,
            image_size=None if image is None else whole("image_size", image),
            lr_mult=own * (size / self._base(place)) ** said.exponent,
            momentum=None if said.momentum is None else said.momentum.at(place),
            strength=None if said.strength is None else said.strength.at(place),
        )

    def next_change(self, place: Place) -> Change | None:
        return self.scheduled.batch_size.next_change(place)

    def describe(self) -> Mapping[str, object]:
        said = self.scheduled
        curves = {
            "image_size": said.image_size,
            "momentum": said.momentum,
            "lr_mult": said.lr_mult,
            "strength": said.strength,
        }
        described = {n: c.describe() for n, c in curves.items() if c is not None}
        described["batch_size"] = multiplied(said.batch_size, self.factor)
        base = said.base_batch and said.base_batch * self.factor
        coupled = {"exponent": said.exponent, "base_batch": base}
        return {
            "kind": "scheduled",
            **described,
            **(coupled if said.exponent else {}),
        }

    def _base(self, place: Place) -> int:
        given = self.scheduled.base_batch
        if given is not None:
            return given * self.factor
        return self._size(Place(0, 0, 0, place.epoch_length))

    def _size(self, place: Place) -> int:
        return whole("batch_size", self.scheduled.batch_size.at(place)) * self.factor


def multiplied(curve: Curve, factor: int) -> Mapping[str, object]:
    """Describe a curve times a factor, as a curve of the same kind if possible."""
    if isinstance(curve, Constant):
        curve = Constant(curve.value * factor)
    elif isinstance(curve, Stages):
        curve = replace(curve, values=tuple(v * factor for v in curve.values))
    elif isinstance(curve, Ramp) and curve.multiple_of is not None:
        first, last, step = curve.first, curve.last, curve.multiple_of
        curve = replace(
            curve, first=first * factor, last=last * factor, multiple_of=step * factor
        )
    elif factor != 1:
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


# A schedule as a table, to check before training.

MAX_LINES = 60
# After the first two, the fields of a `Setting`.
HEAD = ("epoch", "step", "batch", "image", "lr x", "momentum", "strength")
