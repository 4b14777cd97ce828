"""benchmarks/peers: loaders are compared on the same work, or the report says not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import bench
from peers.data import BATCH, Given
from peers.environments import PEERS, REQUIREMENTS, reason
from peers.prepare import prepare
from peers.serve import Server

SETTINGS = {
    "photographs": ({"decoder": "simplejpeg"}, {"workers": 1, "executor": "thread"}),
    "arrays": ({}, {"how": "collate"}),
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    return prepare(tmp_path_factory.mktemp("given"), None, 64)


@pytest.fixture
def opened(given: Given, tmp_path: Path) -> Any:
    """Open a peer, and return it with the main part of its first batch."""
    servers = []

    def opened(peer: str, workload: str, setting: dict[str, Any]) -> Any:
        servers.append(Server(peer, workload, given))
        path = str(tmp_path / f"{peer}.npy")
        request = {"do": "open", "setting": setting, "keep": path}
        assert "error" not in (answer := servers[-1].answer(request)), answer
        return servers[-1], np.load(path)

    yield opened
    for server in servers:
        server.close()


@pytest.mark.parametrize("workload", sorted(BATCH.keys() - {"waits"}))
def test_penstock_and_torch_load_the_same(workload: str, opened: Any) -> None:
    theirs, ours = SETTINGS.get(workload, ({}, {}))
    _, first = opened("torch", workload, {"workers": 0, **theirs})
    server, batch = opened("penstock", workload, ours)
    assert bench.difference(batch, first) == (0.0, 0.0)
    request = {"do": "window", "settle_s": 0.0, "seconds": 0.0}
    assert server.answer(request)["samples"] == BATCH[workload]


def test_an_error_is_an_answer(given: Given) -> None:
    server = Server("torch", "tiny", given)
    answer = server.answer({"do": "open", "setting": {"workers": -1}})
    assert answer["error"].startswith("ValueError")


def test_rows_of_other_work_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def row(name: str, rate: float, differs: tuple[float, float] | None) -> bench.Row:
        return bench.Row("tiny", name, name, rates=[rate], cores=[1.0], differs=differs)

    rows = [
        row("penstock", 300.0, (0.0, 0.0)),
        row("like", 100.0, (0.2, 7.0)),
        row("unlike", 200.0, (50.0, 255.0)),
        bench.Row("tiny", "absent", "absent", error="no wheel"),
    ]
    bench.add_rows(path := tmp_path / "rows.jsonl", rows)
    assert bench.read_rows(path) == {
        "tiny": [bench.Row(**fields) for fields in json.loads(path.read_text())]
    }
    bench.report(bench.read_rows(path)["tiny"], "tiny")
    report = capsys.readouterr().out
    assert "3.00x" in report
    assert "1.00x is the best of: like (defaults)" in report
    assert "OTHER WORK, differs by 50 in the mean, 255 at most" in report
    assert "absent: not measured: no wheel" in report


def test_every_peer_has_its_requirements() -> None:
    pinned = {path.stem for path in REQUIREMENTS.glob("*.txt")}
    assert pinned == PEERS.keys() - {"penstock"}


def test_a_peer_that_cannot_be_installed_says_why() -> None:
    output = "x\nRuntimeError: Could not find opencv.\nnote: not a problem with pip"
    assert reason(output, "") == "RuntimeError: Could not find opencv."
    assert reason("killed\n", "it is compiled") == "killed; it is compiled"
