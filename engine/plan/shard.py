"""Which rows of a global batch belong to which data-parallel rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...errors import check

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` data-parallel ranks.

    Raises:
        SpecError: `size` is below 1, or `rank` is not in [0, size).
    """

    rank: int
    """Number of this rank, from 0."""
    size: int
    """Number of ranks."""

    def __post_init__(self) -> None:
        check(
            self.size >= 1,
            f"`size` must be >= 1, got {self.size}; for one rank, pass Shard(0, 1)",
        )
        check(
            0 <= self.rank < self.size,
            f"`rank` must be >= 0 and < size={self.size}, got {self.rank}; "
            "pass the rank within the data-parallel group, not the global one",
        )

    @classmethod
    def single(cls) -> Shard:
        """Return the shard of a job with a single rank."""
        return cls(0, 1)

    @classmethod
    def found(cls) -> Shard:
        """Return the shard in the default process group, or Shard(0, 1) without one.

        If ranks of a group share data (tensor, context, pipeline parallelism), use
        `from_device_mesh` instead.
        """
        grouped = dist.is_available() and dist.is_initialized()
        return cls.from_process_group() if grouped else cls.single()

    @classmethod
    def from_process_group(cls, group: ProcessGroup | None = None) -> Shard:
        """Return the shard of this process in a group of data-parallel ranks only.

        Args:
            group: a group of `torch.distributed`; None means the default group.

        Raises:
            SpecError: this process is not in it, or there is none.
        """
        check(
            dist.is_available() and dist.is_initialized(),
            "there is no process group: call torch.distributed.init_process_group()"
            " first, or pass Shard(rank, size)",
        )
        rank = dist.get_rank(group)
        check(
            rank >= 0,
            "this process is not a member of the process group; pass a group that it"
            " belongs to, or Shard(rank, size)",
        )
        return cls(rank, dist.get_world_size(group))

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, dims: str | Sequence[str]) -> Shard:
        """Return the shard of this process along a mesh's data-parallel dimensions.

        Ranks that differ only in other dimensions (tensor, context, pipeline) have the
        same shard, and so receive the same bytes.

        Args:
            mesh: the mesh of all ranks, with named dimensions.
            dims: names of the data-parallel dimensions, the outermost first.

        Raises:
            SpecError: the mesh has no such dimension.
        """
        wanted = (dims,) if isinstance(dims, str) else tuple(dims)
        names = mesh.mesh_dim_names or ()
        check(
            wanted and set(wanted) <= set(names),
            f"`dims` must name dimensions of the mesh, {names}, got {wanted}; name"
            " them by init_device_mesh(..., mesh_dim_names=...)",
        )
        rank, size = 0, 1
        for name in wanted:
            length = mesh.size(names.index(name))
            rank, size = rank * length + mesh.get_local_rank(name), size * length
        return cls(rank, size)

    def share(self, n: int) -> tuple[int, int]:
        """Return (first, count) of this rank's part of `n` rows.

        Parts are contiguous, differ by at most one row, and make up n in rank order.
        """
        base, extra = divmod(n, self.size)
        return self.rank * base + min(self.rank, extra), base + (self.rank < extra)
