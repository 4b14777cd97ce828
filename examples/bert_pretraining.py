"""A small BERT, trained to predict masked tokens in blocks packed from documents.

    torchrun --standalone --nproc-per-node=2 examples/bert_pretraining.py

Documents are packed into blocks, so there is almost no padding. Tokens attend only to
tokens of their own document. Masks are drawn from `rng`: they change with every epoch,
and depend only on the seed, the epoch and the block. The documents here are made up.
For yours, set the constants below to the ids of your tokenizer, and make `documents` a
sequence of the ids of each text, not the rows of a dataset, which are dicts:

    tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
    rows = dataset.map(
        lambda row: tokenizer(row["text"], add_special_tokens=False), batched=True
    )
    documents = rows["input_ids"]
"""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn  # imported after the group is made, it never lets it go
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import penstock as ps

VOCABULARY = 64
PAD, SEPARATOR, MASK = 0, 1, 2
SPECIAL = (PAD, SEPARATOR, MASK)
IGNORED = -100
WIDTH, HEADS, LAYERS = 64, 4, 2


def made_up(count: int) -> list[np.ndarray[Any, Any]]:
    """Return documents in which each token follows from the one before it."""
    rng = np.random.default_rng(0)
    steps = rng.integers(1, 4, count)
    lengths = rng.integers(8, 60, count)
    usable = VOCABULARY - len(SPECIAL)
    return [
        len(SPECIAL) + (rng.integers(usable) + step * np.arange(length)) % usable
        for step, length in zip(steps, lengths, strict=True)
    ]


class Bert(nn.Module):
    """Token and position embeddings, an encoder, and scores for each token."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(size, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.scores = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return scores `[N, size, VOCABULARY]`."""
        documents = batch["document_ids"]
        # True: may not attend. Padding, number -1, attends to padding.
        apart = documents.unsqueeze(1) != documents.unsqueeze(2)
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        masks = apart.repeat_interleave(HEADS, dim=0)
        return self.scores(self.encoder(hidden, mask=masks))


def learn(model: nn.Module, batch: Any, plan: Any) -> float:
    """Add up gradients; return the mean loss over the masked tokens of all ranks."""
    labels = batch["labels"].clone()
    labels[plan.n_local :] = IGNORED  # rows that pad an epoch's last batch
    scores = model(batch).flatten(0, 1)
    loss = nn.functional.cross_entropy(
        scores, labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    # The number of masked tokens differs between ranks, and DDP takes the mean over
    # ranks. Dividing sums by the count of all ranks gives each token equal weight.
    both = torch.stack([loss.detach(), (labels != IGNORED).sum().float()])
    dist.all_reduce(both)
    (loss * dist.get_world_size() / both[1]).backward()
    return float(both[0] / both[1])


def seen(batch: Any, plan: Any) -> dict[bytes, bytes]:
    """Return which tokens are masked in each block, by the block's own tokens."""
    rows = zip(batch["input_ids"], batch["labels"], strict=True)
    return {
        torch.where(labels != IGNORED, labels, ids).numpy().tobytes(): (
            (labels != IGNORED).numpy().tobytes()
        )
        for ids, labels in list(rows)[: plan.n_local]
    }


def of_all_ranks(blocks: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the blocks that all ranks have seen, and check that no two share one."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, blocks)
    all_blocks = dict(chain.from_iterable(part.items() for part in parts))
    assert len(all_blocks) == sum(map(len, parts)), "two ranks have seen the same block"
    return all_blocks


def check(epochs: list[dict[bytes, bytes]], blocks: ps.text.PackedBlocks) -> None:
    """Check that every block was seen, each time with another mask."""
    whole = {
        block["input_ids"].tobytes()
        for block in map(blocks.__getitem__, range(len(blocks)))
    }
    assert all(epoch.keys() == whole for epoch in epochs), "a block is missing"
    first, last = epochs[0], epochs[-1]
    again = sum(first[block] == last[block] for block in whole)
    assert again == 0, f"{again} blocks have the same mask in two epochs"
    tokens = int(sum(blocks.lengths + 1))
    mask_count = sum(map(sum, first.values()))
    print(
        f"{len(whole)} blocks, {tokens / (len(whole) * blocks.size):.1%} of them"
        f" tokens, {mask_count / tokens:.1%} masked, none twice the same way"
    )


def train(options: argparse.Namespace) -> None:
    """Train, and check the blocks that were seen."""
    documents = made_up(options.documents)
    lengths = [len(document) for document in documents]
    blocks = ps.text.PackedBlocks(
        documents, lengths, size=options.size, eos_id=SEPARATOR, split=False, pad_id=PAD
    )
    mask = ps.text.mask_tokens(VOCABULARY, MASK, special_ids=SPECIAL)
    pipe = (
        ps.Pipeline.from_dataset(blocks)
        .shuffle(seed=0)  # best-fit packing has the longest documents first
        .map(mask)
        .batch(global_size=options.batch)
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(Bert(options.size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    epochs, losses = [], []
    for _ in range(options.epochs):
        mine: dict[bytes, bytes] = {}
        for batch in pipe:
            optimizer.zero_grad()
            losses.append(learn(model, batch, pipe.plan))
            optimizer.step()
            mine |= seen(batch, pipe.plan)
        epochs.append(of_all_ranks(mine))
    if dist.get_rank() == 0:
        check(epochs, blocks)
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def main() -> None:
    """Parse the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=600)
    parser.add_argument("--size", type=int, default=128, help="tokens of a block")
    parser.add_argument("--batch", type=int, default=16, help="blocks over all ranks")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--lr", type=float, default=3e-3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
