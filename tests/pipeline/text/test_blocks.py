"""Blocks of packed documents, token by token, and as a dataset."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.cache.fingerprint import digest
from penstock.errors import SampleError, SpecError
from penstock.pipeline.text import PackedBlocks
from support.datasets import KINDS

KEYS = ["input_ids", "document_ids", "position_ids", "attention_mask"]
EOS, PADDING = 7, 3


def documents(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Return documents whose tokens say which they are; some are empty."""
    lengths = np.random.default_rng(seed).integers(0, longest + 1, count).tolist()
    return [[1000 * (i + 1) + k for k in range(n)] for i, n in enumerate(lengths)]


class Counted:
    """Documents that record which were read, together or one by one."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> list[int]:
        raise AssertionError

    def __getitems__(self, indices: list[int]) -> list[list[int]]:
        self.asked.append(indices)
        return [self.texts[index] for index in indices]


def lines(blocks: PackedBlocks) -> list[dict[str, list[int]]]:
    """Return all blocks as lists."""
    contents = [blocks[number] for number in range(len(blocks))]
    for block in contents:
        assert list(block) == KEYS
        assert {(v.dtype.str, v.shape) for v in block.values()} == {
            ("<i8", (blocks.size,))
        }
    return [{key: value.tolist() for key, value in block.items()} for block in contents]


def by_hand(texts: list[list[int]], size: int) -> list[dict[str, list[int]]]:
    """Fill blocks token by token, with `EOS` after each document."""
    blocks: list[dict[str, list[int]]] = []
    for text in texts:
        document, position = -1, 0
        for token in [*text, EOS]:
            if not blocks or len(blocks[-1]["input_ids"]) == size:
                blocks.append({key: [] for key in KEYS})
                document = -1
            block = blocks[-1]
            if document < 0:
                document = max(block["document_ids"], default=-1) + 1
                position = 0
            for key, value in zip(KEYS, (token, document, position, 1), strict=True):
                block[key].append(value)
            position += 1
    for key, filler in zip(KEYS, (PADDING, -1, 0, 0), strict=True):
        blocks[-1][key] += [filler] * (size - len(blocks[-1][key]))
    return blocks


def parts_of(block: dict[str, list[int]]) -> list[list[int]]:
    """Check the other rows of a block, and return the tokens of its documents."""
    tokens, numbers, positions, attended = (block[key] for key in KEYS)
    count = sum(attended)
    assert attended == [1] * count + [0] * (len(tokens) - count)
    assert set(tokens[count:]) <= {PADDING}
    assert set(numbers[count:]) <= {-1}
    assert set(positions[count:]) <= {0}
    parts: list[list[int]] = []
    for token, number, position in list(zip(tokens, numbers, positions, strict=True))[
        :count
    ]:
        if number == len(parts):
            parts.append([])
        assert number == len(parts) - 1
        assert position == len(parts[-1])
        parts[-1].append(token)
    return parts


@pytest.mark.parametrize("size", [1, 7, 64, 5000])
def test_blocks_are_those_of_a_plain_loop(size: int) -> None:
    for seed in range(3):
        texts = documents(60, 40, seed)
        blocks = PackedBlocks(texts, size=size, eos_id=EOS, pad_id=PADDING)
        assert lines(blocks) == by_hand(texts, size)


@pytest.mark.parametrize("size", [1, 7, 64, 5000])
def test_unsplit_blocks_hold_whole_documents_or_full_cuts_of_long_ones(
    size: int,
) -> None:
    texts = documents(1100, min(40, 4 * size))  # more than are measured at once
    blocks = PackedBlocks(texts, size=size, eos_id=EOS, split=False, pad_id=PADDING)
    parts = [part for block in lines(blocks) for part in parts_of(block)]
    ended_texts = [[*text, EOS] for text in texts]
    expected = [t[at : at + size] for t in ended_texts for at in range(0, len(t), size)]
    assert sorted(parts) == sorted(expected)


texts_of = st.lists(st.integers(0, 30), min_size=1, max_size=20).map(
    lambda lengths: [
        [1000 * (i + 1) + k for k in range(n)] for i, n in enumerate(lengths)
    ]
)


@given(texts_of.filter(any), st.integers(1, 40), st.booleans(), st.booleans())
def test_every_token_is_in_one_block(
    texts: list[list[int]],
    size: int,
    split: bool,  # noqa: FBT001
    ended: bool,  # noqa: FBT001
) -> None:
    blocks = PackedBlocks(
        texts, size=size, split=split, eos_id=EOS if ended else None, pad_id=PADDING
    )
    parts = [part for block in lines(blocks) for part in parts_of(block)]
    tokens = [token for text in texts for token in (*text, *[EOS] * ended)]
    assert sorted(token for part in parts for token in part) == sorted(tokens)


@pytest.mark.parametrize("split", [True, False])
def test_documents_come_as_lists_arrays_tensors_or_dicts(split: bool) -> None:  # noqa: FBT001
    texts = documents(50, 20)
    lengths = [len(text) for text in texts]
    expected = lines(PackedBlocks(texts, lengths, size=16, split=split))
    for form in (
        [np.array(text, np.uint16) for text in texts],
        [torch.tensor(text, dtype=torch.int32) for text in texts],
        [{"input_ids": text, "other": None} for text in texts],
        tuple(texts),
    ):
        assert (
            lines(PackedBlocks(form, torch.tensor(lengths), size=16, split=split))
            == expected
        )
        assert lines(PackedBlocks(form, size=16, split=split)) == expected


def test_each_document_is_read_once_for_several_blocks() -> None:
    dataset = Counted(documents(40, 20))
    lengths = [len(text) for text in dataset.texts]
    blocks = PackedBlocks(dataset, lengths, size=16, eos_id=EOS)
    assert dataset.asked == []
    several = blocks.__getitems__([5, 3, 5, 4])
    assert len(dataset.asked) == 1
    [numbers] = dataset.asked
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 20
    for block, number in zip(several, (5, 3, 5, 4), strict=True):
        assert all((block[key] == blocks[number][key]).all() for key in KEYS)


def test_negative_numbers_count_blocks_from_the_end() -> None:
    blocks = PackedBlocks(documents(40, 20), size=16)
    last = blocks[len(blocks) - 1]
    assert (blocks[-1]["input_ids"] == last["input_ids"]).all()
    for number in (len(blocks), -len(blocks) - 1):
        with pytest.raises(IndexError, match=f"block {number} is out of range"):
            blocks[number]
    assert len(list(blocks)) == len(blocks)


def test_copies_of_packed_blocks_are_complete() -> None:
    blocks = PackedBlocks(documents(40, 20), size=16, split=False)
    for other in (pickle.loads(pickle.dumps(blocks)), copy.deepcopy(blocks)):  # noqa: S301
        assert lines(other) == lines(blocks)
    assert (
        repr(blocks)
        == f"<PackedBlocks: {len(blocks)} of 16 tokens, of 40 documents (list)>"
    )


class Said(list[Any]):
    """Documents with a fingerprint of their own."""

    def __penstock_fingerprint__(self) -> str:
        return "these"


def test_blocks_are_identified_by_what_they_are_made_of() -> None:
    texts = documents(40, 20)
    lengths = [len(text) for text in texts]
    for kind in (list, Said):
        assert digest(PackedBlocks(kind(texts), size=16), "a") == digest(
            PackedBlocks(kind(texts), lengths, size=16), "a"
        )
        digests = {
            digest(PackedBlocks(kind(texts), size=16, **options), "blocks")  # type: ignore[arg-type]
            for options in ({}, {"eos_id": 1}, {"pad_id": 1}, {"split": False})
        }
        digests |= {digest(PackedBlocks(kind(texts), size=17), "blocks")}
        assert len(digests) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "`size` must be an int >= 1, got 0; 2048"),
        ({"size": 2.5}, "`size` must be an int >= 1, got 2.5"),
        ({"eos_id": -1}, "`eos_id` must be an int >= 0, got -1"),
        ({"pad_id": None}, "`pad_id` must be an int >= 0, got None"),
        ({"lengths": [1]}, r"integers \[2\], one per document, got int64 \[1\]; leave"),
        ({"lengths": [1.0, 2.0]}, "one per document, got float64"),
        ({"lengths": [1, -2]}, "must be >= 0, got -2 for document 1; count"),
        ({"documents": [[], []]}, "the 2 documents have no tokens"),
        ({"documents": []}, "the 0 documents have no tokens"),
    ],
)
def test_arguments_that_make_no_blocks_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        PackedBlocks(**({"documents": [[1], [2, 3]], "size": 4} | options))


def test_documents_that_contradict_their_description_are_refused() -> None:
    with pytest.raises(SampleError, match="1 has 2 tokens, but `lengths` says 3"):
        PackedBlocks([[1], [2, 3]], [1, 3], size=4)[0]
    with pytest.raises(SampleError, match="must have one dimension, got an array"):
        PackedBlocks([np.ones((2, 2), int)], size=4)
    with pytest.raises(SampleError, match="tokenize text first"):
        PackedBlocks(["a text"], [3], size=4)[0]


def test_an_answer_with_too_few_documents_is_refused() -> None:
    class Lossy(Counted):
        def __getitems__(self, indices: list[int]) -> list[list[int]]:
            return [self.texts[index] for index in indices[1:]]

    with pytest.raises(SampleError, match="Lossy got 3 indices and returned 2"):
        PackedBlocks(Lossy([[1], [2], [3]]), [1, 1, 1], size=4)[0]


# In a loader and in a pipeline

TEXTS = documents(200, 30, 1)


def packed(split: bool) -> PackedBlocks:  # noqa: FBT001
    return PackedBlocks(TEXTS, size=32, eos_id=EOS, split=split)


def rows(batches: Any) -> list[list[list[int]]]:
    return [[batch[key].tolist() for key in KEYS] for batch in batches]


@pytest.mark.long
@pytest.mark.parametrize("split", [True, False])
def test_a_loader_gives_the_same_blocks_with_any_number_of_workers(
    split: bool,  # noqa: FBT001
) -> None:
    blocks, runs = packed(split), []
    for workers, seeding in (0, split), (0, not split), (1, not split), (3, split):
        loader = ps.DataLoader(
            blocks,
            4,
            shuffle=True,
            num_workers=workers,
            sample_seeding=seeding,
            generator=torch.Generator().manual_seed(3),
        )
        runs.append(rows(loader))
        loader.close()
    assert all(run == runs[0] for run in runs)
    input_rows = [row for batch in runs[0] for row in batch[0]]
    assert sorted(input_rows) == sorted(block["input_ids"] for block in lines(blocks))


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        ("inline", 11),
        ("2 threads", 11),
        pytest.param("3 processes", 50, marks=pytest.mark.long),
    ],
)
def test_a_pipeline_of_blocks_resumes_exactly(kind: str, every: int) -> None:
    def pipe() -> ps.Pipeline:
        source = ps.Pipeline.from_dataset(packed(split=False), **KINDS[kind])
        return source.shuffle(seed=0).batch(4)

    ps.testing.assert_exact_resume(pipe, epochs=2, every=every)
    with (
        pipe() as pipeline,
        ps.Pipeline.from_dataset(packed(split=False))
        .shuffle(seed=0)
        .batch(4) as expected,
    ):
        assert rows(pipeline) == rows(expected)
