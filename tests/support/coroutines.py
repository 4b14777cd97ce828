"""Pipelines whose stage is a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import penstock as ps

from .datasets import Numbers

__all__ = ["hand_on", "pipe_of"]


async def hand_on(sample: Any) -> Any:
    """Let others go first, and return the sample."""
    await asyncio.sleep(0)
    return sample


def pipe_of(
    function: Callable[..., Awaitable[Any]],
    *,
    length: int = 48,
    batch: Mapping[str, Any] = {},
    **settings: Any,
) -> ps.Pipeline:
    """Return batches of eight `Numbers`, which the stage `fetch` has worked on."""
    source = ps.Pipeline.from_dataset(Numbers(length))
    return source.map(function, name="fetch", **settings).batch(8, **batch)
