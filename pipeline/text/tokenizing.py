"""Text to token ids, by the tokenizer that the user brings."""
# ruff: noqa: N801

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from ...errors import SampleError, SpecError, check
from .padding import pad
from .sample import IDS, MASK, described, whole_number

Columns: TypeAlias = Mapping[str, list[list[int]]]
"""A row a text, under the tokenizer's names: `input_ids`, `attention_mask`, ..."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""The variable that tells the package `tokenizers` whether to use threads."""
IMPORTED_IN = os.getpid()
"""The process that loaded this module."""


@dataclass(frozen=True, slots=True, repr=False)
class tokenize:
    """Turn text into token ids, a whole batch in one call of the tokenizer.

    Behind `.batch()` a list of texts becomes a dict of tensors: `input_ids` and
    `attention_mask`, `int64 [rows, n]`, and what else the tokenizer tells of a token.
    One text becomes a dict of arrays, `int64 [n]`, without padding of ours. The ids are
    those that the tokenizer itself gives.

    It keeps a copy of the tokenizer, with its settings as they are now, and no call
    changes these: any number of threads may share it. The package `tokenizers` has
    threads of its own, which do not survive a fork. So `TOKENIZERS_PARALLELISM` is set
    to "false" where it is not set at all, and in a forked process always. Several
    workers are what makes it faster.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a tokenizer of `transformers`.
        max_length: tokens at most, special ones included; what is longer loses its end
            (or its start, if the tokenizer says so). None: as the tokenizer is set.
        key: where in a dict the text is; the ids take its place. In a tuple it is the
            first element. All else is handed on.
        add_special_tokens: whether the tokenizer adds its own, such as `[CLS]`.
        padding: how batches are padded. None: to the longest, with the token and on
            the side that the tokenizer is set to (id 0 and right, where a
            `tokenizers.Tokenizer` has no padding).

    Raises:
        SpecError: it is no tokenizer, or one that draws at random.
    """

    tokenizer: Any
    _: KW_ONLY
    max_length: int | None = None
    key: str | None = None
    add_special_tokens: bool = True
    padding: pad | None = None
    own: Any = field(init=False, compare=False)
    """The copy."""
    encode: Callable[[list[str]], Columns] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_length is not None:
            whole_number("max_length", self.max_length, 1, "512 is usual")
        check_tokenizer(self.tokenizer)
        keep_to_one_thread()
        own = copy.deepcopy(self.tokenizer)
        object.__setattr__(self, "own", own)
        make = by_tokenizers if hasattr(own, "encode_batch") else by_transformers
        encode = make(own, self.max_length, special=self.add_special_tokens)
        object.__setattr__(self, "encode", encode)

    def __call__(self, sample: Any) -> Any:
        """Return ids for one text, or for the texts of a batch.

        Args:
            sample: text; a list of texts; a tuple that begins with either, or a list
                that begins with the latter; or a dict that has either under `key`.

        Raises:
            SampleError: there is no text.
            SpecError: texts of several lengths, and the tokenizer has no padding token.
        """
        if isinstance(sample, Mapping):
            rest = {name: sample[name] for name in sample if name != self.key}
            return rest | self._encoded(text_under(self.key, sample))
        if not begins_with_text(sample):
            return self._encoded(sample)
        changed = (self._encoded(sample[0]), *sample[1:])
        return getattr(type(sample), "_make", type(sample))(changed)

    def _encoded(self, text: Any) -> dict[str, Any]:
        """Return what the tokenizer says of one text or of several."""
        keep_to_one_thread()
        if isinstance(text, str):
            columns = self.encode([text])
            return {key: np.array(columns[key][0], np.int64) for key in columns}
        check_texts(text)
        columns = self.encode(list(text))
        rows = zip(*columns.values(), strict=True)
        samples = [dict(zip(columns, each, strict=True)) for each in rows]
        padding = self.padding or padding_of(self.own, samples)
        batch: dict[str, Any] = padding(samples)
        return batch

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the call that makes it, with the copy: its settings are kept."""
        return partial(tokenize, **self._options()), (self.own,)

    def __repr__(self) -> str:
        """Return the call that makes it; the tokenizer prints as its type's name."""
        usual = {"add_special_tokens": True}
        shown = [
            f", {name}={value!r}"
            for name, value in self._options().items()
            if value != usual.get(name)
        ]
        return f"tokenize(<{type(self.tokenizer).__name__}>{''.join(shown)})"

    def _options(self) -> dict[str, Any]:
        names = ("max_length", "key", "add_special_tokens", "padding")
        return {name: getattr(self, name) for name in names}


# The two kinds of tokenizers. Both are set once, here: to set one while another thread
# uses it is an error of the package `tokenizers` ("Already borrowed").


def by_tokenizers(
    own: Any, max_length: int | None, *, special: bool
) -> Callable[[list[str]], Columns]:
    """Return what calls a `tokenizers.Tokenizer`."""
    if max_length is not None:
        own.enable_truncation(**((own.truncation or {}) | {"max_length": max_length}))
    return partial(_columns, own, special)


def _columns(own: Any, special: bool, texts: list[str]) -> Columns:  # noqa: FBT001
    found = own.encode_batch(texts, add_special_tokens=special)
    return {
        IDS: [each.ids for each in found],
        MASK: [each.attention_mask for each in found],
    }


def by_transformers(
    own: Any, max_length: int | None, *, special: bool
) -> Callable[[list[str]], Columns]:
    """Return what calls a tokenizer of `transformers`."""
    options: dict[str, Any] = {
        "add_special_tokens": special,
        "return_attention_mask": True,
    }
    if max_length is not None:
        options |= {"max_length": max_length, "truncation": True}
    encode = partial(own, **options)
    encode(["first"])  # sets it
    return encode


def padding_of(own: Any, samples: list[dict[str, list[int]]]) -> pad:
    """Return how a tokenizer would pad its texts to the longest.

    Raises:
        SpecError: it has to, and has no token for it.
    """
    if hasattr(own, "encode_batch"):
        told = own.padding or {}
        return pad(told.get("pad_id", 0), side=told.get("direction", "right"))
    if own.pad_token_id is None:
        lengths = {len(each[IDS]) for each in samples}
        check(
            len(lengths) == 1,
            f"the texts of a batch have {min(lengths)} to {max(lengths)} tokens, and "
            "the tokenizer has no token to pad with; set tokenizer.pad_token ="
            " tokenizer.eos_token, or say padding=ps.text.pad(id)",
        )
        return pad()
    types = {"token_type_ids": own.pad_token_type_id}
    return pad(own.pad_token_id, side=own.padding_side, fill=types)


def check_tokenizer(tokenizer: Any) -> None:
    """Raise `SpecError` unless it is a tokenizer, and gives the same ids each time."""
    known = hasattr(tokenizer, "encode_batch") or (
        callable(tokenizer) and hasattr(tokenizer, "pad_token_id")
    )
    check(
        known and not isinstance(tokenizer, type),
        "`tokenizer` must be a tokenizers.Tokenizer or a tokenizer of transformers, "
        f"got {described(tokenizer)}; load one with Tokenizer.from_file(path) or"
        " AutoTokenizer.from_pretrained(name)",
    )
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    dropout = getattr(getattr(backend, "model", None), "dropout", None)
    if dropout:
        raise SpecError(
            f"this tokenizer has dropout={dropout:.3g}, for which it draws from a"
            " generator that nothing can seed, so the same seed would give other ids;"
            " set `model.dropout` of the tokenizer to None"
        )


def keep_to_one_thread() -> None:
    """Have `tokenizers` use no threads, where nothing was said or a fork ended them."""
    said = os.environ.get(PARALLELISM)
    is_forked = os.getpid() != IMPORTED_IN
    if said is None or (is_forked and said != "false"):
        os.environ[PARALLELISM] = "false"  # once: other threads may be reading it


# Where the text is.


def text_under(key: str | None, sample: Mapping[str, Any]) -> Any:
    """Return the text of a dict, or raise `SampleError`."""
    if key is None or key not in sample:
        raise SampleError(
            f"a dict must have its text under `key`, {key!r}, got the keys "
            f'{sorted(map(str, sample))}; say for instance tokenize(..., key="text")'
        )
    return sample[key]


def begins_with_text(sample: Any) -> bool:
    """Whether it is a tuple, or a batch of tuples as torch collates them.

    A list of texts is a batch; a tuple of texts is one sample, of which the first is
    tokenized.
    """
    if isinstance(sample, tuple):
        return bool(sample)
    return isinstance(sample, list) and any(
        isinstance(first, list | tuple) for first in sample[:1]
    )


def check_texts(texts: Any) -> None:
    """Raise `SampleError` unless it is a list of texts, or a tuple, not empty."""
    found = "an empty list"
    if not isinstance(texts, list | tuple):
        found = described(texts)
    elif texts:
        wrong = [each for each in texts if not isinstance(each, str)]
        if not wrong:
            return
        found = f"a list with {described(wrong[0])}"
    raise SampleError(
        f"`tokenize` takes text, or a list of texts, got {found}; for dicts say"
        ' key="text"; decode bytes, and leave out what is None, in a map() before this'
    )
