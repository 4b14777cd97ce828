"""The DataLoader face: torch's own class, tuned.

    from penstock import DataLoader                    # the one line that changes
    penstock.set_enable_autotune(True)
    loader = DataLoader(dataset, batch_size=64, shuffle=True)

Without autotune it *is* torch's loader: the same workers, seeding and bytes. With
autotune or `sample_seeding=True`, penstock's engine loads map-style data in the order
that torch's samplers draw. The batches are then the same for any number of workers.
"""
# ruff: noqa: SLF001 some of what torch's iterators know is private

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from operator import index
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar

import torch.utils.data
from torch.autograd import profiler
from torch.utils.data import IterableDataset, IterDataPipe, default_collate

from .. import config
from ..engine.batch.buffer import is_default_unchanged
from ..engine.plan import AHEAD, BatchPlan, Drawing, LateOrder
from ..engine.recipe import Executor, Options, Recipe, check_name
from ..errors import StateError, check
from ..system.forking import FORKS
from ..system.printing import loader_call
from ..system.wakeup import weakly
from .session import (
    Epoch,
    Face,
    Slot,
    looping_threads,
    rank_of_process,
    torchs_runs,
)
from .sources.source import length_of, warn_of

if TYPE_CHECKING:
    from ..autotune.explain import Explanation
    from ..engine.run import Run
    from .torch_workers import ShareWatch, TorchsRun

BYPASSED = (
    "Accelerate builds a plain torch DataLoader from this one, so penstock neither"
    " loads nor tunes; keep it with penstock.integrations.accelerate.prepare("
    "accelerator, ...) in place of accelerator.prepare(...)"
)


# Whether Accelerate works on loaders that are put back afterwards.
KNOWN_BYPASS = ContextVar("known_bypass", default=False)

UNTUNED = "autotune is off"
UNORDERED = (
    "in_order=False: which {} batches were consumed is not known, because they come in"
    " the order in which workers finish them; resuming here would repeat some samples"
    " and lose others. Take the state between two epochs, or use in_order=True"
)
T_co = TypeVar("T_co", covariant=True)


class Loop(Epoch):
    """One epoch of penstock's engine with the interface of torch's iterators.

    Args:
        loader: what is looped over.
        slot: as for `Epoch`.
        begin: starts the run. It is called at once, and again at the first `next` if
            `set_epoch` was called in between, as Lightning does after a resume.
        drawing: the epoch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        slot: Slot,
        begin: Callable[[], Run],
        drawing: Drawing,
    ) -> None:
        super().__init__(loader, slot, begin(), keeps=loader._keeps_workers)
        self._loader, self._drawing = loader, drawing
        self._begin: Callable[[], Run] | None = begin
        # After it: some samplers go on by themselves.
        self._epochs = loader._sampler_epochs()
        self._pinned = loader.pin_memory and torch.cuda.is_available()

    def _deliver(self) -> Any:
        if not profiler._is_profiler_enabled:  # as torch.compile asks
            return self._loaded()
        # Torch's profilers recognise loading by the beginning and the end of this name.
        with profiler.record_function("enumerate(DataLoader)#_PenstockIter.__next__"):
            return self._loaded()

    def _loaded(self) -> Any:
        begin, self._begin = self._begin, None
        if begin is not None and self._loader._sampler_epochs() != self._epochs:
            self._abandon.detach()
            self._slot.release(self._run)
            self._join(begin())
        data = super()._deliver()
        if self._pinned:
            from torch.utils.data._utils.pin_memory import pin_memory

            data = pin_memory(data)  # type: ignore[no-untyped-call]
        return data

    def _record(self, plan: BatchPlan | None) -> None:
        drawing = self._drawing
        if plan is None:
            drawing.end()
        else:
            drawing.batch = plan.batch + 1  # failed batches count
            drawing.whole = plan.last
            vars(self._loader)["_plan"] = plan  # torch's setter takes 2 us
        self._loader._follow(drawing)

    def __len__(self) -> int:
        return len(self._loader)


class DataLoader(torch.utils.data.DataLoader[T_co], Face):
    """A torch DataLoader; with autotune on, penstock loads the data and tunes itself.

    It takes all arguments of torch's DataLoader. With autotune on, penstock chooses the
    number of workers and starts with none. `num_workers` above 0 is the number that it
    starts with; `num_workers=0` leaves all loading to the trainer's thread, where
    samples draw from the program's own streams, as with torch.

    Args:
        dataset: map-style or iterable, as for torch.
        *args: as torch takes them.
        sample_seeding: seed the global generators of `random`, numpy and torch before
            each sample, with a seed of its own, so that its bytes do not depend on the
            number of workers. None: while autotune is on, unless the program says
            `num_workers=0`; True: always; False: never, and then torch's own workers
            load, untuned.
        thread_safe: True lets several threads of a process load at once. penstock then
            seeds nothing, because threads share the global generators.
        snapshot_every_n_steps: torchdata's; ignored, as every state is exact.
        name: the name of this loader in the log and its files (default: the variable
            that it is stored in, without `_loader`; or file and line).
        **kwargs: as torch takes them.

    Raises:
        SpecError: one of penstock's own arguments is wrong.
        ValueError: one of torch's arguments is wrong.
    """

    _RUNNING = frozenset(
        (
            "_base",
            "_drawing",
            "_loop_drawings",
            "_iterator",
            "_listeners",
            "_made_from",
            "_plan",
            "_recipe",
            "_resumed",
            "_run",
            "_slot",
            "_torchs",
            "_tuned",
        )
    )
    in_order = True
    """Torch before 2.6 knows no other value."""

    def __init__(
        self,
        dataset: Any,
        *args: Any,
        sample_seeding: bool | None = None,
        thread_safe: bool | None = None,
        snapshot_every_n_steps: int = 1,
        name: str = "",
        **kwargs: Any,
    ) -> None:
        warn_of(dataset)
        super().__init__(dataset, *args, **kwargs)
        for argument, value in (
            ("sample_seeding", sample_seeding),
            ("thread_safe", thread_safe),
        ):
            check(
                value is None or type(value) is bool,
                f"`{argument}` must be True, False or None, got {value!r}",
            )
        # Whether the program itself says how many workers load. Torch has four
        # arguments between `dataset` and `num_workers`.
        self._says_workers = "num_workers" in kwargs or len(args) > 4
        self.sample_seeding, self.thread_safe = sample_seeding, thread_safe
        self.snapshot_every_n_steps = snapshot_every_n_steps
        check_name(name)
        default_name = getattr(type(self), "name", None)  # a subclass may have its own
        self._set_up(name or (default_name if isinstance(default_name, str) else ""))
        self.name = self._name

    def _set_up(self, name: str) -> None:
        self._iterator = None
        # Values that the recipe depends on and that torch allows to assign late.
        self._made_from: tuple[Any, ...] = ()
        # Whether it was compiled while autotune was on: inline work may move then.
        self._tuned = False
        # The epoch of the newest batch, or the next epoch.
        self._drawing = Drawing()
        # Whether `_drawing` comes from a state whose loop has not begun.
        self._resumed = False
        # The drawings of all current loops by id, in the order of their newest batches.
        self._loop_drawings: dict[int, Drawing] = {}
        # The base seed of torch's workers, if they outlive an epoch.
        self._base: int | None = None
        # The loop that torch's own workers load, if there is one.
        self._torchs: TorchsRun | None = None
        super()._set_up(name)

    def __iter__(self) -> Any:
        """Run a new epoch, or the rest of the epoch that a loaded state left off in."""
        with self._slot.loop_change():
            return looping_threads.run(self._loop)

    def _loop(self) -> Any:
        if not isinstance(self.generator, (torch.Generator, NoneType)):
            self._drawn_seed()  # raises what torch raises
        self._slot.show_log(rank_of_process())  # compiling may have something to say
        why = self._why_torchs()
        drawing = replace(self._drawing)  # so that a loop that fails to begin keeps it
        if not self._resumed:
            # The seeds of samples by kept workers differ in the number of the epoch
            # alone, so there a loop that has begun counts as one.
            begun = drawing.whole if self._base is None else drawing.torchs is not None
            drawing = Drawing(drawing.epoch + begun, base=self._base)
        if why is None:
            self._torchs = self._iterator = None
            with self._slot.loop_change(imports=True):
                loop = self._iterate(drawing)
        else:
            self._slot.tell(f"torch's own workers load, untuned: {why}.")
            if not self._slot.busy:
                self._slot.close()
            loop = self._iterate_torchs(drawing, why)
        self._drawing, self._resumed, self._plan = drawing, False, None
        self._loop_drawings[id(drawing)] = drawing
        weakref.finalize(loop, weakly(self._forget), drawing)
        return loop

    # Position and state

    def state_dict(self) -> dict[str, object]:
        """Return the position of the next batch: JSON of some 14 kB at most.

        What an iterable keeps of its own place comes on top of that.

        The position counts consumed batches; prefetched batches do not count. If
        several loops run at once, the loop that got the last batch counts. The state
        holds the generator that the order was drawn from: torch's global generator, or
        the loader's own. If a sampler draws from elsewhere, or in turn with samples
        that nobody seeds, its owner has to restore it. What such samples draw goes on
        from the program's own generators, wherever it has restored them. If torch's own
        workers load, they load the consumed batches once more after a resume and drop
        them.

        Raises:
            StateError: an epoch with `in_order=False` and several workers is under way,
                whose batches would come in another order next time.
        """
        drawing = self._drawing
        if drawing.batch and not self.in_order and self.num_workers > 1:
            raise StateError(UNORDERED.format(drawing.batch))
        if drawing.torchs is None:  # between epochs: where the next begins
            drawing = Drawing(drawing.epoch, base=self._base, now="")
            drawing.note(self.generator)
            from .torch_workers import is_keeper

            dataset: Any = self.dataset
            if (
                self.num_workers == 0
                and isinstance(self.dataset, IterableDataset)
                and is_keeper(dataset)
            ):
                drawing.dataset = dataset.state_dict()
        return drawing.to_state()

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume the next loop where `state` was taken; an empty state does nothing.

        Raises:
            StateError: the state is damaged, or belongs to something else or to another
                version.
        """
        if state:
            self._drawing, self._resumed = Drawing.from_state(state), True
            self._base = self._drawing.base
            self._iterator = None  # kept workers are ahead of the state

    def _follow(self, drawing: Drawing, watch: ShareWatch | None = None) -> None:
        """Set the loader's position to the position of a loop."""
        if watch is not None:
            watch.tell()
        if self._drawing is not drawing and not self._resumed:
            self._drawing = drawing
            self._loop_drawings.pop(id(drawing), None)
            self._loop_drawings[id(drawing)] = drawing
        if drawing.torchs is None:
            self._loop_drawings.pop(id(drawing), None)

    def _forget(self, drawing: Drawing) -> None:
        """Drop a loop; the loader's position becomes that of another current loop.

        So a peek at a batch in the middle of an epoch does not change the state.
        """
        if self._loop_drawings.pop(id(drawing), None) is None:
            return
        if self._drawing is drawing and self._loop_drawings:
            self._drawing = next(reversed(self._loop_drawings.values()))

    # Reports and tuning

    def explain(self) -> Explanation:
        """Explain what has slowed training lately: print the result or read its fields.

        If torch's own workers load, only the time that the trainer waits is known.
        """
        from .torch_workers import TorchsRun

        run, why = self._torchs, self._why_torchs()
        if run is None and why is None:
            return self._slot.explain(self._compiled)[1]
        if run is None:
            run = TorchsRun(
                self.name,
                self,
                why or "",
                tunable=why == UNTUNED and not self._zero_workers,
            )
        return run.explain()

    # Frameworks

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, the batch sampler and the dataset which epoch is next.

        Each of these that has a `set_epoch` gets the call. Samplers draw when a loop
        begins.
        """
        for receiver in (*self._samplers(), self.dataset):
            if hasattr(receiver, "set_epoch"):
                receiver.set_epoch(epoch)
        if self.persistent_workers and hasattr(self.dataset, "set_epoch"):
            self._slot.close()  # its workers hold the old dataset
            self._iterator = None

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate reads this before it builds a plain loader from this one."""
        if config.get_enable_autotune() and not KNOWN_BYPASS.get():
            KNOWN_BYPASS.set(True)  # once is enough
            self._slot.tell(BYPASSED)
        return False

    __repr__ = loader_call

    # Torch's own workers

    def _why_torchs(self) -> str | None:
        """Say why torch's own workers load; None if penstock's engine loads."""
        from ..engine.witness.hazards import keeps_stream

        seeding, safe = self.sample_seeding, self.thread_safe
        reasons = {
            "sample_seeding is off": seeding is False,
            UNTUNED: not (seeding or config.get_enable_autotune()),
            "an iterable dataset says itself which worker reads what": isinstance(
                self.dataset, IterableDataset
            ),
            "batch_size=None asks for single samples": not self._auto_collation,
            "worker_init_fn is for processes, and thread_safe asks for threads": (
                self.worker_init_fn is not None and safe
            ),
            "the dataset has a random generator of its own, so its draws depend on"
            " which worker makes a sample": (
                config.get_enable_autotune()
                and not (seeding or safe)
                and self.num_workers
                and keeps_stream(self.dataset, self.worker_init_fn)
            ),
            "the dataset has no length": length_of(self.dataset) is None,
            "a timeout is for workers": self.timeout and not self.num_workers,
            "in_order=False takes batches as they come": not self.in_order,
            "penstock's worker processes need Linux": (
                self.num_workers and not (safe or FORKS)
            ),
        }
        return next((why for why, applies in reasons.items() if applies), None)

    def _iterate_torchs(self, drawing: Drawing, why: str) -> Iterator[Any]:
        from .torch_workers import ShareWatch, TorchsRun, resumed, tell_of_cuda

        if self.num_workers:
            tell_of_cuda(self.dataset)
        iterable = isinstance(self.dataset, IterableDataset)
        drawing.on(self.num_workers if iterable else None)
        new = not drawing.restore(self.generator)
        if new:
            drawing.note(self.generator)
        watch = (
            ShareWatch(self.worker_init_fn, self.num_workers)
            if self._forks_readers() and config.get_enable_autotune()
            else None
        )
        begin = partial(self._begun_by_torch, drawing, watch, new=new)
        follow = partial(self._follow, drawing, watch)
        run = self._torchs = TorchsRun(
            self.name, self, why, tunable=why == UNTUNED and not self._zero_workers
        )
        loop = resumed(
            begin,
            drawing,
            self.dataset if iterable and self.num_workers == 0 else None,
            follow=follow,
            run=run,
        )
        if config.get_enable_autotune():
            torchs_runs.add(run)
            weakref.finalize(loop, run.stop_tuning)
        return loop

    def _begun_by_torch(
        self, drawing: Drawing, watch: ShareWatch | None, *, new: bool
    ) -> Any:
        """Return torch's own iterator, whose order may be drawn later than it is made.

        Torch's workers take the attributes given here with them; no other code sees
        them.

        Args:
            drawing: the epoch. Torch draws no base seed for workers that it would have
                kept, so the generator of the order is left to the samplers.
            watch: the watch on new workers of an iterable.
            new: whether the epoch begins only now.
        """
        attributes: dict[str, Any] = {}
        piped = isinstance(self.dataset, IterDataPipe)  # its order is also drawn here
        if drawing.base is not None and self._iterator is None and not piped:
            attributes["generator"] = torch.Generator().manual_seed(drawing.base)
        if watch is not None:
            attributes["worker_init_fn"] = watch
        before = {name: vars(self)[name] for name in attributes}
        try:
            vars(self).update(attributes)
            iterator: Any = super().__iter__()
        finally:
            vars(self).update(before)
        self._base = int(iterator._base_seed) if self._keeps_workers else None
        if self.num_workers or isinstance(self.dataset, IterableDataset):
            return iterator
        if new:
            order, seed = iterator._sampler_iter, iterator._base_seed
            iterator._sampler_iter = LateOrder(order, drawing, seed, self.generator)
        elif drawing.seed is not None:  # the states are those at the order
            drawing.restore(self.generator)
        return iterator

    def _forks_readers(self) -> bool:
        """Whether torch forks several workers, each with a copy of an iterable."""
        context = self.multiprocessing_context or torch.multiprocessing
        return (
            self.num_workers > 1
            and isinstance(self.dataset, IterableDataset)
            and not isinstance(self.dataset, IterDataPipe)  # torch shares these out
            and not (self.persistent_workers and self._iterator is not None)
            and context.get_start_method() == "fork"
        )

    @property
    def _keeps_workers(self) -> bool:
        """Whether torch's workers, and so their base seed, outlive an epoch."""
        return bool(self.persistent_workers) and self.num_workers > 0

    # Penstock's engine

    def _iterate(self, drawing: Drawing) -> Iterator[Any]:
        slot, recipe = self._slot, self._recipe
        made_from = (
            self._collate,
            self.worker_init_fn,
            self.pin_memory,
            self.num_workers,
            self.prefetch_factor,
            self.timeout,
            self.multiprocessing_context,
        )
        tunes = config.get_enable_autotune()
        if slot.busy:  # a second loop beside a current one has its own run
            slot, recipe = Slot(self.name), self._compiled()
        elif (
            recipe is None
            or slot.run is None
            or made_from != self._made_from
            or (tunes and not self._tuned and recipe.segments[0].executor == "inline")
        ):
            slot.close()
            recipe = self._recipe = self._compiled()
            self._made_from, self._tuned = made_from, tunes
            slot.tell(
                f"order by torch's samplers, {self.num_workers} workers to begin with,"
                f" {'each sample' if self._seeds else 'no sample'} seeded for itself."
            )
        loop = Loop(self, slot, partial(self._begin, slot, recipe, drawing), drawing)
        if slot is not self._slot:
            weakref.finalize(loop, slot.finalise)
        return loop

    def _begin(self, slot: Slot, recipe: Recipe, drawing: Drawing) -> Run:
        """Draw the rest of the epoch's order and run it."""
        from ..engine.program.randomness import mixed

        plan = recipe.drawn
        assert plan is not None
        late = drawing.torchs is None and not self.num_workers
        with drawing.drawn_again(self.generator):
            batches = iter(self._index_sampler)
            if drawing.seed is not None:
                seed = drawing.seed
            elif drawing.base is None:
                seed = self._drawn_seed()
                if self.num_workers:  # with workers, torch begins and draws twice
                    batches = iter(self._index_sampler)
            else:
                seed = mixed((drawing.base, drawing.epoch)) >> 1
            if late:
                batches = LateOrder(batches, drawing, seed, self.generator)
            cursor = plan.begin(
                drawing.epoch,
                batches,
                seed,
                skip=drawing.batch,
                length=length_of(self),
                most=self._may_draw(),
                late=late,
            )
        return slot.start(recipe, cursor, rank_of_process())

    def _may_draw(self) -> int:
        """Return how many batches may be drawn in advance: by default as by torch."""
        from ..engine.witness.hazards import may_watch

        shared = self.num_workers and self.generator  # another loader may draw from it
        if not (shared or may_watch(self._index_sampler)):
            return AHEAD
        return (self.prefetch_factor or 2) * self.num_workers

    def _drawn_seed(self) -> int:
        """Draw the seed that torch draws for its workers, before the samplers draw."""
        seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        self._base = int(seed) if self._keeps_workers else None
        return int(seed)

    def _samplers(self) -> list[Any]:
        inner = getattr(self.batch_sampler, "sampler", None)
        return list(
            {id(s): s for s in (self.sampler, self.batch_sampler, inner)}.values()
        )

    def _sampler_epochs(self) -> list[Any]:
        """Return the epochs that samplers received through `set_epoch`."""
        return [getattr(sampler, "epoch", None) for sampler in self._samplers()]

    def _compiled(self) -> Recipe:
        from ..engine.program.operations import WorkerStart
        from .compile import compile_drawn
        from .stages import SourceStage
        from .torch_workers import start_method, tell_of_cuda

        why = self._why_torchs()
        check(
            why is None, f"torch's own workers load ({why}); leave load_autotune() out"
        )
        tell_of_cuda(self.dataset)
        workers, safe = index(self.num_workers), self.thread_safe is True
        tunes = config.get_enable_autotune()
        moves = (safe or tunes) and not self._zero_workers
        default: Executor = "auto" if moves else "inline"
        source = SourceStage(
            self.dataset,
            num_parallel_workers=workers or None,
            executor="process" if workers and not safe else default,
            thread_safe=safe,
            timeout=(workers and self.timeout) or None,
            drawn=True,
        )
        start = WorkerStart(self.dataset, workers, self.worker_init_fn)
        ahead = index(self.prefetch_factor or 2) * max(1, workers)  # as torch counts
        return compile_drawn(
            source,
            self._collate,
            replace(config.current, prefetch_size=ahead),
            Options(
                host="trainer",  # the samplers live there
                persistent_workers=bool(self.persistent_workers),
                multiprocessing_context=start_method(
                    self.multiprocessing_context, source.executor
                ),
            ),
            name=self.name,
            start=start if self._seeds else None,
            pin_memory=self.pin_memory,
            fixed="num_workers=0" if self._zero_workers and tunes else "",
        )

    @property
    def _zero_workers(self) -> bool:
        """Whether the program itself says that no workers shall load."""
        return self._says_workers and self.num_workers == 0

    @property
    def _seeds(self) -> bool:
        """Whether each sample has a seed; else all draw from the streams there are."""
        return not self.thread_safe and bool(
            self.sample_seeding or not self._zero_workers
        )

    @property
    def _collate(self) -> Callable[[list[Any]], Any] | None:
        """Return the user's `collate_fn`; None for torch's, which runs in place."""
        plain = self.collate_fn is default_collate and is_default_unchanged()
        return None if plain else self.collate_fn
