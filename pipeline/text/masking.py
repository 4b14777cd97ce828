"""Masked language modelling: choosing the tokens that a model has to predict.

Source: Devlin et al. 2018, "BERT", sections 3.1 and A.1. A new mask is drawn each time
a sample is read, as in Liu et al. 2019, "RoBERTa", section 4.1 ("dynamic masking").
"""
# ruff: noqa: N801

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import SampleError, check, whole_number
from .sample import (
    FROM_ZERO,
    IDS,
    IGNORED,
    LABELS,
    MASK,
    Ids,
    ids_in,
    integers,
    without_none,
)

Flags = NDArray[np.bool_]
ROUNDING = 1e-9
"""Shares that add up to 1 on paper may exceed it slightly in floating point."""


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
        for each in (*special, whole_number("mask_id", self.mask_id, 0, FROM_ZERO)):
            check(
                each < size,
                f"`mask_id` and `special_ids` must be below `vocab_size`, {size}, got "
                f"{each}; include added tokens in the size, as len(tokenizer) does",
            )
        object.__setattr__(self, "special_ids", special)
        for name in ("p", "mask_share", "random_share"):
            share = getattr(self, name)
            check(
                0 <= share <= 1,
                f"`{name}` must be a probability, 0 to 1, got {share}; BERT uses"
                " p=0.15, mask_share=0.8, random_share=0.1",
            )
        check(
            self.mask_share + self.random_share <= 1 + ROUNDING,
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
        given = ids_in(fields)
        if LABELS in fields:
            raise SampleError(
                f"`mask_tokens` sets `{LABELS}`, but this sample already has that key;"
                f" its keys are {described_keys(fields)}; rename or drop it in a map()"
                " before `mask_tokens`"
            )
        ids = integers(given, IDS)
        if ids.ndim not in (1, 2):
            raise SampleError(
                f"`{IDS}` must have the shape [n] or [rows, n], got {[*ids.shape]};"
                " mask one sample or one padded batch at a time"
            )
        if rng is None:  # torch's generator is one that a DataLoader seeds in workers
            rng = np.random.default_rng(int(torch.randint(2**63 - 1, ())))
        chosen = self._chosen(ids, fields, rng)
        masked, labels = self._masked(ids, chosen, rng)
        if not isinstance(given, torch.Tensor):
            return {**fields, IDS: masked, LABELS: labels}
        made = {IDS: torch.from_numpy(masked), LABELS: torch.from_numpy(labels)}
        return {**fields, **made}

    def _chosen(
        self, ids: Ids, fields: Mapping[str, Any], rng: np.random.Generator
    ) -> Flags:
        """Return which tokens the model must predict; one draw per token."""
        allowed = np.isin(ids, self.special_ids, invert=True)
        if MASK in fields:
            allowed &= matching(fields[MASK], MASK, ids) != 0
        if SPECIAL in fields:
            allowed &= matching(fields[SPECIAL], SPECIAL, ids) == 0
        draws = rng.random(ids.shape)
        if self.whole_words:
            if WORDS not in fields:
                raise SampleError(
                    f"whole_words=True needs `{WORDS}`, one number per token, got "
                    f"{described_keys(fields)}; fast tokenizers return them from"
                    " word_ids()"
                )
            words = matching(without_none(fields[WORDS]), WORDS, ids)
            allowed &= words >= 0
            draws = first_of_word(draws, words)
        return allowed & (draws < self.p)

    def _masked(
        self, ids: Ids, chosen: Flags, rng: np.random.Generator
    ) -> tuple[Ids, Ids]:
        """Return new ids and labels.

        There is one draw per chosen token, and a second one if it becomes a random
        token. That token is drawn from the whole vocabulary, so it may be the same.
        """
        targets = ids[chosen]
        draws = rng.random(len(targets))
        replaced = np.where(draws < self.mask_share, self.mask_id, targets)
        is_random = (draws >= self.mask_share) & (
            draws < self.mask_share + self.random_share
        )
        replaced[is_random] = rng.integers(self.vocab_size, size=is_random.sum())
        masked, labels = ids.copy(), np.full(ids.shape, self.ignore_id, np.int64)
        masked[chosen], labels[chosen] = replaced, targets
        return masked, labels


SPECIAL = "special_tokens_mask"
WORDS = "word_ids"


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


def first_of_word(draws: NDArray[np.float64], words: Ids) -> NDArray[np.float64]:
    """Return, for each token, the draw of the first token of its word."""
    starts = np.ones(words.shape, np.bool_)
    starts[..., 1:] = words[..., 1:] != words[..., :-1]
    spread = np.cumsum(starts).reshape(draws.shape) - 1
    return np.take(draws[starts], spread)


def described_keys(fields: Mapping[str, Any]) -> str:
    """Return the keys of a sample as text for a message."""
    return f"the keys {sorted(map(str, fields))}"
