"""What a cache did, for people and for `explain()`."""

from __future__ import annotations

from dataclasses import dataclass

from .counters import Counts

__all__ = ["CacheStatistics", "TierStatistics", "saved_s"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One level."""

    name: str
    """`RAM` or `disk`."""
    hits: int
    """Samples found here."""
    records: int
    nbytes: int
    """Of all records, those of other jobs on this host among them."""
    capacity: int
    evictions: int
    seconds_saved: float
    """Worker-seconds that computing these samples anew would have taken longer."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A cache: counts are of this pipeline on this host since it began."""

    name: str
    """As `Cache(ID:2)`."""
    tiers: tuple[TierStatistics, ...]
    misses: int
    """Samples computed."""
    waits: int
    """Samples that another was about to compute, and that were waited for."""
    refused: int
    """Samples computed for which there was no room."""
    damaged: int
    """Records that were not whole; their samples were computed anew."""
    ratio: float
    """Bytes of records for each byte of the samples stored; 1.0 before any is."""

    @property
    def line(self) -> str:
        """What it does, in one line."""
        parts = [
            f"{tier.name} {tier.hits:,} ({tier.nbytes / MIB:,.0f} of"
            f" {tier.capacity / MIB:,.0f} MiB, {tier.seconds_saved:.1f} s of work"
            " spared)"
            for tier in self.tiers
        ]
        short = f"; no room for {self.refused:,}" if self.refused else ""
        return (
            f"{self.name}: {self.hit_share:.0%} of samples found: {', '.join(parts)}"
            f"{short}"
        )

    @property
    def hits(self) -> int:
        """Samples found on any level."""
        return sum(tier.hits for tier in self.tiers)

    @property
    def hit_share(self) -> float:
        """Share of samples, 0 to 1, that were found."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


def saved_s(counts: Counts, hits: int, took_ns: int) -> float:
    """Return what finding `hits` samples in `took_ns` saved, in seconds, 0 or more.

    A sample that was found counts as long as those did, in the mean, that were not.
    """
    if not counts.misses:
        return 0.0
    anew_ns = hits * counts.compute_ns / counts.misses
    return max(0.0, (anew_ns - took_ns) / 1e9)
