"""Buffers: a batch being filled, row by row, by any worker that has rows for it.

The layout of a batch is learned from the first sample placed, once for each image size.
From then on, samples are written straight into the batch's memory. Distinct workers
write distinct rows, so writing needs no lock; only opening the memory does.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info
from torch.utils.data._utils import collate as torchs

from ...errors import NOTE, ExitError, SampleNote, add_note
from ..core.in_flight import Failure, InFlightBatch
from ..plan import BatchPlan, PlannedBatch
from .array_rows import TableRows
from .layout import (
    Allocate,
    Indices,
    Layout,
    Misfit,
    learn,
    size_of_all,
    spread,
    write_rows,
)

Collate = Callable[[list[Any]], Any]


def on_heap(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate on the CPU, whatever torch.set_default_device() says.

    Torch aligns memory with posix_memalign(), for which glibc asks for a little more
    than it keeps: what is freed is too small for the next batch of the same size. Where
    the loop kept each batch's labels in between, memory grew by all images. numpy's
    malloc() reuses it.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < LARGE_BYTES:
        return torch.empty(*shape, dtype=dtype, device=_CPU)
    memory = np.empty(count * dtype.itemsize, np.uint8)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


_CPU = torch.device("cpu")
# Memory that is large enough to be worth the microseconds of a numpy array.
LARGE_BYTES = 1 << 17


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch that is ready for the trainer."""

    data: Any
    failures: tuple[Failure, ...] = ()
    """Failures whose rows carry another sample's data instead."""


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch that could not be made: the trainer gets the error when it is due."""

    error: BaseException
    failures: tuple[Failure, ...] = ()
    """All of its rows, if only another batch's sample could replace them."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A batch whose rows are all there, but not collated yet."""

    buffer: BatchBuffer
    plan: BatchPlan
    indices: NDArray[Any]
    failures: tuple[Failure, ...] = ()

    def collate(self) -> Finished | FailedBatch:
        """Make the batch; an exception of `collate_fn` becomes the batch's error."""
        try:
            rows = tuple(failure.row for failure in self.failures)
            return Finished(self.buffer.collect(rows), self.failures)
        except Exception as error:  # noqa: BLE001 the trainer raises it
            self.buffer.maker.blame(
                error, self.plan, self.buffer.samples(()), self.indices
            )
            return FailedBatch(error)


@dataclass(frozen=True, slots=True)
class Buffers:
    """How batches are made: opens one buffer per batch, and finishes it.

    Args:
        stage: the stage that collation errors name, such as `Batch(ID:3)`.
        collate: the user's `collate_fn`; None means torch's default, in place.
        keep: batches stay lists of samples in row order (a later step makes batches).
        substitute: fill rows that failed from the batch's next healthy row.
    """

    stage: str
    collate: Collate | None = None
    keep: bool = False
    substitute: bool = False
    whole: bool = False
    """Whether `collate` gets what the dataset read for the whole batch, as it is."""
    by_workers: bool = False
    """Whether worker processes call `collate` from the first batch on, as torch's do:
    it may turn samples that cannot be sent into a batch that can."""
    allocate: Allocate = on_heap
    """Allocates the memory of batches."""
    lend: Callable[[Layout, int], Any] | None = None
    """Lends memory for so many rows instead, as `Layout.open` returns it, which other
    processes read; None: none do."""
    pin: Callable[[Any], Any] | None = None
    """Applied to every batch that workers have made, before the trainer asks for it:
    moves it to pinned memory. None: the batch stays where it is."""
    layouts: dict[int | None, Layout | None] = field(default_factory=dict)
    """Learned layouts by image size; None: default_collate must be used."""

    def open(self, planned: PlannedBatch) -> BatchBuffer:
        """Open the buffer of a batch, or of some of its rows, which stay samples."""
        return BatchBuffer(
            self if planned.whole else replace(self, keep=True), planned.plan
        )

    @property
    def elsewhere(self) -> Buffers:
        """The same batches made in another process, which may not use CUDA."""
        return replace(self, allocate=on_heap, pin=None)

    def layout(self, image_size: int | None, samples: Sequence[Any]) -> Layout | None:
        """Return the layout of rows, learning it from the first if it is unknown."""
        if image_size not in self.layouts:
            self.layouts.setdefault(image_size, learn(samples[0]))
        return self.layouts[image_size]

    def together(
        self, plan: BatchPlan, samples: Any, indices: Indices | None = None
    ) -> Any:
        """Return a batch of samples that are all there.

        Args:
            plan: the plan of the batch.
            samples: as for `collate`.
            indices: into the dataset, by row; None if unknown.

        Raises:
            Exception: as `collate`, with a note that names the odd samples.
        """
        try:
            if self.collate is not None:
                return self.collate(samples if self.whole else list(samples))
            layout = self.layout(plan.image_size, samples)
            if layout is not None:
                try:
                    return layout.together(samples, self.allocate)
                except Misfit:
                    pass
            return collate_by_default(list(samples))
        except Exception as error:
            if plan.n_rows:
                rows = [samples] if self.whole else samples
                self.blame(error, plan, dict(enumerate(rows)), indices)
            raise

    def finish(self, in_flight: InFlightBatch) -> Finished | Gathered | FailedBatch:
        """Make the batch whose rows are done.

        The user's `collate_fn` is left to the trainer's thread, where torch calls it
        without workers: one batch after another, in order, when it is requested.
        """
        plan, buffer = in_flight.plan, in_flight.buffer
        batch: Finished | FailedBatch | None = in_flight.made
        if batch is not None:  # a worker elsewhere has done all of this
            return batch
        if not in_flight.whole:
            part = Finished(buffer.collect(()), tuple(in_flight.failures))
            in_flight.failures.clear()
            return part
        # The error that cut an iterable short was raised already, unless substituted.
        failures = sorted(
            (f for f in in_flight.failures if self.substitute or not f.cut_short),
            key=lambda failure: failure.row,
        )
        in_flight.failures.clear()  # breaks a cycle: the tracebacks' frames hold it
        if (failed := self.failed(failures, plan)) is not None:
            return failed
        gathered = Gathered(buffer, plan, in_flight.rows.indices, tuple(failures))
        users = self.collate is not None and not self.keep
        return gathered if users else gathered.collate()

    def failed(
        self, failures: Sequence[Failure], plan: BatchPlan
    ) -> FailedBatch | None:
        """Return the failure of the whole batch, or None if it can be made.

        That is the first one that no other sample can replace.

        Args:
            failures: the failures of its rows, in row order.
            plan: the plan of the batch.
        """
        for failure in failures:
            error = failure.error  # SystemExit is not ordinary
            ordinary = isinstance(error, Exception) and not isinstance(error, ExitError)
            if failure.cut_short or not (ordinary and self.substitute):
                return FailedBatch(failure.annotated(plan, block=self.keep))
        if len(failures) == plan.n_rows and not self.keep:
            return FailedBatch(failures[0].annotated(plan), tuple(failures))
        return None

    def blame(
        self,
        error: Exception,
        plan: BatchPlan,
        samples: Mapping[int, Any],
        indices: Indices | None,
    ) -> None:
        """Note on a collation error which batch and which samples are odd.

        Args:
            error: what collating raised.
            plan: the plan of the batch.
            samples: by row.
            indices: into the dataset, by row; None if unknown.
        """
        where = f"{self.stage} (epoch {plan.epoch}, step {plan.step})"
        try:
            odd = spread(samples, indices)
        except Exception as unknown:  # noqa: BLE001 the user objects' code raised it
            odd = f"they cannot be described ({type(unknown).__name__})"
        if self.collate is not None:
            add_note(error, f"{NOTE}the collate_fn of {where}: {odd}")
            return
        text = (
            f"{NOTE}{where}: the samples of a batch must be of one shape and type;"
            f" {odd}. Bring them to one shape in a map(), or give"
            " batch(collate_fn=...) a function that pads"
        )
        add_note(error, SampleNote(text))


class BatchBuffer:
    """One batch being filled.

    The lock guards opening `memory`; rows are written without it.
    """

    __slots__ = (
        "_layout",
        "_lock",
        "_opened",
        "_size",
        "kept",
        "maker",
        "memory",
        "rows",
    )

    def __init__(self, maker: Buffers, plan: BatchPlan) -> None:
        self.maker, self.rows, self._size = maker, plan.n_rows, plan.image_size
        self._lock = threading.Lock()
        self._opened = maker.keep or maker.collate is not None
        self._layout: Layout | None = None
        self.memory: Any = None
        # Samples by row, as they are, until the batch is collated.
        self.kept: dict[int, Any] = {}

    def _open(self, layout: Layout | None) -> None:
        """Open the memory for rows of this layout, unless it is open already."""
        with self._lock:
            if self._opened:
                return
            if layout is not None and self.maker.lend:
                self.memory = self.maker.lend(layout, self.rows)
            elif layout is not None:
                self.memory = layout.open(self.rows, self.maker.allocate)
            self._layout, self._opened = layout, True

    def _at_once(self, layout: Layout, samples: Sequence[Any]) -> bool:
        """Make the batch of its columns, if these are all of its rows."""
        free = self.maker.lend is None and self.maker.allocate is on_heap
        columns = isinstance(samples, TableRows) and len(samples) == self.rows
        if not (free and columns):
            return False
        try:
            self.memory = layout.together(samples, on_heap)
        except Misfit:
            return False
        self._layout, self._opened = layout, True
        return True

    def place(self, rows: Sequence[int], samples: Sequence[Any]) -> int:
        """Put one sample into each of `rows`; return the bytes they take."""
        if not self._opened:
            layout = self.maker.layout(self._size, samples)
            if layout is not None and self._at_once(layout, samples):
                return layout.row_bytes * len(rows)
            self._open(layout)
        layout = self._layout
        if layout is not None:
            try:
                write_rows(layout, self.memory, rows, samples)
            except Misfit:
                pass
            else:
                return layout.row_bytes * len(rows)
        self.kept.update(zip(rows, samples, strict=True))
        return size_of_all(samples)

    @property
    def sealed(self) -> bool:
        """Whether the batch is its memory, as its layout says."""
        return self._layout is not None and not self.kept

    def let_go(self) -> None:
        """Release everything: the batch is made, and stands on its own from now on."""
        self._layout, self.memory, self.kept = None, None, {}

    def collect(self, failed: tuple[int, ...]) -> Any:
        """Return the batch, with failed rows filled in."""
        maker, layout = self.maker, self._layout
        if maker.keep:
            return self.samples(failed)
        pairs = donors(failed, self.rows) if failed else []
        if layout is not None and not self.kept:
            for row, donor in pairs:
                layout.write(self.memory, row, [layout.read(self.memory, donor)])
            return layout.seal(self.memory)
        samples = self.samples(failed)
        samples |= {row: samples[donor] for row, donor in pairs}
        collate = maker.collate or collate_by_default
        if maker.whole:
            return collate(samples[0])
        return collate([samples[row] for row in range(self.rows)])

    def samples(self, failed: tuple[int, ...]) -> dict[int, Any]:
        """Return the samples by row, including those in the batch's memory."""
        kept, layout = self.kept, self._layout
        present = [row for row in range(self.rows) if row not in failed]
        if layout is None:
            return {row: kept[row] for row in present if row in kept}
        return {
            row: kept[row] if row in kept else layout.read(self.memory, row)
            for row in present
        }


def donors(failed: tuple[int, ...], rows: int) -> list[tuple[int, int]]:
    """Pair each failed row with the next healthy one, wrapping around at the end.

    This depends only on which rows failed, so the batch is the same however it was
    loaded.
    """
    healthy = [row for row in range(rows) if row not in failed]
    return [
        (row, next((other for other in healthy if other > row), healthy[0]))
        for row in failed
    ]


# What layouts know samples to consist of, with subclasses such as named tuples.
LAID_OUT: tuple[type, ...] = (
    *(torch.Tensor, np.ndarray, np.generic, int, float, str, bytes),
    *(dict, list, tuple),
)


def collate_by_default(samples: list[Any]) -> Any:
    """Return what torch's `default_collate` does in the trainer.

    In a worker process, torch stacks tensors into shared memory. That refuses those of
    a graph, and rounds a batch of several types to the first one's.
    """
    rules = torchs.default_collate_fn_map
    if get_worker_info() is None or rules[torch.Tensor] is not torchs.collate_tensor_fn:
        return torchs.default_collate(samples)  # type: ignore[no-untyped-call]
    return torchs.collate(samples, collate_fn_map={**rules, torch.Tensor: _stacked})


def is_default_unchanged() -> bool:
    """Whether `default_collate` calls nobody's functions for the samples of layouts.

    A library may register a function for a class of its own, as tensordict does when it
    is imported; such samples have no layout.
    """
    return all(
        function.__module__ == torchs.__name__
        for key, function in torchs.default_collate_fn_map.items()
        if isinstance(key, tuple)
        or issubclass(key, LAID_OUT)
        or any(issubclass(kind, key) for kind in LAID_OUT)
    )


def _stacked(tensors: Sequence[torch.Tensor], **how: Any) -> torch.Tensor:
    if tensors[0].is_nested or tensors[0].layout is not torch.strided:
        batch: torch.Tensor = torchs.collate_tensor_fn(tensors, **how)
        return batch
    return torch.stack(list(tensors))
