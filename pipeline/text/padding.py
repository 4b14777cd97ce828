"""Batches of sequences of different lengths: a `collate_fn`."""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch.utils.data import default_collate

from ...errors import SampleError, check, whole_number
from .sample import (
    IDS,
    IGNORED,
    LABELS,
    MASK,
    Ids,
    ids_in,
    row,
    without_none,
)

Side: TypeAlias = Literal["right", "left"]
To: TypeAlias = Literal["longest"] | int | tuple[int, ...]

PER_TOKEN: Mapping[str, int] = {
    MASK: 0,
    "document_ids": -1,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "token_type_ids": 0,
    "word_ids": -1,
}
"""The entries with one number per token, and their values in padding."""


@dataclass(frozen=True, slots=True)
class pad:
    """Pad sequences to the same length and make a batch of them: a `collate_fn`.

    A sample is a sequence of ids (a list, an array or a tensor), a dict that has one as
    `input_ids`, or a tuple that begins with either.

    - For sequences and dicts, the batch is a dict of tensors: `input_ids` and
      `attention_mask`, `int64 [rows, n]`. The mask is the samples' own, padded with 0,
      or else 1 for tokens and 0 for padding.
    - In a dict, `labels` are padded with -100. Entries with one number per token are
      padded with a neutral value: `token_type_ids` and `position_ids` with 0,
      `special_tokens_mask` with 1, `document_ids` and `word_ids` with -1. `labels` may
      have a length of their own, as in translation. Everything else is collated as in
      torch.
    - For tuples, the batch is a tuple: that dict, then the other elements. Sequences of
      integers among these are labels, padded with -100; everything else is collated as
      in torch.

    Args:
        pad_id: the id that pads `input_ids`.
        to: the length: "longest" for the longest sequence of the batch, a number, or
            several numbers, of which the smallest that fits is used, so that few shapes
            occur.
        multiple_of: round the length up to a multiple of this.
        side: the side on which padding is added.
        truncate: cut off the end of sequences longer than `to`. False: raise an error.
        fill: the values that pad further sequences in dicts, by key.

    Raises:
        SpecError: an argument is out of range, or two contradict each other.
    """

    pad_id: int = 0
    _: KW_ONLY
    to: To | Sequence[int] = "longest"
    multiple_of: int = 1
    side: Side = "right"
    truncate: bool = False
    fill: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        whole_number("multiple_of", self.multiple_of, 1, "8 suits most GPUs")
        check(
            isinstance(self.pad_id, int | np.integer),
            f"`pad_id` must be an int, got {self.pad_id!r}; most tokenizers have it as"
            " `pad_token_id`",
        )
        check(
            self.side in ("right", "left"),
            f'`side` must be "right" or "left", got {self.side!r}; models that continue'
            ' a text need "left"',
        )
        object.__setattr__(self, "to", checked_lengths(self.to, self.multiple_of))
        object.__setattr__(self, "fill", dict(self.fill))
        check(
            not self.truncate or self.to != "longest",
            'truncate=True needs a length to cut to, got to="longest"; pass, for'
            " example, to=512",
        )

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Return a batch of these samples.

        Raises:
            SampleError: the samples are of different kinds, the ids are not integers,
                or a sequence is longer than `to` allows.
        """
        first = samples[0]
        if not isinstance(first, tuple):
            return self._dicts(samples)
        columns = list(zip(*samples, strict=True))
        batch = (self._dicts(columns[0]), *map(self._others, columns[1:]))
        return getattr(type(first), "_make", tuple)(batch)

    def _dicts(self, samples: Sequence[Any]) -> dict[str, Any]:
        if not isinstance(samples[0], Mapping):
            samples = [{IDS: each} for each in samples]
        rows = [row(ids_in(each), IDS) for each in samples]
        batch = {IDS: self._padded(rows, IDS, self.pad_id)}
        for key in samples[0]:
            if key != IDS:
                column = values_of(samples, key)
                batch[key] = self._column(column, str(key), rows)
        if MASK not in batch:
            ones = [np.ones(len(each), np.int64) for each in rows]
            batch[MASK] = self._padded(ones, MASK, 0)
        return batch

    def _column(self, column: list[Any], key: str, rows: list[Ids]) -> Any:
        """Return the batch's entry for one key of its samples."""
        if key == LABELS and key not in self.fill:
            return self._others(column)
        filler = self.fill.get(key, PER_TOKEN.get(key))
        if filler is None:
            return collated(column, key)
        found = [row(without_none(each), key) for each in column]
        for each, ids in zip(found, rows, strict=True):
            if key in PER_TOKEN and len(each) != len(ids):
                raise SampleError(
                    f"`{key}` must have one number per token, got {len(each)} for"
                    f" {len(ids)} `{IDS}`; cut both to the same length"
                )
        return self._padded(found, key, filler)

    def _others(self, column: Sequence[Any]) -> Any:
        """Return labels: padded if they are sequences, else as torch collates them."""
        if not is_sequence_of_integers(column[0]):
            return collated(column, LABELS)
        rows = [row(each, LABELS) for each in column]
        return self._padded(rows, LABELS, IGNORED)

    def _padded(self, rows: Sequence[Ids], key: str, filler: int) -> torch.Tensor:
        """Return `int64 [len(rows), n]`."""
        length = self._length(max(map(len, rows)), key)
        rows = [each[:length] for each in rows]
        lengths = np.array([len(each) for each in rows])[:, None]
        columns = np.arange(length)
        is_token = columns < lengths
        if self.side == "left":
            is_token = columns >= length - lengths
        batch = np.full((len(rows), length), filler, np.int64)
        batch[is_token] = np.concatenate(rows)
        return torch.from_numpy(batch)

    def _length(self, longest: int, key: str) -> int:
        """Return the length for the rows of a batch."""
        if self.to == "longest":
            return -(-longest // self.multiple_of) * self.multiple_of
        allowed = self.to if isinstance(self.to, tuple) else (self.to,)
        found = next((each for each in allowed if longest <= int(each)), None)
        if found is None and not self.truncate:
            raise SampleError(
                f"a sequence of `{key}` has {longest} numbers, but to={self.to!r} "
                f"allows at most {allowed[-1]}; raise `to`, shorten the sequence before"
                " this, or pass truncate=True to cut off its end"
            )
        return int(allowed[-1] if found is None else found)


def checked_lengths(to: Any, multiple_of: int) -> To:
    """Return `to` as "longest", an int or a sorted tuple.

    Raises:
        SpecError: it is none of these, or not a multiple of `multiple_of`.
    """
    if isinstance(to, str):
        check(
            to == "longest",
            f'`to` must be "longest", a length or several lengths, got {to!r}; pass,'
            ' for example, to="longest"',
        )
        return "longest"
    several = isinstance(to, Sequence | np.ndarray)
    lengths = [
        whole_number("to", each, 1, 'pass "longest", a length or several lengths')
        for each in (to if several else [to])
    ]
    check(lengths, '`to` must not be empty; pass "longest" or, for example, [128, 512]')
    for length in lengths:
        check(
            length % multiple_of == 0,
            f"`to` must be a multiple of `multiple_of`, {multiple_of}, got {length}; "
            f"pass {-(-length // multiple_of) * multiple_of}",
        )
    return tuple(sorted(set(lengths))) if several else lengths[0]


def values_of(samples: Sequence[Any], key: Any) -> list[Any]:
    """Return the value that each sample has under a key.

    Raises:
        SampleError: a sample does not have the key.
    """
    try:
        return [each[key] for each in samples]
    except (KeyError, IndexError, TypeError) as error:
        raise SampleError(
            f"some samples of the batch have `{key}` and others do not; give all"
            " samples the same keys"
        ) from error


def collated(column: Sequence[Any], key: str) -> Any:
    """Return a column as torch collates it.

    Raises:
        SampleError: torch cannot collate it.
    """
    try:
        return default_collate(list(column))
    except (TypeError, ValueError, RuntimeError) as error:
        raise SampleError(
            f"`{key}` cannot be made into a batch: {error}; to have it padded as a"
            f' sequence, pass ps.text.pad(..., fill={{"{key}": 0}}); otherwise drop it'
            " in a map() before this"
        ) from error


def is_sequence_of_integers(value: Any) -> bool:
    """Whether it is a list, an array or a tensor of one dimension, of integers."""
    if not isinstance(value, list | tuple | np.ndarray | torch.Tensor):
        return False
    array = np.asarray(value)
    return array.ndim == 1 and (array.dtype.kind in "biu" or array.size == 0)
