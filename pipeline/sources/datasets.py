"""The user's datasets: how to read them, and how to identify them.

A map-style dataset is anything with `__len__` and `__getitem__`: a torch dataset, a
list, an array, an HF dataset. An iterable one is anything else with `__iter__`.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from ...errors import SpecError, check
from .source import Source

ONCE = frozenset(("builtins", "itertools", "_csv", "_io"))
"""Modules whose iterators cannot restart: generators, `zip`, open files."""


def is_iterable(dataset: Any) -> bool:
    """Tell an iterable dataset from a map-style one.

    Raises:
        SpecError: it is neither.
    """
    if isinstance(dataset, IterableDataset):
        return True
    cure = cure_of(dataset)
    check(
        not cure,
        f"`from_dataset` cannot take {type(dataset).__name__} objects: {cure}",
    )
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return False
    if hasattr(dataset, "__iter__"):
        return True
    raise SpecError(
        f"`from_dataset` needs a dataset with __len__ and __getitem__, or one with "
        f"__iter__, got {type(dataset).__name__}; give an object of a torch Dataset, a "
        "list or an array"
    )


def cure_of(data: Any) -> str:
    """Say why an object only looks like a dataset; empty if it may be one."""
    package = type(data).__module__.partition(".")[0]
    kind = f"{package}.{type(data).__name__}"
    if isinstance(data, (str, bytes, os.PathLike)):
        return (
            "a path is not a dataset of the files there; use from_folder(path) or"
            " from_files(pattern)"
        )
    if kind == "pandas.DataFrame":
        return 'an index picks a column of it; give its rows: df.to_dict("records")'
    if kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
        return (
            "an index picks a column of it; give its rows, table.to_pylist(), or"
            " datasets.Dataset(table), which reads them on demand"
        )
    if isinstance(data, Mapping) and len(data) and 0 not in data:
        return (
            "samples are read by index, and its keys are not 0, 1, 2, ...; for a dict"
            " of columns give torch.utils.data.StackDataset(**columns)"
        )
    if isinstance(data, Iterator) and type(data).__module__ in ONCE:
        return (
            "it can only be read once, but each epoch starts at the beginning; give an"
            " object whose __iter__ starts again, such as a torch IterableDataset"
        )
    return ""


def has_length(dataset: Any) -> bool:
    """Whether a dataset says how long it is; with a sampler, it need not."""
    try:
        return len(dataset) >= 0
    except Exception:  # noqa: BLE001 whatever the user's dataset raises
        return False


def warn_of(data: Any) -> None:
    """Warn if an object looks like a dataset to torch but is not one.

    Torch would take the letters of a path for samples. A mapping gets no warning,
    because a sampler may draw its keys.
    """
    if not isinstance(data, Mapping) and (cure := cure_of(data)):
        kind = type(data).__name__
        text = f"this {kind} is not a dataset: {cure}"
        warnings.warn(text, UserWarning, stacklevel=3)


# The identity of a dataset, as far as it gives one; a state is checked against it.


def identity_of(dataset: Any) -> str | None:
    """Return 32 hex digits; None if only the length is known.

    penstock's own sources identify themselves; others do so by
    `__penstock_fingerprint__`, or by the `_fingerprint` of Hugging Face's datasets.
    Nothing else about an object is sure to be the same in the next run, and a run that
    cannot be resumed is worse than one that can.
    """
    if isinstance(dataset, Source):
        return dataset.identity()
    from ...cache.digest import said_fingerprint

    said = said_fingerprint(dataset)
    return None if said is None else hashlib.blake2b(said, digest_size=16).hexdigest()
