"""The batches of all epochs as a few runs of equal size: each one found in O(log).

What a batch is like is a pure function of its place, never of a clock. A schedule
answers two questions. `at`: which setting applies to the batch that starts here?
`next_change`: until where, at least, does its global size hold? The second makes
lengths and random access exact without walking over the steps. Whatever does not change
the number of batches (image size, learning rate, momentum) may differ at every step
without announcing a change.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal, NamedTuple, Protocol

from ...errors import check


@dataclass(frozen=True, slots=True)
class Setting:
    """What applies to one global batch.

    Raises:
        SpecError: a value is out of its range.
    """

    global_size: int
    """Samples over all ranks, >= 1."""
    image_size: int | None = None
    """Pixels per side, >= 1; None if the pipeline's own operators decide."""
    lr_mult: float = 1.0
    """Factor on the learning rate, >= 0."""
    momentum: float | None = None
    """0 to 1; None leaves the optimiser's own."""
    strength: float | None = None
    """Strength of augmentation, >= 0; None if nothing sets it."""

    def __post_init__(self) -> None:
        size, momentum, strength = self.image_size, self.momentum, self.strength
        for kept, rule in (
            (
                self.global_size >= 1,
                f"`global_size` must be >= 1, got {self.global_size}",
            ),
            (
                size is None or size >= 1,
                f"`image_size` must be >= 1 pixel or None, got {size}",
            ),
            (self.lr_mult >= 0, f"`lr_mult` must be >= 0, got {self.lr_mult}"),
            (
                momentum is None or 0 <= momentum <= 1,
                f"`momentum` must be 0 to 1 or None, got {momentum}",
            ),
            (
                strength is None or strength >= 0,
                f"`strength` must be >= 0 or None, got {strength}",
            ),
        ):
            check(kept, f"{rule}; correct the batch size or the schedule")


class Place(NamedTuple):
    """Where a batch starts: all that a schedule may depend on."""

    epoch: int
    position: int
    """Positions of the epoch before it."""
    step: int
    """Batches before it, over all epochs."""
    epoch_length: int
    """Positions in every epoch."""

    @property
    def samples(self) -> int:
        """Positions before it, over all epochs, including dropped tails."""
        return self.epoch * self.epoch_length + self.position


@dataclass(frozen=True, slots=True)
class Change:
    """The earliest place at which another global size may apply."""

    unit: Literal["samples", "steps"]
    """As `Place.samples` or `Place.step` counts. Epoch e is sample e * epoch_length."""
    value: int


class Schedule(Protocol):
    """Decides the setting of each batch.

    It is pure, the same on every rank, and changes the global size finitely many times.
    """

    def at(self, place: Place) -> Setting:
        """Return what applies to the batch that starts at `place`."""

    def next_change(self, place: Place) -> Change | None:
        """Return how far beyond `place` the global size holds; None: without end.

        The first batch at or after the change has the size that `at` returns there,
        even if it is the same. The next change is then requested from there.
        """

    def describe(self) -> Mapping[str, object]:
        """Return what identifies it: small, JSON, global sizes only."""


@dataclass(frozen=True, slots=True)
class ConstantSchedule:
    """The same setting for every batch."""

    setting: Setting

    def at(self, place: Place) -> Setting:  # noqa: ARG002 - the same everywhere
        return self.setting

    def next_change(self, place: Place) -> Change | None:  # noqa: ARG002 - there is none
        return None

    def describe(self) -> Mapping[str, object]:
        setting = asdict(self.setting)
        if self.setting.strength is None:  # states from before it existed lack it
            del setting["strength"]
        return {"kind": "constant", **setting}


class Span(NamedTuple):
    """The positions of one global batch."""

    place: Place
    stop: int
    """One past its last position; it has `stop - place.position` samples."""
    size: int
    """The global size that applies; an epoch's tail has fewer samples."""

    @property
    def n_true(self) -> int:
        """Number of the epoch's samples in it."""
        return self.stop - self.place.position


@dataclass(frozen=True, slots=True)
class SettingRun:
    """Batches of one global size: from one batch up to the next run, or without end.

    Attributes `epoch`, `batch`, `position` and `step` say where its first batch starts.
    """

    epoch: int
    batch: int
    position: int
    step: int
    size: int
    epoch_length: int
    here: int
    """Batches in its first epoch, from its first one to the epoch's end."""
    per_epoch: int
    """Batches in each later epoch."""

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, batch) of `step`."""
        beyond = step - self.step - self.here
        if beyond < 0:
            return self.epoch, self.batch + self.here + beyond
        epochs, batch = divmod(beyond, self.per_epoch)
        return self.epoch + 1 + epochs, batch

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or would start."""
        if epoch == self.epoch:
            ahead = batch - self.batch
            step, position = self.step + ahead, self.position + ahead * self.size
        else:
            before = self.here + (epoch - self.epoch - 1) * self.per_epoch
            step, position = self.step + before + batch, batch * self.size
        return Place(epoch, position, step, self.epoch_length)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch` of `epoch`."""
        place = self.place(epoch, batch)
        return Span(
            place, min(place.position + self.size, self.epoch_length), self.size
        )

    def until(self, change: Change) -> tuple[int, int]:
        """Return (epoch, batch) of the first batch at or after `change`.

        The place after an epoch's last whole batch counts as well if samples are left
        there: they are dropped if this size stays, but a smaller batch may still fit.
        """
        if change.unit == "steps":
            # The batch after the last one before the change.
            epoch, batch = self.locate(change.value - 1)
            batch += 1
        else:
            epoch, position = divmod(change.value, self.epoch_length)
            is_first = epoch == self.epoch
            first, start = (self.batch, self.position) if is_first else (0, 0)
            batch = first - (start - position) // self.size
        inside = self.place(epoch, batch).position < self.epoch_length
        return (epoch, batch) if inside else (epoch + 1, 0)


class Timeline:
    """All batches of all epochs under one schedule. Immutable; ignores ranks and tails.

    Args:
        schedule: provides sizes and where they change.
        epoch_length: positions in an epoch, >= 1.
        drop_last: whether an epoch ends with its last whole batch.

    Raises:
        SpecError: an epoch would have no batch, or the schedule contradicts itself.
    """

    def __init__(
        self, schedule: Schedule, epoch_length: int, *, drop_last: bool
    ) -> None:
        self.epoch_length = epoch_length
        self.drop_last = drop_last
        self.runs = self._all_runs(schedule)
        self._steps = [run.step for run in self.runs]
        self._starts = [(run.epoch, run.batch) for run in self.runs]

    def find(self, step: int) -> tuple[Span, int]:
        """Return the positions of the global `step`, and its number in its epoch."""
        run = self.runs[bisect_right(self._steps, step) - 1]
        epoch, batch = run.locate(step)
        return run.span(epoch, batch), batch

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or where the last one ends."""
        place = self.run_at(epoch, batch).place(epoch, batch)
        end = min(place.position, self.epoch_length)
        return place._replace(position=end)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch`, which `epoch` must have."""
        return self.run_at(epoch, batch).span(epoch, batch)

    def batch_of(self, epoch: int, position: int) -> int:
        """Return the batch of `epoch` that holds `position`, or the epoch's end."""
        steps = self.steps_in(epoch)
        batch = bisect_right(
            range(steps), position, key=lambda b: self.span(epoch, b).place.position
        )
        inside = self.span(epoch, max(batch - 1, 0)).stop
        return max(batch - 1, 0) if position < inside else steps

    def run_at(self, epoch: int, batch: int) -> SettingRun:
        """Return the run, of batches of one global size, that holds this batch."""
        return self.runs[bisect_right(self._starts, (epoch, batch)) - 1]

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`."""
        last = self.runs[-1]
        if last.epoch > epoch:
            last = self.runs[bisect_right(self._starts, (epoch, math.inf)) - 1]
        return last.batch + last.here if last.epoch == epoch else last.per_epoch

    def _all_runs(self, schedule: Schedule) -> tuple[SettingRun, ...]:
        place, batch = Place(0, 0, 0, self.epoch_length), 0
        runs: list[SettingRun] = []
        while True:
            run = self._run(place, batch, schedule.at(place).global_size)
            runs.append(run)
            change = schedule.next_change(place)
            if change is None:
                return tuple(runs)
            now = place.samples if change.unit == "samples" else place.step
            check(
                change.value > now,
                f"`next_change` must lie beyond {now} {change.unit}, got {change.value}"
                "; return the next change after `place`, or None if there is none",
            )
            epoch, batch = run.until(change)
            place = run.place(epoch, batch)

    def _run(self, place: Place, batch: int, size: int) -> SettingRun:
        per_epoch = self._count(self.epoch_length, size)
        check(
            per_epoch,
            f"with drop_last=True an epoch of {self.epoch_length} samples has no batch"
            f" of {size} samples, the size from epoch {place.epoch} on; lower the batch"
            " size or pass drop_last=False",
        )
        here = self._count(self.epoch_length - place.position, size)
        epoch, position, step, length = place
        return SettingRun(epoch, batch, position, step, size, length, here, per_epoch)

    def _count(self, samples: int, size: int) -> int:
        return samples // size if self.drop_last else -(-samples // size)
