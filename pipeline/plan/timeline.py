"""The batches of all epochs as a few runs of equal size: each one found in O(log)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import SpecError
from .schedule import Change, Place, Schedule

__all__ = ["Run", "Span", "Timeline"]


class Span(NamedTuple):
    """The positions of one global batch."""

    place: Place
    stop: int
    """One past its last position; `stop - place.position` samples are in it."""
    size: int
    """The global size in force: an epoch's tail has fewer samples than that."""

    @property
    def n_true(self) -> int:
        """Samples of the epoch that are in it."""
        return self.stop - self.place.position


@dataclass(frozen=True, slots=True)
class Run:
    """Batches of one global size: from one batch up to the next run, or for ever.

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

    def batches_in(self, epoch: int) -> int:
        """Return how many batches `epoch` has if it ends in this run."""
        return self.batch + self.here if epoch == self.epoch else self.per_epoch

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

    def until(self, change: Change) -> tuple[int, int]:
        """Return (epoch, batch) of the first batch at or after `change`.

        The place after an epoch's last whole batch counts as well where samples are
        left there: they are dropped if this size stays, but a smaller one may still
        fit.
        """
        if change.unit == "steps":
            return self._until_step(change.value)
        epoch, position = divmod(change.value, self.epoch_length)
        first, start = (self.batch, self.position) if epoch == self.epoch else (0, 0)
        batch = first - (start - position) // self.size
        return self._or_next_epoch(epoch, batch)

    def _until_step(self, step: int) -> tuple[int, int]:
        if step <= self.step + self.here:
            return self._or_next_epoch(self.epoch, self.batch + step - self.step)
        epoch, batch = self.locate(step)
        if batch == 0:
            return self._or_next_epoch(epoch - 1, self.per_epoch)
        return epoch, batch

    def _or_next_epoch(self, epoch: int, batch: int) -> tuple[int, int]:
        inside = self.place(epoch, batch).position < self.epoch_length
        return (epoch, batch) if inside else (epoch + 1, 0)


class Timeline:
    """All batches of all epochs under one schedule. Immutable; ranks and tails aside.

    Args:
        schedule: gives sizes and where they change.
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

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, batch) of the global `step`."""
        return self.runs[bisect_right(self._steps, step) - 1].locate(step)

    def place(self, epoch: int, batch: int) -> Place:
        """Return where `batch` of `epoch` starts, or where the last one ends."""
        place = self._run_at(epoch, batch).place(epoch, batch)
        end = min(place.position, self.epoch_length)
        return place._replace(position=end)

    def span(self, epoch: int, batch: int) -> Span:
        """Return the positions of `batch`, one that `epoch` has."""
        run = self._run_at(epoch, batch)
        place = run.place(epoch, batch)
        return Span(place, min(place.position + run.size, self.epoch_length), run.size)

    def batch_of(self, epoch: int, position: int) -> int:
        """Return the batch of `epoch` that holds `position`, or the epoch's end."""
        steps = self.steps_in(epoch)
        batch = bisect_right(
            range(steps), position, key=lambda b: self.span(epoch, b).place.position
        )
        inside = self.span(epoch, max(batch - 1, 0)).stop
        return max(batch - 1, 0) if position < inside else steps

    def even(self, epoch: int, first: int, last: int) -> bool:
        """Whether two batches of an epoch, and all between, are of one global size."""
        return self._run_at(epoch, first) is self._run_at(epoch, last)

    def _run_at(self, epoch: int, batch: int) -> Run:
        return self.runs[bisect_right(self._starts, (epoch, batch)) - 1]

    def steps_in(self, epoch: int) -> int:
        """Return the number of batches in `epoch`."""
        last = bisect_right(self._starts, (epoch, math.inf)) - 1
        return self.runs[last].batches_in(epoch)

    def _all_runs(self, schedule: Schedule) -> tuple[Run, ...]:
        place, batch = Place(0, 0, 0, self.epoch_length), 0
        runs: list[Run] = []
        while True:
            run = self._run(place, batch, schedule.at(place).global_size)
            runs.append(run)
            change = schedule.next_change(place)
            if change is None:
                return tuple(runs)
            check_beyond(change, place)
            epoch, batch = run.until(change)
            place = run.place(epoch, batch)

    def _run(self, place: Place, batch: int, size: int) -> Run:
        per_epoch = self._count(self.epoch_length, size)
        if per_epoch == 0:
            message = (
                f"an epoch of {self.epoch_length} samples has no batch of {size} "
                f"(in force from epoch {place.epoch}) with drop_last=True; "
                "lower the batch size or pass drop_last=False"
            )
            raise SpecError(message)
        here = self._count(self.epoch_length - place.position, size)
        epoch, position, step, length = place
        return Run(epoch, batch, position, step, size, length, here, per_epoch)

    def _count(self, samples: int, size: int) -> int:
        return samples // size if self.drop_last else -(-samples // size)


def check_beyond(change: Change, place: Place) -> None:
    """Raise `SpecError` where a schedule announces a change that is not ahead."""
    now = place.samples if change.unit == "samples" else place.step
    if change.value <= now:
        message = (
            f"`next_change` must lie beyond {now} {change.unit}, got {change.value}; "
            "return the next change after `place`, or None where there is none"
        )
        raise SpecError(message)
