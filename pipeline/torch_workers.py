"""Loading by torch's own workers: their loops, shares and typical problems.

The only position that torch's loaders have is the number of batches they gave, so a
resumed loop loads those once more and drops them. An iterable may keep its own
position, with `state_dict` and `load_state_dict` on itself or on its iterator. penstock
uses these with 0 workers, when the iterable is in the trainer's process.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch.utils.data._utils import worker as torchs

from .. import config
from ..engine.plan import Drawing
from ..engine.trainer_cost import TrainerMeter
from ..engine.witness.hazards import find_on_device
from ..errors import LOGGER, StateError
from .session import at_exit, looping_threads, rank_of_process, torchs_runs

if TYPE_CHECKING:
    from ..autotune.explain import Explanation
    from ..engine.recipe import Executor, StartMethod


class TorchLoop(Iterator[Any]):
    """Counts the batches of a torch iterator and delegates everything else to it."""

    def __init__(
        self,
        torchs: Any,
        drawing: Drawing,
        follow: Callable[[], object],
        run: TorchsRun,
    ) -> None:
        self._torchs, self._run = torchs, run
        self._drawing, self._follow = drawing, follow
        at_exit()

    def __next__(self) -> Any:
        meter = self._run.meter
        meter.ask(time.perf_counter_ns())
        received = getattr(self._torchs, "_rcvd_idx", None)
        try:
            data = looping_threads.run(self._torchs.__next__)
        except StopIteration:
            if self._drawing.torchs is not None:  # it ends now
                meter.stop()
                self._drawing.end()
                self._follow()
            raise
        except Exception:
            # Torch goes on after it, unless a worker is late or dead.
            if received is None or self._torchs._rcvd_idx != received:  # noqa: SLF001
                self._drawing.batch += 1
            raise
        meter.count(time.perf_counter_ns(), self._run.rows)
        self._drawing.batch += 1
        self._follow()
        return data

    def pass_over(self, batches: int) -> None:
        """Load the consumed batches once more; one that raised may raise again.

        Raises:
            Exception: what keeps the loop from getting there.
        """
        passed: Exception | None = None
        for count in range(1, batches + 1):
            try:
                next(self, None)
            except Exception as error:  # noqa: BLE001 whatever a sample raises
                passed = error
            if passed is not None and self._drawing.batch < count:
                raise passed

    def __len__(self) -> int:
        return len(self._torchs)

    def __getattr__(self, name: str) -> Any:
        if name == "_torchs":  # while it is copied, or if it could not be made
            raise AttributeError(name)
        return getattr(self._torchs, name)


class TorchsRun:
    """What is known of a loop that torch's own workers load.

    Args:
        name: the name of the loader in the log.
        loader: the loader, with its workers as they are now.
        why: why torch loads, and not penstock.
        tunable: whether penstock would load if autotune were on.
    """

    def __init__(
        self,
        name: str,
        loader: torch.utils.data.DataLoader[Any],
        why: str,
        *,
        tunable: bool,
    ) -> None:
        # Measures how long the trainer waits.
        self.meter = TrainerMeter()
        # How many rows a batch has.
        self.rows = loader.batch_size or 1
        self._name = name
        self._stage = f"Dataset(ID:0) {type(loader.dataset).__name__}"
        self._workers, self._why, self._tunable = loader.num_workers, why, tunable

    def explain(self) -> Explanation:
        """Return what the wait of the trainer says."""
        from ..autotune.explain import of_torchs

        return of_torchs(
            self.meter.read(),
            self._stage,
            self._workers,
            executor="process" if self._workers else "inline",
            why=self._why,
            tunable=self._tunable,
        )

    def stop_tuning(self) -> None:
        """Write a row to the autotune log, once, if there is one and it has steps."""
        prefix = config.current.filepath_prefix
        if self not in torchs_runs or prefix is None:
            return
        torchs_runs.discard(self)
        from ..autotune.log import AutotuneLog

        explanation = self.explain()
        if explanation.trainer.steps:
            with AutotuneLog(prefix, rank_of_process(), self._name) as log:
                log.torchs(explanation)


def resumed(
    begin: Callable[[], Any],
    drawing: Drawing,
    iterable: Any,
    follow: Callable[[], object],
    run: TorchsRun,
) -> TorchLoop:
    """Start a loop at the position of `drawing`.

    Args:
        begin: makes torch's iterator.
        drawing: the epoch; the generators are set to where it began.
        iterable: the dataset, if it is an iterable that the trainer reads.
        follow: called after each batch, and at the end.
        run: what is known of the loop.
    """
    consumed_batches, drawing.batch = drawing.batch, 0
    state, drawing.data = drawing.data, None
    later, drawing.later = drawing.later, None
    owner = iterable if is_keeper(iterable) else None
    before = drawing.dataset if state is None or later is not None else state
    refusal: Exception | None = None
    if owner is not None:
        before, refusal = placed(owner, before)  # its iterators begin where it stands
    loop = TorchLoop(begin(), drawing, follow, run)
    # What torch reads from, if that is in this process.
    fetcher = getattr(loop, "_dataset_fetcher", None)
    reader: Any = getattr(fetcher, "dataset_iter", None)
    keeper = drawing.keeper = next(filter(is_keeper, (reader, iterable)), None)
    if refusal and before is not None and reader is not owner:
        raise refusal
    if keeper is None and (state is not None or before is not None):
        raise StateError(
            f"the state is of an iterable that keeps its own place, and"
            f" {type(iterable).__name__} has no `load_state_dict` with num_workers=0;"
            " load it with the dataset and the num_workers it was taken with"
        )
    drawing.dataset = None
    if owner is not None and keeper is not owner:
        drawing.owner, drawing.dataset = owner, before
        if later is not None:
            owner.load_state_dict(later)
    if state is None:
        loop.pass_over(consumed_batches)
        return loop
    drawing.batch = consumed_batches
    if keeper is reader:  # also where that is the dataset itself
        keeper.load_state_dict(state)  # as what began it may have drawn
    return loop


def placed(owner: Any, state: Any) -> tuple[Any, Exception | None]:
    """Set or get the state of an iterable; return the state and any exception.

    An iterable that is its own iterator may have no state before it begins.
    """
    try:
        if state is None:
            return owner.state_dict(), None
        owner.load_state_dict(state)
    except Exception as error:  # noqa: BLE001 whatever the user's method raises
        return state, error
    return state, None


def is_keeper(candidate: Any) -> bool:
    """Whether an object implements torch's protocol `Stateful`."""
    return hasattr(candidate, "state_dict") and hasattr(candidate, "load_state_dict")


# The attributes that a worker reads to take its share of an iterable.
SHARES = frozenset(("id", "num_workers", "dataset"))


class Watched(torchs.WorkerInfo):
    """Torch's worker info; it records that code has read the worker's share."""

    __slots__ = ()
    share_flag: ClassVar[Any] = None

    def __getattribute__(self, name: str) -> Any:
        if name in SHARES:
            Watched.share_flag[0] = 1
        return super().__getattribute__(name)


class ShareWatch:
    """Warns of an iterable that several workers each read in full.

    It is the `worker_init_fn` of forked workers and calls the user's, which may assign
    the shares. It only warns and drops no data, because the iterable may be shared out
    by other means, such as a queue.
    """

    def __init__(self, init: Callable[[int], Any] | None, workers: int) -> None:
        self._init, self._workers = init, workers
        self._share_flag = mmap.mmap(-1, 1)  # forked workers share it with the trainer

    def __call__(self, number: int) -> None:
        Watched.share_flag = self._share_flag
        # What `get_worker_info` returns: torch gives no other way to watch it.
        object.__setattr__(torchs._worker_info, "__class__", Watched)  # noqa: SLF001
        if self._init is not None:
            self._init(number)

    def tell(self) -> None:
        """Warn once a batch has arrived; by then a generator has read its share."""
        if not self._share_flag[0]:
            tell_once(READ_WHOLE, self._workers, self._workers)


# Warnings about problems of worker processes, given beforehand and once each.

ON_CUDA = (
    "`%s` is a tensor on %s: forked worker processes cannot use it, and other worker"
    " processes each have a copy. Keep it on the CPU, and move batches to the device"
)
READ_WHOLE = (
    "no worker has asked which share of the iterable dataset is its own, so each of"
    " the %d workers reads all of it, and each sample comes %d times, as in torch. Let"
    " `__iter__` read one share: torch.utils.data.get_worker_info() has the `id` of the"
    " worker, and `num_workers`. If you divide the dataset in another way, ignore this"
)


def start_method(context: Any, executor: Executor) -> StartMethod | None:
    """Return how a loader's workers start; None if the engine may choose.

    Args:
        context: the loader's `multiprocessing_context`.
        executor: what its workers are to begin with.
    """
    if context is not None:
        return cast("StartMethod", context.get_start_method())
    usual = torch.multiprocessing.get_start_method(allow_none=True) or "fork"
    return "fork" if executor == "process" and usual == "fork" else None


def tell_of_cuda(dataset: Any) -> None:
    """Warn about a dataset that holds tensors on a CUDA device."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    path_and_device = find_on_device(dataset, "dataset", "cuda")
    if path_and_device is not None:
        tell_once(ON_CUDA, *path_and_device)


@cache
def tell_once(text: str, *values: object) -> None:
    """Warn, unless the same warning was given before."""
    LOGGER.warning("%s.", text % values)
