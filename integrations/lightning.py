"""Verdicts for the loggers of Lightning's Trainer.

    trainer = Trainer(callbacks=[verdict_logger()], ...)

Lightning accepts `penstock.DataLoader` as it is; this callback only adds the figures.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..autotune.log import on_verdict

if TYPE_CHECKING:
    from ..autotune.explain import Explanation

__all__ = ["verdict_logger"]


class Verdicts:
    """The hooks of a Lightning callback that logs each verdict."""

    def __init__(self) -> None:
        self._verdicts: deque[tuple[str, Explanation]] = deque()
        self._end: Callable[[], object] | None = None

    def on_fit_start(self, *_: Any, **__: Any) -> None:
        """Start listening for verdicts."""
        self._end = on_verdict(
            lambda name, verdict: self._verdicts.append((name, verdict))
        )

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Log the verdicts since the last step. Loggers belong to this thread."""
        while self._verdicts:
            name, verdict = self._verdicts.popleft()
            scalars = {f"penstock/{name}/{k}": v for k, v in verdict.scalars().items()}
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=trainer.global_step)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Stop listening."""
        end, self._end = self._end, None
        if end is not None:
            end()

    on_exception = teardown  # which Lightning does not call then


def verdict_logger() -> Any:
    """Return a callback that logs each verdict as `penstock/<name>/...`.

    It uses the Trainer's own loggers.
    """
    from lightning.pytorch.callbacks import Callback

    return type("VerdictLogger", (Verdicts, Callback), {})()
