"""An optimiser that follows the schedule of the current batch."""

from __future__ import annotations

from typing import Any

import torch

from ..engine.plan import BatchPlan
from ..errors import SpecError
from .pipeline import Pipeline

__all__ = ["follow"]

# Where a parameter group has its rates, which are saved with it: the base rate, the
# last one of a batch, and the one that was left in the group. If the group has another
# one since, a scheduler or the user has set it: it is the new base rate.
RATES = "penstock_lr"


class follow:  # noqa: N801 it is used like a function
    """Let an optimiser follow the schedule of a pipeline, batch by batch.

    It puts learning rate and momentum of each batch into the optimiser. The rate of a
    group is its base rate times the stamp's `lr_mult`. The base rate is the one that
    the optimiser was made with, or that a learning rate scheduler has set since. The
    new rate is set when a batch is handed over. A scheduler continues from the rate
    that it finds, so `follow` restores the base rate after each step. The base rate is
    saved with the optimiser, so a training that is resumed goes on from it.

    Args:
        optimizer: any torch optimiser.
        pipe: the pipeline that provides the batches; the loop itself needs no change.
        lr_in_velocity: whether its velocity is a sum of steps, v = m v + lr g, rather
            than of gradients, as in torch: v = m v + g. Then v is multiplied by new /
            old whenever the rate changes (P. Goyal et al., arXiv:1706.02677, section 3,
            "momentum correction").
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        pipe: Pipeline,
        *,
        lr_in_velocity: bool = False,
    ) -> None:
        self._optimizer, self._lr_in_velocity = optimizer, lr_in_velocity
        self._hook = optimizer.register_step_post_hook(self._after_step)
        self._end = pipe.on_batch(self.apply)

    def apply(self, plan: BatchPlan) -> None:
        """Set the learning rate and momentum of this batch.

        Raises:
            SpecError: the schedule sets a momentum, but the optimiser has none.
        """
        for group in self._optimizer.param_groups:
            base, before, left = group.get(RATES, (group["lr"],) * 3)
            if group["lr"] != left:
                base = group["lr"]
            group["lr"] = now = base * plan.lr_mult
            group[RATES] = base, now, now
            if self._lr_in_velocity and now != before and before > 0:
                self._correct(group, now / before)
            if plan.momentum is None:
                continue
            if "momentum" in group:  # SGD's
                group["momentum"] = plan.momentum
            elif "betas" in group:  # Adam's
                group["betas"] = (plan.momentum, *group["betas"][1:])
            else:
                raise SpecError(
                    "the schedule sets a momentum, and this optimiser has neither"
                    " `momentum` nor `betas`; leave the momentum out of the schedule"
                )

    def detach(self) -> None:
        """Stop changing the optimiser."""
        self._end()
        self._hook.remove()

    def _after_step(self, *_: Any) -> None:
        if hasattr(self._optimizer.step, "_wrapped_by_lr_sched"):
            for group in self._optimizer.param_groups:
                base, now, left = group.get(RATES, (None,) * 3)
                if group["lr"] == left:
                    group["lr"] = base
                    group[RATES] = base, now, base

    def _correct(self, group: dict[str, Any], factor: float) -> None:
        for parameter in group["params"]:
            velocity = self._optimizer.state[parameter].get("momentum_buffer")
            if velocity is not None:
                velocity.mul_(factor)
