"""Masks against a plain loop that draws the same numbers, token by token."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SampleError, SpecError
from penstock.pipeline.text import mask_tokens

VOCABULARY, MASK, SPECIAL = 120, 4, (0, 1, 2)
SAMPLES = 300


def seeded(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def drawn_ids(rng: np.random.Generator, *shape: int) -> Any:
    return rng.integers(VOCABULARY, size=shape)


def drawn_words(rng: np.random.Generator, length: int) -> list[int | None]:
    """Return words of one to four tokens, and between them tokens outside any word."""
    words: list[int | None] = []
    number = 0
    while len(words) < length:
        if rng.random() < 0.2:
            words.append(None)
        else:
            words += [number] * int(rng.integers(1, 5))
            number += 1
    return words[:length]


def by_hand(
    ids: list[int],
    allowed: list[bool],
    rng: np.random.Generator,
    *,
    starts: list[int] | None = None,
    p: float = 0.15,
) -> tuple[list[int], list[int]]:
    """Mask as BERT does; `starts` holds the first token of each token's word."""
    draws = [rng.random() for _ in ids]
    of_word = [draws[at] for at in starts or range(len(ids))]
    places = [at for at in range(len(ids)) if allowed[at] and of_word[at] < p]
    kinds = [rng.random() for _ in places]
    masked, labels = list(ids), [-100] * len(ids)
    for at, kind in zip(places, kinds, strict=True):
        labels[at] = ids[at]
        if kind < 0.8:
            masked[at] = MASK
        elif kind < 0.8 + 0.1:
            masked[at] = int(rng.integers(VOCABULARY))
    return masked, labels


def test_masks_are_those_of_a_plain_loop() -> None:
    mask, count = mask_tokens(VOCABULARY, MASK, special_ids=SPECIAL), 0
    for seed in range(SAMPLES):
        rng = seeded(seed)
        ids = drawn_ids(rng, int(rng.integers(0, 200))).tolist()
        attended = rng.random(len(ids)) < 0.9
        marked = rng.random(len(ids)) < 0.05
        sample = {
            "input_ids": ids,
            "attention_mask": attended.astype(int),
            "special_tokens_mask": torch.from_numpy(marked),
        }
        output = mask(sample, seeded(seed + SAMPLES))
        allowed = [
            ids[at] not in SPECIAL and bool(attended[at]) and not marked[at]
            for at in range(len(ids))
        ]
        expected = by_hand(ids, allowed, seeded(seed + SAMPLES))
        assert (output["input_ids"].tolist(), output["labels"].tolist()) == expected
        count += sum(label != -100 for label in expected[1])
    assert count > SAMPLES


def test_words_are_masked_as_in_a_plain_loop() -> None:
    mask = mask_tokens(VOCABULARY, MASK, special_ids=SPECIAL, whole_words=True, p=0.3)
    for seed in range(SAMPLES):
        rng = seeded(seed)
        words = drawn_words(rng, int(rng.integers(1, 100)))
        ids = drawn_ids(rng, len(words)).tolist()
        sample = {"input_ids": ids, "word_ids": words}
        output = mask(sample, seeded(seed + SAMPLES))
        starts: list[int] = []
        for at, word in enumerate(words):
            goes_on = at > 0 and word == words[at - 1]
            starts.append(starts[-1] if goes_on else at)
        allowed = [
            word is not None and token not in SPECIAL
            for word, token in zip(words, ids, strict=True)
        ]
        expected = by_hand(ids, allowed, seeded(seed + SAMPLES), starts=starts, p=0.3)
        assert (output["input_ids"].tolist(), output["labels"].tolist()) == expected


def test_a_padded_batch_is_masked_like_its_tokens_in_a_row() -> None:
    mask = mask_tokens(VOCABULARY, MASK, special_ids=SPECIAL)
    for seed in range(100):
        ids = drawn_ids(seeded(seed), 8, 37)
        lengths = seeded(seed).integers(1, 38, 8)
        attended = np.arange(37) < lengths[:, None]
        output = mask({"input_ids": ids, "attention_mask": attended}, seeded(seed))
        allowed = attended & ~np.isin(ids, SPECIAL)
        masked, labels = by_hand(
            ids.ravel().tolist(), allowed.ravel().tolist(), seeded(seed)
        )
        assert output["input_ids"].ravel().tolist() == masked
        assert output["labels"].ravel().tolist() == labels


def test_words_do_not_continue_in_the_next_row() -> None:
    mask = mask_tokens(VOCABULARY, MASK, whole_words=True, p=0.5)
    ids = np.full((200, 2), 50)
    labels = mask({"input_ids": ids, "word_ids": np.zeros_like(ids)}, seeded(0))[
        "labels"
    ]
    assert (labels[:, 0] == labels[:, 1]).all()
    assert 60 < (labels[:, 0] == 50).sum() < 140


def within(count: int, total: int, p: float) -> bool:
    """Return whether a count is within five standard deviations of its expectation."""
    return abs(count - total * p) <= 5 * math.sqrt(total * p * (1 - p))


@pytest.mark.parametrize("whole_words", [False, True])
def test_shares_are_those_of_bert(whole_words: bool) -> None:  # noqa: FBT001
    size, total = 30_000, 2_000_000
    ids = np.full(total, 29_999)
    words = {"word_ids": np.arange(total)} if whole_words else {}
    mask = mask_tokens(size, 103, special_ids=(0,), whole_words=whole_words)
    output = mask({"input_ids": ids, **words}, seeded(1))
    masked, is_chosen = output["input_ids"], output["labels"] != -100
    count = int(is_chosen.sum())
    assert within(count, total, 0.15)
    assert (output["labels"][is_chosen] == 29_999).all()
    assert (masked[~is_chosen] == 29_999).all()
    is_hidden, is_kept = masked[is_chosen] == 103, masked[is_chosen] == 29_999
    assert within(int(is_hidden.sum()), count, 0.8 + 0.1 / size)
    assert within(int(is_kept.sum()), count, 0.1 + 0.1 / size)
    tokens = masked[is_chosen][~is_hidden & ~is_kept]
    assert 0 <= tokens.min() < tokens.max() < size
    quarters = np.bincount(tokens * 4 // size, minlength=4)
    assert all(within(int(quarter), len(tokens), 1 / 4) for quarter in quarters)


samples = st.lists(st.integers(0, VOCABULARY - 1), max_size=60)


@given(samples, st.integers(0, 2**32), st.floats(0, 1), st.floats(0, 1), st.data())
def test_only_chosen_tokens_change_and_labels_keep_the_old_ones(
    ids: list[int], seed: int, p: float, mask_share: float, data: st.DataObject
) -> None:
    random_share = data.draw(st.floats(0, 1 - mask_share))
    mask = mask_tokens(
        VOCABULARY,
        MASK,
        special_ids=SPECIAL,
        p=p,
        mask_share=mask_share,
        random_share=random_share,
        ignore_id=-1,
    )
    given_ids = np.array(ids, np.int32)
    output = mask(given_ids, seeded(seed))
    masked, labels = output["input_ids"], output["labels"]
    assert masked.dtype == labels.dtype == np.int64
    assert given_ids.tolist() == ids
    is_chosen = labels != -1
    assert (labels[is_chosen] == given_ids[is_chosen]).all()
    assert (masked[~is_chosen] == given_ids[~is_chosen]).all()
    assert not np.isin(labels[is_chosen], SPECIAL).any()
    if p == 1:
        assert (is_chosen == ~np.isin(given_ids, SPECIAL)).all()
    if p == 0:
        assert not is_chosen.any()


@given(samples, st.integers(0, 2**32))
def test_lists_arrays_and_tensors_are_masked_alike(ids: list[int], seed: int) -> None:
    mask = mask_tokens(VOCABULARY, MASK, special_ids=list(SPECIAL))
    assert mask == mask_tokens(VOCABULARY, MASK, special_ids=SPECIAL)
    of_list = mask(ids, seeded(seed))
    of_array = mask(np.array(ids, np.uint8), seeded(seed))
    tensor = torch.tensor(ids, dtype=torch.int32)
    of_tensor = mask({"input_ids": tensor, "number": 3}, seeded(seed))
    assert of_tensor["number"] == 3
    for key in ("input_ids", "labels"):
        assert of_list[key].tolist() == of_array[key].tolist()
        assert isinstance(of_tensor[key], torch.Tensor)
        assert of_tensor[key].dtype == torch.int64
        assert of_tensor[key].tolist() == of_list[key].tolist()
    assert tensor.tolist() == ids


def test_torchs_global_generator_is_used_without_rng() -> None:
    mask, ids = mask_tokens(VOCABULARY, MASK), np.full(1000, 9)
    torch.manual_seed(5)
    one, other = (mask(ids)["labels"].tolist() for _ in range(2))
    torch.manual_seed(5)
    assert mask(ids)["labels"].tolist() == one != other


def test_an_operator_compares_and_prints_as_a_value() -> None:
    mask = mask_tokens(VOCABULARY, MASK, special_ids=np.array(SPECIAL), p=0.2)  # type: ignore[arg-type]
    assert repr(mask).startswith("mask_tokens(vocab_size=120, mask_id=4, special_ids=")
    for other in (pickle.loads(pickle.dumps(mask)), eval(repr(mask))):  # noqa: S301, S307
        assert other == mask
        assert hash(other) == hash(mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "`vocab_size` must be an int >= 1, got 0"),
        ({"mask_id": 120}, "below `vocab_size`, 120, got 120; include added"),
        ({"mask_id": None}, "`mask_id` must be an int >= 0, got None"),
        ({"special_ids": (3, -1)}, "`special_ids` must be an int >= 0, got -1"),
        ({"special_ids": 3}, "`special_ids` must be a tuple of ids, got 3"),
        ({"p": 15}, "`p` must be a probability, 0 to 1, got 15; BERT"),
        ({"mask_share": 0.95}, "must add up to at most 1, got 0.95 and 0.1"),
        ({"p": math.nan}, "`p` must be a probability, 0 to 1, got nan"),
    ],
)
def test_arguments_that_make_no_mask_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        mask_tokens(**({"vocab_size": VOCABULARY, "mask_id": MASK} | options))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("some text", "of integers, got a str: 'some text'; tokenize text"),
        ([0.5], "tensor of integers"),
        ([[1, 2], [3]], "tensor of integers"),
        (np.zeros((2, 2, 2), int), r"shape \[n\] or \[rows, n\], got \[2, 2, 2\]"),
        ({"ids": [1]}, r"as `input_ids`, got the keys \['ids'\]; rename"),
        (
            {"input_ids": [1], "labels": [1]},
            "sets `labels`, but .* already has that key",
        ),
        ({"input_ids": [1], "attention_mask": [1, 1]}, r"shape .* \[1\], got \[2\]"),
    ],
)
def test_samples_that_cannot_be_masked_are_refused(sample: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        mask_tokens(VOCABULARY, MASK)(sample, seeded(0))


def test_whole_words_need_words() -> None:
    with pytest.raises(SampleError, match="needs `word_ids`.* from word_ids()"):
        mask_tokens(VOCABULARY, MASK, whole_words=True)([1, 2], seeded(0))
