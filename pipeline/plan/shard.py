"""Which rows of a global batch belong to which data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SpecError

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` data-parallel ranks."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            message = f"`size` must be >= 1, got {self.size}; one rank is Shard(0, 1)"
            raise SpecError(message)
        if not 0 <= self.rank < self.size:
            message = (
                f"`rank` must be >= 0 and < size={self.size}, got {self.rank}; "
                "pass the rank within the data-parallel group, not the global one"
            )
            raise SpecError(message)

    @classmethod
    def single(cls) -> Shard:
        """Return the shard of a job that has one rank."""
        return cls(0, 1)

    def share(self, n: int) -> tuple[int, int]:
        """Return (first, count) of this rank's part of `n` rows.

        Parts are contiguous, differ by at most one row, and in rank order make up n.
        """
        base, extra = divmod(n, self.size)
        return self.rank * base + min(self.rank, extra), base + (self.rank < extra)
