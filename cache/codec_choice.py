"""Which codec makes later epochs shortest: the rule behind `codec="auto"`.

Pure. A smaller record is read sooner, and more of them fit; a plain one costs no CPU.
What weighs more depends on the samples, the tier and what it costs to compute anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Expected", "Facts", "Measured", "choose"]

EPOCHS = 10
"""Over so many the cost of filling the cache is spread: a short training."""

TIE = 0.03
"""Costs this close are the same: measured on a few samples, they are no closer."""
SLIGHT = 0.02
"""A share of what a sample takes to compute that is not worth a codec, either."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a codec does to a few samples; times of one."""

    name: str
    ratio: float
    """Bytes of its records by those of raw ones: 1 is raw."""
    encode_ns: float
    decode_ns: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What a choice rests on."""

    measured: Sequence[Measured]
    """The simplest first: that one wins ties."""
    sample_bytes: float
    """Of a raw record."""
    samples: int
    """In an epoch."""
    compute_ns: float
    """CPU time to make a sample anew, all that the cache would spare."""
    capacity_bytes: float
    """Of the tier."""
    read_bytes_per_s: float
    """Of the tier; infinite for memory."""
    spare_cpu: float = 0.0
    """Share of the CPUs, 0 to 1, that nobody uses while the cache fills."""

    def __post_init__(self) -> None:
        checked = {
            "measured": len(self.measured) > 0,
            "sample_bytes": self.sample_bytes > 0,
            "samples": self.samples > 0,
            "compute_ns": self.compute_ns >= 0,
            "capacity_bytes": self.capacity_bytes >= 0,
            "read_bytes_per_s": self.read_bytes_per_s > 0,
            "spare_cpu": 0 <= self.spare_cpu <= 1,
        }
        for name, is_right in checked.items():
            if not is_right:
                value = getattr(self, name)
                text = f"`{name}` is {value!r}: no codec can be chosen by that; measure"
                raise ValueError(f"{text} at least one codec, amounts > 0, shares 0..1")


@dataclass(frozen=True, slots=True)
class Expected:
    """What a codec would cost in later epochs; means of one sample."""

    name: str
    hit: float
    """Share of samples found in the tier, 0 to 1."""
    cost_ns: float

    def __str__(self) -> str:
        return f"{self.name} {self.cost_ns / 1e6:.3f} ms ({self.hit:.0%} found)"


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, and what each was expected to cost."""

    name: str
    expected: tuple[Expected, ...]

    def __str__(self) -> str:
        every = ", ".join(map(str, self.expected))
        return f'codec "{self.name}": expected of a sample: {every}'


def choose(facts: Facts) -> Choice:
    """Return the codec of the least expected cost; ties go to the simpler one."""
    costs = tuple(expected(facts, each) for each in facts.measured)
    least_ns = min(each.cost_ns for each in costs)
    bound = (1 + TIE) * least_ns + SLIGHT * facts.compute_ns
    name = next(each.name for each in costs if each.cost_ns <= bound)
    return Choice(name, costs)


def expected(facts: Facts, measured: Measured) -> Expected:
    """Return what a codec would cost.

    A tier that keeps what it has and admits no more once it is full is hit in
    proportion to what fits, whatever the order (MinIO of CoorDL, J. Mohan et al.,
    VLDB 2021). Only what it admits is encoded, once; that CPUs do unnoticed which
    nobody else uses.
    """
    stored = measured.ratio * facts.sample_bytes
    hit = min(1.0, facts.capacity_bytes / (facts.samples * stored))
    read_ns = measured.decode_ns + 1e9 * stored / facts.read_bytes_per_s
    fill_ns = (1 - facts.spare_cpu) * measured.encode_ns / EPOCHS
    cost_ns = hit * (read_ns + fill_ns) + (1 - hit) * facts.compute_ns
    return Expected(measured.name, hit, cost_ns)
