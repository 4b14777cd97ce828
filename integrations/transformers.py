"""Transformers' Trainer with penstock's loaders.

    class MyTrainer(TrainerMixin, transformers.Trainer): ...

A `Trainer` makes its loaders itself, from the data set and its arguments. This one
exchanges them for penstock's, over the same samples in the same order.
"""

from __future__ import annotations

from typing import Any

from .. import config
from ..pipeline.session import explanations
from .accelerate import keep

__all__ = ["TrainerMixin"]


class TrainerMixin:
    """Stands before `transformers.Trainer` among the bases of a class.

    A run that is resumed within an epoch has the Trainer skip what was consumed of it,
    for which it builds a plain loader: that epoch is loaded by torch, the ones after it
    by penstock.

    While autotune is on, what penstock finds is logged beside the loss, as
    `penstock/<name>/wait_share` and more.
    """

    def get_train_dataloader(self) -> Any:
        """Return the Trainer's own loader, with penstock's inside."""
        return keep(super().get_train_dataloader())  # type: ignore[misc]

    def get_eval_dataloader(self, *args: Any, **settings: Any) -> Any:
        """Return the Trainer's own loader, with penstock's inside."""
        return keep(super().get_eval_dataloader(*args, **settings))  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        """Log the Trainer's figures, and beside them what penstock finds."""
        if config.get_enable_autotune():
            logs |= {
                f"penstock/{name}/{scalar}": value
                for name, said in explanations().items()
                for scalar, value in said.scalars().items()
            }
        super().log(logs, *args, **settings)  # type: ignore[misc]
