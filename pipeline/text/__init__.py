"""Text for the training of language models: token ids, packed, masked and padded.

    tokenize = ps.text.tokenize(tokenizer, max_length=512)
    mask = ps.text.mask_tokens(
        len(tokenizer), tokenizer.mask_token_id, special_ids=tokenizer.all_special_ids
    )
    pipe = ps.Pipeline.from_dataset(texts).shuffle(seed=0).batch(32)
    pipe = pipe.map(tokenize).map(mask)

    blocks = ps.text.PackedBlocks(documents, lengths, size=2048, eos_id=0)
    loader = ps.DataLoader(blocks, 8, shuffle=True)

    loader = ps.DataLoader(documents, 32, collate_fn=ps.text.pad(multiple_of=8))

Masks depend on `rng` alone and blocks on the lengths alone, so the batches are the same
for any number of workers. penstock imports no library of tokenizers: you bring your
own tokenizer.
"""

from .blocks import PackedBlocks
from .tokenizing import tokenize
from .tokens import mask_tokens, pad

__all__ = ["PackedBlocks", "mask_tokens", "pad", "tokenize"]
