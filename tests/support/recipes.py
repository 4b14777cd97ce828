"""Stages to compile: a source, functions of each kind, and the recipe of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.config import Settings
from penstock.engine.plan import Shard
from penstock.engine.recipe import Recipe
from penstock.pipeline.compile import compile_recipe
from penstock.pipeline.stages import SourceStage, Stage

__all__ = ["DATA", "compiled", "decode", "flip", "wanted"]

DATA = SourceStage(list(range(10)), name="data")
"""Ten samples that threads may share."""
DEFAULTS = Settings(num_parallel_workers=3, prefetch_size=2, seed=11, cpu_budget=1.0)


def decode(sample: Any) -> Any:
    """A function of a sample alone."""
    return sample


def flip(sample: Any, rng: np.random.Generator) -> Any:
    """A random function."""
    return sample


def wanted(sample: Any) -> bool:
    """A predicate."""
    return True


def compiled(*stages: Stage, shard: Shard | None = None) -> Recipe:
    """Return their recipe, on one rank if no `shard` is given."""
    return compile_recipe(stages, DEFAULTS, shard or Shard.single())
