"""From text to token ids, with the user's own tokenizer."""
# ruff: noqa: N801

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np

from ...errors import SampleError, SpecError, check, whole_number
from ...system.printing import Bare, call
from .tokens import IDS, MASK, described, pad

# One list per text, under the tokenizer's names: `input_ids`, `attention_mask`, ...
Columns: TypeAlias = Mapping[str, list[list[int]]]

# The variable that tells the package `tokenizers` whether to use threads.
PARALLELISM = "TOKENIZERS_PARALLELISM"
# The process that loaded this module.
IMPORTED_IN = os.getpid()


@dataclass(frozen=True, slots=True, repr=False)
class tokenize:
    """Turn text into token ids, a whole batch in one call of the tokenizer.

    After `.batch()`, a list of texts becomes a dict of tensors: `input_ids` and
    `attention_mask`, `int64 [rows, n]`, and whatever else the tokenizer returns for
    each token. A single text becomes a dict of arrays, `int64 [n]`, with no padding but
    to a length that the tokenizer itself is set to.
    The ids are the same as from the tokenizer itself.

    The operator keeps a copy of the tokenizer with its present settings, and no call
    changes them, so any number of threads may share it. The package `tokenizers` starts
    threads of its own, which do not survive a fork. Therefore `TOKENIZERS_PARALLELISM`
    is set to "false" if it is unset, and always in a forked process. To tokenize
    faster, use several workers.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a tokenizer of `transformers`.
        max_length: most tokens of a text, special ones included. Longer texts lose
            their end (or their start, if the tokenizer is set so). None: as the
            tokenizer is set.
        key: the text's key if the sample is a dict; the ids replace it. In a tuple, the
            text is the first element. Everything else is passed on.
        add_special_tokens: whether the tokenizer adds special tokens such as `[CLS]`.
        padding: how to pad batches. None: to the longest text, with the token and on
            the side that the tokenizer is set to (id 0 on the right, if a
            `tokenizers.Tokenizer` has no padding; to its length, if it has one).

    Raises:
        SpecError: this is not a tokenizer, or one that draws at random.
    """

    tokenizer: Any
    _: KW_ONLY
    max_length: int | None = None
    key: str | None = None
    add_special_tokens: bool = True
    padding: pad | None = None
    own: Any = field(init=False, compare=False)
    """The copy of the tokenizer."""
    encode: Callable[[list[str]], Columns] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_length is not None:
            whole_number("max_length", self.max_length, 1, "512 is usual")
        check_tokenizer(self.tokenizer)
        keep_to_one_thread()
        own = copy.deepcopy(self.tokenizer)
        encode = encoder(own, self.max_length, special=self.add_special_tokens)
        object.__setattr__(self, "own", own)
        object.__setattr__(self, "encode", encode)

    def __call__(self, sample: Any) -> Any:
        """Return ids for one text, or for the texts of a batch.

        Args:
            sample: a text; a list of texts; a tuple that begins with either; a list
                that begins with a list of texts, as torch collates tuples; or a dict
                that has a text or a list of texts under `key`.

        Raises:
            SampleError: it has no text in any of these places.
            SpecError: the texts differ in length, and the tokenizer has no padding
                token.
        """
        if isinstance(sample, Mapping):
            if self.key is None or self.key not in sample:
                raise SampleError(
                    f"a dict must have its text under `key`, {self.key!r}, got the"
                    f" keys {sorted(map(str, sample))}; pass, for example,"
                    ' tokenize(..., key="text")'
                )
            rest = {name: sample[name] for name in sample if name != self.key}
            return rest | self._encoded(sample[self.key])
        if not begins_with_text(sample):
            return self._encoded(sample)
        elements = (self._encoded(sample[0]), *sample[1:])
        return getattr(type(sample), "_make", type(sample))(elements)

    def _encoded(self, text: Any) -> dict[str, Any]:
        """Return the tokenizer's columns for one text or for several."""
        keep_to_one_thread()
        is_single = isinstance(text, str)
        if not is_single:
            check_texts(text)
        columns = self.encode([text] if is_single else list(text))
        samples = [
            dict(zip(columns, values, strict=True))
            for values in zip(*columns.values(), strict=True)
        ]
        own_padding = is_single and getattr(self.own, "padding", None)
        if is_single and (self.padding or not (own_padding or {}).get("length")):
            return {key: np.array(ids, np.int64) for key, ids in samples[0].items()}
        padding = self.padding or padding_of(self.own, samples)
        batch = cast("dict[str, Any]", padding(samples))
        return (
            {key: ids[0].numpy() for key, ids in batch.items()} if is_single else batch
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the call that makes this, with the copy, to keep its settings."""
        options = {
            name: getattr(self, name)
            for name in ("max_length", "key", "add_special_tokens", "padding")
        }
        return partial(tokenize, **options), (self.own,)

    def __repr__(self) -> str:
        """Return the call that makes this, with the type of the tokenizer."""
        return call("tokenize", self, Bare(f"<{type(self.tokenizer).__name__}>"))


# The two kinds of tokenizers.


def encoder(
    own: Any, max_length: int | None, *, special: bool
) -> Callable[[list[str]], Columns]:
    """Return a function that calls a tokenizer on a list of texts.

    The tokenizer is configured once, here: the package `tokenizers` raises "Already
    borrowed" if one is changed while another thread uses it.
    """
    is_limited = max_length is not None
    if hasattr(own, "encode_batch"):
        if is_limited:
            own.enable_truncation(**(own.truncation or {}) | {"max_length": max_length})
        if own.padding:  # which `padding_of` reads: batches are padded later
            own = copy.deepcopy(own)
            own.no_padding()
        return partial(_columns, own, special)
    cut = {"max_length": max_length, "truncation": True} if is_limited else {}
    encode = partial(own, add_special_tokens=special, return_attention_mask=True, **cut)
    encode(["first"])  # the first call changes the tokenizer's settings
    return encode


def _columns(own: Any, special: bool, texts: list[str]) -> Columns:  # noqa: FBT001
    encodings = own.encode_batch(texts, add_special_tokens=special)
    return {
        IDS: [encoding.ids for encoding in encodings],
        MASK: [encoding.attention_mask for encoding in encodings],
    }


def padding_of(own: Any, samples: list[dict[str, list[int]]]) -> pad:
    """Return a `pad` that pads these texts as the tokenizer would.

    Raises:
        SpecError: padding is needed, and the tokenizer has no token for it.
    """
    if hasattr(own, "encode_batch"):
        padding = own.padding or {}
        step = padding.get("pad_to_multiple_of") or 1
        longest = max(len(sample[IDS]) for sample in samples)
        length = -(-max(longest, padding.get("length") or 0) // step) * step
        return pad(
            padding.get("pad_id", 0),
            to=length or "longest",
            side=padding.get("direction", "right"),
        )
    if own.pad_token_id is None:
        lengths = {len(sample[IDS]) for sample in samples}
        check(
            len(lengths) == 1,
            f"the texts of a batch have {min(lengths)} to {max(lengths)} tokens, and "
            "the tokenizer has no token to pad them with; set tokenizer.pad_token ="
            " tokenizer.eos_token, or pass padding=ps.text.pad(id)",
        )
        return pad()
    types = {"token_type_ids": own.pad_token_type_id}
    return pad(own.pad_token_id, side=own.padding_side, fill=types)


def check_tokenizer(tokenizer: Any) -> None:
    """Check that this is a tokenizer that always returns the same ids for a text.

    Raises:
        SpecError: it is not.
    """
    is_tokenizer = hasattr(tokenizer, "encode_batch") or (
        callable(tokenizer) and hasattr(tokenizer, "pad_token_id")
    )
    check(
        is_tokenizer and not isinstance(tokenizer, type),
        "`tokenizer` must be a tokenizers.Tokenizer or a tokenizer of transformers, "
        f"got {described(tokenizer)}; load one with Tokenizer.from_file(path) or"
        " AutoTokenizer.from_pretrained(name)",
    )
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    dropout = getattr(getattr(backend, "model", None), "dropout", None)
    if dropout:
        raise SpecError(
            f"this tokenizer has dropout={dropout:.3g}, which draws from a generator"
            " that cannot be seeded, so the same seed would give different ids; set"
            " `model.dropout` of the tokenizer to None"
        )


def keep_to_one_thread() -> None:
    """Stop `tokenizers` from using threads unless the user asked for them.

    Its threads do not survive a fork, so a forked process never uses them.
    """
    setting = os.environ.get(PARALLELISM)
    is_forked = os.getpid() != IMPORTED_IN
    if setting is None or (is_forked and setting != "false"):
        os.environ[PARALLELISM] = "false"  # once: other threads may be reading it


# Where a sample has its text.


def begins_with_text(sample: Any) -> bool:
    """Whether a sample is a tuple, or a batch of tuples as torch collates them.

    A list of texts is a batch. A tuple of texts is one sample, of which only the first
    is tokenized.
    """
    return isinstance(sample, list | tuple) and any(
        isinstance(sample, tuple) or isinstance(first, list | tuple)
        for first in sample[:1]
    )


def check_texts(texts: Any) -> None:
    """Check that this is a list or a tuple of texts, and not empty.

    Raises:
        SampleError: it is not.
    """
    kind = "an empty list"
    if not isinstance(texts, list | tuple):
        kind = described(texts)
    elif texts:
        wrong = [value for value in texts if not isinstance(value, str)]
        if not wrong:
            return
        kind = f"a list with {described(wrong[0])}"
    raise SampleError(
        f"`tokenize` takes a text or a list of texts, got {kind}; for dicts, pass"
        ' key="text"; decode bytes, and drop None, in a map() before this'
    )
