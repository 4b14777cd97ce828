"""What the maker of worker pools shares among them, and lets go of in the end.

Ray is played: real actors are tried where it is installed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.engine.far import actors
from penstock.engine.far.pools import ACTOR, FarPools, start_method


class Played:
    """Stands for a connection to Ray and for the pool of actors; notes the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def join(self, tenants: Any, options: Any) -> Played:
        self.calls.append(("join", tenants, options))
        return self

    def leave(self, *tenants: Any) -> None:
        self.calls.append(("leave", *tenants))

    def pool(self, *arguments: Any, seeds: Any, options: Any) -> Any:
        arguments = (*arguments, seeds, options)
        self.calls.append(("pool", *arguments))
        pool = SimpleNamespace(arguments=arguments)
        pool.renew = lambda: self.calls.append(("renew", pool))
        return pool


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    stand_in = Played()
    monkeypatch.setattr(actors, "join", stand_in.join)
    monkeypatch.setattr(actors, "ActorPool", stand_in.pool)
    return stand_in


def recipe(*executors: str, ray_options: Any = None, context: Any = None) -> Any:
    segments = [
        SimpleNamespace(executor=kind, subjects=(), program=None) for kind in executors
    ]
    options = SimpleNamespace(ray_options=ray_options, multiprocessing_context=context)
    plan = SimpleNamespace(shard=SimpleNamespace(rank=2))
    return SimpleNamespace(
        plan=plan,
        planned=plan,
        drawn=None,
        segments=segments,
        seed=7,
        options=options,
        cpu_cores=2.4,
    )


def test_an_engine_without_actors_never_asks_for_ray(played: Played) -> None:
    maker = FarPools(recipe("thread", "inline"), 0)
    maker.begin()
    maker.renew()
    maker.close()
    assert played.calls == []
    assert not maker.forked


def test_an_engine_joins_ray_once_and_asks_for_room_for_each_stage(
    played: Played,
) -> None:
    ray_recipe = recipe("ray", "thread", "ray", ray_options={"num_cpus": 3})
    maker = FarPools(ray_recipe, 5)
    maker.begin()
    options = {**ACTOR, "num_cpus": 3}
    assert played.calls == [("join", [(maker, 0), (maker, 2)], options)]
    maker.close()
    assert played.calls[-1] == ("leave", (maker, 0), (maker, 2))


def test_pools_of_actors_are_handed_out_seeded_and_renewed_together(
    played: Played,
) -> None:
    ray_recipe = recipe("ray", "ray")
    maker = FarPools(ray_recipe, 5)
    maker.begin()
    connector: Any = SimpleNamespace(segment=0)
    pools: list[Any] = [
        maker.make(connector, segment, "ray") for segment in ray_recipe.segments
    ]
    for nth, pool in enumerate(pools):
        *others, seeds, options = pool.arguments
        assert (others, options) == ([connector, ray_recipe, played, (maker, 0)], ACTOR)
        # The seed, the first batch, the rank, the segment, and how many were before.
        assert (seeds(0, 3), seeds(0, nth)) == ((7, 5, 2, 0, nth), (7, 5, 2, 0, 0))
    assert len({id(pool.arguments[4]) for pool in pools}) == 1  # none are given twice
    maker.renew()
    assert played.calls[-2:] == [("renew", pool) for pool in pools]


@pytest.mark.parametrize("said", [None, "spawn", "forkserver", "fork"])
def test_processes_are_forked_unless_the_user_says_otherwise(said: Any) -> None:
    assert start_method(recipe("process", context=said)) == (said or "fork")
