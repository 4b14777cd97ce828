"""Where torch's own workers load: their loops, their shares, what they suffer from.

What torch's loaders know of their place is how many batches they gave, so a loop goes
on by loading those once more, and dropping them. An iterable that keeps its own place,
with `state_dict` and `load_state_dict` on itself or on its iterator, is asked for it
where it is in the trainer's process: with 0 workers.
"""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.utils.data._utils import worker as torchs

from .. import config
from ..engine.movable import find_on_device
from ..engine.observe.reading import TrainerMeter
from ..engine.plan import Drawing
from ..errors import StateError
from ..system.shared_memory import SHARED_MEMORY
from .session import rank_of_process, running

if TYPE_CHECKING:
    from ..autotune.explain import Explanation


class TorchLoop(Iterator[Any]):
    """An iterator of torch's, counted; all else is asked of it."""

    def __init__(
        self,
        torchs: Any,
        drawing: Drawing,
        given: Callable[[], object],
        meter: TrainerMeter,
        rows: int,
    ) -> None:
        self._meter, self._rows = meter, rows
        self._torchs = torchs
        self._drawing = drawing
        self._given = given

    def __next__(self) -> Any:
        meter = self._meter
        meter.ask(time.perf_counter_ns())
        try:
            data = next(self._torchs)
        except StopIteration:
            meter.stop()
            self._drawing.end()
            self._given()
            raise
        meter.count(time.perf_counter_ns(), self._rows)
        self._drawing.batch += 1
        self._given()
        return data

    def __len__(self) -> int:
        return len(self._torchs)

    def __getattr__(self, name: str) -> Any:
        if name == "_torchs":  # while it is copied, or if it could not be made
            raise AttributeError(name)
        return getattr(self._torchs, name)


class TorchsRow:
    """Writes what torch's own workers loaded into the autotune log, at a loop's end."""

    def __init__(self, name: str, told: Callable[[], Explanation]) -> None:
        self._name = name
        self._told: Callable[[], Explanation] | None = told
        running.add(self)

    def stop_tuning(self) -> None:
        """Write it, once, where there is a log and a step was measured."""
        told, self._told = self._told, None
        prefix = config.settings().filepath_prefix
        if told is None or prefix is None or not (seen := told()).trainer.steps:
            return
        from ..autotune.log import AutotuneLog

        with AutotuneLog(prefix, rank_of_process(), self._name) as log:
            log.torchs(seen)


def resumed(
    begin: Callable[[], Any],
    drawing: Drawing,
    iterable: Any,
    given: Callable[[], object],
    meter: TrainerMeter,
    rows: int,
) -> TorchLoop:
    """Begin a loop where `drawing` stands.

    Args:
        begin: makes torch's iterator.
        drawing: the epoch; the generators are set to where it began.
        iterable: the data set, where it is an iterable and loaded by the trainer.
        given: called after each batch, and at the end.
        meter: measures what the trainer waits.
        rows: of a batch.
    """
    consumed, drawing.batch = drawing.batch, 0
    known, drawing.data = drawing.data, None
    later, drawing.later = drawing.later, None
    owner = iterable if is_keeper(iterable) else None
    before = drawing.dataset if known is None or later is not None else known
    refused: Exception | None = None
    if owner is not None:
        before, refused = placed(owner, before)  # its iterators begin where it stands
    loop = TorchLoop(begin(), drawing, given, meter, rows)
    keeper = drawing.keeper = keeper_of(loop, iterable)
    if refused and before is not None and iterator_of(loop) is not owner:
        raise refused
    if keeper is None and (known is not None or before is not None):
        raise StateError(
            f"the state is of an iterable that keeps its own place, and"
            f" {type(iterable).__name__} has no `load_state_dict` with num_workers=0;"
            " load it with the data set and the num_workers it was taken with"
        )
    drawing.dataset = None
    if owner is not None and keeper is not owner:
        drawing.owner, drawing.dataset = owner, before
        if later is not None:
            owner.load_state_dict(later)
    if known is None:
        deque(islice(loop, consumed), maxlen=0)
        return loop
    drawing.batch = consumed
    if keeper is iterator_of(loop):  # also where that is the data set itself
        keeper.load_state_dict(known)  # as what began it may have drawn
    return loop


def placed(owner: Any, state: Any) -> tuple[Any, Exception | None]:
    """Set an iterable to its state, or ask for it; return that, and what was raised.

    One that is its own iterator may have no place before it is begun.
    """
    try:
        if state is None:
            return owner.state_dict(), None
        owner.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 whatever the user's method raises
        return state, error
    return state, None


def keeper_of(loop: TorchLoop, iterable: Any) -> Any:
    """Return what knows how far an iterable is read, if anything does."""
    if iterable is None:
        return None
    return next(filter(is_keeper, (iterator_of(loop), iterable)), None)


def iterator_of(loop: TorchLoop) -> Any:
    """Return the data set's iterator that torch reads from in this process."""
    return getattr(getattr(loop, "_dataset_fetcher", None), "dataset_iter", None)


def is_keeper(each: Any) -> bool:
    """Whether it has torch's protocol `Stateful`."""
    return hasattr(each, "state_dict") and hasattr(each, "load_state_dict")


SHARES = frozenset(("id", "num_workers", "dataset"))
"""What a worker looks at to take its share of an iterable."""


class Watched(torchs.WorkerInfo):
    """Torch's worker info; notes that somebody looks whose share is whose."""

    __slots__ = ()
    seen: ClassVar[Any] = None

    def __getattribute__(self, name: str) -> Any:
        if name in SHARES:
            Watched.seen[0] = 1
        return super().__getattribute__(name)


class ShareWatch:
    """Tells of an iterable that several workers read whole, each a copy of its own.

    It is a `worker_init_fn` of forked workers, and calls the user's, which may be what
    takes the shares. Nothing is left out: a queue may share it out, or anything else.
    """

    def __init__(self, init: Callable[[int], Any] | None, workers: int) -> None:
        self._init = init
        self._workers = workers
        self._seen = mmap.mmap(-1, 1)  # forked workers share it with the trainer

    def __call__(self, number: int) -> None:
        Watched.seen = self._seen
        info = torchs._worker_info  # noqa: SLF001 what `get_worker_info` returns
        object.__setattr__(info, "__class__", Watched)
        if self._init is not None:
            self._init(number)

    def tell(self) -> None:
        """Say it, once a batch has come: a generator has looked by then."""
        if not self._seen[0]:
            tell_once(READ_WHOLE, self._workers, self._workers)


# What worker processes will suffer from, said before they do: once each.

LOGGER = logging.getLogger("penstock")
SMALL = 256 * 2**20
"""Bytes; what a container is given unasked is a quarter of it."""
TOLD: set[str] = set()
ON_CUDA = (
    "`%s` is a tensor on %s: forked worker processes cannot use it, and other worker"
    " processes each have a copy. Keep it on the CPU, and move batches to the device"
)
READ_WHOLE = (
    "no worker has asked which share of the iterable data set is its own, so each of"
    " the %d workers reads all of it, and each sample comes %d times, as in torch. Let"
    " `__iter__` read one share: torch.utils.data.get_worker_info() has the `id` of the"
    " worker, and `num_workers`. If you divide the data set in another way, ignore this"
)
TOO_SMALL = (
    "%s holds %d MiB, and torch's own workers hand their batches over there; give the"
    " container more (docker run --shm-size=1g), or turn autotune on: penstock's own"
    " workers do not use it"
)


def tell_of_cuda(dataset: Any) -> None:
    """Warn of a data set that holds tensors on a CUDA device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    found = find_on_device(dataset, "dataset", "cuda")
    if found is not None:
        tell_once(ON_CUDA, *found)


def tell_of_shared_memory(folder: str = SHARED_MEMORY) -> None:
    """Warn of too little shared memory for torch's own workers."""
    if not os.path.isdir(folder):
        return
    total = shutil.disk_usage(folder).total
    if total < SMALL:
        tell_once(TOO_SMALL, folder, total // 2**20)


def tell_once(text: str, *values: object) -> None:
    """Warn, unless the same was said before."""
    line = text % values
    if line not in TOLD:
        TOLD.add(line)
        LOGGER.warning("%s.", line)
