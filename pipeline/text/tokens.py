"""Token ids: what samples of them are, and operators that mask and pad them.

Ids are lists, arrays or tensors of integers. A dict has them as `input_ids`.

Masks follow Devlin et al. 2018, "BERT", sections 3.1 and A.1. A new one is drawn each
time a sample is read, as in Liu et al. 2019, "RoBERTa", section 4.1.
"""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate

from ...errors import SampleError, check, whole_number

# Token ids, or other integers.
Ids: TypeAlias = NDArray[np.int64]

FROM_ZERO = "tokenizers number their tokens from 0"

IDS = "input_ids"
MASK = "attention_mask"
LABELS = "labels"
SPECIAL = "special_tokens_mask"
WORDS = "word_ids"
# The label that `torch.nn.functional.cross_entropy` ignores by default.
IGNORED = -100


def integers(value: Any, name: str) -> Ids:
    """Return a list, an array or a tensor of integers as an `int64` array.

    Raises:
        SampleError: they are not integers, or are rows of different lengths.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.empty(0, object)
    if array.size == 0 and array.dtype == np.float64:  # from an empty list
        array = array.astype(np.int64)
    if array.dtype.kind not in "biu":
        raise SampleError(
            f"`{name}` must be a list, an array or a tensor of integers, got "
            f"{described(value)}; tokenize text first, with ps.text.tokenize"
        )
    return array.astype(np.int64, copy=False)


def row(value: Any, name: str) -> Ids:
    """Return one sequence of integers as `int64 [n]`.

    Raises:
        SampleError: it is not one sequence of integers.
    """
    array = integers(value, name)
    if array.ndim != 1:
        raise SampleError(
            f"`{name}` of a sample must have one dimension, got "
            f"{described(value)}; give one sequence of token ids per sample"
        )
    return array


def without_none(value: Any) -> Any:
    """Return a list with None, fast tokenizers' sign for "no word", replaced by -1."""
    has_none = isinstance(value, list | tuple) and None in value
    return [-1 if number is None else number for number in value] if has_none else value


def ids_in(sample: Mapping[str, Any]) -> Any:
    """Return a dict's `input_ids`.

    Raises:
        SampleError: it has none.
    """
    if IDS not in sample:
        raise SampleError(
            f"a dict must have the token ids as `{IDS}`, got the keys "
            f"{sorted(map(str, sample))}; rename them in a map() before this"
        )
    return sample[IDS]


def described(value: object) -> str:
    """Return the kind of `value`; for arrays and tensors, also dtype and shape."""
    if isinstance(value, np.ndarray | torch.Tensor):
        kind = "an array" if isinstance(value, np.ndarray) else "a tensor"
        return f"{kind} {value.dtype} {list(value.shape)}"
    return f"a {type(value).__name__}: {value!r:.60}"


# Masks: which tokens a model has to predict.


@dataclass(frozen=True, slots=True)
class mask_tokens:
    """Choose tokens for the model to predict, and hide most of them, as in BERT.

    Each token is chosen independently with probability `p`. Of the chosen tokens, a
    share is replaced by the mask token, a share by tokens drawn uniformly from the
    vocabulary, and the rest stays as it is. Special tokens and padding are never
    chosen. Padding is where `attention_mask` is 0; without one, add its id to
    `special_ids`. Tokens marked in a `special_tokens_mask` are never chosen either.

    Args:
        vocab_size: size of the vocabulary; all ids are below it.
        mask_id: id of the mask token.
        special_ids: ids of tokens that are never chosen.
        p: probability that a token, or a word, is chosen.
        mask_share: share of the chosen tokens that the mask token replaces.
        random_share: share of the chosen tokens that a random token replaces.
        ignore_id: label of the tokens that are not chosen.
        whole_words: choose all tokens of a word or none. The sample must then have
            `word_ids`: consecutive tokens with the same number form a word. Tokens with
            None or a negative number belong to no word, and are never chosen. The
            replacement is drawn for each token separately, as in BERT.

    Raises:
        SpecError: an argument is out of range.
    """

    vocab_size: int
    mask_id: int
    _: KW_ONLY
    special_ids: Sequence[int] = ()
    p: float = 0.15
    mask_share: float = 0.8
    random_share: float = 0.1
    ignore_id: int = IGNORED
    whole_words: bool = False

    def __post_init__(self) -> None:
        size = whole_number("vocab_size", self.vocab_size, 1, "len(tokenizer) is usual")
        check(
            np.iterable(self.special_ids),
            f"`special_ids` must be a tuple of ids, got {self.special_ids!r}; most"
            " tokenizers have them as `all_special_ids`",
        )
        special = tuple(
            whole_number("special_ids", i, 0, FROM_ZERO) for i in self.special_ids
        )
        for token_id in (*special, whole_number("mask_id", self.mask_id, 0, FROM_ZERO)):
            check(
                token_id < size,
                f"`mask_id` and `special_ids` must be below `vocab_size`, {size}, got "
                f"{token_id}; include added tokens in the size, as len(tokenizer) does",
            )
        object.__setattr__(self, "special_ids", special)
        for name in ("p", "mask_share", "random_share"):
            share = getattr(self, name)
            check(
                0 <= share <= 1,
                f"`{name}` must be a probability, 0 to 1, got {share}; BERT uses"
                " p=0.15, mask_share=0.8, random_share=0.1",
            )
        # Shares that add up to 1 on paper may exceed it slightly in floating point.
        check(
            self.mask_share + self.random_share <= 1 + 1e-9,
            f"`mask_share` and `random_share` must add up to at most 1, got "
            f"{self.mask_share} and {self.random_share}; BERT uses 0.8 and 0.1",
        )

    def __call__(
        self, sample: Any, rng: np.random.Generator | None = None
    ) -> dict[str, Any]:
        """Return the sample with `input_ids` masked and `labels`, both `int64`.

        Args:
            sample: token ids `[n]`, or padded `[rows, n]`; or a dict that has them as
                `input_ids`, whose other values are passed on. The result is tensors for
                a tensor, and arrays for an array or a list.
            rng: the generator to draw from; `Pipeline.map` passes it. None, as in a
                dataset or a `collate_fn`: one seeded from torch's global generator.

        Raises:
            SampleError: the ids are not integers, a mask has another shape, or the
                sample has `labels` already.
        """
        fields = sample if isinstance(sample, Mapping) else {IDS: sample}
        tokens = ids_in(fields)
        if LABELS in fields:
            raise SampleError(
                f"`mask_tokens` sets `{LABELS}`, but this sample already has that key;"
                f" its keys are {sorted(map(str, fields))}; rename or drop it in a"
                " map() before `mask_tokens`"
            )
        ids = integers(tokens, IDS)
        if ids.ndim not in (1, 2):
            raise SampleError(
                f"`{IDS}` must have the shape [n] or [rows, n], got {[*ids.shape]};"
                " mask one sample or one padded batch at a time"
            )
        if rng is None:  # torch's generator is one that a DataLoader seeds in workers
            rng = np.random.default_rng(int(torch.randint(2**63 - 1, ())))
        new_ids, labels = self._masked(ids, self._chosen(ids, fields, rng), rng)
        if not isinstance(tokens, torch.Tensor):
            return {**fields, IDS: new_ids, LABELS: labels}
        tensors = map(torch.from_numpy, (new_ids, labels))
        return {**fields, **dict(zip((IDS, LABELS), tensors, strict=True))}

    def _chosen(
        self, ids: Ids, fields: Mapping[str, Any], rng: np.random.Generator
    ) -> NDArray[np.bool_]:
        """Return which tokens the model must predict; one draw per token."""
        candidates = np.isin(ids, self.special_ids, invert=True)
        if MASK in fields:
            candidates &= matching(fields[MASK], MASK, ids) != 0
        if SPECIAL in fields:
            candidates &= matching(fields[SPECIAL], SPECIAL, ids) == 0
        draws = rng.random(ids.shape)
        if self.whole_words:
            if WORDS not in fields:
                raise SampleError(
                    f"whole_words=True needs `{WORDS}`, one number per token, got the"
                    f" keys {sorted(map(str, fields))}; fast tokenizers return them"
                    " from word_ids()"
                )
            words = matching(without_none(fields[WORDS]), WORDS, ids)
            candidates &= words >= 0
            starts = np.ones(words.shape, np.bool_)
            starts[..., 1:] = words[..., 1:] != words[..., :-1]
            # All tokens of a word have the draw of its first one.
            draws = draws[starts][np.cumsum(starts).reshape(draws.shape) - 1]
        return candidates & (draws < self.p)

    def _masked(
        self, ids: Ids, is_target: NDArray[np.bool_], rng: np.random.Generator
    ) -> tuple[Ids, Ids]:
        """Return new ids and labels.

        There is one draw per chosen token, and a second one if it becomes a random
        token. That token is drawn from the whole vocabulary, so it may be the same.
        """
        targets = ids[is_target]
        draws = rng.random(len(targets))
        replacements = np.where(draws < self.mask_share, self.mask_id, targets)
        is_random = (draws >= self.mask_share) & (
            draws < self.mask_share + self.random_share
        )
        replacements[is_random] = rng.integers(self.vocab_size, size=is_random.sum())
        new_ids, labels = ids.copy(), np.full(ids.shape, self.ignore_id, np.int64)
        new_ids[is_target], labels[is_target] = replacements, targets
        return new_ids, labels


def matching(value: Any, name: str, ids: Ids) -> Ids:
    """Return an entry that must have one number per token, as `int64`.

    Raises:
        SampleError: its shape differs from that of the ids.
    """
    array = integers(value, name)
    if array.shape != ids.shape:
        raise SampleError(
            f"`{name}` must have the shape of `{IDS}`, {[*ids.shape]}, got "
            f"{[*array.shape]}; give one number per token"
        )
    return array


# Batches of sequences of different lengths.

To: TypeAlias = Literal["longest"] | int | tuple[int, ...]

# The entries with one number per token, and their values in padding.
PER_TOKEN: Mapping[str, int] = {
    MASK: 0,
    "document_ids": -1,
    "position_ids": 0,
    SPECIAL: 1,
    "token_type_ids": 0,
    WORDS: -1,
}


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
    side: Literal["right", "left"] = "right"
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
            samples = [{IDS: ids} for ids in samples]
        rows = [row(ids_in(sample), IDS) for sample in samples]
        batch = {IDS: self._padded(rows, IDS, self.pad_id)}
        batch |= {
            key: self._column(values_of(samples, key), str(key), rows)
            for key in samples[0]
            if key != IDS
        }
        if MASK not in batch:
            ones = [np.ones(len(ids), np.int64) for ids in rows]
            batch[MASK] = self._padded(ones, MASK, 0)
        return batch

    def _column(self, column: list[Any], key: str, rows: list[Ids]) -> Any:
        """Return the batch's entry for one key of its samples."""
        if key == LABELS and key not in self.fill:
            return self._others(column)
        filler = self.fill.get(key, PER_TOKEN.get(key))
        if filler is None:
            return collated_column(column, key)
        entries = [row(without_none(entry), key) for entry in column]
        for entry, ids in zip(entries, rows, strict=True):
            if key in PER_TOKEN and len(entry) != len(ids):
                raise SampleError(
                    f"`{key}` must have one number per token, got {len(entry)} for"
                    f" {len(ids)} `{IDS}`; cut both to the same length"
                )
        return self._padded(entries, key, filler)

    def _others(self, column: Sequence[Any]) -> Any:
        """Return labels: padded if they are sequences, else as torch collates them."""
        try:
            row(column[0], LABELS)
        except SampleError:  # no sequence of integers
            return collated_column(column, LABELS)
        return self._padded([row(labels, LABELS) for labels in column], LABELS, IGNORED)

    def _padded(self, rows: Sequence[Ids], key: str, filler: int) -> torch.Tensor:
        """Return `int64 [len(rows), n]`."""
        length = self._length(max(map(len, rows)), key)
        rows = [ids[:length] for ids in rows]
        lengths = np.array([len(ids) for ids in rows])[:, None]
        columns = np.arange(length)
        is_token = (
            columns >= length - lengths if self.side == "left" else columns < lengths
        )
        batch = np.full((len(rows), length), filler, np.int64)
        batch[is_token] = np.concatenate(rows)
        return torch.from_numpy(batch)

    def _length(self, longest: int, key: str) -> int:
        """Return the length for the rows of a batch."""
        if self.to == "longest":
            return -(-longest // self.multiple_of) * self.multiple_of
        lengths = self.to if isinstance(self.to, tuple) else (self.to,)
        length = next((length for length in lengths if longest <= int(length)), None)
        if length is None and not self.truncate:
            raise SampleError(
                f"a sequence of `{key}` has {longest} numbers, but to={self.to!r} "
                f"allows at most {lengths[-1]}; raise `to`, shorten the sequence before"
                " this, or pass truncate=True to cut off its end"
            )
        return int(lengths[-1] if length is None else length)


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
        whole_number("to", length, 1, 'pass "longest", a length or several lengths')
        for length in (to if several else [to])
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
        return [sample[key] for sample in samples]
    except (KeyError, IndexError, TypeError) as error:
        raise SampleError(
            f"some samples of the batch have `{key}` and others do not; give all"
            " samples the same keys"
        ) from error


def collated_column(column: Sequence[Any], key: str) -> Any:
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
