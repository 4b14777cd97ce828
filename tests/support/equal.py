"""Whether two batches are the same: containers, types and values."""

from __future__ import annotations

from typing import Any

import torch


def equal(ours: Any, theirs: Any) -> bool:
    """Whether a batch is another one, bit for bit."""
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(
            equal(ours[name], theirs[name]) for name in theirs
        )
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(equal, ours, theirs))
    return bool(ours == theirs)
