"""A run begins with what the previous one found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.errors import SpecError


@pytest.fixture(autouse=True)
def _off_again() -> Iterator[None]:
    yield
    ps.set_enable_autotune(False)


def described(**settings: Any) -> ps.Pipeline:
    workers = {"executor": "thread", "num_parallel_workers": 1, **settings}
    return ps.Pipeline.from_dataset(list(range(40)), **workers).batch(4)


def written(path: Path, **row: object) -> Path:
    defaults = {
        "knobs": [
            {"op": "Dataset(ID:0) list", "knob": "num_parallel_workers", "value": 5},
            {"op": "Batch(ID:1)", "knob": "prefetch_size", "value": 7},
        ],
        "executors": {"Dataset(ID:0) list": "thread"},
    }
    path.write_text(json.dumps({"pipelines": {"train": {**defaults, **row}}}))
    return path


def only(row: str) -> str:
    """Return the result file of a run with one pipeline."""
    return '{"pipelines": {"train": ' + row + "}}"


def first_stage(pipe: ps.Pipeline) -> dict[str, Any]:
    stage: dict[str, Any] = pipe.explain().to_dict()["stages"][0]  # type: ignore[index]
    return stage


def test_loaded_values_apply_from_the_first_batch_on(tmp_path: Path) -> None:
    pipe = described()
    pipe.load_autotune(written(tmp_path / "run_0.json"))
    with pipe:
        batches = iter(pipe)
        tensors = [next(batches)]
        stage = first_stage(pipe)
        tensors += batches
    assert (stage["num_parallel_workers"], stage["prefetch_size"]) == (5, 7)
    assert torch.cat(tensors).tolist() == list(range(40))


def test_the_file_of_a_tuned_run_can_be_loaded(tmp_path: Path) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    with described(num_parallel_workers=3) as pipe:
        list(pipe)
    again = described()
    again.load_autotune(tmp_path / "run_0.json")
    assert first_stage(again)["num_parallel_workers"] == 3


def test_one_file_serves_all_pipelines_that_were_tuned(tmp_path: Path) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    for name, workers in (("train", 3), ("val", 2)):
        with described(num_parallel_workers=workers).options(name=name) as pipe:
            list(pipe)
    for name, workers in (("train", 3), ("val", 2)):
        pipe = described().options(name=name)
        pipe.load_autotune(tmp_path / "run_0.json")
        with pipe:
            next(iter(pipe))
            assert first_stage(pipe)["num_parallel_workers"] == workers
    pipe = described()
    with pytest.raises(SpecError, match="results of 'train', 'val', and several"):
        pipe.load_autotune(tmp_path / "run_0.json")
    pipe.load_autotune(tmp_path / "run_0.json", name="val")
    assert first_stage(pipe)["num_parallel_workers"] == 2


def test_a_loader_begins_with_what_its_previous_run_found(tmp_path: Path) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    train_loader = ps.DataLoader(list(range(40)), 4, num_workers=2)
    assert train_loader.name == "train"
    list(train_loader)
    train_loader.close()
    path = tmp_path / "run_0.json"
    content = json.loads(path.read_text())
    for knob in content["pipelines"]["train"]["knobs"]:
        knob["value"] = 3
    path.write_text(json.dumps(content))
    again = ps.DataLoader(list(range(40)), 4, num_workers=2, name="train")
    again.load_autotune(path)
    next(iter(again))
    stages: Any = again.explain().to_dict()["stages"]
    assert stages[0]["num_parallel_workers"] == 3
    again.close()
    ps.set_enable_autotune(False)
    with pytest.raises(SpecError, match="torch's own workers load"):
        again.load_autotune(path)


@pytest.mark.parametrize("kind", ["inline", "thread", "process", "async"])
def test_a_file_that_names_any_kind_of_workers_can_be_loaded(
    kind: str, tmp_path: Path
) -> None:
    executors = {"Dataset(ID:0) list": kind}
    pipe = described(executor="auto")
    pipe.load_autotune(written(tmp_path / "run_0.json", executors=executors))
    with pipe:
        assert torch.cat(list(pipe)).tolist() == list(range(40))


def test_bounds_and_pins_of_the_user_have_priority(tmp_path: Path) -> None:
    knobs = [
        {"op": operator, "knob": "num_parallel_workers", "value": 5}
        for operator in ("Dataset(ID:0) list", "Map(ID:1) abs")
    ]
    path = written(tmp_path / "run_0.json", knobs=knobs)
    source = ps.Pipeline.from_dataset(
        list(range(40)), executor="thread", num_parallel_workers=(1, 2)
    )
    one: Any = {"executor": "thread", "num_parallel_workers": 1}
    pipe = source.map(abs, tune=False, **one).batch(4)
    pipe.load_autotune(path)
    stages: Any = pipe.explain().to_dict()["stages"]
    assert [stage["num_parallel_workers"] for stage in stages] == [2, 1]


def test_a_run_begins_with_the_executor_that_was_found(tmp_path: Path) -> None:
    path = written(tmp_path / "run_0.json", executors={"Dataset(ID:0) list": "process"})
    free, fixed = described(executor="auto"), described()
    free.load_autotune(path)
    fixed.load_autotune(path)
    assert first_stage(free)["executor"] == "process"
    assert first_stage(fixed)["executor"] == "thread"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "is not an autotune result"),
        ("{}", "is not an autotune result"),
        ('{"version": 2, "pipelines": {}}', "has format version 2, and this"),
        ("[" * 100_000, "is not an autotune result"),
        ('{"knobs": []}', "is not an autotune result"),
        (
            only('{"knobs": [], "machine": {"cpu_cores": 1' + "0" * 400 + "}}"),
            "is not an autotune result",
        ),
        (
            only('{"knobs": [{"op": "a", "knob": "prefetch_size", "value": 0}]}'),
            "may not be",
        ),
        (
            only('{"knobs": [], "executors": {"a": "fork bomb"}}'),
            "there is no executor",
        ),
        (only('{"knobs": []}'), "tuned nothing of any pipeline"),
        (
            only('{"knobs": [{"op": "a", "knob": "prefetch_size", "value": 3}]}'),
            "has results of 'train', and none of them could be",
        ),
    ],
    ids=lambda text: text[:20],
)
def test_another_file_is_an_error_that_says_so(
    tmp_path: Path, text: str, told: str
) -> None:
    path = tmp_path / "run_0.json"
    path.write_text(text)
    with pytest.raises(SpecError, match=told):
        described().load_autotune(path)


def test_a_missing_file_is_an_error_that_says_where_such_files_come_from(
    tmp_path: Path,
) -> None:
    with pytest.raises(SpecError, match="filepath_prefix"):
        described().load_autotune(tmp_path / "nothing.json")


def test_results_from_another_machine_are_not_used_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "run_0.json", machine={"cpu_cores": 1000.0})
    pipe = described()
    pipe.load_autotune(path)
    assert first_stage(pipe)["num_parallel_workers"] == 1
    assert "found with 1000 usable cores" in caplog.text


def test_each_batch_size_begins_with_its_own_values(tmp_path: Path) -> None:
    key = {"op": "Dataset(ID:0) list", "knob": "num_parallel_workers"}
    regimes = {"batches of 4": [{**key, "value": 9}], "batches of 8": []}
    pipe = described()
    pipe.load_autotune(written(tmp_path / "run_0.json", regimes=regimes))
    assert first_stage(pipe)["num_parallel_workers"] == 9


def test_the_loop_after_one_that_was_left_begins_with_what_it_found() -> None:
    ps.set_enable_autotune(True)
    with described() as pipe:
        for _ in pipe:
            break
        run = pipe._slot.run  # noqa: SLF001 - where its knobs are
        assert run is None
        batches = iter(pipe)
        next(batches)
        workers = pipe._slot.run.knobs()[0]  # type: ignore[union-attr]  # noqa: SLF001
        workers.set(3)
        del batches
        next(iter(pipe))
        assert first_stage(pipe)["num_parallel_workers"] == 3
        ps.set_enable_autotune(False)
        pipe.close()
        next(iter(pipe))
        assert first_stage(pipe)["num_parallel_workers"] == 1


@pytest.mark.parametrize(
    ("name", "whose"), [("train", "'train'"), ("val", "any pipeline")]
)
def test_a_run_that_tuned_nothing_leaves_nothing_to_load(
    name: str, whose: str, tmp_path: Path
) -> None:
    ps.set_enable_autotune(True, str(tmp_path / "run"))
    with described(executor="inline").options(name="train") as pipe:
        list(pipe)
    message = f"tuned nothing of {whose}, because .*; leave load_autotune\\(\\) out"
    with pytest.raises(SpecError, match=message):
        described().options(name=name).load_autotune(tmp_path / "run_0.json")
