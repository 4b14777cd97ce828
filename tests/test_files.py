"""Files by URL: from disk, from memory, and from a slow web server."""

from __future__ import annotations

import asyncio
import errno
import pickle
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import pytest

import penstock as ps
import penstock.pipeline.sources.files
from penstock.pipeline.sources.files import AsyncFiles, Files, find_files
from penstock.pipeline.sources.patience import may_pass
from support.datasets import KINDS
from support.http_store import Fault, HttpStore, served

CONTENTS = {f"{at:03}.bin": bytes([at]) * (at + 1) for at in range(40)}


@pytest.fixture(scope="module", autouse=True)
def own_thread_of_fsspec() -> None:
    """Start fsspec's loop for reads outside ours; it lasts as long as the process."""
    fsspec.asyn.get_loop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "040.bin").write_bytes(b"deep")
    return tmp_path


@pytest.fixture
def memory() -> Iterator[str]:
    store = fsspec.filesystem("memory")
    store.pipe({f"/store/{name}": content for name, content in CONTENTS.items()})
    yield "memory://store"
    store.rm("/store", recursive=True)


@pytest.fixture
def web() -> Iterator[HttpStore]:
    with served(CONTENTS) as store:
        yield store


def below(place: object) -> list[str]:
    return [f"{place}/{name}" for name in CONTENTS]


def contents(pipe: ps.Pipeline) -> list[bytes]:
    with pipe:
        return [content for batch in pipe for content in batch]


def executor_of(pipe: ps.Pipeline) -> str:
    return str(pipe.explain().to_dict()["stages"][0]["executor"])


# Where they are


@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["auto", *KINDS])
def test_files_from_a_disk_arrive_whole_and_in_order(
    folder: Path, kind: Mapping[str, Any]
) -> None:
    pipe = ps.Pipeline.from_files(below(folder), **kind).batch(8)
    assert contents(pipe) == [*CONTENTS.values()]


@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["auto", *KINDS])
def test_files_in_memory_arrive_whole_and_in_order(
    memory: str, kind: Mapping[str, Any]
) -> None:
    pipe = ps.Pipeline.from_files(below(memory), **kind).batch(8)
    assert contents(pipe) == [*CONTENTS.values()]


@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["auto", *KINDS])
def test_files_from_a_web_server_arrive_whole_and_in_order(
    web: HttpStore, kind: Mapping[str, Any]
) -> None:
    pipe = ps.Pipeline.from_files(below(web.url), **kind).batch(8)
    assert contents(pipe) == [*CONTENTS.values()]


def test_a_pattern_gives_its_matches_in_sorted_order(folder: Path, memory: str) -> None:
    for place in (folder, memory):
        pipe = ps.Pipeline.from_files(f"{place}/*.bin").batch(8)
        assert contents(pipe) == [*CONTENTS.values()]


def test_two_stars_match_files_in_folders_below(folder: Path) -> None:
    pipe = ps.Pipeline.from_files(folder / "**" / "*.bin").batch(8)
    assert contents(pipe) == [*CONTENTS.values(), b"deep"]


def test_paths_are_relative_to_the_folder_where_they_were_given(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    pipe = ps.Pipeline.from_files(["003.bin", Path("005.bin")]).batch(2)
    monkeypatch.chdir("/")
    assert contents(pipe) == [CONTENTS["003.bin"], CONTENTS["005.bin"]]


def test_files_in_an_archive_are_read_by_chained_urls(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name, content in CONTENTS.items():
            archive.writestr(name, content)
    urls = [f"zip://{name}::file://{tmp_path}/all.zip" for name in CONTENTS]
    assert contents(ps.Pipeline.from_files(urls).batch(8)) == [*CONTENTS.values()]


# How they are read


def test_a_web_server_is_read_in_an_event_loop_and_a_disk_by_threads(
    web: HttpStore, folder: Path
) -> None:
    for place, expected in ((web.url, "async"), (folder, "thread")):
        with ps.Pipeline.from_files(below(place)).map(len).batch(8) as pipe:
            assert len(list(pipe)) == 5
            assert executor_of(pipe) == expected


def test_as_many_requests_are_in_flight_as_there_are_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After a few batches, none is answered until more than aiohttp's 100 are there."""
    many, answer = asyncio.Event(), HttpStore.answer

    async def answer_all_at_once(store: HttpStore, request: Any) -> Any:
        store.inside += 1
        store.most = max(store.most, store.inside)
        if store.inside > 100:
            many.set()
        if store.asked.total() >= 40:
            await many.wait()
        store.inside -= 1
        return await answer(store, request)

    monkeypatch.setattr(HttpStore, "answer", answer_all_at_once)
    with served(CONTENTS, latency_s=0) as store:
        urls = below(store.url) * 10
        settings: dict[str, Any] = {"num_parallel_workers": 150, "hedge": False}
        with ps.Pipeline.from_files(urls, **settings).batch(8) as pipe:
            assert len(list(pipe)) == 50
            assert pipe.stats() is not None
    assert 100 < store.most <= 150


def test_several_pipelines_may_use_one_reader_of_a_web_server(web: HttpStore) -> None:
    """Each has a loop of its own and therefore a session of its own."""
    pipe = ps.Pipeline.from_files(below(web.url))
    with pipe.batch(8) as first, pipe.shuffle(seed=1).batch(8) as second:
        both = [(a, b) for a, b in zip(first, second, strict=True)]
        assert len(both) == 5
    assert contents(pipe.batch(8)) == [*CONTENTS.values()]


def test_a_loop_over_a_web_server_may_be_left_early() -> None:
    with served(CONTENTS, latency_s=0.05) as store:
        pipe = ps.Pipeline.from_files(below(store.url) * 10).batch(8)
        for _ in pipe:
            break
        pipe.close()


def test_storage_options_reach_the_file_system(web: HttpStore) -> None:
    options = {"client_kwargs": {"headers": {"x": "y"}, "no_such_setting": 1}}
    pipe = ps.Pipeline.from_files(below(web.url), storage_options=options).batch(8)
    with pipe, pytest.raises(TypeError, match="no_such_setting"):
        list(pipe)


# What they come with


def test_labels_go_with_their_files(folder: Path) -> None:
    pipe = ps.Pipeline.from_files(below(folder), labels=range(40)).shuffle(seed=5)
    by_label = {}
    with pipe.batch(8) as pipe:
        for batch in pipe:
            by_label |= dict(zip(batch[1].tolist(), batch[0], strict=True))
    assert by_label == dict(enumerate(CONTENTS.values()))


def test_labels_go_with_awaited_files(web: HttpStore) -> None:
    pipe = ps.Pipeline.from_files(below(web.url), [*range(40)]).batch(40)
    with pipe:
        (batch,) = pipe
    assert batch[1].tolist() == list(range(40))
    assert [*batch[0]] == [*CONTENTS.values()]


@pytest.mark.parametrize("place", ["folder", "url"])
def test_a_resumed_loop_continues_where_it_was_left(
    place: str, folder: Path, web: HttpStore
) -> None:
    urls = below(folder if place == "folder" else web.url)
    pipe = ps.Pipeline.from_files(urls).shuffle(seed=2).batch(8)
    with pipe:
        whole = [*pipe, *pipe]
        pipe.set_epoch(0)
        for step, _ in enumerate(pipe):
            if step == 2:
                state = pipe.state_dict()
                break
    again = ps.Pipeline.from_files(urls).shuffle(seed=2).batch(8)
    again.load_state_dict(state)
    with again:
        assert [list(b) for b in [*again, *again]] == [list(b) for b in whole[3:]]


# What goes wrong


@pytest.mark.parametrize("place", ["folder", "memory", "web"])
def test_a_missing_file_belongs_to_its_row(
    place: str, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue(place)
    urls = below(getattr(store, "url", store))
    urls[21] = urls[21].replace("021", "no-such")
    pipe = ps.Pipeline.from_files(urls).batch(8)
    with pipe:
        batches = iter(pipe)
        next(batches), next(batches)
        with pytest.raises(FileNotFoundError, match="no-such") as caught:
            next(batches)
    assert "Files(ID:0) read, sample index 21" in caught.value.__notes__[0]


def test_the_timeout_bounds_the_wait_for_a_silent_server() -> None:
    with served(CONTENTS, latency_s=3600) as store:
        pipe = ps.Pipeline.from_files(below(store.url), timeout=0.1).batch(8)
        with pipe, pytest.raises(TimeoutError, match=r"timeout` of 0\.1 s"):
            list(pipe)


PASSING: list[Fault] = [503, 500, 429, 408, "reset", "short", 206]
LASTING = [400, 403, 410]
SOON: dict[str, Any] = {"backoff": 0.001}


def alone(pipe: ps.Pipeline) -> ps.Pipeline:
    """Return the pipeline without reading ahead for the next epoch."""
    return pipe.options(persistent_workers=False)


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("fault", PASSING)
def test_transient_errors_are_retried_until_they_pass(fault: Fault, kind: Any) -> None:
    faults = {"021.bin": [fault] * 3, "003.bin": [fault]}
    with served(CONTENTS, faults=faults) as store:
        pipe = ps.Pipeline.from_files(below(store.url), executor=kind, **SOON)
        assert contents(alone(pipe.batch(8))) == [*CONTENTS.values()]
        assert store.asked["021.bin"] == 4 or fault == "reset"  # aiohttp retries, too
        assert store.asked["001.bin"] == 1


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("fault", PASSING)
def test_a_fault_that_does_not_pass_is_an_error_after_the_given_tries(
    fault: Fault, kind: Any
) -> None:
    with served(CONTENTS, faults={"001.bin": [fault] * 9}) as store:
        pipe = ps.Pipeline.from_files(
            below(store.url)[:2], executor=kind, retries=2, **SOON
        )
        with (
            alone(pipe.batch(2)) as batches,
            pytest.raises(Exception, match=r".") as caught,
        ):
            list(batches)
        assert store.asked["001.bin"] == 3 or fault == "reset"
    assert "sample index 1" in caught.value.__notes__[0]


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("status", LASTING)
def test_lasting_errors_are_not_retried(status: int, kind: Any) -> None:
    with served(CONTENTS, faults={"001.bin": [status] * 9}) as store:
        pipe = ps.Pipeline.from_files(below(store.url)[:2], executor=kind)
        with (
            alone(pipe.batch(2)) as batches,
            pytest.raises(Exception, match=str(status)),
        ):
            list(batches)
        assert store.asked["001.bin"] == 1


class ConnectionLostError(Exception):
    """Stands for botocore's exceptions, which are not an `OSError`."""


class AnswerError(Exception):
    """Stands for botocore's `ClientError`."""

    def __init__(self, status: int) -> None:
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def as_s3fs_raises(status: int) -> OSError:
    error = OSError(errno.EINVAL, "whatever the store says")
    error.__cause__ = AnswerError(status)
    return error


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (ConnectionLostError(), True),
        *((as_s3fs_raises(status), True) for status in (500, 503, 429)),
        *((as_s3fs_raises(status), False) for status in (400, 405, 416)),
        (OSError(errno.EIO, "a disk"), True),
        (KeyError("a bug"), False),
    ],
    ids=repr,
)
def test_an_object_stores_error_is_judged_by_the_answer_in_it(
    error: Exception,
    passes: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exceptions = types.ModuleType("botocore.exceptions")
    for name in ("ConnectionError", "HTTPClientError", "IncompleteReadError"):
        setattr(exceptions, name, ConnectionLostError)
    monkeypatch.setitem(sys.modules, "botocore.exceptions", exceptions)
    assert may_pass(error) == passes


def test_the_timeout_bounds_all_tries_together() -> None:
    with served(CONTENTS, faults={"001.bin": ["stall"] * 9}) as store:
        pipe = ps.Pipeline.from_files(below(store.url)[:2], timeout=0.3)
        with (
            alone(pipe.batch(2)) as batches,
            pytest.raises(TimeoutError, match=r"0\.3 s"),
        ):
            list(batches)


def test_a_connection_that_stalls_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(penstock.pipeline.sources.files, "STALLED_S", 0.3)
    with served(CONTENTS, faults={"001.bin": ["stall"]}) as store:
        pipe = ps.Pipeline.from_files(below(store.url)[:2], **SOON).batch(2)
        assert contents(pipe) == [*CONTENTS.values()][:2]


@pytest.mark.parametrize("kind", ["async", "thread"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_body_is_not_read_beyond_its_bound(
    kind: Any,
    packed: bool,  # noqa: FBT001
) -> None:
    large = bytes(10_000_000)
    with served({"large.bin": large}, packed=packed) as store:
        urls = [f"{store.url}/large.bin"]
        pipe = ps.Pipeline.from_files(urls, executor=kind, max_bytes="1MB")
        with (
            alone(pipe.batch(1)) as batches,
            pytest.raises(ps.BudgetError, match="max_bytes"),
        ):
            list(batches)
        assert store.asked["large.bin"] == 1
        pipe = ps.Pipeline.from_files(urls, executor=kind, max_bytes="10MB")
        assert contents(pipe.batch(1)) == [large]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("az://bucket/train", "cannot read 'az://bucket/train': .*[Ii]nstall"),
        ("https://127.0.0.1:9/b", "could not list 'https://127.0.0.1:9/b': "),
    ],
)
def test_a_folder_that_cannot_be_listed_is_refused_by_name_and_cure(
    url: str, message: str
) -> None:
    for root in (url, Path(url)):  # Path makes one slash of two
        with pytest.raises(ps.SpecError, match=message):
            ps.Pipeline.from_folder(root)


@pytest.mark.parametrize(
    ("urls", "settings", "text"),
    [
        (["/a"], {"retries": -1}, "`retries` must be an int >= 0, got -1"),
        (["/a"], {"backoff": "1"}, "`backoff` must be seconds >= 0, got '1'"),
        (["/a"], {"max_bytes": "much"}, "a size must be"),
        ([], {}, "at least one URL.*was the listing"),
        ("*.nothing", {}, "found no file that matches '\\*.nothing'; `\\*` matches"),
        (".", {}, "matches '.', only folders; .*\\*\\*"),
        (["memory://a", "/b"], {}, r"'memory' \(memory://a\) and 'file' \(/b\); make"),
        (["/b", "http://a"], {}, "'file'.*'http'.*one pipeline for each"),
        (["/a", "/b"], {"labels": [1]}, "got 1 labels for 2 files"),
        (["/a", 3], {}, "must be a str or a path, got 3"),
        (["nosuch://a"], {}, "cannot read 'nosuch://a': Protocol not known: nosuch"),
        (["/a"], {"executor": "async"}, "which 'file' is not; leave it out"),
        (["http://a"], {"executor": "async", "timeout": -1}, "`timeout`"),
    ],
)
def test_files_that_cannot_be_read_are_refused_at_once(
    urls: Any, settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ps.SpecError, match=text):
        ps.Pipeline.from_files(urls, **settings)


# What it looks like


def test_a_pipeline_of_files_prints_as_the_code_that_makes_it(
    folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(folder)
    listed = ps.Pipeline.from_files(below(folder), range(40), name="raw")
    assert repr(listed) == "Pipeline.from_files(<40 urls>, <40 labels>, name='raw')"
    assert repr(ps.Pipeline.from_files("*.bin")) == "Pipeline.from_files('*.bin')"
    text = repr(ps.Pipeline.from_files("*.bin", retries=1, max_bytes=9, name="raw"))
    assert text == "Pipeline.from_files('*.bin', retries=1, max_bytes=9, name='raw')"


def test_files_are_pickled_as_text(folder: Path) -> None:
    files = find_files(below(folder), range(40), None, "auto")
    assert files[3] == (CONTENTS["003.bin"], 3)
    again = pickle.loads(pickle.dumps(files))  # noqa: S301 our own
    assert type(again) is Files
    assert again[39] == files[39]
    waiting = find_files(["http://a/b"], None, None, "auto")
    again = pickle.loads(pickle.dumps(waiting))  # noqa: S301 our own
    assert type(again) is AsyncFiles
    assert repr(waiting) == "<AsyncFiles http: 1 files>"


def test_describing_files_opens_nothing() -> None:
    """The trainer forks when the loop begins, and connections do not survive it."""
    assert len(find_files(["http://no-such-host/a"] * 1000, None, None, "auto")) == 1000


def test_paths_may_come_from_an_iterator(tmp_path: Path) -> None:
    for at in range(3):
        (tmp_path / f"{at}.txt").write_bytes(b"x" * at)
    pipe = ps.Pipeline.from_files(tmp_path.glob("*.txt")).batch(3)  # type: ignore[arg-type]
    assert sorted(map(len, next(iter(pipe)))) == [0, 1, 2]
    pipe.close()
