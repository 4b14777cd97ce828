"""Ids are those that the tokenizer itself gives, in any thread or process."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.cache.fingerprint import digest
from penstock.errors import SampleError, SpecError
from penstock.pipeline.text import pad, tokenize
from support.texts import Listed, plain

pytest.importorskip("tokenizers")
PADDING = 0


def by_itself(tokenizer: Any, texts: list[str], length: int | None = None) -> Any:
    """Return what the tokenizer makes of a batch, which it pads itself."""
    own = copy.deepcopy(tokenizer)
    own.enable_padding(pad_id=PADDING)
    if length is not None:
        own.enable_truncation(length)
    encodings = own.encode_batch(texts)
    return {
        "input_ids": [encoding.ids for encoding in encodings],
        "attention_mask": [encoding.attention_mask for encoding in encodings],
    }


@pytest.mark.parametrize("length", [None, 3, 20])
def test_a_batch_is_what_the_tokenizer_makes_of_it(
    tokenizer: Any, texts: list[str], length: int | None
) -> None:
    f = tokenize(tokenizer, max_length=length)
    for at in range(0, len(texts), 16):
        batch = texts[at : at + 16]
        assert plain(f(batch)) == by_itself(tokenizer, batch, length)
    assert tokenizer.padding is None
    assert tokenizer.truncation is None


def test_one_text_is_what_the_tokenizer_makes_of_it(
    tokenizer: Any, texts: list[str]
) -> None:
    f = tokenize(tokenizer, add_special_tokens=False)
    for text in texts:
        tokens, expected = f(text), tokenizer.encode(text, add_special_tokens=False)
        assert list(tokens) == ["input_ids", "attention_mask"]
        assert tokens["input_ids"].dtype == np.int64
        assert tokens["input_ids"].tolist() == expected.ids
        assert tokens["attention_mask"].tolist() == expected.attention_mask


@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=5))
def test_any_text_is_tokenized(tokenizer: Any, texts: list[str]) -> None:
    assert plain(tokenize(tokenizer)(texts)) == by_itself(tokenizer, texts)


def test_settings_of_the_tokenizer_apply(tokenizer: Any, texts: list[str]) -> None:
    own = copy.deepcopy(tokenizer)
    own.enable_padding(pad_id=4, direction="left")
    own.enable_truncation(12, direction="left")
    expected = own.encode_batch(texts[:20])
    for f in (tokenize(own), tokenize(own, max_length=12)):
        assert plain(f(texts[:20])) == {
            "input_ids": [encoding.ids for encoding in expected],
            "attention_mask": [encoding.attention_mask for encoding in expected],
        }
    f = tokenize(own)
    own.enable_truncation(2)
    assert f(texts[:20])["input_ids"].shape == (20, 12)


def test_a_fixed_length_is_that_of_batches_and_of_single_texts(
    tokenizer: Any, texts: list[str]
) -> None:
    own, batch = copy.deepcopy(tokenizer), texts[:8]
    own.enable_padding(pad_id=4, length=300, pad_to_multiple_of=8)
    f = tokenize(own)
    for same in (f, pickle.loads(pickle.dumps(f))):  # noqa: S301
        assert plain(same(batch)) == {
            "input_ids": [encoding.ids for encoding in own.encode_batch(batch)],
            "attention_mask": [e.attention_mask for e in own.encode_batch(batch)],
        }
    assert f(texts[0])["input_ids"].tolist() == own.encode(texts[0]).ids
    requested = pad(7, side="left")
    ids = tokenize(own, padding=requested)(texts[0])["input_ids"]
    assert ids.tolist() == tokenizer.encode(texts[0]).ids
    tokens = plain(tokenize(own, padding=requested)(batch))
    assert tokens == plain(tokenize(tokenizer, padding=requested)(batch))


def test_padding_can_be_requested(tokenizer: Any, texts: list[str]) -> None:
    f = tokenize(tokenizer, max_length=30, padding=pad(7, to=(32, 64)))
    tokens = f(texts[:16])
    assert tokens["input_ids"].shape == (16, 32)
    assert (tokens["input_ids"][tokens["attention_mask"] == 0] == 7).all()


def test_text_is_found_where_a_sample_keeps_it(
    tokenizer: Any, texts: list[str]
) -> None:
    expected = by_itself(tokenizer, texts[:4])
    in_key = tokenize(tokenizer, key="text")
    tokens = in_key({"text": texts[:4], "label": torch.arange(4)})
    assert tokens.pop("label").tolist() == [0, 1, 2, 3]
    assert plain(tokens) == expected
    f = tokenize(tokenizer)
    for batch in ((texts[:4], 5), [tuple(texts[:4]), 5]):  # torch collates to a list
        tokens, rest = f(batch)
        assert type(f(batch)) is type(batch)
        assert plain(tokens) == expected
        assert rest == 5
    one, rest = f((texts[0], texts[1]))
    assert one["input_ids"].tolist() == tokenizer.encode(texts[0]).ids
    assert rest == texts[1]


class Pair(NamedTuple):
    """A namedtuple of the user's."""

    text: Any
    label: int


def test_a_namedtuple_stays_a_namedtuple(tokenizer: Any, texts: list[str]) -> None:
    pair = tokenize(tokenizer)(Pair(texts[0], 5))
    assert isinstance(pair, Pair)
    assert pair.text["input_ids"].tolist() == tokenizer.encode(texts[0]).ids


def test_many_threads_share_a_tokenizer(tokenizer: Any, texts: list[str]) -> None:
    f = tokenize(tokenizer, max_length=16)
    batches = [texts[at : at + 7] for at in range(0, len(texts), 7)] * 5
    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(f, batches))
    for batch, tokens in zip(batches, results, strict=True):
        assert plain(tokens) == by_itself(tokenizer, batch, 16)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.usefixtures("warm_interpreters")
def test_worker_processes_give_the_same_ids(
    tokenizer: Any, texts: list[str], method: str
) -> None:
    f = tokenize(tokenizer, max_length=16)
    assert (
        f(texts[:8])["input_ids"].shape[0] == 8
    )  # the tokenizer was used before the fork
    batches = [texts[:8], texts[8:16], texts[16:20]]
    with ProcessPoolExecutor(2, get_context(method)) as processes:
        results = list(processes.map(Listed(f), batches))
    assert results == [by_itself(tokenizer, batch, 16) for batch in batches]


FORKED = """
import os, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from penstock.pipeline.text import tokenize

own = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
own.pre_tokenizer = pre_tokenizers.Whitespace()
f = tokenize(own)
batch = ["a b"] * 64
expected = f(batch)["input_ids"].tolist()
own.encode_batch(batch)  # the user's own: by its threads, which a fork ends
child = os.fork()
if not child:
    os._exit(f(batch)["input_ids"].tolist() != expected)
print(os.environ["TOKENIZERS_PARALLELISM"], os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("said", "kept"), [(None, "false"), ("true", "true")])
def test_a_fork_works_whatever_the_environment_variable_says(
    said: str | None, kept: str
) -> None:
    variables = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    if said is not None:
        variables["TOKENIZERS_PARALLELISM"] = said
    process = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert process.stdout.split() == [kept, "0"]
    assert "just got forked" not in process.stderr


def test_a_copy_of_a_tokenizer_keeps_its_settings(
    tokenizer: Any, texts: list[str]
) -> None:
    f = tokenize(tokenizer, max_length=9, key="text", padding=pad(2))
    assert repr(f) == (
        f"tokenize(<Tokenizer>, max_length=9, key='text', padding={pad(2)!r})"
    )
    batch = {"text": texts[:8]}
    for other in (pickle.loads(pickle.dumps(f)), copy.deepcopy(f)):  # noqa: S301
        assert plain(other(batch)) == plain(f(batch))
        assert repr(other) == repr(f)


def test_a_tokenizer_is_identified_by_what_it_does(tokenizer: Any) -> None:
    f = tokenize(tokenizer, max_length=9)
    assert digest(f, "f") == digest(pickle.loads(pickle.dumps(f)), "f")  # noqa: S301
    smaller = copy.deepcopy(tokenizer)
    smaller.add_tokens(["another"])
    others = [
        tokenize(tokenizer, max_length=8),
        tokenize(tokenizer, max_length=9, add_special_tokens=False),
        tokenize(smaller, max_length=9),
    ]
    assert len({digest(function, "f") for function in (f, *others)}) == 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: tokenize("bert-base-uncased"), "got a str: 'bert.*; load one with"),
        (lambda own: tokenize(type(own)), "must be a tokenizers.Tokenizer"),
        (lambda own: tokenize(own, max_length=0), "must be an int >= 1, got 0; 512"),
    ],
)
def test_an_object_that_is_not_a_tokenizer_is_refused(
    tokenizer: Any, make: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        make(tokenizer)


def test_a_tokenizer_with_random_results_is_refused() -> None:
    from tokenizers import Tokenizer, models

    own = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=0.1))
    with pytest.raises(SpecError, match="has dropout=0.1, .* set `model.dropout`"):
        tokenize(own)
    own.model.dropout = None
    assert tokenize(own)("ab")["input_ids"].tolist() == [2]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (b"bytes", "got a bytes: .*decode bytes"),
        ([], "got an empty list"),
        (["a", None], "got a list with a NoneType: None"),
        ({"text": "a"}, r'under `key`, None, got the keys \[\'text\'\].*key="text"'),
        (5, "got a int: 5"),
        ((), r"got an empty"),
    ],
)
def test_a_sample_that_is_not_text_is_refused(
    tokenizer: Any, sample: Any, message: str
) -> None:
    with pytest.raises(SampleError, match=message):
        tokenize(tokenizer)(sample)


# Tokenizers of transformers.


@pytest.fixture(scope="module")
def fast(tokenizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",  # noqa: S106
        padding_side="left",
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("length", [None, 10])
def test_ids_are_those_of_a_tokenizer_of_transformers(
    fast: Any, texts: list[str], length: int | None
) -> None:
    f = tokenize(fast, max_length=length)
    cut = {} if length is None else {"max_length": length, "truncation": True}
    for at in range(0, 64, 8):
        theirs = fast(texts[at : at + 8], padding=True, return_tensors="pt", **cut)
        assert plain(f(texts[at : at + 8])) == plain(dict(theirs))
    assert f(texts[0])["input_ids"].tolist() == fast(texts[0], **cut)["input_ids"]


@pytest.mark.filterwarnings("ignore")
def test_threads_share_a_tokenizer_of_transformers(fast: Any, texts: list[str]) -> None:
    f = tokenize(fast, max_length=10)
    batches = [texts[at : at + 7] for at in range(0, len(texts), 7)] * 5
    expected = [plain(f(batch)) for batch in batches]
    with ThreadPoolExecutor(8) as threads:
        assert [plain(tokens) for tokens in threads.map(f, batches)] == expected


@pytest.mark.filterwarnings("ignore")
def test_padding_needs_a_token(fast: Any) -> None:
    own = copy.deepcopy(fast)
    own.pad_token = None
    f = tokenize(own)
    assert f(["same", "same"])["input_ids"].shape[0] == 2
    with pytest.raises(SpecError, match="have 2 to .* set tokenizer.pad_token"):
        f(["", "some more words"])
