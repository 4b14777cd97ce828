"""What operators that draw random numbers share.

In a pipeline they get the sample's own generator as `rng`, so a sample does not depend
on the worker that makes it. Called directly, they draw from numpy's global generator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

Rng = np.random.Generator


class RandomOperator(ABC):
    """An operator whose result depends on random numbers."""

    __slots__ = ()

    def __call__(self, image: Any, rng: Rng | None = None) -> Any:
        return self.drawn(image, chosen_rng(rng))

    @abstractmethod
    def drawn(self, image: Any, rng: Rng) -> Any:
        """Return the result for an image, drawn from this generator.

        Raises:
            SampleError: the image is not what the operator takes.
        """


def chosen_rng(rng: Rng | None) -> Rng:
    """Return a generator, or one that draws from numpy's global state if it is None."""
    if rng is not None:
        return rng
    return np.random.Generator(np.random.get_bit_generator())  # type: ignore[attr-defined]


def called(operation: Any, values: tuple[Any, ...], rng: Rng) -> Any:
    """Return what an operation makes of values; one that draws gets the generator."""
    extras = {"rng": rng} if isinstance(operation, RandomOperator) else {}
    return operation(*values, **extras)
