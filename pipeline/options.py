"""Options of a whole pipeline: where its engine lives, how its processes come to be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .printing import call
from .staffing import check

__all__ = ["AS_SHIPPED", "Host", "Options", "StartMethod"]

Host = Literal["auto", "trainer", "process"]
StartMethod = Literal["fork", "forkserver", "spawn"]


@dataclass(frozen=True, slots=True, repr=False)
class Options:
    """What holds for all stages of a pipeline; it changes no byte of any batch."""

    host: Host = "auto"
    """Where the engine and its threads run: beside the trainer, or in a child."""
    persistent_workers: bool = True
    """Whether worker processes, and what is prefetched, outlive an epoch."""
    multiprocessing_context: StartMethod | None = None
    """How worker processes start; None: fork, and forkserver once CUDA is in use."""

    def __post_init__(self) -> None:
        check(
            self.host in ("auto", "trainer", "process"),
            f"`host` must be 'auto', 'trainer' or 'process', got {self.host!r}",
        )
        check(
            type(self.persistent_workers) is bool,
            f"`persistent_workers` must be a bool, got {self.persistent_workers!r}",
        )
        check(
            self.multiprocessing_context in (None, "fork", "forkserver", "spawn"),
            "`multiprocessing_context` must be 'fork', 'forkserver' or 'spawn', got "
            f"{self.multiprocessing_context!r}",
        )

    def __repr__(self) -> str:
        if self == AS_SHIPPED:
            return ""
        return call(
            ".options",
            host=(self.host, "auto"),
            persistent_workers=(self.persistent_workers, True),
            multiprocessing_context=(self.multiprocessing_context, None),
        )


AS_SHIPPED = Options()
