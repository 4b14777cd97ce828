"""Making the worker pools of one engine, and owning what they share.

Worker processes need Linux, and actors need Ray: their modules are loaded when the
first one starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from ...errors import check
from ...system.forking import FORKS
from ...system.interrupts import interrupts_deferred
from ..core.connector import Connector
from ..plan import DrawnPlan
from ..recipe import Recipe, SegmentRecipe, StartMethod
from ..witness.hazards import find_on_device
from .coroutines import Coroutines
from .inline import Inline
from .pool import Watches, WorkerPool, no_watch
from .threads import Threads

if TYPE_CHECKING:
    from .actors import ActorPool
    from .cluster import RayCluster
    from .process.fork_server import ForkServer

Kind = Literal["inline", "thread", "process", "async", "ray"]

ACTOR = {
    "num_cpus": 1,
    "scheduling_strategy": "SPREAD",
    "max_restarts": 0,
    "max_task_retries": 0,
}
"""Options of an actor: the pool itself replaces it, and repeats its work."""


class PoolMaker:
    """Makes pools, and owns what they share: a fork server, a connection to Ray.

    Args:
        recipe: the engine's recipe.
        begun_at: the first batch wanted.
        watch: makes what observes the samples of a worker; it may return None.
    """

    def __init__(
        self, recipe: Recipe, begun_at: int, watch: Watches = no_watch
    ) -> None:
        self._recipe = recipe
        self._begun_at = begun_at
        self._watch = watch
        self._cores = max(1, round(recipe.cpu_cores))
        self._fork_server: ForkServer | None = None
        self._cluster: RayCluster | None = None
        self._actor_pools: list[ActorPool] = []

    def begin(self) -> None:
        """Start what the pools share, before the engine has threads.

        The caller must `close`, also after an error.

        Raises:
            SpecError: worker processes or actors cannot be started.
        """
        kinds = [segment.executor for segment in self._recipe.segments]
        if "process" in kinds:
            self.fork()
        if "ray" not in kinds:
            return
        from .cluster import join

        self._cluster = join(self)
        self._cluster.check_room(self, kinds.count("ray"), self._actor_options)

    def make(
        self, connector: Connector, recipe: SegmentRecipe, kind: Kind
    ) -> WorkerPool:
        """Create a pool of one kind, without workers yet.

        Args:
            connector: where they take their leases.
            recipe: the segment's recipe.
            kind: kind of the workers.

        Raises:
            SpecError: this system has no such workers, or the program cannot be sent
                to them.
        """
        program, seed = recipe.program, self._recipe.seed
        match kind:
            case "inline":
                return Inline(connector, program, seed, self._watch)
            case "thread":
                return Threads(connector, program, seed, recipe.name, self._watch)
            case "async":
                name, limit_s = recipe.name, recipe.timeout_s
                return Coroutines(connector, program, seed, name, limit_s)
            case "process":
                return self._processes(connector, recipe)
            case "ray":
                return self._actors(connector, recipe)

    def _processes(self, connector: Connector, recipe: SegmentRecipe) -> WorkerPool:
        from .process.pool import ProcessPool

        assert self._fork_server is not None
        cores, recipes = recipe.children or self._cores, self._recipe
        return ProcessPool(
            connector, recipe, self._fork_server, cores, lambda: recipes.collate_seed
        )

    def _actors(self, connector: Connector, recipe: SegmentRecipe) -> WorkerPool:
        from .actors import ActorPool

        assert self._cluster is not None
        recipes, cluster, options = self._recipe, self._cluster, self._actor_options
        work = recipes.elsewhere(connector.segment), recipe
        seeds = recipes.seed, *self._begun
        pool = ActorPool(
            connector,
            work,
            cluster,
            self,
            seeds,
            options,
            lambda: recipes.collate_seed,
        )
        self._actor_pools.append(pool)
        return pool

    @property
    def _actor_options(self) -> dict[str, Any]:
        return {**ACTOR, **(self._recipe.options.ray_options or {})}

    @property
    def forked(self) -> bool:
        """Whether there is a fork server."""
        return self._fork_server is not None

    def fork(self) -> None:
        """Start the fork server, while nobody works: a fork copies locks as they are.

        Raises:
            SpecError: a segment cannot be sent to another process, or this system has
                no fork.
        """
        check(
            FORKS,
            "worker processes need fork and memfd, which only Linux has; use"
            ' executor="thread" or "inline", and host="trainer"',
        )
        from .process.fork_server import ForkServer

        recipe = self._recipe
        # Ray's threads run by now: a fork could copy a lock that one of them holds.
        method = "forkserver" if self._cluster else start_method(recipe)
        works = {
            at: (recipe.elsewhere(at), each)
            for at, each in enumerate(recipe.segments)
            if not each.in_order
        }
        with interrupts_deferred():  # until it is known whose child it is
            self._fork_server = ForkServer(works, recipe.seed, self._begun, method)

    def renew(self) -> None:
        """Replace all workers in other processes: the dataset may have changed.

        Raises:
            SpecError: something in the programs can no longer be sent.
        """
        if self._fork_server is not None:
            self._fork_server.renew()
        for pool in self._actor_pools:
            pool.renew()

    def close(self) -> None:
        """End the fork server, and all worker processes with it; let go of Ray."""
        if self._fork_server is not None:
            self._fork_server.close()
        if self._cluster is not None:
            self._cluster.leave(self)

    @property
    def _begun(self) -> tuple[int, ...]:
        """What distinguishes this run from others with the same seed."""
        plan = self._recipe.plan
        if isinstance(plan, DrawnPlan):
            return (plan.seed,)
        return self._begun_at, self._recipe.planned.shard.rank


def start_method(recipe: Recipe) -> StartMethod:
    """Return how worker processes start.

    By fork by default, like torch's, even if CUDA is in use; but not if the dataset or
    a function holds CUDA tensors, which a forked process cannot use. Whoever has set
    another method for the whole program had a reason.
    """
    if (said := recipe.options.multiprocessing_context) is not None:
        return said
    usual = torch.multiprocessing.get_start_method(allow_none=True)
    if usual == "spawn":
        return "spawn"
    if usual == "forkserver":
        return "forkserver"
    subjects = [each.subjects for each in recipe.segments]
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    held = cuda and find_on_device(subjects, "subjects", "cuda") is not None
    return "forkserver" if held else "fork"
