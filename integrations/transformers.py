"""The Trainer of transformers, with penstock's loaders.

    class MyTrainer(TrainerMixin, transformers.Trainer): ...

A `Trainer` makes its own loaders from the dataset and its arguments. The mixin replaces
them by penstock's, with the same samples in the same order.
"""

from __future__ import annotations

from typing import Any

from .. import config
from ..pipeline.session import explanations
from .accelerate import keep

__all__ = ["TrainerMixin"]


class TrainerMixin:
    """A base class to put before `transformers.Trainer`.

    If a run is resumed within an epoch, the Trainer skips the batches that were already
    used, and builds a plain loader to do so. torch then loads that epoch, and penstock
    the following ones.

    While autotune is on, penstock's figures are logged beside the loss, as
    `penstock/<name>/wait_share` and so on.
    """

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's loader for training, with penstock's inside."""
        return keep(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **settings: Any) -> Any:
        """Return the Trainer's loader for evaluation, with penstock's inside."""
        return keep(super().get_eval_dataloader(*args, **settings))  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log the Trainer's figures, together with penstock's."""
        figures = {
            f"penstock/{name}/{scalar}": value
            for name, explanation in (
                explanations() if config.get_enable_autotune() else {}
            ).items()
            for scalar, value in explanation.scalars().items()
        }
        logs |= figures
        super().log(logs, *args, **settings)  # type: ignore[misc]
        for name in figures:  # they are no metrics; what the Trainer added is
            logs.pop(name, None)
