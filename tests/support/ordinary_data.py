"""Ordinary datasets, and what one program sees of them: cases for a differential test.

A `Case` is plain data: its `repr` is code that makes it again. `looped` runs it with
torch's loader or with a face of penstock's, and returns all that the program saw: each
batch, each exception, and what the trainer itself drew from the global generators.

Whatever a dataset or a collate function draws lies in [DRAWN, DRAWN + 1), so that it
can be told from the rest of a batch; nothing else does.
"""

from __future__ import annotations

import collections
import copy
import fcntl
import io
import multiprocessing
import os
import random
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
import torch.utils.data as torchs
from hypothesis import strategies as st

import penstock as ps
from penstock.engine import engine
from penstock.engine.auto_executor import Resolved
from penstock.engine.host import direct

__all__ = [
    "BOTH",
    "DRAWN",
    "DRAWS",
    "ORDERLESS",
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

DRAWN = 1000.0
NOT_DRAWN = 999.0
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
    """Of a pipeline's workers."""
    tuned: bool = True
    """Whether autotune is on."""
    move: int = 0
    """The batch after which the executor is made to move, if it may; 0: never."""
    trait: str = "plain"
    """What is particular about the dataset: of `TRAITS` or `SCHEMES`."""
    shape: str = "int"
    """What its samples look like: of `SHAPES`."""
    sampler: str = "sequential"
    collate: str = "default"
    length: int = 12
    batch: int = 4
    drop_last: bool = False
    epochs: int = 1
    persistent: bool = False
    seed: int = 0

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
        alone = self.face == "pipeline" and self.workers == 0
        return alone and self.trait in DRAWS and not self.moved_blindly

    @property
    def moved_blindly(self) -> bool:
        """Whether draws may begin on threads, which share the trainer's generators."""
        return (self.face, self.workers) == ("pipeline", 0) and "rare" in self.trait

    @property
    def torchs_own(self) -> bool:
        """Whether torch's own workers load: all bytes are torch's then."""
        return self.face == "loader" and (self.iterable or not self.tuned)

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


# What samples look like


class Pair(NamedTuple):
    """A namedtuple of the user's."""

    left: torch.Tensor
    right: int


@dataclass
class Record:
    """A class of the user's."""

    number: int
    values: torch.Tensor


class Tagged(torch.Tensor):
    """A tensor of the user's own class."""


Dice = np.random.Generator


def strided(dice: Dice) -> Any:
    return dice.integers(0, 255, (4, 6), np.uint8)[::2, ::3]


def ordered(dice: Dice) -> Any:
    return collections.OrderedDict(b=int(dice.integers(9)), a=float(dice.random()))


def defaulting(dice: Dice) -> Any:
    return collections.defaultdict(list, {"a": int(dice.integers(9))})


SHAPES: dict[str, Callable[[Dice], Any]] = {
    "int": lambda dice: int(dice.integers(900)),
    "float": lambda dice: float(dice.random()),
    "bool": lambda dice: bool(dice.random() < 0.5),
    "str": lambda dice: "abc"[: dice.integers(4)],
    "bytes": lambda dice: dice.bytes(3),
    "numpy float": lambda dice: np.float32(dice.random()),
    "numpy int": lambda dice: np.int16(dice.integers(9)),
    "numpy bool": lambda dice: np.bool_(dice.random() < 0.5),
    "numpy str": lambda dice: np.str_("abc"[: dice.integers(4)]),
    "array": lambda dice: dice.random((2, 3), np.float32),
    "array of no dimension": lambda dice: np.array(dice.random()),
    "strided array": strided,
    "read-only array": lambda dice: np.frombuffer(dice.bytes(8), np.uint8),
    "array of objects": lambda dice: np.array([None, "a"], object),
    "tensor": lambda dice: torch.from_numpy(dice.random((2, 3))),
    "number in a tensor": lambda dice: torch.tensor(dice.random()),
    "bfloat16": lambda dice: torch.tensor([dice.random()], dtype=torch.bfloat16),
    "graph": lambda dice: torch.tensor([dice.random()], requires_grad=True),
    "sparse": lambda dice: torch.eye(2).to_sparse() * float(dice.random()),
    "tensor of a class": lambda dice: torch.tensor([dice.random()]).as_subclass(Tagged),
    "namedtuple": lambda dice: Pair(torch.tensor([dice.random()]), 3),
    "dict": lambda dice: {"a": int(dice.integers(9)), 2: [float(dice.random()), "b"]},
    "ordered dict": ordered,
    "defaultdict": defaulting,
    "user's dict": lambda dice: collections.UserDict(a=int(dice.integers(9))),
    "nested": lambda dice: ((int(dice.integers(9)), [dice.random(2)]), {"a": ("b",)}),
    "no members": lambda dice: ((), [], 1),
    "ragged": lambda dice: torch.arange(dice.integers(1, 5)),
    "ragged list": lambda dice: list(range(dice.integers(1, 5))),
    "now int, now float": lambda dice: [1, 2.5][dice.integers(2)],
    "now int, now None": lambda dice: [1, 2, 3, None][dice.integers(4)],
    "now keys, now others": lambda dice: [{"a": 1, "b": 2}, {"a": 1}][dice.integers(2)],
    "now list, now tuple": lambda dice: [[1, 2], (3, 4)][dice.integers(2)],
    "now two, now three": lambda dice: (1,) * dice.integers(2, 4),
    "now narrow, now wide": lambda dice: np.ones(2, ["f4", "f8"][dice.integers(2)]),
    "large int": lambda dice: 2**64 - int(dice.integers(9)),
    "complex": lambda dice: complex(dice.random(), 1),
    "bytearray": lambda dice: bytearray(dice.bytes(2)),
    "None": lambda dice: None,
    "dataclass": lambda dice: Record(int(dice.integers(9)), torch.ones(2)),
    "fraction": lambda dice: Fraction(int(dice.integers(9)), 7),
    "timedelta": lambda dice: timedelta(int(dice.integers(9))),
    "set": lambda dice: {int(dice.integers(9))},
}


# Map-style datasets


class Refused(Exception):
    """Of the user's; made from two values."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(index, why)


ERRORS: dict[str, Callable[[int], Exception]] = {
    "KeyError": KeyError,
    "IndexError": IndexError,
    "ValueError": lambda index: ValueError(f"sample {index}"),
    "OSError": lambda index: FileNotFoundError(2, "no such file", str(index)),
    "UnicodeError": lambda index: UnicodeDecodeError("utf-8", b"a", 0, 1, str(index)),
    "Refused": lambda index: Refused(index, "refused"),
}
RECORD = 8


class Data:
    """Sample i is what a shape makes of i: nothing else, whoever asks."""

    def __init__(self, case: Case, folder: Path, *, mute: bool) -> None:
        self.case = case
        self.mute = mute
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Take what it needs."""

    def __len__(self) -> int:
        return self.case.length

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.case.length:
            raise IndexError(index)
        return self.value(index)

    def value(self, index: int) -> Any:
        dice = np.random.default_rng((self.case.seed, index))
        return SHAPES[self.case.shape](dice)


class Marked(Data, ABC):
    """Has something else in each sample, too."""

    def __getitem__(self, index: int) -> Any:
        return self.mark(index), self.value(index)

    @abstractmethod
    def mark(self, index: int) -> Any:
        """Return what else is in sample `index`."""


class Many(Data):
    """Gives several samples at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(self.value, indices))


class Memo(Marked):
    """Keeps what it made."""

    def begin(self) -> None:
        self.kept: dict[int, Any] = {}

    def mark(self, index: int) -> Any:
        return self.kept.setdefault(index, index)


def records_of(folder: Path, length: int) -> Path:
    path = folder / "records.bin"
    if not path.exists():
        path.write_bytes(np.arange(length, dtype=np.int64).tobytes())
    return path


class Filed(Marked):
    """Reads through a handle that it keeps."""

    buffering = -1
    file: Any = None

    def begin(self) -> None:
        self.open()

    def open(self) -> None:
        path = records_of(self.folder, self.case.length)
        self.file = path.open("rb", buffering=self.buffering)

    def mark(self, index: int) -> Any:
        self.file.seek(index * RECORD)
        return int.from_bytes(self.file.read(RECORD), "little")

    def __del__(self) -> None:
        if self.file is not None:
            self.file.close()


class Raw(Filed):
    """Through one without a buffer."""

    buffering = 0


class Lazy(Filed):
    """Opens it when it is first read."""

    def begin(self) -> None:
        records_of(self.folder, self.case.length)

    def mark(self, index: int) -> Any:
        if self.file is None:
            self.open()
        return super().mark(index)


class Own(Filed):
    """Opens one in each process."""

    owner = 0

    def mark(self, index: int) -> Any:
        if self.owner != os.getpid():
            self.open()
            self.owner = os.getpid()
        return super().mark(index)


class Zipped(Filed):
    """Reads from an archive."""

    def open(self) -> None:
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for index in range(self.case.length):
                archive.writestr(str(index), str(index))
        path = self.folder / "records.zip"
        path.write_bytes(packed.getvalue())
        self.file = zipfile.ZipFile(path)

    def mark(self, index: int) -> Any:
        return int(self.file.read(str(index)))


class InOrder(Filed):
    """Reads on, whatever is asked for; at the end it begins again."""

    def mark(self, index: int) -> Any:
        if not (found := self.file.read(RECORD)):
            self.file.seek(0)
            found = self.file.read(RECORD)
        return int.from_bytes(found, "little")


class Counter(Marked):
    """Counts its calls."""

    def begin(self) -> None:
        self.calls = 0

    def mark(self, index: int) -> Any:
        self.calls += 1
        return self.calls


class ByClosure(Counter):
    """Counts in a function that remembers."""

    def begin(self) -> None:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def mark(self, index: int) -> Any:
        return self.count()


calls_of_all = 0


class ByGlobal(Counter):
    """Counts in a variable of its module."""

    def begin(self) -> None:
        global calls_of_all  # noqa: PLW0603 as some do
        calls_of_all = 0

    def mark(self, index: int) -> Any:
        global calls_of_all  # noqa: PLW0603 as some do
        calls_of_all += 1
        return calls_of_all


class Noted(Counter):
    """Keeps the number of the call that made a sample."""

    def begin(self) -> None:
        super().begin()
        self.kept: dict[int, int] = {}

    def mark(self, index: int) -> Any:
        return self.kept.setdefault(index, super().mark(index))


class Streaming(Marked):
    """Draws from a generator of its own."""

    makes: Any = staticmethod(random.Random)

    def begin(self) -> None:
        self.generator = self.makes(self.case.seed)

    def mark(self, index: int) -> Any:
        return float(self.generator.random())


class NumpyStream(Streaming):
    makes = staticmethod(np.random.default_rng)


class LegacyStream(Streaming):
    makes = staticmethod(np.random.RandomState)


class TorchStream(Streaming):
    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(self.case.seed)

    def mark(self, index: int) -> Any:
        return float(torch.rand((), generator=self.generator))


GLOBAL: dict[str, Callable[[], float]] = {
    "random": random.random,
    "numpy": np.random.rand,
    "torch": lambda: float(torch.rand((), dtype=torch.float64)),
}


class Drawing(Marked):
    """Draws from a global generator, in every sample or in some."""

    def mark(self, index: int) -> Any:
        how, _, library = self.case.trait.partition(" ")
        if how == "rare" and index % 7 != 5:
            return NOT_DRAWN
        return DRAWN if self.mute else DRAWN + GLOBAL[library]()


class DrawingCounter(Drawing):
    """Draws from a global generator, and counts its calls."""

    def begin(self) -> None:
        self.calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        return self.mark(index), self.calls, self.value(index)

    def mark(self, index: int) -> Any:
        return DRAWN if self.mute else DRAWN + random.random()


class LateDrawingCounter(DrawingCounter):
    """The same, but seldom."""

    def mark(self, index: int) -> Any:
        return super().mark(index) if index % 7 == 5 else NOT_DRAWN


class Raising(Data):
    """Cannot make one of its samples."""

    def value(self, index: int) -> Any:
        if index == self.case.seed % self.case.length:
            raise ERRORS[self.case.trait.partition(" ")[2]](index)
        return super().value(index)


HANDLES: dict[str, type[Data]] = {"file": Filed, "raw file": Raw, "archive": Zipped}
"""Right as long as one process reads."""
CHANGING: dict[str, type[Data]] = {
    "reads on": InOrder,
    "counts": Counter,
    "counts in a closure": ByClosure,
    "counts in its module": ByGlobal,
    "notes": Noted,
    "Python's stream": Streaming,
    "numpy's stream": NumpyStream,
    "numpy's legacy stream": LegacyStream,
    "torch's stream": TorchStream,
}
"""Whose samples depend on those made before."""
DRAWS: dict[str, type[Data]] = {
    **{f"draws {library}": Drawing for library in GLOBAL},
    **{f"rare {library}": Drawing for library in GLOBAL},
    "draws and counts": DrawingCounter,
    "counts, seldom draws": LateDrawingCounter,
}
BOTH = frozenset(("draws and counts", "counts, seldom draws"))
PURE: dict[str, type[Data]] = {
    "plain": Data,
    "many": Many,
    "keeps": Memo,
    "file when read": Lazy,
    "file of the process": Own,
    **{f"raises {name}": Raising for name in ERRORS},
}
TRAITS = PURE | HANDLES | CHANGING | DRAWS


# Iterables


class Streamed(torchs.IterableDataset[Any]):
    """Every worker reads all of it."""

    def __init__(self, case: Case, folder: Path, *, mute: bool) -> None:
        self.case = case
        self.data = Data(case, folder, mute=mute)
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Take what it needs."""

    def __iter__(self) -> Iterator[Any]:
        return ((number, self.data[number]) for number in self.numbers())

    def numbers(self) -> Iterator[int]:
        return iter(range(self.case.length))


class OfEpochs(Streamed):
    """Has another order each time it is read."""

    def begin(self) -> None:
        self.epoch = 0

    def numbers(self) -> Iterator[int]:
        self.epoch += 1
        return iter(np.random.default_rng(self.epoch).permutation(self.case.length))


class OwnIterator(Streamed):
    """Is its own iterator."""

    def __iter__(self) -> Self:
        self.left = iter(range(self.case.length))
        return self

    def __next__(self) -> Any:
        number = next(self.left)
        return number, self.data[number]


class ByWorker(Streamed):
    """Each worker takes its share by its number."""

    def numbers(self) -> Iterator[int]:
        info = torchs.get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.case.length, step))


class Split(Streamed):
    """A `worker_init_fn` sets the share."""

    first, step = 0, 1

    def numbers(self) -> Iterator[int]:
        return iter(range(self.first, self.case.length, self.step))


def split(number: int) -> None:
    info: Any = torchs.get_worker_info()
    if isinstance(info.dataset, Split):
        info.dataset.first, info.dataset.step = number, info.num_workers


class Queued(Streamed):
    """Workers take from one queue."""

    def begin(self) -> None:
        self.queue = multiprocessing.SimpleQueue()
        for _ in range(self.case.epochs):
            for number in [*range(self.case.length), *[None] * max(1, self.ends)]:
                self.queue.put(number)

    @property
    def ends(self) -> int:
        return self.case.workers if self.case.face == "loader" else 1

    def numbers(self) -> Iterator[int]:
        return iter(self.queue.get, None)


TAKEN = multiprocessing.Value("q", 0)
"""One for all cases: the memory of such is never given back."""
TAKEN.value = 0  # from here on that memory counts as this process's


class Valued(Streamed):
    """Workers count together."""

    def begin(self) -> None:
        self.taken = TAKEN
        self.taken.value = 0

    def numbers(self) -> Iterator[int]:
        while True:
            with self.taken.get_lock():
                number = self.taken.value
                self.taken.value += 1
            if number >= self.case.length:
                return
            yield number


class Locked(Streamed):
    """Workers keep the count in a file, behind a lock."""

    def begin(self) -> None:
        self.path = self.folder / "taken"
        self.path.write_text("0")

    def numbers(self) -> Iterator[int]:
        while True:
            with self.path.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                number = int(file.read())
                file.seek(0)
                file.write(str(number + 1))
            if number >= self.case.length:
                return
            yield number


ORDERLESS: dict[str, type[Streamed]] = {
    "queue": Queued,
    "shared value": Valued,
    "lock file": Locked,
}
"""Whose samples come once, from whichever worker is there first."""
SCHEMES: dict[str, type[Streamed]] = {
    "unshared": Streamed,
    "other epochs": OfEpochs,
    "own iterator": OwnIterator,
    "by worker": ByWorker,
    "split": Split,
    **ORDERLESS,
}


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
"""Of which each worker of torch's has a copy."""


def collate_of(case: Case, *, mute: bool) -> Any:
    made = COLLATES[case.collate]
    return made(case, mute=mute) if isinstance(made, type) else made


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


def uneven(order: Sequence[int]) -> list[list[int]]:
    """Batches of 1, 2, 3, 1, 2, 3, ... samples."""
    sizes, left, batches = [1, 2, 3], list(order), []
    while left:
        size = sizes[len(batches) % 3]
        batches.append(left[:size])
        left = left[size:]
    return batches


SAMPLERS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "sequential": lambda case: {},
    "shuffle": lambda case: {"shuffle": True},
    "own generator": lambda case: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(case.seed),
    },
    "list": lambda case: {"sampler": some_of(case)},
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
    "batches": lambda case: {"batch_sampler": uneven(some_of(case))},
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


# Loops


def looped(case: Case, folder: Path, *, torchs_loader: bool, mute: bool) -> list[Any]:
    """Return what a program sees in the epochs of a case.

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
        found = seen(case, loader)
    return [*found, trainers()]


@contextmanager
def program_of(
    case: Case, folder: Path, *, torchs_loader: bool = False, mute: bool = False
) -> Iterator[Any]:
    """Make what a case loops over; close it in the end."""
    data = (TRAITS | SCHEMES)[case.trait](case, folder, mute=mute)
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
        num_workers=case.workers,
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
    found: list[Any] = []
    with moving_for(case):
        for _ in range(case.epochs):
            found.append("an epoch")
            for number, entry in enumerate(epoch(loader), start=1):
                found.append(entry)
                if case.sampler != "replacement":  # which draws while it goes on
                    found.append(trainers())
                if number == case.move:
                    set_knobs(loader, "host" if number % 2 == 0 else "executor")
    return found


def trainers() -> tuple[Any, ...]:
    """Return what the trainer itself draws from the global generators."""
    return TRAINERS, *(draw() for draw in GLOBAL.values())


def epoch(loader: Any) -> Iterator[Any]:
    """Yield copies of batches, and what was raised in place of some."""
    try:
        batches = iter(loader)
    except Exception as error:  # noqa: BLE001 it is compared
        yield raised(error)
        return
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
        return [drawn for part in tree for drawn in draws_in(part)]
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


@contextmanager
def moving_for(case: Case) -> Iterator[None]:
    """Have `auto` find that other workers pay, after as many looks as batches.

    That alone is made up: whether the data may go there is asked as ever.
    """
    looks = 0

    def found(*_: int, thread_safe: bool) -> Resolved | None:
        nonlocal looks
        looks += 1
        if looks < case.move:
            return None
        return Resolved("thread" if thread_safe else "process", "as the case says")

    known = engine.resolve
    if case.move:
        engine.resolve = direct.resolve = found
    try:
        yield
    finally:
        engine.resolve = direct.resolve = known


def set_knobs(loader: Any, name: str) -> list[str]:
    """Set the knobs of this name that there are, as the tuner does."""
    slot = getattr(loader, "_slot", None)
    knobs = [] if slot is None or slot.run is None else slot.run.run.knobs()
    others = [knob for knob in knobs if knob.name == name]
    for knob in others:
        knob.set(next(kind for kind in knob.choices if kind != knob.value))
    return [str(knob.value) for knob in others]


# Cases


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Return a strategy of cases that torch's loader runs correctly."""

    def pick(values: Iterable[Any]) -> Any:
        return draw(st.sampled_from(list(values)))

    face = pick(("loader", "pipeline"))
    workers = pick((0, 0, 0, 1, 3))
    kinds = (PURE, HANDLES, CHANGING, DRAWS, SCHEMES)
    case = Case(
        face=face,
        workers=workers,
        executor=pick(("auto", "process")),
        tuned=pick((True, True, False)),
        move=pick((0, 1, 1, 2, 3)),
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
    )
    return meant(case)


def meant(case: Case) -> Case:
    """Return the case, changed where torch would not be right, or has no answer."""
    case = replace(case, persistent=case.persistent and case.workers > 0)
    many = ("raises Refused", "raises UnicodeError")  # made from more than a text
    if case.trait in many and not case.torchs_own:
        case = replace(case, persistent=False)  # torch's workers send another
    if case.iterable:
        case = replace(case, sampler="sequential")
    if case.trait in ORDERLESS:  # what lies in which batch is nobody's to say
        case = replace(case, collate="list", drop_last=False, epochs=1)
    if case.trait in HANDLES | CHANGING or case.trait in BOTH:  # a copy each
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


def sendable(case: Case) -> Case:
    """Return the case, changed where torch's workers cannot send what they make."""
    if case.collate == "buffer":
        case = replace(case, collate="list")  # they send what lies there
    if case.torchs_own:
        return case
    if case.collate in STATEFUL:
        case = replace(case, epochs=1)  # each has a copy
    return replace(case, shape="float") if case.shape == "graph" else case
