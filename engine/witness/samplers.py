"""Whether the order of samples may depend on what the training loop does meanwhile."""

from __future__ import annotations

from typing import Any

from torch.utils.data import RandomSampler

STEADY = frozenset(
    (
        "penstock",
        "torch",
        "torchdata",
        "accelerate",
        "lightning",
        "lightning_fabric",
        "pytorch_lightning",
        "transformers",
    )
)
"""Packages whose samplers do not see what the training loop does."""


def may_watch(sampler: Any) -> bool:
    """Whether what a sampler yields may depend on what the loop does meanwhile."""
    kind = type(sampler)
    if kind in (range, tuple):
        return False
    if str(kind.__module__).partition(".")[0] not in STEADY:
        return True
    shared = getattr(sampler, "generator", None) is not None
    if kind is RandomSampler and shared:  # it draws more of these as it goes
        again = sampler.num_samples > len(sampler.data_source)
        return bool(sampler.replacement or again)
    inner = (getattr(sampler, name, None) for name in ("sampler", "batch_sampler"))
    return any(may_watch(each) for each in inner if each is not None)
