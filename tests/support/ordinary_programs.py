"""What one program sees of ordinary datasets: cases for a differential test.

A `Case` is plain data: its `repr` is code that makes it again. `looped` runs it with
torch's loader or with a face of penstock's, and returns everything that the program
saw: each batch, each exception, and the trainer's own draws from the global generators.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data as torchs
from hypothesis import strategies as st

import penstock as ps

from .moves import workers_pay
from .ordinary_data import (
    BOTH,
    CHANGING,
    DRAWN,
    DRAWS,
    GLOBAL,
    HANDLES,
    ORDERLESS,
    PURE,
    SCHEMES,
    SHAPES,
    STREAMS,
    TRAITS,
    Pair,
    split,
)

__all__ = [
    "RAISED",
    "TRAINERS",
    "Case",
    "cases",
    "draws_in",
    "looped",
    "muted",
    "program_of",
    "seen",
]

RAISED = "raised"
TRAINERS = "the trainer draws"
# Torch's loader waits so many seconds for kept workers to leave; some of them do not.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # type: ignore[attr-defined] # noqa: SLF001

MANY = 1000
"""Batches after which a loop is without end."""


@dataclass(frozen=True)
class Case:
    """One dataset under one configuration."""

    face: str = "loader"
    """"loader" or "pipeline"."""
    workers: int = 0
    executor: str = "auto"
    """The executor of a pipeline's stages."""
    tuned: bool = True
    """Whether autotune is on."""
    move: int = 0
    """The batch after which the executor is made to move, if it may; 0: never."""
    trait: str = "plain"
    """The special trait of the dataset, from `TRAITS` or `SCHEMES`."""
    shape: str = "int"
    """The shape of its samples, from `SHAPES`."""
    sampler: str = "sequential"
    collate: str = "default"
    length: int = 12
    batch: int = 4
    drop_last: bool = False
    epochs: int = 1
    persistent: bool = False
    seed: int = 0
    said: bool = False
    """Whether a loader's program says `num_workers=0`."""
    index: str = "number"
    """What samplers yield, from `INDICES`."""
    many: str = ""
    """What the dataset's `__getitems__` returns, from `FORMS`; empty: it has none."""
    change: int = 0
    """The batch of each epoch after which the loop changes the dataset; 0: never."""

    @property
    def iterable(self) -> bool:
        return self.trait in SCHEMES

    @property
    def draws(self) -> bool:
        """Whether something of the user's draws from a global generator."""
        return self.trait in DRAWS or self.collate == "drawing"

    @property
    def drawn_by_trainer(self) -> bool:
        """Whether the trainer itself draws for its samples, as torch's would alone."""
        if self.face == "loader":
            return self.said and self.workers == 0
        alone = self.face == "pipeline" and self.workers == 0
        return alone and self.trait in DRAWS and not self.moved_blindly

    @property
    def moved_blindly(self) -> bool:
        """Whether draws may begin on threads, which share the trainer's generators."""
        return (self.face, self.workers) == ("pipeline", 0) and "rare" in self.trait

    @property
    def torchs_own(self) -> bool:
        """Whether torch's own workers load: all bytes are torch's then."""
        theirs = self.workers and self.trait in STREAMS
        return self.face == "loader" and bool(self.iterable or not self.tuned or theirs)

    @property
    def reference(self) -> Case:
        """The settings of torch's loader that say what is to come.

        Where penstock loads, that is the trainer alone. Data that changes while it is
        read begins with each worker process as it was, and a pipeline's live on.
        """
        if self.torchs_own:
            return self
        if self.face == "pipeline" or self.workers == 0:
            return replace(self, workers=0, persistent=False)
        if self.trait in CHANGING or self.trait in BOTH:
            return self
        # Torch draws no base seed for later epochs of workers that live on.
        return replace(self, workers=int(self.persistent))


# Collate functions


class Counted:
    """Numbers the batches."""

    def __init__(self, case: Case, *, mute: bool) -> None:
        self.case, self.mute, self.calls = case, mute, 0

    def __call__(self, rows: list[Any]) -> Any:
        self.calls += 1
        return self.calls, rows


class Buffered(Counted):
    """Puts every batch where the last one was."""

    def __init__(self, case: Case, *, mute: bool) -> None:
        super().__init__(case, mute=mute)
        self.rows: list[Any] = []
        self.count = torch.zeros(1)

    def __call__(self, rows: list[Any]) -> Any:
        self.rows[:] = rows
        return {"rows": self.rows, "count": self.count.fill_(len(rows))}


class Masked(Counted):
    """Draws for each batch."""

    def __call__(self, rows: list[Any]) -> Any:
        return [DRAWN + (0.0 if self.mute else GLOBAL["torch"]()), *rows]


class Failing(Counted):
    """Cannot make the second batch."""

    def __call__(self, rows: list[Any]) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise LookupError("the second batch")
        return tuple(rows)


class Boxed(Counted):
    """Makes batches of a class of the user's."""

    def __call__(self, rows: list[Any]) -> Any:
        return Batch(rows, len(rows))


@dataclass
class Batch:
    """A batch of a class of the user's."""

    rows: list[Any]
    count: int


def as_list(rows: list[Any]) -> list[Any]:
    return rows


COLLATES: dict[str, Any] = {
    "default": None,
    "list": as_list,
    "boxed": Boxed,
    "counted": Counted,
    "buffer": Buffered,
    "drawing": Masked,
    "failing": Failing,
}
STATEFUL = frozenset(("counted", "drawing", "failing"))
"""Collate functions that keep something: each worker of torch's has a copy of it."""


def collate_of(case: Case, *, mute: bool) -> Any:
    collate = COLLATES[case.collate]
    return collate(case, mute=mute) if isinstance(collate, type) else collate


# Datasets as programs use them

INDICES: dict[str, Callable[[int], Any]] = {
    "number": int,
    "pair": lambda at: (16, at),
    "name": lambda at: f"{at}.jpg",
    "list": lambda at: [at],
}
NUMBERS: dict[str, Callable[[Any], int]] = {
    "number": int,
    "pair": lambda pair: pair[1],
    "name": lambda name: int(name[:-4]),
    "list": lambda numbers: numbers[0],
}
FORMS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda rows: {"rows": rows, "count": len(rows)},
    "fewer": lambda rows: rows[1:],
}


class Used:
    """A dataset that has indices of another form, and that a loop may change."""

    def __init__(self, data: Any, case: Case) -> None:
        self.data, self.case = data, case
        self.options = {"added": [0]}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        sample = self.data[NUMBERS[self.case.index](index)]
        return (sample, self.options["added"][0]) if self.case.change else sample


class UsedInBatches(Used):
    """Reads whole batches."""

    def __getitems__(self, indices: list[Any]) -> Any:
        return FORMS[self.case.many]([self[index] for index in indices])


in_use: list[Used] = []
"""The dataset that the present loop may change."""


def used(case: Case, data: Any) -> Any:
    """Return the dataset as the program of a case has it."""
    if case.iterable or not (case.index != "number" or case.many or case.change):
        return data
    in_use.append((UsedInBatches if case.many else Used)(data, case))
    return in_use[0]


# Samplers


class Rotating(torchs.Sampler[int]):
    """Begins elsewhere each epoch, and counts these itself."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epochs = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        first = self.epochs = self.epochs + 1
        return ((at + first) % self.length for at in range(self.length))


def uneven(order: Sequence[Any]) -> list[list[Any]]:
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""
    sizes, rest, batches = [1, 2, 3], list(order), []
    while rest:
        size = sizes[len(batches) % 3]
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


SAMPLERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "sequential": lambda case: {},
    "shuffle": lambda case: {"shuffle": True},
    "own generator": lambda case: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(case.seed),
    },
    "list": lambda case: {"sampler": indices_of(case)},
    "subset": lambda case: {"sampler": torchs.SubsetRandomSampler(some_of(case))},
    "weighted": lambda case: {
        "sampler": torchs.WeightedRandomSampler([1.0] * case.length, case.length)
    },
    "replacement": lambda case: {
        "sampler": torchs.RandomSampler(
            range(case.length), replacement=True, num_samples=case.length + 3
        )
    },
    "rotating": lambda case: {"sampler": Rotating(case.length)},
    "batches": lambda case: {"batch_sampler": uneven(indices_of(case))},
    "random batches": lambda case: {
        "batch_sampler": torchs.BatchSampler(
            torchs.RandomSampler(range(case.length)), case.batch, case.drop_last
        )
    },
}
OF_PIPELINES = ("sequential", "list")


def some_of(case: Case) -> list[int]:
    """Indices, some of them more than once."""
    dice = random.Random(case.seed)
    return dice.choices(range(case.length), k=case.length)


def indices_of(case: Case) -> list[Any]:
    """Return what samplers of the program's own yield."""
    return [INDICES[case.index](at) for at in some_of(case)]


# Loops


def looped(case: Case, folder: Path, *, torchs_loader: bool, mute: bool) -> list[Any]:
    """Return everything that a program sees in the epochs of a case.

    Args:
        case: what to load, and how.
        folder: empty, for files of the dataset.
        torchs_loader: whether torch's own loader loads, else penstock.
        mute: whether nothing is drawn, though the case says so.
    """
    random.seed(case.seed)
    np.random.seed(case.seed)  # noqa: NPY002 the global one
    torch.manual_seed(case.seed)
    ps.set_enable_autotune(case.tuned and not torchs_loader)
    ps.set_autotune_interval(MANY)  # of what is tuned, `move` is all
    with program_of(case, folder, torchs_loader=torchs_loader, mute=mute) as loader:
        entries = seen(case, loader)
    in_use.clear()
    return [*entries, trainers()]


@contextmanager
def program_of(
    case: Case, folder: Path, *, torchs_loader: bool = False, mute: bool = False
) -> Iterator[Any]:
    """Make the loader or pipeline of a case, and close it at the end."""
    data = used(case, (TRAITS | SCHEMES)[case.trait](case, folder, mute=mute))
    collate = collate_of(case, mute=mute)
    if case.face == "pipeline" and not torchs_loader:
        with pipeline_of(case, data, collate) as pipe:
            yield pipe
        return
    loader = loader_of(case, data, collate, torchs_loader=torchs_loader)
    try:
        yield loader
    finally:
        if not torchs_loader:
            loader.close()
        if case.persistent:
            loader._iterator = None  # noqa: SLF001 torch's workers end here


def loader_of(case: Case, data: Any, collate: Any, *, torchs_loader: bool) -> Any:
    options: dict[str, Any] = {} if case.iterable else SAMPLERS[case.sampler](case)
    if "batch_sampler" not in options:
        options |= {"batch_size": case.batch, "drop_last": case.drop_last}
    if case.trait == "split" and case.workers:
        options["worker_init_fn"] = split
    if case.face == "pipeline":  # which draws no seed from the global generator
        options.setdefault("generator", torch.Generator())
    kind = torchs.DataLoader if torchs_loader else ps.DataLoader
    return kind(
        data,
        collate_fn=collate,
        **({"num_workers": case.workers} if case.workers or case.said else {}),
        persistent_workers=case.persistent and case.workers > 0,
        **options,
    )


def pipeline_of(case: Case, data: Any, collate: Any) -> ps.Pipeline:
    workers: dict[str, Any] = {}
    if case.workers and not case.iterable:
        workers = {"num_parallel_workers": case.workers, "executor": case.executor}
    pipe = ps.Pipeline.from_dataset(data, **workers)
    if case.sampler == "list" and not case.iterable:
        pipe = pipe.select(some_of(case))
    return pipe.batch(case.batch, drop_last=case.drop_last, collate_fn=collate)


def seen(case: Case, loader: Any) -> list[Any]:
    """Run the epochs, the trainer drawing for itself after each batch."""
    entries: list[Any] = []
    with workers_pay(case.move) if case.move else nullcontext():
        for _ in range(case.epochs):
            entries.append("an epoch")
            for number, entry in enumerate(epoch(loader, early=case.said), start=1):
                entries.append(entry)
                if case.sampler != "replacement":  # which draws while it goes on
                    entries.append(trainers())
                if number == case.change:
                    in_use[0].options["added"][0] += 1
                if number == case.move:
                    set_knobs(loader, "host" if number % 2 == 0 else "executor")
    return entries


def trainers() -> tuple[Any, ...]:
    """Return what the trainer itself draws from the global generators."""
    return TRAINERS, *(draw() for draw in GLOBAL.values())


def epoch(loader: Any, *, early: bool) -> Iterator[Any]:
    """Yield copies of batches, and what was raised in place of some.

    Args:
        loader: the loader or pipeline.
        early: whether the program draws between `iter` and the first batch.
    """
    try:
        batches = iter(loader)
    except Exception as error:  # noqa: BLE001 it is compared
        yield raised(error)
        return
    if early:
        torch.rand(())
    for _ in range(MANY):
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 it is compared
            yield raised(error)
        else:
            yield plain(batch)
    raise AssertionError("a loop without end")


def raised(error: Exception) -> tuple[str, type, str]:
    return RAISED, type(error), str(error)


def plain(tree: Any) -> Any:
    """Return a copy, without penstock's subclasses of containers."""
    if isinstance(tree, torch.Tensor):
        return plain_tensor(tree)
    if isinstance(tree, Batch):
        return "batch", plain(tree.rows), tree.count
    kind = type(tree)
    if "plan" in vars(kind) or kind.__name__.startswith("Stamped"):
        kind = kind.__bases__[0]
    if kind in (list, tuple):
        return kind(map(plain, tree))
    if kind is dict:
        return {key: plain(value) for key, value in tree.items()}
    return Pair(*map(plain, tree)) if kind is Pair else copy.deepcopy(tree)


def plain_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return "sparse", tensor.to_dense()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def draws_in(tree: Any) -> list[float]:
    """Return what was drawn, of all that a program has seen."""
    if isinstance(tree, torch.Tensor):
        tree = tree.tolist() if tree.dtype is torch.float64 else ()
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (list, tuple)):
        return [draw for part in tree for draw in draws_in(part)]
    return [tree] if isinstance(tree, float) and tree >= DRAWN else []


def muted(tree: Any) -> Any:
    """Return a copy in which everything drawn is `DRAWN`."""
    if isinstance(tree, torch.Tensor) and tree.dtype is torch.float64:
        return torch.where(tree >= DRAWN, DRAWN, tree)
    if isinstance(tree, Pair):
        return tree
    if type(tree) in (list, tuple):
        return type(tree)(map(muted, tree))
    if type(tree) is dict:
        return {key: muted(value) for key, value in tree.items()}
    return DRAWN if isinstance(tree, float) and tree >= DRAWN else tree


# Moves


def set_knobs(loader: Any, name: str) -> list[str]:
    """Set the knobs of this name that there are, as the tuner does."""
    slot = getattr(loader, "_slot", None)
    knobs = [] if slot is None or slot.run is None else slot.run.knobs()
    others = [knob for knob in knobs if knob.name == name]
    for knob in others:
        knob.set(next(kind for kind in knob.choices if kind != knob.value))
    return [str(knob.value) for knob in others]


# Cases


@st.composite
def cases(draw: st.DrawFn, *, alone: bool = False) -> Case:
    """Return a strategy of cases that torch's loader runs correctly.

    Args:
        draw: what hypothesis draws with.
        alone: whether no case has workers, which makes it ten times as quick.
    """

    def pick(values: Iterable[Any]) -> Any:
        return draw(st.sampled_from(list(values)))

    face = pick(("loader", "pipeline"))
    workers = 0 if alone else pick((0, 0, 0, 1, 3))
    kinds = (PURE, HANDLES, CHANGING, DRAWS, SCHEMES)
    case = Case(
        face=face,
        workers=workers,
        executor=pick(("auto", "process")),
        tuned=pick((True, True, False)),
        move=0 if alone else pick((0, 1, 1, 2, 3)),
        trait=pick(pick(kinds)),
        shape=pick(SHAPES),
        sampler=pick(OF_PIPELINES if face == "pipeline" else SAMPLERS),
        collate=pick(("default", *COLLATES)),
        length=draw(st.integers(1, 24)),
        batch=draw(st.integers(1, 6)),
        drop_last=draw(st.booleans()),
        epochs=draw(st.integers(1, 2)),
        persistent=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        said=draw(st.booleans()),
        index=pick(("number", "number", *INDICES)),
        many=pick(("", "", "", *FORMS)),
        change=pick((0, 0, 0, 1, 2, 4)),
    )
    return meant(case)


def meant(case: Case) -> Case:
    """Return the case, changed where torch would not be right, or has no answer."""
    case = replace(case, said=case.said and case.workers == 0)
    case = replace(case, persistent=case.persistent and case.workers > 0)
    many = ("raises Refused", "raises UnicodeError")  # made from more than a text
    if case.trait in many and not case.torchs_own:
        case = replace(case, persistent=False)  # torch's workers send another
    if case.iterable:
        case = replace(case, sampler="sequential", change=0)
    case = asked_for(case)
    if case.trait in ORDERLESS:  # nothing determines which batch has which samples
        case = replace(case, collate="list", drop_last=False, epochs=1)
    copied = case.trait in CHANGING or case.trait in BOTH
    if case.trait in HANDLES or (copied and not case.torchs_own):
        case = replace(case, workers=min(case.workers, 1))
    if case.face == "pipeline" and case.length < case.batch:
        case = replace(case, drop_last=False)  # it refuses an epoch without a batch
    if case.face == "pipeline" and case.trait in DRAWS:  # threads share the generators
        calm = "list" if case.collate == "drawing" else case.collate
        case = replace(case, executor="process", collate=calm)
    changes = case.trait in CHANGING or case.trait in BOTH
    if changes and (case.face, case.executor) == ("pipeline", "process"):
        case = replace(case, move=0)  # a copy begins again, as one more worker's does
    if case.reference.workers:
        case = sendable(case)
    return replace(case, persistent=case.persistent and case.workers > 0)


def asked_for(case: Case) -> Case:
    """Return the case, changed where a program could not ask for this."""
    if case.face == "pipeline" or case.sampler not in ("list", "batches"):
        case = replace(case, index="number")
    if case.workers or case.trait not in PURE or case.collate in STATEFUL:
        case = replace(case, change=0)  # workers have copies; the others move seldom
    if case.face == "pipeline" or case.trait not in PURE:
        case = replace(case, many="")  # a pipeline reads the samples of many batches
    if case.many not in ("", "list"):
        case = replace(case, collate="list")  # which returns what it gets
    return case


def sendable(case: Case) -> Case:
    """Return the case, changed where torch's workers cannot send what they make."""
    if case.collate == "buffer":
        case = replace(case, collate="list")  # they send what lies there
    if case.torchs_own:
        return case
    if case.collate in STATEFUL:
        case = replace(case, epochs=1)  # each has a copy
    # They stack into memory of the first one's type, and refuse gradients.
    theirs = case.shape in ("graph", "now narrow, now wide")
    return replace(case, shape="float") if theirs else case
