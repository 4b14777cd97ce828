"""Pools with workers in other processes, and what these share.

Worker processes need Linux, and actors need Ray: their modules are loaded when the
first one starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, cast

import torch

from ...errors import check
from ...system.forking import FORKS, interrupts_deferred
from ..core.connector import Connector
from ..recipe import Recipe, SegmentRecipe, StartMethod
from ..segment import PoolMaker
from ..witness.hazards import Finding, find_on_device
from ..workers import Kind, Watches, WorkerPool, no_watch

if TYPE_CHECKING:
    from .actors import ActorPool, RayCluster, Tenant
    from .fork_server import ForkServer
    from .worker import Seeds

# Options of an actor: the pool itself replaces it, and repeats its work.
ACTOR = {
    "num_cpus": 1,
    "scheduling_strategy": "SPREAD",
    "max_restarts": 0,
    "max_task_retries": 0,
}


class FarPools(PoolMaker):
    """Makes pools of all kinds; owns a fork server, and a connection to Ray.

    The arguments are those of `PoolMaker`.
    """

    def __init__(
        self, recipe: Recipe, begun_at: int, watch: Watches = no_watch
    ) -> None:
        super().__init__(recipe, begun_at, watch)
        self._actor_options = {**ACTOR, **(recipe.options.ray_options or {})}
        self._fork_server: ForkServer | None = None
        self._cluster: RayCluster | None = None
        # The segments that have actors at first.
        self._tenants: list[Tenant] = []
        self._actor_pools: list[ActorPool] = []

    @staticmethod
    def opened_late(recipe: Recipe, step: int) -> Mapping[int, Finding]:
        """Try some samples in a child process, and return what they open."""
        doubtful = any(segment.program.doubtful for segment in recipe.segments)
        if not (FORKS and doubtful) or start_method(recipe) != "fork":
            return {}
        from .rehearsal import opened_late

        return opened_late(recipe, step)

    def begin(self) -> None:
        """Start the fork server, and join Ray, as far as they are needed."""
        kinds = [segment.executor for segment in self._recipe.segments]
        if "process" in kinds:
            self.fork()
        self._tenants = [(self, at) for at, kind in enumerate(kinds) if kind == "ray"]
        if self._tenants:
            from .actors import join

            self._cluster = join(self._tenants, self._actor_options)

    def make(
        self, connector: Connector, recipe: SegmentRecipe, kind: Kind
    ) -> WorkerPool:
        """Create a pool of one kind, without workers yet."""
        if kind == "process":
            from .processes import ProcessPool

            assert self._fork_server is not None
            cores = recipe.children or max(1, round(self._recipe.cpu_cores))
            return ProcessPool(connector, self._recipe, self._fork_server, cores)
        if kind == "ray":
            from .actors import ActorPool

            assert self._cluster is not None
            pool = ActorPool(
                connector,
                self._recipe,
                self._cluster,
                (self, connector.segment),
                seeds=self._seeds,
                options=self._actor_options,
            )
            self._actor_pools.append(pool)
            return pool
        return super().make(connector, recipe, kind)

    @property
    def forked(self) -> bool:
        """Whether there is a fork server."""
        return self._fork_server is not None

    def fork(self) -> None:
        """Start the fork server, while nobody works."""
        check(
            FORKS,
            "worker processes need fork and pidfd_open, which only Linux has; use"
            ' executor="thread" or "inline", and host="trainer"',
        )
        from .fork_server import ForkServer

        recipe = self._recipe
        # Ray's threads run by now: a fork could copy a lock that one of them holds.
        method = "forkserver" if self._cluster else start_method(recipe)
        works = {
            at: (recipe.elsewhere(at), segment)
            for at, segment in enumerate(recipe.segments)
            if not segment.in_order
        }
        with interrupts_deferred():  # until it is known whose child it is
            self._fork_server = ForkServer(works, self._seeds, method)

    def expire(self) -> None:
        """Let worker processes end; none start until `renew`."""
        if self._fork_server is not None:
            self._fork_server.expire()

    def renew(self) -> None:
        """Replace all workers in other processes."""
        if self._fork_server is not None:
            self._fork_server.renew()
        for pool in self._actor_pools:
            pool.renew()

    def close(self) -> None:
        """End the fork server, and all worker processes with it; let go of Ray."""
        self.expire()
        if self._fork_server is not None:
            self._fork_server.reap()
        if self._cluster is not None:
            self._cluster.leave(*self._tenants)

    @cached_property
    def _seeds(self) -> Seeds:
        """Returns the seeds of one more worker of a segment, by its number.

        Processes and actors are counted together: one may take the place of the other,
        and must not draw the same values again.
        """
        recipe = self._recipe
        earlier: defaultdict[tuple[int, int], Iterator[int]] = defaultdict(count)
        plan = recipe.drawn
        where = (plan.seed,) if plan else (self._begun_at, recipe.planned.shard.rank)
        run = recipe.seed, *where
        # It refers to nothing else: the fork server must not keep these pools alive.
        return lambda segment, number: (*run, segment, next(earlier[segment, number]))


def start_method(recipe: Recipe) -> StartMethod:
    """Return how worker processes start.

    By fork by default, like torch's, even if CUDA is in use; but not if the dataset or
    a function holds CUDA tensors, which a forked process cannot use. Whoever has set
    another method for the whole program had a reason.
    """
    if (setting := recipe.options.multiprocessing_context) is not None:
        return setting
    usual = torch.multiprocessing.get_start_method(allow_none=True)
    if usual in ("spawn", "forkserver"):
        return cast("StartMethod", usual)
    subjects = [segment.subjects for segment in recipe.segments]
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    on_gpu = cuda and find_on_device(subjects, "subjects", "cuda") is not None
    return "forkserver" if on_gpu else "fork"
