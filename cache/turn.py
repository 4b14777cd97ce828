"""One sample's way through the tiers, between the moments at which it is waited for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from .claims import Claim, Claims
from .here import Found, Here
from .record import same

__all__ = ["COMPARED", "REPEATED", "RandomUpstreamError", "Turn"]

REPEATED = 3
"""Samples that are computed twice, to see whether that makes a difference."""
COMPARED = 16
"""Records of an earlier run that are computed once more."""


class RandomUpstreamError(ValueError):
    """What is to be stored is another thing each time it is computed."""


class Turn:
    """Whether a sample is there; if not, who computes it, and what becomes of it.

    Within a `with` it is being computed: what was claimed is let go of at its end.
    """

    def __init__(self, here: Here, key: bytes, index: int) -> None:
        self._here = here
        self.key = key
        self._index = index
        self._stored_before = here.stored
        self._found = here.find(key)
        self._claim: Claim | None = None
        self._handed_on = False
        self._took_ns = 0

    @property
    def wants_claim(self) -> bool:
        """Whether it is to be computed here, and stored."""
        here = self._here
        return self._found is None and here.claims is not None and here.admits(self.key)

    @property
    def claims(self) -> Claims:
        """Where it is claimed."""
        assert self._here.claims is not None
        return self._here.claims

    def claimed(self, claim: Claim) -> None:
        """Note whose it is to compute; look again, as others may be through with it."""
        here = self._here
        self._claim = claim
        if claim.waited:
            here.counters.add(waits=1)
        if here.stored != self._stored_before:
            self._found = here.find(self.key)
        if self._found is not None:
            self._free()

    @property
    def settled(self) -> bool:
        """Whether it was found, and is to be believed."""
        return self._found is not None and not self._doubted(self._found)

    @property
    def sample(self) -> Any:
        """What was found."""
        assert self._found is not None
        return self._found.sample

    def numbers(self) -> Iterator[int]:
        """Yield a number for each time that it is to be computed, one after another."""
        began_ns = time.perf_counter_ns()
        yield 0
        self._took_ns = time.perf_counter_ns() - began_ns
        if self._found is None and self._repeats():
            yield 1

    def finish(self, made: Sequence[Any]) -> Any:
        """Compare and store what was computed, and return it.

        Raises:
            RandomUpstreamError: it is another one each time.
            UnstorableError: it holds something that cannot be stored.
        """
        here = self._here
        if self._found is not None:
            self._compare(self._found, made[0])
            return made[0]
        here.counters.add(misses=1, compute_ns=self._took_ns)
        if len(made) > 1:
            if not same(*made):
                raise RandomUpstreamError(RANDOM.format(here.opening.name, self._index))
            here.counters.add(repeated=1)  # not before: the next is to be looked at too
        if self._claim is not None and self._claim.ours:
            here.keep(self.key, made[0], self._took_ns, self._free)
            self._handed_on = True
        elif self._claim is None and here.claims is not None:
            here.counters.add(refused=1)
        return made[0]

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._handed_on:
            self._free()

    def _free(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and claim.ours:
            self.claims.free(self.key)

    def _doubted(self, found: Found) -> bool:
        """Whether it is one of those of an earlier run that are looked at again."""
        return found.from_disk and self.key[:8] in self._here.left

    def _repeats(self) -> bool:
        """Whether it is computed twice: it is among the first of all to be stored."""
        here = self._here
        if self._claim is None or here.sure:
            return False
        enough = here.counters.total("repeated") >= REPEATED
        here.sure = enough or here.records(self.key[:8]) >= REPEATED
        return not here.sure

    def _compare(self, found: Found, made: Any) -> None:
        here = self._here
        here.counters.add(compared=1)
        if not same(found.sample, made):
            here.drop(self.key[:8])
            here.warn(CHANGED.format(self._index))
        elif here.counters.total("compared") >= COMPARED:
            here.vouch(self.key[:8])


RANDOM = (
    "{}: computed twice, sample index {} is not the same, so what stands before the"
    " cache is random (an augmentation in the data set's __getitem__, most likely);"
    " move what is random into a map() that takes `rng`, behind .cache()"
)
CHANGED = (
    "sample index {}, stored by an earlier run, is not what is computed now, though"
    " code and data look the same; all that it left is dropped and computed anew (say"
    " .cache(version=...) when something changes that cannot be seen from here)"
)
