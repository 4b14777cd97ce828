"""Real ranks with gloo end together, report differences, and share bytes in a mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

import penstock as ps
from support import warm
from support.torchrun import TESTS

SCRIPT = TESTS / "support" / "rank_scripts.py"


def told(tasks: str, ranks: int, folder: Path) -> list[dict[str, Any]]:
    """Run tasks on this many ranks, for at most a minute; return what each reports.

    They find each other as under torchrun, in a store that the launcher keeps.
    """
    # libuv would keep a pipe open for as long as this process lives.
    store = TCPStore(
        "localhost", 0, is_master=True, wait_for_workers=False, use_libuv=False
    )
    variables = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, "-P", str(SCRIPT), tasks, str(folder)]

    def run(rank: int) -> subprocess.CompletedProcess[str]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return warm.run(
            command, env={**os.environ, **variables, **own}, timeout=60, brief=True
        )

    with ThreadPoolExecutor(ranks) as threads:
        for process in threads.map(run, range(ranks)):
            assert process.returncode == 0, process.stderr
    paths = (folder / f"{rank}.json" for rank in range(ranks))
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what three ranks report of one task after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    return told("uneven,differing,resuming,decoding", 3, folder)


def test_uneven_data_and_failing_samples_end_at_the_same_step(
    reports: list[dict[str, Any]],
) -> None:
    results = [report["uneven"] for report in reports]
    steps = {result["steps"] for result in results}
    assert steps == {-(-103 // 15) + -(-103 // 9)}
    assert sum(result["substituted"] for result in results) == 10
    weights = sum(result["weights"] for result in results)
    assert weights == pytest.approx(3 * steps.pop())


def test_ranks_that_would_load_different_things_name_the_difference(
    reports: list[dict[str, Any]],
) -> None:
    for rank, report in enumerate(reports):
        error = report["differing"]["error"]
        assert f"length: {100 + rank} on rank {rank}, " in error
        assert sum(f"{length} on" in error for length in (100, 101, 102)) == 2


def test_ranks_that_would_begin_at_different_places_name_them_and_lose_no_state(
    reports: list[dict[str, Any]],
) -> None:
    for rank, report in enumerate(reports):
        step, other = (1, "0 on") if rank == 1 else (0, "1 on 1")
        assert f"step: {step} on rank {rank}, {other}" in report["resuming"]["error"]
        assert report["resuming"]["kept"]


def test_ranks_that_would_decode_differently_name_the_difference(
    reports: list[dict[str, Any]],
) -> None:
    for rank, report in enumerate(reports):
        error = report["decoding"]["error"]
        assert "decoder of decode_only_random_resized_crop" in error
        assert f"libjpeg-turbo 2.{rank}' on rank {rank}, " in error
        assert sum(f"libjpeg-turbo 2.{other}' on" in error for other in range(3)) == 2


@pytest.mark.slow
def test_ranks_that_share_data_in_a_mesh_have_the_same_bytes(tmp_path: Path) -> None:
    results = [report["mesh"] for report in told("mesh", 8, tmp_path)]
    assert [result["shard"] for result in results] == [[0, 2]] * 4 + [[1, 2]] * 4
    digests = [result["digest"] for result in results]
    assert digests[:4] == [digests[0]] * 4
    assert digests[4:] == [digests[4]] * 4
    assert digests[0] != digests[4]


def test_without_a_process_group_there_is_one_rank() -> None:
    assert ps.Shard.found() == ps.Shard(0, 1)
    with pytest.raises(ps.SpecError, match="init_process_group"):
        ps.Shard.from_process_group()
