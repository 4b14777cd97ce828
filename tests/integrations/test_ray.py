"""`executor="ray"`: actors as workers, on clusters of real processes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

import penstock as ps
from penstock.engine.far.actors import demand_of, slots
from support.datasets import Counting, Numbers
from support.functions import augment
from support.ray_processes import ACTOR, of_ray, title

PROGRAMS = Path(__file__).parents[1] / "support" / "ray_programs.py"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path, as Ray keeps its sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="ray"))
    yield path
    shutil.rmtree(path)


def run(name: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """Return what a program reports, run in its own process with its own token."""
    pytest.importorskip("ray", reason="pip install penstock[ray]")
    tests, report = str(PROGRAMS.parents[1]), folder / "told.json"
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
    python = [sys.executable, "-P", "-W", "ignore"]
    subprocess.run(
        [*python, PROGRAMS, name, report, *map(str, arguments)],
        check=True,
        env={
            **os.environ,
            **token,
            "PYTHONPATH": tests,
            "RAY_TMPDIR": str(folder),
            "RAY_ADDRESS": "",
            "RAY_worker_niceness": "0",  # by default they hardly run beside other tests
        },
        timeout=900,  # some twelve processes start, maybe beside other tests
    )
    processes = of_ray(folder)
    assert [process for process in processes if title(process).startswith(ACTOR)] == []
    for process in processes:  # Ray's agents take a minute to notice that a node died
        process.kill()
    psutil.wait_procs(processes)
    return cast("dict[str, Any]", json.loads(report.read_text()))


@pytest.mark.slow
def test_actors_make_the_bytes_that_threads_make(folder: Path) -> None:
    report = run("same_bytes", folder)
    assert set(report["same"].values()) == {True}, report
    assert report["left"] == 0


@pytest.mark.slow
def test_twice_as_many_actors_work_at_once_on_two_raylets(folder: Path) -> None:
    report = run("two_raylets", folder)
    assert report["found"] == [2, 4]
    assert report["left"] == 0


@pytest.mark.slow
def test_no_sample_is_lost_when_actors_and_a_raylet_are_killed(folder: Path) -> None:
    report = run("deaths", folder)
    assert report["exact"]
    assert report["killed"] == {"actors": 4, "raylets": 2}
    assert report["left"] == 0


@pytest.mark.slow
def test_the_tuner_finds_out_how_many_actors_there_is_room_for(folder: Path) -> None:
    report = run("tuned", folder, folder / "log")
    assert report["workers"][-1] == 4, report


@pytest.mark.slow
def test_a_cluster_without_an_actor_for_each_stage_is_refused(folder: Path) -> None:
    report = run("too_small", folder)
    assert "room for 2 actors of {'CPU': 1}, got 3 stages" in report["said"]
    assert "ray_options" in report["said"]
    assert report["begun"] == 0
    assert report["rows"] == 20


@pytest.mark.slow
def test_actors_come_and_go_while_they_are_busy(folder: Path) -> None:
    report = run("resized", folder)
    assert report == {"found": [1, 3], "most": 3, "rows": 20, "beside": 2}


@pytest.mark.slow
def test_work_goes_on_locally_when_the_head_is_killed(folder: Path) -> None:
    report = run("without_head", folder)
    assert report == {"exact": True, "after": "process", "ray": False}


@pytest.mark.slow
def test_work_goes_on_locally_when_the_program_shuts_ray_down(folder: Path) -> None:
    report = run("without_ray", folder)
    assert report == {"exact": True, "after": "process", "ray": False}


@pytest.mark.slow
def test_actors_go_to_the_nodes_that_have_what_they_claim(folder: Path) -> None:
    report = run("places", folder)
    assert report["seen"] == report["wanted"]


@pytest.mark.slow
def test_errors_name_the_sample_and_nothing_hangs(folder: Path) -> None:
    report = run("errors", folder)
    kind, message = report["found"]["faulty"]
    assert (kind, message.splitlines()[0]) == ("LookupError", "the fifth")
    assert "sample index 5" in message
    kind, message = report["found"]["deadly"]
    assert kind == "WorkerError"
    assert "died 5 times on sample index 7" in message
    kind, message = report["found"]["__enter__"]
    assert kind == "SpecError"
    assert "cannot be sent" in message
    assert report["left"] == 0


@pytest.mark.slow
def test_a_ray_started_by_the_pipeline_ends_with_it(folder: Path) -> None:
    assert run("own_ray", folder) == {"same": True, "during": True, "after": False}


def test_data_that_must_stay_on_this_machine_is_refused() -> None:
    data = ps.Pipeline.from_dataset(Numbers(8))
    far = data.map(augment, executor="ray")
    with pytest.raises(ps.SpecError, match=r"cannot come after executor=.ray.*cache"):
        data.map(len, executor="ray").cache(ram="1MB")
    with pytest.raises(ps.SpecError, match=r"host=.process.*leave `host` out"):
        far.options(host="process")
    with pytest.raises(ps.SpecError, match=r"host=.process.*leave `host` out"):
        data.options(host="process").map(augment, executor="ray")
    with pytest.raises(ps.SpecError, match=r"executor=.ray. is for its map"):
        ps.Pipeline.from_dataset(Counting(8), executor="ray")
    with pytest.raises(ps.SpecError, match="`timeout` needs workers"):
        data.map(augment, executor="ray", timeout=1.0)


@pytest.mark.parametrize(
    "options", [{"num_cpu": 1}, {"num_cpus": -1}, {"resources": {"x": "1"}}, [1]]
)
def test_options_that_can_place_no_actor_are_refused(options: Any) -> None:
    pipe = ps.Pipeline.from_dataset(Numbers(8))
    with pytest.raises(ps.SpecError, match="`ray_options`"):
        pipe.options(ray_options=options)


def test_without_ray_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    pipe = ps.Pipeline.from_dataset(Numbers(8), executor="ray").batch(4)
    with pytest.raises(ps.SpecError, match=r"pip install penstock\[ray\]"):
        next(iter(pipe))


def test_an_actor_needs_a_node_that_has_all_it_claims() -> None:
    nodes = [{"CPU": 2.0, "loader": 1.0}, {"CPU": 4.0}, {"GPU": 1.0}]
    assert slots(nodes, {"CPU": 1}) == 6
    assert slots(nodes, {"CPU": 1.5}) == 3
    assert slots(nodes, {"CPU": 1, "loader": 1}) == 1
    assert slots(nodes, {"CPU": 0.5, "GPU": 1}) == 0
    assert slots(nodes, {}) > 1000
    assert slots([], {}) == 0


def test_an_actor_may_claim_no_resources() -> None:
    assert demand_of({"num_cpus": 2, "resources": None}) == {"CPU": 2}
