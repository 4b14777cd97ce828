"""An iterable among several workers of torch's: no sample comes twice.

Each worker has a copy of an iterable data set, and is to find out by `get_worker_info`
which share is its own. One that never looks would yield everything in every worker: of
such a one, worker k of n takes the samples k, k + n, k + 2n, ... and drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data._utils import worker as torchs

__all__ = ["SharedOut", "watching"]

SHARES = frozenset(("id", "num_workers", "dataset"))
"""What one looks at who takes his share himself."""


class Watched:
    """Torch's worker info, and whether anybody looked whose share is whose."""

    def __init__(self, info: Any) -> None:
        vars(self).update(_info=info, _seen=False)

    def __getattr__(self, name: str) -> Any:
        if name in SHARES:
            vars(self)["_seen"] = True
        return getattr(self._info, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._info, name, value)

    def __repr__(self) -> str:
        return repr(self._info)


def watch() -> Watched:
    """See from here on whether this worker looks at its own info."""
    info: Any = torchs._worker_info  # noqa: SLF001 what `get_worker_info` reads
    if not isinstance(info, Watched):
        info = torchs._worker_info = Watched(info)  # type: ignore[assignment] # noqa: SLF001
    watched: Watched = info
    return watched


class watching:  # noqa: N801 it is called as the function that it wraps
    """A `worker_init_fn` that is watched, too: it may be what takes the shares."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, number: int) -> None:
        watch()
        if self._init is not None:
            self._init(number)


class SharedOut(IterableDataset[Any]):
    """An iterable data set as several workers are to read it.

    Everything but iteration is the data set's own, so that a `worker_init_fn` may set
    its attributes.
    """

    def __init__(self, dataset: Any) -> None:
        vars(self).update(_dataset=dataset)

    def __iter__(self) -> Iterator[Any]:
        source: Iterator[Any] = iter(self._dataset)
        if torchs._worker_info is None:  # noqa: SLF001 one reader has it all
            return source
        seen = watch()
        first = list(islice(source, 1))  # a generator looks no earlier
        whole = chain(first, source)
        if vars(seen)["_seen"]:
            return whole
        info = vars(seen)["_info"]
        return islice(whole, info.id, None, info.num_workers)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)
