"""Verdicts in TensorBoard.

writer = SummaryWriter("runs")
end = log_verdicts(writer, step=lambda: trainer.step)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..autotune.log import on_verdict

if TYPE_CHECKING:
    from ..autotune.explain import Explanation

__all__ = ["log_verdicts"]


def log_verdicts(
    writer: Any, step: Callable[[], int] | None = None
) -> Callable[[], object]:
    """Write each verdict of the tuned pipelines as scalars `penstock/<name>/...`.

    It writes once a minute and when a verdict changes, in the tuner's thread.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or any object with its
            `add_scalar`.
        step: returns the present step (default: seconds since this call).

    Returns:
        A function that stops writing.
    """
    begun_s = time.monotonic()

    def write(name: str, verdict: Explanation) -> None:
        at = step() if step is not None else round(time.monotonic() - begun_s)
        for scalar, value in verdict.scalars().items():
            writer.add_scalar(f"penstock/{name}/{scalar}", value, at)

    return on_verdict(write)
