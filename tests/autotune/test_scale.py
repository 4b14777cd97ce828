"""Many nodes in step, in closed form."""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.autotune.planner import (
    DISK,
    STORE,
    Cluster,
    Tier,
    expected_slowest_s,
    normal_steps,
)
from support.simulator.machine import Machine, Ranks
from support.simulator.plant import Simulated
from support.simulator.workload import SimulatedStage, Trainer, Workload

EVEN = Cluster((0.1,), batch_rows=32, row_bytes=1e5, store_bytes_per_s=2e8)
"""A store for 62 batches a second, which is six nodes and a quarter."""
COUNTS = (1, 2, 4, 8, 16, 64, 256, 1024)

positive = st.floats(0.01, 10.0)
clusters = st.builds(
    Cluster,
    steps_s=st.lists(positive, min_size=1, max_size=20).map(tuple),
    batch_rows=st.integers(1, 64),
    row_bytes=st.just(1.0),
    node_rows_per_s=st.floats(1.0, 1e4),
    store_bytes_per_s=st.floats(1.0, 1e4),
)


@given(clusters)
def test_a_step_never_gets_shorter_with_nodes_that_share_a_store(one: Cluster) -> None:
    steps = [max(one.step_bounds(nodes).values()) for nodes in COUNTS]
    assert all(later >= before * (1 - 1e-9) for before, later in pairwise(steps))


@given(clusters, st.sampled_from([1, 2, 8]))
def test_no_step_beats_the_store(one: Cluster, nodes: int) -> None:
    speed = one.speed(nodes)
    most = one.store_bytes_per_s / one.row_bytes
    assert speed.rows_per_s <= most * 1.001
    assert 0.0 < speed.efficiency <= 1.0


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_efficiency_never_rises_with_nodes_that_share_a_store(spread: float) -> None:
    uneven = replace(EVEN, steps_s=normal_steps(0.1, spread))
    efficiencies = [round(uneven.speed(nodes).efficiency, 9) for nodes in COUNTS[:-1]]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[-1] == pytest.approx(6.25 / 256, rel=0.01)


@pytest.mark.parametrize("nodes", [1, 2, 8, 64])
def test_the_slowest_of_uniform_steps_agrees_with_order_statistics(
    nodes: int,
) -> None:
    uniform = [(at + 0.5) / 10_000 for at in range(10_000)]
    assert expected_slowest_s(uniform, nodes) == pytest.approx(
        nodes / (nodes + 1), rel=1e-3
    )


def test_the_slowest_of_normal_steps_agrees_with_random_draws() -> None:
    dice = random.Random(0)
    slowest_s = [max(dice.gauss(1.0, 0.1) for _ in range(1024)) for _ in range(200)]
    expected = expected_slowest_s(normal_steps(1.0, 0.1), 1024)
    assert expected == pytest.approx(statistics.fmean(slowest_s), rel=0.01)


def test_ranks_wait_for_the_slowest_as_long_as_in_the_simulation() -> None:
    machine, ranks = Machine(64.0), Ranks(8)
    stage = SimulatedStage("read", wait_s=1e-4)
    work = Workload((stage,), Trainer(gap_s=0.1, spread=0.1), batch_rows=8)
    plants = [Simulated(machine, work, [4], [2], ranks=ranks) for _ in range(8)]
    machine.advance(40.0)
    one = Cluster(normal_steps(0.1, 0.1), batch_rows=8, row_bytes=1.0)
    rows_per_s = sum(plant.steps for plant in plants) * 8 / 40.0
    assert one.speed(8).rows_per_s == pytest.approx(rows_per_s, rel=0.02)


def test_a_cache_helps_from_the_second_epoch_on() -> None:
    halves = replace(EVEN, data_bytes=1e9, tiers=(Tier(5e8),), own_parts=False)
    first, later = (halves.step_bounds(16, warm=warm) for warm in (False, True))
    assert later[STORE] == first[STORE] / 2
    cold, warm = (halves.speed(64, warm=warm) for warm in (False, True))
    assert cold.binds == warm.binds == STORE
    assert warm.rows_per_s == pytest.approx(2 * cold.rows_per_s, rel=0.02)


def test_disk_keeps_what_ram_cannot_and_only_the_rest_is_read_again() -> None:
    tiers = (Tier(2e8), Tier(3e8, bytes_per_s=1e8))
    one = replace(EVEN, data_bytes=1e9, tiers=tiers)
    batch = 32 * 1e5
    alone, four = (one.step_bounds(nodes, warm=True) for nodes in (1, 4))
    assert alone[DISK] == pytest.approx(0.3 * batch / 1e8)
    assert alone[STORE] == pytest.approx(0.5 * batch / 2e8)
    assert four[DISK] == pytest.approx(0.2 * batch / 1e8)
    assert four[STORE] == pytest.approx(0.0, abs=1e-12)


def test_with_enough_nodes_each_part_fits_into_its_nodes_cache() -> None:
    one = replace(EVEN, data_bytes=1e9, tiers=(Tier(1e8),))
    few, many = (one.speed(nodes, warm=True) for nodes in (5, 64))
    assert few.rows_per_s <= 5 / 0.1 * 32 * 1.001
    assert many.efficiency == pytest.approx(1.0)
    assert one.speed(64).efficiency == pytest.approx(6.25 / 64, rel=0.02)
