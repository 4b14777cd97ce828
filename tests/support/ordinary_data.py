"""Ordinary datasets, as people write them for torch's loader, for differential tests.

Whatever a dataset or a collate function draws lies in [DRAWN, DRAWN + 1), and nothing
else does, so that drawn values can be recognised in a batch.
"""

from __future__ import annotations

import collections
import fcntl
import io
import multiprocessing
import os
import random
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from fractions import Fraction
from multiprocessing.sharedctypes import synchronized
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
import torch.utils.data as torchs

if TYPE_CHECKING:
    from .ordinary_programs import Case

__all__ = [
    "BOTH",
    "CHANGING",
    "DRAWN",
    "DRAWS",
    "GLOBAL",
    "HANDLES",
    "NOT_DRAWN",
    "ORDERLESS",
    "PURE",
    "SCHEMES",
    "SHAPES",
    "STREAMS",
    "TRAITS",
    "Data",
    "Pair",
    "Refused",
    "split",
    "strided",
]

DRAWN = 1000.0
NOT_DRAWN = 999.0


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
    """The user's own error, which takes two values."""

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
    """Sample i is the shape's value for i, whoever reads it."""

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
    """Keeps the samples it made."""

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
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for index in range(self.case.length):
                archive.writestr(str(index), str(index))
        path = self.folder / "records.zip"
        path.write_bytes(buffer.getvalue())
        self.file = zipfile.ZipFile(path)

    def mark(self, index: int) -> Any:
        return int(self.file.read(str(index)))


class InOrder(Filed):
    """Reads the next record, whatever the index; at the end it starts again."""

    def mark(self, index: int) -> Any:
        if not (record := self.file.read(RECORD)):
            self.file.seek(0)
            record = self.file.read(RECORD)
        return int.from_bytes(record, "little")


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
    """The same, but rarely."""

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
STREAMS: dict[str, type[Data]] = {
    "Python's stream": Streaming,
    "numpy's stream": NumpyStream,
    "numpy's legacy stream": LegacyStream,
    "torch's stream": TorchStream,
}
"""With a generator of their own: torch's own workers load them."""
CHANGING: dict[str, type[Data]] = {
    "reads on": InOrder,
    "counts": Counter,
    "counts in a closure": ByClosure,
    "counts in its module": ByGlobal,
    "notes": Noted,
    **STREAMS,
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
    """Has a different order each time it is read."""

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
        # A worker that was killed within the lock keeps it, so each case has its own.
        self.taken = synchronized(TAKEN.get_obj(), multiprocessing.RLock())
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
