"""A cache as the user wrote it: `.cache(ram="2GB", disk="/nvme/cache")`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cache.codec import NAMES, Name
from .errors import check
from .printing import call

__all__ = ["CacheStage"]


def memory_of_this_machine() -> int:
    """Bytes."""
    import psutil  # a third of what importing all of penstock took

    return int(psutil.virtual_memory().total)


@dataclass(frozen=True, slots=True, repr=False)
class CacheStage:
    """Samples stored as the stage before it makes them."""

    ram: int = 0
    """Bytes of the tier in RAM; 0: there is none."""
    disk: Path | None = None
    disk_limit: int | None = None
    codec: Name = "auto"
    version: int | str | None = None

    def __post_init__(self) -> None:
        check(
            self.ram or self.disk is not None,
            'cache() needs a tier: cache(ram="2GB"), cache(disk="/nvme/cache"), or both'
            ", got neither",
        )
        total = memory_of_this_machine()
        check(
            self.ram <= total,
            f"`ram` must be at most the memory of this machine, {total} bytes, got"
            f" {self.ram}; what does not fit can go to cache(disk=...)",
        )
        check(
            self.disk_limit is None or self.disk is not None,
            f"`disk_limit` is of the folder `disk`, which is not given, got"
            f" {self.disk_limit!r}",
        )
        check(
            self.codec in NAMES,
            f"`codec` must be one of {', '.join(NAMES)}, got {self.codec!r}",
        )
        check(
            self.version is None or type(self.version) in (int, str),
            f"`version` must be an int or a str, got {self.version!r}",
        )

    @property
    def kind(self) -> str:
        """As the log names it."""
        return "Cache"

    def __repr__(self) -> str:
        return call(
            ".cache",
            ram=(self.ram, 0),
            disk=(None if self.disk is None else str(self.disk), None),
            disk_limit=(self.disk_limit, None),
            codec=(self.codec, "auto"),
            version=(self.version, None),
        )
