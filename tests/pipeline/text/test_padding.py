"""Padded batches equal those of plain loops and of transformers."""

from __future__ import annotations

import pickle
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from penstock.errors import SampleError, SpecError
from penstock.pipeline.text import pad
from support.texts import plain

Side = Literal["right", "left"]
SIDES = st.sampled_from(["right", "left"])
ROWS = st.lists(st.lists(st.integers(0, 999), max_size=12), min_size=1, max_size=6)


def filled(row: list[int], length: int, filler: int, side: str) -> list[int]:
    row = row[:length]
    rest = [filler] * (length - len(row))
    return row + rest if side == "right" else rest + row


def by_hand(rows: list[list[int]], length: int, pad_id: int, side: str) -> Any:
    return {
        "input_ids": [filled(row, length, pad_id, side) for row in rows],
        "attention_mask": [filled([1] * len(row), length, 0, side) for row in rows],
    }


def at_least(length: int, multiple: int) -> int:
    while length % multiple:
        length += 1
    return length


@given(ROWS, st.integers(0, 9), st.integers(1, 9), SIDES)
def test_rows_are_filled_up_to_the_longest(
    rows: list[list[int]], pad_id: int, multiple: int, side: Side
) -> None:
    length = at_least(max(map(len, rows)), multiple)
    batch = pad(pad_id, multiple_of=multiple, side=side)(rows)
    assert plain(batch) == by_hand(rows, length, pad_id, side)


@given(ROWS, st.lists(st.integers(1, 14), min_size=1, max_size=4), SIDES)
def test_rows_are_filled_up_to_the_smallest_length_they_fit_into(
    rows: list[list[int]], lengths: list[int], side: Side
) -> None:
    longest = max(map(len, rows))
    fitting = [length for length in lengths if length >= longest]
    cut = pad(1, to=lengths, side=side, truncate=True)
    expected = by_hand(rows, min(fitting, default=max(lengths)), 1, side)
    assert plain(cut(rows)) == expected
    if fitting:
        assert plain(pad(1, to=lengths, side=side)(rows)) == expected
        return
    with pytest.raises(SampleError, match=f"has {longest} numbers, .* raise `to`"):
        pad(1, to=lengths, side=side)(rows)


@given(ROWS, st.integers(1, 14))
def test_a_single_length_is_that_of_every_batch(
    rows: list[list[int]], length: int
) -> None:
    batch = pad(to=length, truncate=True)(rows)
    assert plain(batch) == by_hand(rows, length, 0, "right")


@given(ROWS)
def test_lists_arrays_tensors_and_dicts_are_padded_alike(rows: list[list[int]]) -> None:
    expected = plain(pad(5)(rows))
    for samples in (
        [np.array(row, np.uint16) for row in rows],
        [torch.tensor(row, dtype=torch.int32) for row in rows],
        [{"input_ids": row} for row in rows],
        [{"attention_mask": [1] * len(row), "input_ids": row} for row in rows],
    ):
        assert plain(pad(5)(samples)) == expected


FILLERS = {
    "attention_mask": 0,
    "document_ids": -1,
    "labels": -100,
    "mine": 77,
    "position_ids": 0,
    "special_tokens_mask": 1,
    "token_type_ids": 0,
    "word_ids": -1,
}


@given(ROWS, SIDES, st.integers(0, 2**32))
def test_each_row_is_filled_with_the_value_that_means_none(
    rows: list[list[int]], side: Side, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    samples = [
        {"input_ids": row, "number": number}
        | {key: rng.integers(9, size=len(row)).tolist() for key in FILLERS}
        for number, row in enumerate(rows)
    ]
    batch = plain(pad(8, side=side, fill={"mine": 77})(samples))
    length = max(map(len, rows))
    for key, filler in {**FILLERS, "input_ids": 8}.items():
        expected = [filled(sample[key], length, filler, side) for sample in samples]  # type: ignore[arg-type]
        assert batch[key] == expected
    assert batch["number"] == list(range(len(rows)))


def test_labels_may_have_another_length() -> None:
    samples = [
        {"input_ids": [1, 2], "labels": [5, 6, 7]},
        {"input_ids": [3], "labels": [8]},
    ]
    batch = plain(pad()(samples))
    assert batch["labels"] == [[5, 6, 7], [8, -100, -100]]
    assert batch["input_ids"] == [[1, 2], [3, 0]]


def test_word_ids_of_fast_tokenizers_may_be_none() -> None:
    samples = [
        {"input_ids": [1, 2, 3], "word_ids": [None, 0, None]},
        {"input_ids": [1], "word_ids": [0]},
    ]
    assert plain(pad()(samples))["word_ids"] == [[-1, 0, -1], [0, -1, -1]]


class Pair(NamedTuple):
    """A namedtuple of the user's own."""

    text: Any
    label: Any


def test_tuples_stay_tuples_and_sequences_in_them_are_labels() -> None:
    ids, mask = pad()([([1, 2], 0, [4], 0.5), ([3], 1, [5, 6], 1.5)])[0].values()
    assert ids.tolist() == [[1, 2], [3, 0]]
    assert mask.tolist() == [[1, 1], [1, 0]]
    _, classes, labels, weights = pad()([([1, 2], 0, [4], 0.5), ([3], 1, [5, 6], 1.5)])
    assert classes.tolist() == [0, 1]
    assert labels.tolist() == [[4, -100], [5, 6]]
    assert weights.tolist() == [0.5, 1.5]
    pair = pad()([Pair({"input_ids": [1]}, "a"), Pair({"input_ids": [2]}, "b")])
    assert isinstance(pair, Pair)
    assert pair.text["input_ids"].tolist() == [[1], [2]]
    assert pair.label == ["a", "b"]


def test_uneven_lists_beside_ids_are_collated_as_in_torch() -> None:
    column = [[[1], [2, 3]], [[4], [5, 6]]]
    _, batch = pad()([([1, 2], lists) for lists in column])
    assert str(batch) == str(default_collate(column))


def test_an_operator_compares_and_prints_as_a_value() -> None:
    one = pad(3, to=[64, 16], multiple_of=8, side="left", fill={"mine": 1})
    assert one.to == (16, 64)
    for other in (pickle.loads(pickle.dumps(one)), eval(repr(one))):  # noqa: S301, S307
        assert other == one
        assert hash(other) == hash(one)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pad_id": "[PAD]"}, r"`pad_id` must be an int, got '\[PAD\]'"),
        ({"to": "max_length"}, "several lengths, got 'max_length'"),
        ({"to": 0}, "`to` must be an int >= 1, got 0"),
        ({"to": []}, "`to` must not be empty"),
        ({"to": [64, 100], "multiple_of": 8}, "`multiple_of`, 8, got 100; pass 104"),
        ({"multiple_of": 0}, "`multiple_of` must be an int >= 1, got 0"),
        ({"side": "both"}, '`side` must be "right" or "left", got \'both\''),
        ({"truncate": True}, 'needs a length to cut to, got to="longest"'),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        pad(**options)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["text", "more"], "of integers, got .* tokenize text first"),
        ([{"input_ids": [1], "a": 1}, {"input_ids": [1]}], "`a` and others do not"),
        (
            [{"input_ids": [1], "a": [1.5]}, {"input_ids": [1], "a": [1.5, 2.5]}],
            "fill={",
        ),
        ([{"input_ids": [1, 2], "word_ids": [1]}], "got 1 for 2 `input_ids`; cut"),
        ([{"tokens": [1]}], r"`input_ids`, got the keys \['tokens'\]"),
        ([[[1, 2]]], "must have one dimension"),
    ],
)
def test_samples_that_cannot_be_padded_are_refused(samples: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        pad()(samples)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 8])
def test_batches_are_those_of_transformers(
    tokenizer: Any, side: Side, multiple: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",  # noqa: S106
        padding_side=side,
    )
    collate = transformers.DataCollatorWithPadding(fast, pad_to_multiple_of=multiple)
    ours = pad(fast.pad_token_id, side=side, multiple_of=multiple or 1)
    for seed in range(50):
        rng = np.random.default_rng(seed)
        samples = [
            {
                "input_ids": rng.integers(200, size=n).tolist(),
                "token_type_ids": rng.integers(2, size=n).tolist(),
                "attention_mask": rng.integers(2, size=n).tolist(),
                "label": int(rng.integers(5)),
            }
            for n in rng.integers(1, 40, 9).tolist()
        ]
        theirs = dict(collate([dict(sample) for sample in samples]))
        batch = ours(samples)
        batch["labels"] = batch.pop("label")  # which transformers renames
        assert plain(batch) == plain(theirs)
