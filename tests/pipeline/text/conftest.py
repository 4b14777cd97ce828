"""A small tokenizer, trained on random text."""

from __future__ import annotations

import os
from typing import Any

import pytest

from support.texts import drawn_texts

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return drawn_texts(300, 0)


@pytest.fixture(scope="session")
def tokenizer(texts: list[str]) -> Any:
    """Return a `tokenizers.Tokenizer` like BERT's: WordPiece, [CLS] ... [SEP]."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors, trainers

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer
