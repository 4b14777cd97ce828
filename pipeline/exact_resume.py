"""A check for anybody's pipeline: does it go on exactly where a state was taken?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.utils.data

__all__ = ["assert_exact_resume"]


def assert_exact_resume(
    make_pipeline: Callable[[], Any], *, epochs: int = 1, every: int = 1
) -> None:
    """Run a pipeline, then resume it from states taken on the way, and compare.

    For each state that is looked at: it is JSON, a pipeline made anew and given it
    returns it again, and what that yields from there on equals, to the byte and in its
    stamps, what came without any break.

    Args:
        make_pipeline: makes the same pipeline (or DataLoader) each time.
        epochs: that are run.
        every: look at the state before each n-th batch; those at the ends of epochs are
            looked at, too.

    Raises:
        AssertionError: it says at which state, and what differs.
    """
    pipe = make_pipeline()
    states, batches = [], []
    for epoch in range(epochs):
        states.append(carried(pipe))
        for batch in pipe:
            batches.append((batch, pipe.plan))
            states.append(carried(pipe))
        assert len(batches) > 0, f"epoch {epoch} has no batch"
    pipe.close()
    checked = [at for at in range(len(states)) if at % every == 0]
    for at in sorted({*checked, len(states) - 1}):
        check(make_pipeline, states[at], batches, at, epochs)


def carried(pipe: Any) -> Any:
    """Return the state of a pipeline as it is after a way through JSON."""
    return json.loads(json.dumps(pipe.state_dict()))


def check(
    make_pipeline: Callable[[], Any],
    state: Any,
    batches: list[tuple[Any, Any]],
    at: int,
    epochs: int,
) -> None:
    """Resume at one state, and compare all that follows."""
    pipe = make_pipeline()
    pipe.load_state_dict(state)
    again = carried(pipe)
    assert again == state, f"state {at} is {again} once loaded, was {state}"
    given = iter(rest_of(pipe, epochs))
    start = None
    for got, plan in given:
        if start is None:
            stamps = [(p.epoch, p.batch) for _, p in batches]
            start = stamps.index((plan.epoch, plan.batch))
        wanted, stamp = batches[start]
        if isinstance(pipe, torch.utils.data.DataLoader):  # which counts since it began
            stamp = replace(stamp, step=plan.step)
        assert plan == stamp, f"after state {at}: stamp {plan}, was {stamp}"
        text = f"after state {at}: batch of step {plan.step} differs"
        assert equal(got, wanted), text
        start += 1
    assert start in (None, len(batches)), f"after state {at}: ended at {start}"
    pipe.close()


def rest_of(pipe: Any, epochs: int) -> Iterator[tuple[Any, Any]]:
    """Yield what is left of so many epochs."""
    for _ in range(epochs):
        for batch in pipe:
            if pipe.plan.epoch >= epochs:
                return
            yield batch, pipe.plan


def equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same, to the byte."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if isinstance(one, dict):
        keys = one.keys()
        return keys == other.keys() and all(equal(one[k], other[k]) for k in keys)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
